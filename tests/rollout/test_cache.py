import torch
from transformers import DynamicCache, Lfm2Config, LlamaConfig, MistralConfig, Qwen2Config
from transformers.cache_utils import DynamicLayer

from rewarden.rollout.cache import BlockLayer, open_cache, pads_safely, prompt_cache


def states(rows, positions, draw):
    return torch.randn(rows, 2, positions, 4, generator=draw), torch.randn(rows, 2, positions, 6, generator=draw)


def test_block_layer_returns_what_concatenation_returns():
    draw = torch.Generator().manual_seed(0)
    ours, theirs, rows = BlockLayer(is_sliding=False, most=300), DynamicLayer(), 5
    for step in range(250):
        keys, values = states(rows, 7 if step == 0 else 1, draw)
        for got, expected in zip(ours.update(keys, values), theirs.update(keys, values), strict=True):
            assert torch.equal(got, expected)
        assert ours.get_mask_sizes(1) == theirs.get_mask_sizes(1)
        assert ours.get_seq_length() == theirs.get_seq_length()
        if step in (3, 80, 81):
            index = torch.tensor([2, 0, 0, 1] if step == 3 else [3, 1] if step == 80 else [1])
            rows = len(index)
            ours.reorder_cache(index)
            theirs.batch_select_indices(index)
    assert ours.keys.shape[2] <= 300


def test_buffers_grow_in_blocks_and_not_beyond_what_is_needed():
    layer, sizes = BlockLayer(is_sliding=False, most=130), []
    draw = torch.Generator().manual_seed(0)
    for step in range(121):
        layer.update(*states(1, 10 if step == 0 else 1, draw))
        sizes.append(layer.keys.shape[2])
    assert sorted(set(sizes)) == [74, 130]


def test_prompts_of_several_parts_are_right_aligned_and_padded_with_zeros():
    draw = torch.Generator().manual_seed(0)
    cache, _ = open_cache(LlamaConfig(num_hidden_layers=1), most=9)
    k_short, v_short = states(1, 2, draw)
    k_long, v_long = states(2, 4, draw)
    for first_row, (k, v) in ((0, (k_short, v_short)), (1, (k_long, v_long))):
        part = prompt_cache(cache, first_row=first_row, num_rows=3, width=4)
        assert part.get_mask_sizes(k.shape[2], 0) == (k.shape[2], 0)
        assert part.update(k, v, 0) == (k, v)
    assert cache.get_seq_length() == 4
    k_new, v_new = states(3, 1, draw)
    keys, values = cache.update(k_new, v_new, 0)
    pad = torch.nn.functional.pad
    assert torch.equal(keys, torch.cat([torch.cat([pad(k_short, (0, 0, 2, 0)), k_long]), k_new], 2))
    assert torch.equal(values, torch.cat([torch.cat([pad(v_short, (0, 0, 2, 0)), v_long]), v_new], 2))


def test_only_plain_attention_gets_the_block_cache():
    assert open_cache(LlamaConfig(num_hidden_layers=3), most=8)[1] == "block"
    cache, kind = open_cache(MistralConfig(num_hidden_layers=3, sliding_window=4), most=8)
    assert kind == "block"
    assert cache.is_sliding == [True] * 3
    mixed = Qwen2Config(num_hidden_layers=2, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    assert open_cache(mixed, most=8)[0].is_sliding == [False, True]
    chunked = LlamaConfig(num_hidden_layers=2, layer_types=["chunked_attention", "full_attention"], attention_chunk_size=4)
    assert open_cache(chunked, most=8)[1] == "dynamic"
    convolution = Lfm2Config(num_hidden_layers=2, layer_types=["conv", "full_attention"])
    cache, kind = open_cache(convolution, most=8)
    assert kind == "dynamic"
    assert isinstance(cache, DynamicCache)
    assert not pads_safely(cache)
    assert pads_safely(open_cache(chunked, most=8)[0])
