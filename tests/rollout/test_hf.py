import copy
import math

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconH1Config,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
)

from rewarden.errors import ConfigError, DataError, RewardenError
from rewarden.protocols import Sampler
from rewarden.rollout.choose import Choice
from rewarden.rollout.decoder import PREFILL_POSITIONS
from rewarden.rollout.hf import HFSampler, Sampling
from rewarden.text.render import load_template

from .conftest import END, NUM_TOKENS, PAD, SPECIAL, chat_tokenizer, llama, prompt, prompts

TEMPLATE = load_template(chat_tokenizer())
SMALL = {
    "vocab_size": NUM_TOKENS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": PAD, "bos_token_id": None, "eos_token_id": END,
}  # fmt: skip
CONFIGS = {
    "llama_tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "gpt2_absolute_positions": GPT2Config(
        vocab_size=NUM_TOKENS, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2, bos_token_id=None, eos_token_id=END
    ),
    "qwen2": Qwen2Config(**SMALL),
    "qwen2_mixed_layers": Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "mistral_sliding": MistralConfig(**SMALL, sliding_window=5),
    "gemma2_softcap": Gemma2Config(**SMALL, head_dim=8, sliding_window=5, query_pre_attn_scalar=8, hidden_activation="gelu_pytorch_tanh"),
    "neox_parallel": GPTNeoXConfig(**{k: v for k, v in SMALL.items() if k != "num_key_value_heads"}, attention_dropout=0.1),
    "bloom_alibi": BloomConfig(vocab_size=NUM_TOKENS, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.2, pad_token_id=PAD, eos_token_id=END),
    "llama4_chunked": Llama4TextConfig(
        **SMALL, intermediate_size_mlp=48, num_local_experts=2, head_dim=8, attention_chunk_size=8, no_rope_layers=[1, 0]
    ),
    "lfm2_convolution": Lfm2Config(**SMALL, layer_types=["conv", "full_attention"]),
    "falcon_h1_state_space": FalconH1Config(
        **SMALL, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1, mamba_chunk_size=8
    ),
}  # fmt: skip


def build(name):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name])).eval()


def generated(model, ids, **options):
    with torch.no_grad():
        out = model.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), pad_token_id=PAD, eos_token_id=END,
            do_sample=False, **options,
        )  # fmt: skip
    return out[0].tolist()


def recomputed(model, ids, start, temperature):
    """log p of ids[start:] from one plain forward over everything."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0].double() / temperature
    return [logits[t - 1].log_softmax(-1)[ids[t]].item() for t in range(start, len(ids))]


def sample(model, rollouts, seeds=None, policy_version=0, **sampling):
    sampler = HFSampler(model, TEMPLATE, Sampling(**{"max_completion_length": 12, **sampling}))
    return sampler.sample(
        rollouts, seeds=range(len(rollouts)) if seeds is None else seeds, policy_version=policy_version
    ), sampler


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_text_is_that_of_generate(name):
    model, rollouts = build(name), prompts(9)
    out, sampler = sample(model, rollouts, temperature=0.0, batch_size=7)
    for before, after in zip(rollouts, out, strict=True):
        assert list(after.token_ids) == generated(model, before.token_ids, max_new_tokens=12)
    assert sampler.stats.cache == (
        "dynamic" if name in ("llama4_chunked", "lfm2_convolution", "falcon_h1_state_space") else "block"
    )
    assert any(rollout.stop == "eos" for rollout in out) or name not in ("llama_tied",)


@pytest.mark.parametrize("name", CONFIGS)
def test_log_probabilities_equal_a_full_forward(name):
    model, rollouts = build(name), prompts(9)
    out, _ = sample(model, rollouts, temperature=0.7)
    for before, after in zip(rollouts, out, strict=True):
        expected = recomputed(model, after.token_ids, len(before.token_ids), 0.7)
        np.testing.assert_allclose(after.logp_sampler, expected, atol=1e-4)


def test_filters_change_the_draw_but_not_the_recorded_log_probability(model):
    rollouts = prompts(9)
    out, sampler = sample(model, rollouts, temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.3)
    plain, plain_sampler = sample(model, rollouts, temperature=0.7)
    assert [r.token_ids for r in out] != [r.token_ids for r in plain]
    for before, after in zip(rollouts, out, strict=True):
        np.testing.assert_allclose(
            after.logp_sampler, recomputed(model, after.token_ids, len(before.token_ids), 0.7), atol=1e-4
        )
    assert plain_sampler.stats.behavior_gap == 0
    assert sampler.stats.behavior_gap > 0.05


@pytest.mark.parametrize(("name", "padded"), [("llama_tied", True), ("lfm2_convolution", False), ("bloom_alibi", False)])
def test_padding_meets_only_models_that_mask_it(name, padded):
    model, masks = build(name), []
    body = model.get_submodule(model.base_model_prefix)
    body.register_forward_pre_hook(lambda module, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True)
    sample(model, prompts(20), max_completion_length=2)
    assert any(mask is not None and not mask.all() for mask in masks) == padded


def test_greedy_repetition_penalty_counts_this_response_only(model):
    rollouts = prompts(6)
    out, _ = sample(model, rollouts, temperature=0.0, repetition_penalty=1.5)
    for before, after in zip(rollouts, out, strict=True):
        ids, start = list(before.token_ids), len(before.token_ids)
        for _ in range(12):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids])).logits[0, -1].double()
            for token in set(ids[start:]):
                logits[token] = logits[token] * 1.5 if logits[token] < 0 else logits[token] / 1.5
            ids.append(int(logits.argmax()))
            if ids[-1] == END:
                break
        assert list(after.token_ids) == ids


def test_a_row_does_not_depend_on_the_rows_beside_it(model):
    rollouts = prompts(16)
    together, _ = sample(model, rollouts, seeds=range(100, 116))
    alone = [sample(model, [rollout], seeds=[100 + i])[0][0] for i, rollout in enumerate(rollouts)]
    backwards, _ = sample(model, rollouts[::-1], seeds=range(115, 99, -1), batch_size=5)
    for a, b, c in zip(together, alone, backwards[::-1], strict=True):
        assert a.token_ids == b.token_ids == c.token_ids
        np.testing.assert_allclose(a.logp_sampler, b.logp_sampler, atol=1e-5)
        np.testing.assert_allclose(a.logp_sampler, c.logp_sampler, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["qwen2_mixed_layers", "mistral_sliding", "gpt2_absolute_positions", "neox_parallel", "gemma2_softcap"]
)
def test_ragged_rows_that_leave_the_batch_are_what_they_are_alone(name):
    # Long prompts meet the model's last position early, so their rows leave while the others go on.
    model, rollouts, sizes = build(name), prompts(20, longest=60), []
    body = model.get_submodule(model.base_model_prefix)
    hook = body.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(len(args[0] if args else kwargs["input_ids"])), with_kwargs=True
    )
    together, _ = sample(model, rollouts, temperature=1.4, max_completion_length=30)
    hook.remove()
    assert len(set(sizes)) > 2
    for i in range(0, 20, 3):
        (alone,), _ = sample(model, [rollouts[i]], seeds=[i], temperature=1.4, max_completion_length=30)
        assert alone.token_ids == together[i].token_ids
        expected = recomputed(model, alone.token_ids, len(rollouts[i].token_ids), 1.4)
        np.testing.assert_allclose(together[i].logp_sampler, expected, atol=1e-4)


def test_equal_prompts_with_different_seeds_get_different_texts_and_equal_seeds_the_same(model):
    same = [prompt(f"copy{i}", [7, 8, 9]) for i in range(8)]
    out, _ = sample(model, same, seeds=[1, 2, 3, 4, 1, 2, 3, 4])
    texts = [rollout.token_ids for rollout in out]
    assert texts[:4] == texts[4:]
    assert len(set(texts)) == 4


def test_equal_prompts_go_through_the_model_once(model):
    same = [prompt(f"copy{i}", [7, 8, 9, 10]) for i in range(8)] + [prompt("other", [7, 8, 9, 11, 12])]
    sample(model, same)  # the first call tries the model out
    shapes = forward_shapes(model)
    out, sampler = sample(model, same)
    assert shapes[:3] == [(1, 4), (1, 5), (9, 1)]
    assert sampler.stats.prompt_tokens == 9
    for before, after in zip(same, out, strict=True):
        np.testing.assert_allclose(
            after.logp_sampler, recomputed(model, after.token_ids, len(before.token_ids), 1.0), atol=1e-4
        )


def test_a_long_batch_is_prefilled_in_parts_of_little_padding(model, monkeypatch):
    rollouts = prompts(40, longest=40)
    whole, _ = sample(model, rollouts)
    monkeypatch.setitem(PREFILL_POSITIONS, "cpu", 64)
    shapes = forward_shapes(model)
    parts, sampler = sample(model, rollouts)
    prefills = [shape for shape in shapes if shape[1] > 1]
    assert len(prefills) > 5
    assert all(rows * width <= 64 or rows == 1 for rows, width in prefills)
    for a, b in zip(whole, parts, strict=True):
        assert a.token_ids == b.token_ids
        np.testing.assert_allclose(a.logp_sampler, b.logp_sampler, atol=1e-5)
    assert sampler.stats.padding_share < 0.2


def test_a_higher_length_limit_only_continues_the_text(model):
    rollouts = prompts(6)
    short, _ = sample(model, rollouts, max_completion_length=4)
    long, _ = sample(model, rollouts, max_completion_length=20)
    assert all(b.token_ids[: len(a.token_ids)] == a.token_ids for a, b in zip(short, long, strict=True))
    assert any(len(b.token_ids) > len(a.token_ids) for a, b in zip(short, long, strict=True))


def test_finished_rows_leave_the_batch(model):
    rollouts = prompts(40)
    shapes = forward_shapes(model)
    out, _ = sample(model, rollouts, max_completion_length=40, temperature=1.5)
    steps = [rows for rows, width in shapes if width == 1]
    lengths = [len(after.token_ids) - len(before.token_ids) for before, after in zip(rollouts, out, strict=True)]
    rows = 40
    for step, got in enumerate(steps, start=1):
        live = sum(length > step for length in lengths)
        rows = live if live < 0.7 * rows else rows
        assert got == rows
    assert len(steps) == max(lengths) - 1
    assert steps[-1] < 28


def test_only_the_last_position_of_a_prompt_meets_the_vocabulary(model):
    seen = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(tuple(output.shape)))
    sample(model, prompts(5))
    assert all(shape[1:] == (1, NUM_TOKENS) for shape in seen)


def test_the_record_of_a_sampled_turn(model):
    before = prompts(1)[0]
    (after,), _ = sample(model, [before], seeds=[79], policy_version=5)
    start, stop = len(before.token_ids), len(after.token_ids)
    assert after.token_ids[:start] == before.token_ids
    span = after.spans[-1]
    assert (span.role, span.turn, span.start, span.stop, span.ended) == ("assistant", 0, start, stop, after.stop)
    assert after.spans[:-1] == before.spans
    assert (after.seeds, after.policy_version) == ((79,), 5)
    assert len(after.logp_sampler) == stop - start
    assert after.conversation.messages[-1].role == "assistant"
    content = [i for i in after.token_ids[start:] if i >= len(SPECIAL)]
    assert content
    assert after.conversation.messages[-1].text == " ".join(TEMPLATE.tokenizer.convert_ids_to_tokens(content))
    assert before.stop == "open"
    assert isinstance(HFSampler(model, TEMPLATE, Sampling(max_completion_length=3)), Sampler)


def test_what_ended_each_turn_is_marked_and_counted(model):
    rollouts = [*prompts(30), prompt("near_the_end", [*range(5, 59), *range(5, 12)])]
    out, sampler = sample(model, rollouts, max_completion_length=6, temperature=1.2)
    new = [after.token_ids[len(before.token_ids) :] for before, after in zip(rollouts, out, strict=True)]
    for ids, after in zip(new, out, strict=True):
        assert (ids[-1] == END) == (after.stop == "eos")
        assert END not in ids[:-1]
    assert len(out[-1].token_ids) == 64
    assert out[-1].stop == "length"
    stats = sampler.stats
    assert stats.cut_by_context == 1
    assert stats.cut_by_length == sum(len(ids) == 6 and ids[-1] != END for ids in new)
    assert stats.ended_by_eos == sum(ids[-1] == END for ids in new) > 0
    assert stats.generated_tokens == sum(map(len, new))
    assert stats.rows == 31
    assert 0 < stats.padding_share < 1
    assert all(math.isfinite(value) for value in stats.report().values())


def test_the_conversation_remembers_which_turns_were_cut(model):
    before = prompt("a", [5, 6, 7], truncated=[0], topic="x")
    (after,), _ = sample(model, [before], max_completion_length=1)
    assert after.stop == "length"
    assert after.conversation.meta == {"truncated": (0, 0), "topic": "x"}
    (whole,), _ = sample(model, [prompt("b", [5, 6, 7])], max_completion_length=50, seeds=[3])
    assert whole.stop == "eos"
    assert "truncated" not in whole.conversation.meta
    with pytest.raises(DataError, match="'c': meta\\['truncated'\\] is True"):
        sample(model, [prompt("c", [5], truncated=True)])


def test_a_row_cut_at_the_last_position_does_not_disturb_the_others():
    model = build("gpt2_absolute_positions")
    rollouts = [*prompts(9), prompt("near_the_end", [*range(5, 59), *range(5, 12)])]
    out, sampler = sample(model, rollouts)
    alone = [sample(model, [rollout], seeds=[i])[0][0] for i, rollout in enumerate(rollouts)]
    assert sampler.stats.cut_by_context == 1
    assert len(out[-1].token_ids) == 64
    assert [rollout.token_ids for rollout in out] == [rollout.token_ids for rollout in alone]


def test_padding_share_counts_pads_and_finished_rows(model, monkeypatch):
    sampler = HFSampler(model, TEMPLATE, Sampling(max_completion_length=3))
    order = iter([[9, END, 9], [9, 9, 9], [9, 9, 9]])

    def scripted(logits_BV, generated_BT, uniform_B, **options):
        zeros = torch.zeros(len(logits_BV))
        return Choice(id_B=torch.tensor(next(order)), logp_B=zeros, behavior_logp_B=zeros)

    monkeypatch.setattr("rewarden.rollout.hf.choose", scripted)
    monkeypatch.setattr("rewarden.rollout.decode.KEEP_ROWS_ABOVE", 0.5)
    sampler.sample([prompt("a", [5]), prompt("b", [5, 6]), prompt("c", [5, 6, 7])], seeds=[1, 2, 3])
    # prefill 3 x 3 positions of which 6 are real; two steps of 3 rows of which 2 are live
    assert sampler.stats.padding_share == pytest.approx(1 - (6 + 2 + 2) / (9 + 3 + 3))


def test_a_prompt_without_room_is_named(model):
    rollouts = [prompt("fine", [5, 6]), prompt("row-12", [5] * 64, where="prompts.jsonl:12")]
    with pytest.raises(DataError, match=r"'row-12' \(prompts.jsonl:12\): the prompt has 64 tokens and the model 64 positions"):
        sample(model, rollouts)


def test_only_open_rollouts_are_sampled(model):
    done, _ = sample(model, prompts(1))
    with pytest.raises(DataError, match="only an open rollout"):
        sample(model, done)
    with pytest.raises(DataError, match="2 seeds for 1 rollouts"):
        sample(model, prompts(1), seeds=[1, 2])


def test_no_rollouts_give_no_rollouts(model):
    out, sampler = sample(model, [])
    assert out == []
    assert all(math.isfinite(value) for value in sampler.stats.report().values())


def test_dropout_is_off_and_every_mode_is_restored():
    model = llama(attention_dropout=0.5)
    reference, _ = sample(model.eval(), prompts(4))
    model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    out, _ = sample(model, prompts(4))
    assert [r.token_ids for r in out] == [r.token_ids for r in reference]
    assert [module.training for module in model.modules()] == modes


def test_modes_are_restored_after_an_error(model):
    model.train()
    model.model.norm.weight.data[0] = float("nan")
    with pytest.raises(RewardenError, match="'row0': the policy's logits are not finite at completion token 0"):
        sample(model, prompts(1))
    assert all(module.training for module in model.modules())


def test_training_goes_on_after_sampling():
    model = llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}).train()
    sample(model, prompts(4))
    tensors = [*model.parameters(), *model.buffers()]
    assert not any(tensor.is_inference() for tensor in tensors)
    model(input_ids=torch.tensor([[5, 6, 7]]), labels=torch.tensor([[5, 6, 7]])).loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_threads_and_global_randomness_are_untouched(model):
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    sample(model, prompts(3))
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
def test_a_lora_policy_samples_as_its_merged_weights_do(model):
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, lora_dropout=0.3))
    wrapped.train()
    out, _ = sample(wrapped, prompts(5))
    with wrapped.disable_adapter():
        base, _ = sample(wrapped, prompts(5))
    merged = copy.deepcopy(wrapped).merge_and_unload().eval()
    expected, _ = sample(merged, prompts(5))
    assert [r.token_ids for r in out] == [r.token_ids for r in expected]
    assert [r.token_ids for r in out] != [r.token_ids for r in base]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
def test_adapters_outside_the_layers_are_refused(model):
    from peft import PromptTuningConfig, get_peft_model

    wrapped = get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(ConfigError, match="PROMPT_TUNING"):
        sample(wrapped, prompts(1))


def test_a_model_that_is_no_decoder_is_refused():
    from transformers import BertConfig, BertForMaskedLM

    small = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    with pytest.raises(ConfigError, match="BertForMaskedLM"):
        sample(BertForMaskedLM(BertConfig(**small)), prompts(1))


@pytest.mark.slow
def test_a_real_model_matches_generate_and_its_full_forward(smollm2):
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    rollouts = [prompt("a", range(400, 412)), prompt("b", range(900, 905))]
    greedy, _ = sample(model, rollouts, temperature=0.0, max_completion_length=6)
    assert [list(r.token_ids) for r in greedy] == [generated(model, r.token_ids, max_new_tokens=6) for r in rollouts]
    out, _ = sample(model, rollouts, max_completion_length=6)
    for before, after in zip(rollouts, out, strict=True):
        np.testing.assert_allclose(
            after.logp_sampler, recomputed(model, after.token_ids, len(before.token_ids), 1.0), atol=1e-4
        )


def forward_shapes(model):
    shapes = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    return shapes
