import copy
import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rewarden.errors import RewardenError
from rewarden.rollout import decode, shared
from rewarden.rollout import past as past_module
from rewarden.rollout.bundles import MOST_WASTE, bundles, plan
from rewarden.rollout.decoder import PREFILL_POSITIONS, Decoder
from rewarden.rollout.hf import HFSampler, Sampling
from rewarden.rollout.past import Shared
from rewarden.rollout.rows import Rows
from rewarden.rollout.shared import CannotShare

from .conftest import END, NUM_TOKENS, PAD, SPECIAL, llama, prompt
from .test_hf import CONFIGS, TEMPLATE, build, recomputed

SHARING = [
    "llama_tied", "gpt2_absolute_positions", "qwen2", "qwen2_mixed_layers", "mistral_sliding", "gemma2_softcap", "neox_parallel",
]  # fmt: skip
COPYING = sorted(CONFIGS.keys() - set(SHARING))


def groups(*sizes, lengths=(9, 14, 6, 11, 3), seed=0):
    """Open rollouts: a prompt for each size, with that many rows, in no order."""
    draw = torch.Generator().manual_seed(seed)
    out = []
    for group, size in enumerate(sizes):
        ids = torch.randint(len(SPECIAL), NUM_TOKENS, (lengths[group % len(lengths)],), generator=draw).tolist()
        out += [prompt(f"prompt{group}-{i}", ids) for i in range(size)]
    return [out[i] for i in torch.randperm(len(out), generator=draw).tolist()]


def sample(model, rollouts, **sampling):
    sampler = HFSampler(model, TEMPLATE, Sampling(**{"max_completion_length": 12, **sampling}))
    return sampler.sample(rollouts, seeds=range(len(rollouts))), sampler.stats


def unshared(model, rollouts, monkeypatch, **sampling):
    with monkeypatch.context() as patch:
        patch.setattr(decode, "SHARE_FROM", 10**9)
        out, stats = sample(model, rollouts, **sampling)
    assert stats.shared_rows == 0
    return out


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert (a.token_ids, a.stop) == (b.token_ids, b.stop)
        np.testing.assert_allclose(a.logp_sampler, b.logp_sampler, atol=1e-5)


@pytest.mark.parametrize("name", SHARING)
def test_rows_that_share_a_prompt_are_what_they_are_with_a_copy_each(name, monkeypatch):
    model, rollouts = build(name), groups(7, 1, 2, 5, 1)
    out, stats = sample(model, rollouts, max_completion_length=30, temperature=1.2)
    assert (stats.shared_rows, stats.copied_rows, stats.not_shared) == (14, 0, None)
    assert_same(out, unshared(model, rollouts, monkeypatch, max_completion_length=30, temperature=1.2))
    assert len({len(row.token_ids) for row in out}) > 5
    for before, after in zip(rollouts, out, strict=True):
        expected = recomputed(model, after.token_ids, len(before.token_ids), 1.2)
        np.testing.assert_allclose(after.logp_sampler, expected, atol=1e-5)


@pytest.mark.parametrize("name", COPYING)
def test_models_that_cannot_share_copy_and_say_so_once(name, caplog):
    model, rollouts = build(name), groups(4, 2, 1)
    with caplog.at_level(logging.WARNING, logger="rewarden.rollout.shareable"):
        out, stats = sample(model, rollouts)
        sample(model, rollouts)
    assert (stats.shared_rows, stats.copied_rows) == (0, 4)
    assert stats.not_shared
    told = [record.getMessage() for record in caplog.records if "copied, not shared" in record.getMessage()]
    assert told == [f"{type(model).__name__}: equal prompts are copied, not shared: {stats.not_shared}"]
    for before, after in zip(rollouts, out, strict=True):
        expected = recomputed(model, after.token_ids, len(before.token_ids), 1.0)
        np.testing.assert_allclose(after.logp_sampler, expected, atol=1e-5)


def test_blocks_that_cut_a_group_change_nothing(model, monkeypatch):
    rollouts = groups(7, 3, 1, 2)
    out, stats = sample(model, rollouts, batch_size=4)
    # by length: 3 (two rows), 6 (one), 9 (seven), 14 (three) in blocks of four; the row of 9 that is cut off at each end is alone
    assert stats.batches == 4
    assert_same(out, unshared(model, rollouts, monkeypatch))


@pytest.mark.parametrize("bound", [8, 20])
def test_prompts_longer_than_the_prefill_bound_are_shared_too(bound, model, monkeypatch):
    monkeypatch.setitem(PREFILL_POSITIONS, "cpu", bound)
    rollouts = groups(3, 2, 4, 1, lengths=(40, 12, 33, 25))
    out, stats = sample(model, rollouts)
    assert (stats.shared_rows, stats.prompt_tokens) == (9, 110)
    assert_same(out, unshared(model, rollouts, monkeypatch))


@pytest.mark.parametrize("name", ["llama_tied", "gpt2_absolute_positions"])
def test_prompts_near_the_last_position_are_cut_by_it(name, monkeypatch):
    model, rollouts = build(name), groups(3, 2, 4, lengths=(63, 60, 8))
    out, stats = sample(model, rollouts, temperature=1.5)
    assert stats.shared_rows == 9
    assert all(len(row.token_ids) <= 64 for row in out)
    cut = [row for row in out if row.stop == "length" and len(row.token_ids) == 64]
    assert stats.cut_by_context == len(cut) >= 3
    assert_same(out, unshared(model, rollouts, monkeypatch, temperature=1.5))


def test_finished_rows_leave_their_group_and_empty_groups_leave_the_products(model, monkeypatch):
    rollouts, met = groups(12, 2, 5, 1), []
    own = shared._to_prompts

    def spied(q, prompts, part, last, score):
        met.append((q[part.rows].shape[0], part.prompts))
        return own(q, prompts, part, last, score)

    sample(model, rollouts[:0])
    monkeypatch.setattr(shared, "_to_prompts", spied)
    out, _ = sample(model, rollouts, max_completion_length=40, temperature=1.4)
    rows_met = [rows for rows, _ in met]
    assert max(rows_met) >= 12
    assert min(rows_met) < 5
    assert len({(part.start, part.stop) for _, part in met}) > 1
    assert_same(out, unshared(model, rollouts, monkeypatch, max_completion_length=40, temperature=1.4))


def test_distinct_prompts_never_meet_the_function_for_shared_ones(model, monkeypatch):
    def refused(*args):
        raise AssertionError("unshared prompts went through two products")

    monkeypatch.setattr(shared, "_shared", refused)
    _, stats = sample(model, groups(1, 1, 1, 1))
    assert (stats.shared_rows, stats.copied_rows) == (0, 0)


def test_in_a_mixed_batch_only_rows_with_equal_prompts_take_two_products(model, monkeypatch):
    sample(model, groups(2, 1))
    counts, own = [], shared._shared
    monkeypatch.setattr(shared, "_shared", lambda q, *rest: counts.append(len(q)) or own(q, *rest))
    _, stats = sample(model, groups(3, 1, 1, 2), max_completion_length=2)
    assert set(counts) == {5}
    assert stats.shared_rows == 5


def test_the_keys_of_a_shared_prompt_are_held_once(model):
    prompts = [(5, 6, 7, 8, 9)] * 20 + [(10, 11, 12)] * 30
    with torch.no_grad():
        past = Shared(Decoder(model), prompts, 4, plan(prompts, 2))
        rows = Rows(prompts, [4] * 50, torch.device("cpu"), past.order)
        rows.feed(torch.full((50,), 7))
        past.logits(rows)
    for layer in past._layers:
        assert layer.alone is None
        assert layer.prompts.keys.shape == layer.prompts.values.shape == (2, 2, 5, 8)
        assert layer.own.keys.shape == layer.own.values.shape == (50, 2, 4, 8)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
def test_a_lora_policy_shares_as_its_merged_weights_do(model):
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, lora_dropout=0.3))
    rollouts = groups(5, 2, 1)
    out, stats = sample(wrapped.train(), rollouts)
    assert stats.shared_rows == 7
    merged = copy.deepcopy(wrapped).merge_and_unload().eval()
    assert_same(out, sample(merged, rollouts)[0])


def test_half_precision_shares_within_its_own_noise():
    model = llama().to(torch.bfloat16).eval()
    rollouts = groups(4, 3)
    out, stats = sample(model, rollouts)
    assert stats.shared_rows == 7
    for before, after in zip(rollouts, out, strict=True):
        expected = recomputed(model, after.token_ids, len(before.token_ids), 1.0)
        np.testing.assert_allclose(after.logp_sampler, expected, atol=0.15)


def test_the_attention_function_of_the_model_is_put_back(model):
    before = model.config._attn_implementation
    sample(model, groups(3, 2))
    assert model.config._attn_implementation == before
    model.model.norm.weight.data[0] = float("nan")
    with pytest.raises(RewardenError, match="not finite"):
        sample(model, groups(3, 2))
    assert model.config._attn_implementation == before


def test_weights_that_are_not_finite_decide_nothing_about_the_model(model):
    weight = model.model.norm.weight.data
    kept = weight.clone()
    weight[0] = float("nan")
    with pytest.raises(RewardenError, match="not finite"):
        sample(model, groups(3, 2))
    weight.copy_(kept)
    assert sample(model, groups(3, 2))[1].shared_rows == 5


def test_a_model_that_turns_out_not_to_share_starts_the_batch_again_with_copies(model, monkeypatch):
    rollouts, calls, own = groups(4, 2, 1), [], past_module.attending
    expected = unshared(model, rollouts, monkeypatch)
    sample(model, rollouts)

    def failing(base, step):
        calls.append(step)
        if len(calls) == 3:
            raise CannotShare("a rule that shows late")
        return own(base, step)

    monkeypatch.setattr(past_module, "attending", failing)
    out, stats = sample(model, rollouts)
    assert (stats.shared_rows, stats.copied_rows, stats.not_shared) == (0, 4, "a rule that shows late")
    assert_same(out, expected)
    sample(model, rollouts)
    assert len(calls) == 3


def test_a_model_in_which_sharing_changes_the_logits_is_found_out(model, monkeypatch):
    def crossed(lengths, counts, device):
        # every row reads the prompt after its own
        return tuple(replace(part, prompts=slice(0, 1), rows=part.rows) for part in bundles(lengths, counts, device))

    monkeypatch.setattr(past_module, "bundles", crossed)
    monkeypatch.setitem(MOST_WASTE, "cpu", 1.0)
    rollouts = groups(3, 2)
    out, stats = sample(model, rollouts)
    assert stats.not_shared.startswith("logits of a shared prompt are off by")
    assert_same(out, unshared(model, rollouts, monkeypatch))


def test_rows_are_planned_by_their_prompts():
    a, b, c, d = (1,), (1, 2), (2, 2), (3, 3, 3)
    found = plan([a, b, a, c, b, d, b, d], 2)
    assert found.shared == ((a, (0, 2)), (b, (1, 4, 6)), (d, (5, 7)))
    assert found.alone == (3,)
    assert found.order == (0, 2, 1, 4, 6, 5, 7, 3)
    assert plan([a, b, a, c, b, d, b, d], 3).order == (1, 4, 6, 0, 2, 3, 5, 7)


def test_a_plan_with_a_bound_keeps_the_others_in_their_order():
    assert plan([(1,), (2,), (1,)], 3).alone == (0, 1, 2)


def test_bundles_join_neighbors_while_little_is_computed_in_vain(monkeypatch):
    monkeypatch.setitem(MOST_WASTE, "cpu", 1.25)
    cpu = torch.device("cpu")
    # 4 x 10 and 4 x 8 tokens: 80 for 72; with 4 x 2 it would be 120 for 80
    first, second = bundles([10, 8, 2], [4, 4, 4], cpu)
    assert (first.prompts, first.rows, first.num_slots, first.length) == (slice(0, 2), slice(0, 8), 4, 10)
    assert first.hidden_G11P[:, 0, 0].tolist() == [[False] * 10, [True] * 2 + [False] * 8]
    assert first.row_of_slot is None
    assert (second.prompts, second.rows, second.length, second.hidden_G11P) == (slice(2, 3), slice(8, 12), 2, None)
    # rows of 4, 3, none, 5: 4 and 3 share, with the last row of the second repeated
    first, second = bundles([6, 6, 6, 6], [4, 3, 0, 5], cpu)
    assert first.row_of_slot.tolist() == [0, 1, 2, 3, 4, 5, 6, 6]
    assert first.slot_of_row.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert (second.prompts, second.rows) == (slice(3, 4), slice(7, 12))
    assert bundles([6], [0], cpu) == ()


def chi_square(a, b):
    """Upper tail of the two-sample statistic sum (a - b)^2 / (a + b) for samples of equal size; rare tokens are pooled."""
    count_a, count_b = (np.bincount(x, minlength=NUM_TOKENS).astype(float) for x in (a, b))
    rare = count_a + count_b < 20
    count_a, count_b = (np.append(x[~rare], x[rare].sum()) for x in (count_a, count_b))
    total = count_a + count_b
    statistic = ((count_a - count_b) ** 2 / np.maximum(total, 1)).sum()
    freedom = (total > 0).sum() - 1
    return torch.special.gammaincc(torch.tensor(freedom / 2), torch.tensor(statistic / 2)).item()


def written(rollouts, num, start):
    """The first `num` sampled ids of each row; END goes on as PAD, as generate pads."""
    return np.array([[*row.token_ids[start : start + num], *[PAD] * num][:num] for row in rollouts])


def test_next_tokens_have_the_frequencies_of_generate(model):
    """Two-sample chi-square at each of three positions, by prompt; seeds: torch 7 for generate, 0 ... 2999 for ours."""
    num, steps, ids = 1500, 3, ([7, 8, 9, 30, 41], [12, 50, 33, 6, 20])
    rollouts = [prompt(f"{p}-{i}", ids[p]) for p in range(2) for i in range(num)]
    ours, stats = sample(model, rollouts, max_completion_length=steps)
    hotter, _ = sample(model, rollouts, max_completion_length=steps, temperature=2.0)
    assert stats.shared_rows == 2 * num
    torch.manual_seed(7)
    theirs = model.eval().generate(
        torch.tensor(ids), attention_mask=torch.ones(2, 5, dtype=torch.long), num_return_sequences=num, max_new_tokens=steps,
        do_sample=True, top_k=0, pad_token_id=PAD, eos_token_id=END,
    )[:, 5:].numpy()  # fmt: skip
    rows = (slice(0, num), slice(num, 2 * num))
    tails = [chi_square(written(ours, steps, 5)[part, t], theirs[part, t]) for part in rows for t in range(steps)]
    other = [chi_square(written(hotter, steps, 5)[part, t], theirs[part, t]) for part in rows for t in range(steps)]
    print(f"seeds: torch 7, ours 0 ... {2 * num - 1}; upper tails {tails}; at temperature 2 {other}")
    assert min(tails) > 0.005
    assert max(other) < 1e-4


@pytest.mark.slow
def test_a_real_model_shares_prompts_and_agrees_with_its_full_forward(smollm2, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    rollouts = [prompt(f"{length}-{i}", range(400, 400 + length)) for length in (12, 40) for i in range(4)]
    greedy, stats = sample(model, rollouts, max_completion_length=8, temperature=0.0)
    assert stats.shared_rows == 8
    expected = unshared(model, rollouts, monkeypatch, max_completion_length=8, temperature=0.0)
    assert [row.token_ids for row in greedy] == [row.token_ids for row in expected]
    # Of 49,152 tokens most are so rare that noise in the logits moves a draw to a neighbor now and then: no equal texts here.
    out, _ = sample(model, rollouts, max_completion_length=8)
    for before, after in zip(rollouts, out, strict=True):
        full = recomputed(model, after.token_ids, len(before.token_ids), 1.0)
        np.testing.assert_allclose(after.logp_sampler, full, atol=1e-4)
