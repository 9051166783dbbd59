import copy
import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import SHAPE, VOCABULARY, batch_of, build_model, random_rows
from torch import nn
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    BloomConfig,
    Cohere2Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoConfig,
    GPTNeoXConfig,
    GptOssConfig,
    Lfm2Config,
    MistralConfig,
    OPTConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    StableLmConfig,
)
from transformers.masking_utils import causal_mask_function, chunked_causal_mask_function, sliding_window_causal_mask_function

from rewarden.models import attention
from rewarden.models.attention import NAME, CannotPack, describe_mask, has_kernel, run_trunk
from rewarden.models.forward import sequence_logp
from rewarden.models.layout import Layout, token_chunks
from rewarden.models.packable import packs
from rewarden.models.recompute import recompute_layers
from rewarden.models.trunk import trunk_of

CPU = torch.device("cpu")
NO_GROUPS = {name: value for name, value in SHAPE.items() if name != "num_key_value_heads"}
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32}
GPT2 = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_positions=128, initializer_range=0.3)
JOINED = {
    "gpt2_absolute_positions": GPT2,
    "opt_absolute_positions": OPTConfig(
        **SMALL, ffn_dim=48, num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=128, word_embed_proj_dim=32, init_std=0.3
    ),
    "neox_parallel": GPTNeoXConfig(**NO_GROUPS),
    "qwen2_mixed_layers": Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen3": Qwen3Config(**SHAPE, head_dim=8),
    "mistral_short_window": MistralConfig(**SHAPE, sliding_window=3),
    "mistral_window_longer_than_the_trial": MistralConfig(**SHAPE, sliding_window=12),
    "gemma2_softcap": Gemma2Config(**SHAPE, head_dim=8, sliding_window=5, query_pre_attn_scalar=8, final_logit_softcapping=None),
    "gemma3_pattern": Gemma3TextConfig(**SHAPE, head_dim=8, sliding_window=5, query_pre_attn_scalar=8, sliding_window_pattern=2),
    "cohere2": Cohere2Config(**SHAPE, sliding_window=5, pad_token_id=0, sliding_window_pattern=2, logit_scale=1.0),
}  # fmt: skip
PADDED = {
    "bloom_alibi": BloomConfig(**SMALL, n_layer=2, n_head=4, initializer_range=0.3),
    "gpt_neo_local": GPTNeoConfig(
        **SMALL, num_layers=2, attention_types=[[["global", "local"], 1]], num_heads=4, window_size=5, max_position_embeddings=128
    ),
    "lfm2_convolution": Lfm2Config(**SHAPE, layer_types=["conv", "full_attention", "conv"]),
    "gpt_oss_sinks": GptOssConfig(**SHAPE, head_dim=8, sliding_window=5, num_local_experts=4),
    "stablelm": StableLmConfig(**SHAPE),
}  # fmt: skip


def build(config) -> PreTrainedModel:
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval()


def implementations(model: nn.Module) -> list[str]:
    return [module.config._attn_implementation for module in model.modules() if hasattr(module, "config")]


def joined(rows) -> Layout:
    return Layout.of(range(len(rows)), [len(row) for row in rows], CPU, packed=True)


def padded_logp(model, batch) -> torch.Tensor:
    """As transformers computes it: right padding and its mask."""
    logits = model(input_ids=batch.ids_BT, attention_mask=batch.mask_BT.long()).logits
    taken = logits.double().log_softmax(-1)[:, :-1].gather(-1, batch.ids_BT[:, 1:, None])[..., 0]
    return nn.functional.pad(taken, (1, 0)) * batch.mask_BT


@pytest.mark.parametrize("name", [*JOINED, *PADDED])
def test_log_probs_are_those_of_the_padded_batch_with_its_mask(name, rows):
    model, batch = build({**JOINED, **PADDED}[name]), batch_of(rows, filler=3)
    assert packs(trunk_of(model)) == (name in JOINED)
    before = implementations(model)
    with torch.no_grad():
        got = sequence_logp(model, batch, batch.mask_BT, temperature=1.0, max_tokens=60)
        # Rows alone: some of these models look at padding on the right when they are given a mask.
        alone = [padded_logp(model, batch_of([row]))[0] for row in rows]
    for index, expected in enumerate(alone):
        assert (got[index, : len(expected)] - expected).abs().max() <= 1e-5 * (1 + expected.abs().max())
    assert implementations(model) == before


@pytest.mark.parametrize("name", ["gemma2_softcap", "mistral_short_window", "gpt2_absolute_positions", "qwen3"])
def test_gradients_are_those_of_the_rows_alone(name, rows):
    batch = batch_of(rows)
    weight_BT = torch.rand(batch.mask_BT.shape, generator=torch.Generator().manual_seed(3))
    ours, theirs = (build(JOINED[name]).double() for _ in range(2))
    (sequence_logp(ours, batch, batch.mask_BT, temperature=1.0, max_tokens=50) * weight_BT).sum().backward()
    for row, weight_T in zip(rows, weight_BT, strict=True):
        (padded_logp(theirs, batch_of([row])) * weight_T[: len(row)]).sum().backward()
    for (parameter, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        scale = b.grad.abs().max().clamp(min=1e-9)
        # norms and softmaxes of these models work in float32 whatever the model is
        assert (a.grad - b.grad).abs().max() <= 1e-5 * scale, parameter


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
def test_an_adapter_gets_the_gradients_of_the_padded_batch(rows):
    batch = batch_of(rows)
    gradients = []
    for compute in (lambda model: sequence_logp(model, batch, batch.mask_BT, temperature=1.0), lambda m: padded_logp(m, batch)):
        model = build_model("mistral")
        with torch.random.fork_rng():
            torch.manual_seed(1)
            wrapped = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
        compute(wrapped.eval()).sum().backward()
        gradients.append({name: p.grad for name, p in wrapped.named_parameters() if p.requires_grad})
    for name, expected in gradients[1].items():
        assert (gradients[0][name] - expected).abs().max() <= 1e-4 * expected.abs().max(), name


def enable(model, **kwargs):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    model.train()


@pytest.mark.filterwarnings("ignore:.*(gradient_checkpointing|use_reentrant).*")
@pytest.mark.parametrize(
    "switch", [recompute_layers, lambda m: enable(m, use_reentrant=False), lambda m: enable(m, use_reentrant=True)]
)
@pytest.mark.parametrize("kind", ["mistral", "gpt2"])
def test_layers_that_run_again_in_backward_attend_as_they_did(switch, kind, rows):
    batch, gradients = batch_of(rows), []
    for prepare in (lambda model: model, switch):
        model = build_model(kind, **({"attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0} if kind == "gpt2" else {}))
        prepare(model)
        model.enable_input_require_grads()  # the older kind of recomputation needs it
        calls = []
        model.base_model.get_submodule("layers.1" if kind == "mistral" else "h.1").register_forward_hook(
            lambda *args, calls=calls: calls.append(1)
        )
        assert packs(trunk_of(model))
        loss = sequence_logp(model, batch, batch.mask_BT, temperature=1.0, max_tokens=50).sum()
        functions = [vars(module).get("_gradient_checkpointing_func") for module in model.modules()]
        loss.backward()
        assert [vars(module).get("_gradient_checkpointing_func") for module in model.modules()] == functions
        assert set(implementations(model)) == {"sdpa"}
        gradients.append([p.grad for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert (a - b).abs().max() <= 1e-5 * (1 + b.abs().max())


def test_no_padding_is_computed(rows):
    model, shapes = build_model("llama"), []
    assert packs(trunk_of(model))
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: shapes.append(tuple(out.shape[:2])))
    batch = batch_of(rows, extra=9)
    with torch.no_grad():
        sequence_logp(model, batch, batch.mask_BT, temperature=1.0)
    # a row needs no state after the token before its last; a row of one token has nothing before it
    assert shapes == [(1, sum(len(row) - 1 for row in rows))]


def test_a_layer_that_mixes_neighbors_is_found_and_its_rows_are_padded(rows):
    model, batch = build_model("llama"), batch_of(rows)

    def mixed(module, args, out):
        return out + nn.functional.pad(out, (0, 0, 1, 0))[:, :-1]

    model.model.layers[1].mlp.register_forward_hook(mixed)
    assert not packs(trunk_of(model))
    with torch.no_grad():
        got = sequence_logp(model, batch, batch.mask_BT, temperature=1.0)
        assert (got - padded_logp(model, batch)).abs().max() < 1e-4


def test_an_argument_that_attention_does_not_know_is_not_dropped(rows):
    model = build_model("llama")
    states, packing = torch.zeros(1, 4, 3, 8), attention._Packing((2, 1), torch.tensor([0, 2, 3]))
    with attention._attending(trunk_of(model), packing), pytest.raises(CannotPack, match="not known here \\(sinks\\)"):
        AttentionInterface()[NAME](model.model.layers[0].self_attn, states, states, states, None, sinks=torch.ones(4))
    assert set(implementations(model)) == {"sdpa"}


def test_a_rule_that_shows_only_in_long_rows_pads_those_rows(monkeypatch, rows):
    model, batch = build_model("llama"), batch_of(rows)
    packs(trunk_of(model))
    seen = []

    def picky(trunk, layout, ids_RT):
        seen.append((layout.packed, max(layout.lengths)))
        if layout.packed and max(layout.lengths) > 20:
            raise CannotPack("too long")
        return run_trunk(trunk, layout, ids_RT)

    monkeypatch.setattr("rewarden.models.forward.run_trunk", picky)
    with torch.no_grad():
        got = sequence_logp(model, batch, batch.mask_BT, temperature=1.0, max_tokens=40)
        assert (got - padded_logp(model, batch)).abs().max() < 1e-4
    assert seen[:2] == [(True, 29), (False, 29)]
    assert all(packed for packed, longest in seen[2:])


def ask(mask_function, lengths):
    token = attention._current.set(attention._Packing(tuple(lengths), torch.tensor(0)))
    try:
        total = sum(lengths)
        return describe_mask(q_length=total, kv_length=total, mask_function=mask_function, device=CPU)
    finally:
        attention._current.reset(token)


def test_masks_are_told_apart():
    def everything(batch, head, q, k):
        return (q >= 0) & (k >= 0)

    def prefix_in_full(batch, head, q, k):
        return (k <= q) | (k < 3)

    assert ask(causal_mask_function, [9]) is None
    assert ask(sliding_window_causal_mask_function(9), [9]) is None
    assert ask(sliding_window_causal_mask_function(4), [9]).item() == 4
    assert ask(chunked_causal_mask_function(9, torch.zeros(1, dtype=torch.long)), [9]) is None
    for rule in (everything, prefix_in_full, chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long))):
        with pytest.raises(CannotPack, match="not a causal one"):
            ask(rule, [9])


def test_the_attention_function_is_a_softmax_over_each_sequence(monkeypatch):
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 9, width, generator=draw).double() for heads, width in ((4, 6), (2, 6), (2, 5)))
    module = nn.Identity()
    lengths = (4, 2, 2, 1)
    for window, softcap in ((None, None), (2, None), (None, 1.5), (3, 1.5)):
        token = attention._current.set(attention._Packing(lengths, torch.tensor(0)))
        mask = None if window is None else torch.full((1, 1, 1, 1), window)
        got, _ = attention.attend(module, q, k, v, mask, scaling=0.4, softcap=softcap, sliding_window=99)
        attention._current.reset(token)
        start = 0
        for length in lengths:
            for t in range(length):
                for head in range(4):
                    seen = range(max(0, t - (window or 99) + 1), t + 1)
                    scores = torch.stack([0.4 * q[0, head, start + t] @ k[0, head // 2, start + s] for s in seen])
                    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
                    expected = sum(p * v[0, head // 2, start + s] for p, s in zip(scores.softmax(0), seen, strict=True))
                    assert torch.allclose(got[0, start + t, head], expected, atol=1e-12)
            start += length


def test_the_config_is_put_back_after_an_error(rows):
    model = build_model("gpt2")
    layout = joined(rows)
    with pytest.raises(IndexError):
        run_trunk(trunk_of(model), layout, torch.full((1, sum(layout.lengths)), VOCABULARY))
    assert set(implementations(model)) == {"sdpa"}
    assert attention._current.get() is None


def test_chunks_hold_whole_rows_within_the_bound_longest_first():
    lengths = [7, 0, 300, 12, 12, 90, 1, 2500, 64, 64, 65, 200]
    groups = token_chunks(lengths, max_tokens=600)
    assert groups == [[7], [2, 11, 5], [10, 8, 9, 3, 4, 0, 6]]
    assert token_chunks([], max_tokens=10) == []


def test_a_layout_by_hand():
    x_BT = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]])
    packed = Layout.of([2, 0], [3, 0, 2], CPU, packed=True)
    assert packed.arrange(x_BT).tolist() == [[9, 10, 1, 2, 3]]
    assert packed.position_N.tolist() == [0, 1, 0, 1, 2]
    assert (packed.last_b.tolist(), packed.start_b.tolist()) == ([1, 4], [0, 2])
    padded = Layout.of([0, 2], [3, 0, 2], CPU, packed=False)
    assert padded.arrange(x_BT).tolist() == [[1, 2, 3], [9, 10, 11]]
    assert padded.flat_N.tolist() == [0, 1, 2, 3, 4]
    assert padded.last_b.tolist() == [2, 4]
    halves = [torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[9.0], [10.0]])]
    assert padded.join(halves)[..., 0].tolist() == [[1, 2, 3], [9, 10, 0]]
    assert packed.join(halves[::-1])[..., 0].tolist() == [[9, 10, 1, 2, 3]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_the_kernel_of_a_gpu_gives_what_rows_alone_give(kind):
    device, rows = torch.device("cuda"), random_rows([9, 3, 17, 1, 17, 6, 2, 30])
    if not has_kernel(device, torch.bfloat16):
        pytest.skip("no kernel for sequences of unequal length")
    model = build_model(kind).to(device, torch.bfloat16)
    batch = batch_of(rows).to(device)
    assert packs(trunk_of(model))
    with torch.no_grad():
        got = sequence_logp(model, batch, batch.mask_BT, temperature=1.0)
        alone = sequence_logp(model, batch, batch.mask_BT, temperature=1.0, max_tokens=1)
    assert (got - alone).abs().max() < 0.1
