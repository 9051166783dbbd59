import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rewarden.maths import (
    disagreement,
    lower_bound,
    mean,
    median,
    soft_worst_case,
    variance_penalty,
    worst_case,
)

R = torch.tensor([[1.0, 2.0, 4.5]])
RULES = {
    "mean": mean,
    "worst_case": worst_case,
    "median": median,
    "lower_bound": lambda s: lower_bound(s, coef=0.7, ddof=0),
    "variance_penalty": lambda s: variance_penalty(s, coef=0.7, ddof=0),
    "soft_worst_case": lambda s: soft_worst_case(s, temperature=0.3),
}


def test_ensemble_t1_mean_minimum_median_and_spread():
    assert float(mean(R)) == pytest.approx(2.5, abs=1e-6)
    assert float(worst_case(R)) == 1.0
    assert float(median(R)) == 2.0
    assert float(disagreement(R)) == pytest.approx(1.4719601, abs=1e-6)


@pytest.mark.parametrize(
    ("coef", "ddof", "expected"),
    [
        (0.1, 0, 2.3528040),
        (0.5, 0, 1.7640199),
        (1, 0, 1.0280399),
        (0.1, 1, 2.3197224),
        (0.5, 1, 1.5986122),
        (1, 1, 0.6972244),
    ],
)
def test_ensemble_t1_lower_bound(coef, ddof, expected):
    assert float(lower_bound(R, coef=coef, ddof=ddof)) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("coef", "ddof", "expected"), [(0.1, 0, 2.2833333), (0.5, 0, 1.4166667), (0.1, 1, 2.175), (0.5, 1, 0.875)]
)
def test_ensemble_t1_variance_penalty(coef, ddof, expected):
    assert float(variance_penalty(R, coef=coef, ddof=ddof)) == pytest.approx(expected, abs=1e-6)


def test_t21_strength_of_a_published_pair_by_ten_reward_models():
    chosen = torch.tensor(
        [3.71875, 0.58984375, 3.390625, 0.006805419921875, -0.6953125, 1.0390625, 1.4140625, 0.8359375, 3.078125, 2]
    )
    rejected = torch.tensor(
        [3.546875, 0.9921875, 2.125, -0.330078125, 1.171875, 1.2578125, 1.078125, 1.0546875, 3.546875, 2.265625]
    )
    gap = (chosen - rejected).unsqueeze(0)
    assert float(mean(gap)) == pytest.approx(-0.133109, abs=1e-5)
    assert float(disagreement(gap)) == pytest.approx(0.755961, abs=1e-5)
    assert float(mean(gap) - lower_bound(gap, coef=1, ddof=1)) == pytest.approx(0.796853, abs=1e-5)
    assert int((gap > 0).sum()) == 4


@settings(max_examples=40, deadline=None)
@given(members=st.lists(st.floats(-50, 50), min_size=2, max_size=7), coef=st.floats(0, 3), temperature=st.floats(0.05, 100))
def test_every_rule_is_its_formula(members, coef, temperature):
    score = torch.tensor([members], dtype=torch.float64)
    average, lowest = statistics.fmean(members), min(members)
    soft = lowest - temperature * math.log(statistics.fmean(math.exp(-(x - lowest) / temperature) for x in members))
    expected = {
        mean(score): average,
        worst_case(score): lowest,
        median(score): statistics.median(members),
        disagreement(score): statistics.pstdev(members),
        lower_bound(score, coef=coef, ddof=0): average - coef * statistics.pstdev(members),
        lower_bound(score, coef=coef, ddof=1): average - coef * statistics.stdev(members),
        variance_penalty(score, coef=coef, ddof=0): average - coef * statistics.pvariance(members),
        variance_penalty(score, coef=coef, ddof=1): average - coef * statistics.variance(members),
        soft_worst_case(score, temperature=temperature): soft,
    }
    for ours, theirs in expected.items():
        assert float(ours) == pytest.approx(theirs, rel=1e-9, abs=1e-9)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), num_members=st.integers(1, 6))
def test_the_order_of_members_does_not_matter_and_rows_do_not_mix(seed, num_members):
    generator = torch.Generator().manual_seed(seed)
    score = torch.randn(4, num_members, generator=generator, dtype=torch.float64)
    order = torch.randperm(num_members, generator=generator)
    for rule in RULES.values():
        torch.testing.assert_close(rule(score[:, order]), rule(score), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(rule(score[2:3]), rule(score)[2:3], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_one_member_is_no_ensemble(rule):
    score = torch.tensor([[1.7], [-0.3]], requires_grad=True)
    out = rule(score)
    out.sum().backward()
    assert torch.equal(out, score[:, 0])
    torch.testing.assert_close(score.grad, torch.ones(2, 1))


@pytest.mark.parametrize("rule", [lower_bound, variance_penalty])
def test_one_member_has_no_unbiased_spread_and_the_error_says_so(rule):
    with pytest.raises(ValueError, match=r"ddof is 1 with 1 ensemble member.*use ddof from 0 to 0, or more members"):
        rule(torch.tensor([[1.7]]), coef=0.5, ddof=1)
    with pytest.raises(ValueError, match=r"ddof is -1 .*use ddof from 0 to 2"):
        rule(R, coef=0.5, ddof=-1)


def test_no_members_or_no_temperature_is_refused():
    with pytest.raises(ValueError, match="no members"):
        mean(torch.zeros(3, 0))
    with pytest.raises(ValueError, match=r"temperature is 0.*above 0"):
        soft_worst_case(R, temperature=0)


@pytest.mark.parametrize("ddof", [0, 1])
def test_a_lower_bound_without_penalty_is_the_mean(ddof):
    score = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(lower_bound(score, coef=0, ddof=ddof), mean(score))
    assert torch.equal(variance_penalty(score, coef=0, ddof=ddof), mean(score))


def test_the_soft_worst_case_runs_from_the_minimum_to_the_mean():
    score = R.double()
    assert float(soft_worst_case(score, temperature=1e-3)) == pytest.approx(1.0, abs=2e-3)
    assert float(soft_worst_case(score, temperature=1e7)) == pytest.approx(2.5, abs=1e-6)
    steps = [float(soft_worst_case(score, temperature=t)) for t in (0.01, 0.1, 1.0, 10.0, 100.0)]
    assert steps == sorted(steps)


def test_the_soft_worst_case_is_a_variance_penalty_to_second_order():
    score, temperature = R.double(), 1e3
    second_order = 2.5 - (2.1666667) / (2 * temperature)
    assert float(soft_worst_case(score, temperature=temperature)) == pytest.approx(second_order, abs=3e-6)


def test_the_soft_worst_case_keeps_its_digits_in_float32_at_a_high_temperature():
    assert float(soft_worst_case(R, temperature=1e6)) == pytest.approx(2.5, abs=1e-5)
    assert float(soft_worst_case(R - 1000, temperature=0.01)) == pytest.approx(-999 + 0.01 * math.log(3), abs=1e-4)


def test_a_constant_added_to_every_member_moves_the_score_by_as_much():
    for rule in RULES.values():
        torch.testing.assert_close(rule(R.double() + 3), rule(R.double()) + 3, rtol=1e-12, atol=1e-12)


def test_members_that_agree_give_a_gradient_without_nan():
    score = torch.full((1, 3), 2.0, requires_grad=True)
    lower_bound(score, coef=1.0, ddof=0).sum().backward()
    torch.testing.assert_close(score.grad, torch.full((1, 3), 1 / 3))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_nan_member_is_not_hidden(rule):
    score = torch.tensor([[1.0, float("nan"), 2.0], [1.0, 1.5, 2.0]])
    assert rule(score).isnan().tolist() == [True, False]


def test_prompts_and_samples_may_be_leading_dimensions():
    score = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(1))
    for rule in RULES.values():
        torch.testing.assert_close(rule(score), rule(score.reshape(10, 3)).reshape(2, 5), rtol=0, atol=0)
