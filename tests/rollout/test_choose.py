import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor, TopKLogitsWarper, TopPLogitsWarper

from rewarden.errors import ConfigError
from rewarden.rollout.choose import choose, keep_top_k, nucleus, penalize, uniforms

OFF = {"top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
NONE = torch.zeros((1, 0), dtype=torch.long)


def logits_of(rows, vocabulary, seed=0):
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 2


def none_of(rows):
    return torch.zeros((rows, 0), dtype=torch.long)


def test_nucleus_keeps_tokens_whose_predecessors_sum_to_less_than_p():
    probs = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    np.testing.assert_allclose(nucleus(probs, p=0.9)[0], [0.526316, 0.315789, 0.157895, 0], atol=1e-6)
    assert nucleus(probs, p=0.5).tolist() == [[1, 0, 0, 0]]


def test_behavior_and_recorded_log_probability_differ_as_worked_by_hand():
    logits = torch.tensor([[2.0, -1.0, 0.5, 1.0]])
    choice = choose(
        logits, torch.tensor([[0, 1]]), torch.tensor([0.01]), temperature=0.8, top_k=0, top_p=0.9, repetition_penalty=1.1
    )
    assert choice.id_B.tolist() == [0]
    # The published case, -0.439610 to 1e-5, comes from probabilities rounded to six digits; this is the sum without rounding.
    kept = np.exp(np.array([2 / 1.1, 0.5, 1.0]) / 0.8)
    assert np.log(kept[0] / kept.sum()) == pytest.approx(-0.439610, abs=1e-5)
    assert choice.behavior_logp_B.item() == pytest.approx(np.log(kept[0] / kept.sum()), abs=1e-6)
    scored = choose(logits, NONE, torch.tensor([0.01]), temperature=1.0, **OFF)
    assert scored.id_B.tolist() == [0]
    assert scored.logp_B.item() == pytest.approx(-0.495182, abs=1e-6)
    assert choice.logp_B.item() == pytest.approx(float((logits.double()[0] / 0.8).log_softmax(0)[0]), abs=1e-6)


def test_repetition_penalty_counts_each_distinct_token_once():
    logits = torch.tensor([[2.0, -1.0, 0.5]])
    np.testing.assert_allclose(
        penalize(logits, torch.tensor([[0, 1, 0, 1, 1]]), penalty=1.1)[0], [2 / 1.1, -1.1, 0.5], rtol=1e-6
    )
    logits, generated = logits_of(5, 30), torch.randint(0, 30, (5, 9), generator=torch.Generator().manual_seed(1))
    expected = RepetitionPenaltyLogitsProcessor(1.3)(generated, logits.clone())
    torch.testing.assert_close(penalize(logits, generated, penalty=1.3), expected)


@pytest.mark.parametrize("p", [0.05, 0.3, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("vocabulary", [3, 40, 3000])
def test_nucleus_is_the_ranked_prefix(p, vocabulary):
    flat = torch.zeros(1, vocabulary)
    tied = logits_of(4, vocabulary).round()
    probs = torch.cat([logits_of(4, vocabulary, 1), tied, flat]).softmax(-1)
    for row, got in zip(probs.double().numpy(), nucleus(probs, p=p).double().numpy(), strict=True):
        order = sorted(range(vocabulary), key=lambda i: (-row[i], i))
        before, kept = 0.0, []
        for i in order:
            if before < p or not kept:
                kept.append(i)
            before += row[i]
        expected = np.zeros(vocabulary)
        expected[kept] = row[kept] / row[kept].sum()
        np.testing.assert_allclose(got, expected, atol=2e-7)


def test_top_k_and_top_p_agree_with_transformers():
    logits = logits_of(6, 50)
    filtered = TopPLogitsWarper(0.8)(None, TopKLogitsWarper(7)(None, logits.clone()))
    torch.testing.assert_close(nucleus(keep_top_k(logits, k=7).softmax(-1), p=0.8), filtered.softmax(-1))


@pytest.mark.parametrize("uniform", [2.0**-53, 1e-9, 0.5, 1 - 2.0**-53, 1.0])
def test_a_filtered_token_is_never_drawn(uniform):
    logits = torch.tensor([[-9.0, -9.0, 5.0, 4.9, -9.0, -9.0]])
    choice = choose(
        logits, NONE, torch.tensor([uniform], dtype=torch.float64), temperature=1.0, top_k=2, top_p=1.0, repetition_penalty=1.0
    )
    assert choice.id_B.item() in (2, 3)
    assert torch.isfinite(choice.behavior_logp_B).all()


def test_draws_have_the_policys_frequencies():
    num, logits = 40_000, torch.tensor([[1.0, 0.0, -1.0, 2.0, -3.0]])
    uniform = torch.from_numpy(uniforms([7], num))[0]
    drawn = choose(logits.expand(num, -1), none_of(num), uniform, temperature=0.7, **OFF).id_B
    expected = (logits.double() / 0.7).softmax(-1)[0] * num
    chi2 = ((torch.bincount(drawn, minlength=5) - expected) ** 2 / expected).sum().item()
    assert chi2 < 18.47  # 99.9 % quantile at 4 degrees of freedom


def test_recorded_log_probability_is_that_of_the_tempered_unfiltered_policy():
    logits, uniform = logits_of(20, 50), torch.from_numpy(uniforms(range(20), 1))[:, 0]
    generated = torch.randint(0, 50, (20, 4), generator=torch.Generator().manual_seed(3))
    choice = choose(logits, generated, uniform, temperature=0.6, top_k=9, top_p=0.8, repetition_penalty=1.4)
    expected = (logits.double() / 0.6).log_softmax(-1).gather(1, choice.id_B[:, None])[:, 0]
    np.testing.assert_allclose(choice.logp_B, expected, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1e-9, 1e-6, 1e-4])
def test_no_temperature_takes_the_most_probable_token(temperature):
    logits, uniform = logits_of(20, 50), torch.from_numpy(uniforms(range(20), 1))[:, 0]
    choice = choose(logits, none_of(20), uniform, temperature=temperature, **OFF)
    assert choice.id_B.tolist() == logits.argmax(-1).tolist()
    assert torch.isfinite(choice.logp_B).all()


def test_greedy_choice_records_the_policy_at_temperature_one():
    logits = logits_of(3, 10)
    choice = choose(logits, none_of(3), torch.ones(3), temperature=0.0, **OFF)
    np.testing.assert_allclose(choice.logp_B, logits.double().log_softmax(-1).amax(-1), atol=1e-6)
    assert choice.behavior_logp_B.tolist() == [0, 0, 0]


def test_a_longer_stream_begins_with_the_shorter_one():
    short, long = uniforms([3, 4], 5), uniforms([3, 4], 500)
    assert (long[:, :5] == short).all()
    assert (uniforms([4, 3], 5) == short[::-1]).all()
    assert (long > 0).all()
    assert (long <= 1).all()
    assert abs(long.mean() - 0.5) < 0.05
    assert len(np.unique(long)) == 1000


def test_a_seed_outside_the_key_range_is_refused():
    with pytest.raises(ConfigError, match="seed of row 1 is -5"):
        uniforms([0, -5], 3)
