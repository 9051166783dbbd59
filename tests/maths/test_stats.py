import itertools
import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rewarden.maths import (
    WinCounts,
    accuracy_with_ties,
    alpaca_eval_preference,
    bootstrap_interval,
    correlation,
    discrete_win_rate,
    expected_calibration_error,
    standard_error,
    wilson_interval,
    win_counts,
    win_rate,
    wins_with_ties,
)

NAN = float("nan")


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_ensemble_t14_win_rate_of_alpaca_eval_codes():
    preference = alpaca_eval_preference(torch.tensor([2, 1, 1.5, 0, 2, 1.25]))
    assert preference.tolist() == [1.0, 0.0, 0.5, 0.5, 1.0, 0.25]
    assert 100 * win_rate(preference) == pytest.approx(54.1666667, abs=1e-6)
    assert 100 * standard_error(preference) == pytest.approx(16.3511807, abs=1e-6)
    assert win_counts(preference) == WinCounts(num_wins=2, num_losses=2, num_draws=2)
    assert 100 * discrete_win_rate(preference) == pytest.approx(50, abs=1e-9)


def test_refuel_case_40_win_rate_and_standard_error():
    assert 100 * win_rate(torch.tensor([1.0, 1, 1, 0.5, 0])) == pytest.approx(70, abs=1e-6)
    half = torch.tensor([0.0, 1.0]).repeat(250)
    assert 100 * standard_error(half) == pytest.approx(2.24, abs=0.005)


def test_a_missing_verdict_stays_missing_and_is_never_averaged_away():
    preference = alpaca_eval_preference(torch.tensor([2.0, NAN, 1.0]))
    assert preference.isnan().tolist() == [False, True, False]
    for statistic in (win_rate, win_counts, discrete_win_rate, standard_error):
        with pytest.raises(ValueError, match=r"\[1\] is nan \(1 such of 3\).*leave out what has no value, and count it"):
            statistic(preference)
    assert win_rate(preference[~preference.isnan()]) == 0.5


def test_codes_and_probabilities_are_not_mixed_up():
    with pytest.raises(ValueError, match=r"preference\[0\] is 0.3; AlpacaEval's codes are 1 to 2"):
        alpaca_eval_preference(torch.tensor([0.3, 1.0]))
    with pytest.raises(ValueError, match=r"preference\[1\] is 2 .*numbers from 0 to 1"):
        win_rate(torch.tensor([1.0, 2.0]))


def test_t17_accuracy_with_ties_as_half():
    assert accuracy_with_ties(torch.tensor([2.0, 0.5, 1.0]), torch.tensor([1.0, 1.0, 1.0])) == pytest.approx(0.5)


def test_a_comparison_is_won_by_half_when_the_scores_are_equal_and_not_at_all_without_a_number():
    assert wins_with_ties(torch.tensor([1e-9, 0.0, -0.0, -2.0, NAN])).tolist() == [1.0, 0.5, 0.5, 0.0, 0.0]
    by_head = wins_with_ties(torch.tensor([[3.0, -1.0], [0.0, 0.0]], dtype=torch.float64))
    assert (by_head.dtype, by_head.tolist()) == (torch.float64, [[1.0, 0.0], [0.5, 0.5]])


def test_correlation_by_hand():
    """Deviations (-1, 0, 1) and (-1, 1, 0): their product sums to 1, their squares to 2 each, so 1 / sqrt(2 * 2)."""
    x = torch.tensor([1.0, 2.0, 3.0])
    assert correlation(x, torch.tensor([1.0, 3.0, 2.0])) == pytest.approx(0.5, abs=1e-12)
    assert correlation(x, 5 - 2 * x) == pytest.approx(-1, abs=1e-12)


def test_values_without_spread_correlate_with_nothing():
    x = torch.tensor([1.0, 2.0, 3.0])
    assert correlation(torch.ones(3), x) == correlation(x, torch.ones(3)) == 0.0


@settings(max_examples=30, deadline=None)
@given(pairs=st.lists(st.tuples(st.integers(-50, 50), st.integers(-50, 50)), min_size=3, max_size=30))
def test_correlation_is_that_of_numpy(pairs):
    x, y = (torch.tensor(side, dtype=torch.float64) for side in zip(*pairs, strict=True))
    spread = float(x.std()) > 0 and float(y.std()) > 0
    expected = float(np.corrcoef(x.numpy(), y.numpy())[0, 1]) if spread else 0.0
    assert correlation(x, y) == pytest.approx(expected, abs=1e-9)


def test_ensemble_t3_accuracy_counts_the_tie_as_half_where_the_reference_counts_it_as_one():
    chosen, rejected = torch.tensor([0.7, 0.4, -0.5]), torch.tensor([0.2, 1.0, -0.5])
    assert accuracy_with_ties(chosen, rejected) == pytest.approx(0.5)


def test_accuracy_does_not_change_when_both_sides_swap_labels():
    chosen, rejected = torch.randn(2, 50, generator=generator()).round(decimals=1).unbind(0)
    assert accuracy_with_ties(chosen, rejected) + accuracy_with_ties(rejected, chosen) == pytest.approx(1.0)


@settings(max_examples=30, deadline=None)
@given(values=st.lists(st.floats(-100, 100), min_size=2, max_size=30))
def test_standard_error_is_the_textbook_formula(values):
    expected = statistics.stdev(values) / math.sqrt(len(values))
    assert standard_error(torch.tensor(values, dtype=torch.float64)) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_a_statistic_of_too_few_values_is_refused():
    with pytest.raises(ValueError, match="values has 1 values; this statistic needs 2 or more"):
        standard_error(torch.tensor([1.0]))
    with pytest.raises(ValueError, match="preference has 0 values"):
        win_rate(torch.zeros(0))
    with pytest.raises(ValueError, match="score_chosen has 0 values"):
        accuracy_with_ties(torch.zeros(0), torch.zeros(0))
    assert win_counts(torch.zeros(0)) == WinCounts(num_wins=0, num_losses=0, num_draws=0)


def test_bootstrap_agrees_with_every_resample_of_three_values():
    """27 equally likely resamples of (0, 1, 5); with many draws the quantiles are those of their means."""
    values = [0.0, 1.0, 5.0]
    means = sorted(statistics.fmean(s) for s in itertools.product(values, repeat=3))
    low, high = bootstrap_interval(torch.tensor(values), confidence=0.5, resamples=40000, generator=generator())
    assert low == pytest.approx(means[6], abs=1e-6)
    assert high == pytest.approx(means[20], abs=1e-6)


def test_bootstrap_is_close_to_the_normal_interval_and_repeats():
    values = torch.randn(400, generator=generator(1)) * 2 + 1
    low, high = bootstrap_interval(values, confidence=0.95, resamples=4000, generator=generator(2))
    se = 2 / math.sqrt(400)
    assert low == pytest.approx(float(values.mean()) - 1.96 * se, abs=0.3 * se)
    assert high == pytest.approx(float(values.mean()) + 1.96 * se, abs=0.3 * se)
    assert (low, high) == bootstrap_interval(values, confidence=0.95, resamples=4000, generator=generator(2))
    assert (low, high) != bootstrap_interval(values, confidence=0.95, resamples=4000, generator=generator(3))


def test_bootstrap_of_one_value_or_equal_values_has_no_width():
    for values in ([2.5], [2.5] * 9):
        assert bootstrap_interval(torch.tensor(values), confidence=0.9, resamples=10, generator=generator()) == (2.5, 2.5)


def test_bootstrap_gives_all_the_resamples_it_was_asked_for(monkeypatch):
    from rewarden.maths import stats

    values, asked = torch.randn(30, generator=generator(4)), {"confidence": 0.8, "resamples": 101}
    whole = bootstrap_interval(values, **asked, generator=generator(5))
    monkeypatch.setattr(stats, "_RESAMPLED_ELEMENTS", 90)
    assert bootstrap_interval(values, **asked, generator=generator(5)) == whole


@pytest.mark.parametrize(
    ("successes", "trials", "expected"),
    [(0, 10, (0.0, 0.277533)), (10, 10, (0.722467, 1.0)), (5, 10, (0.236593, 0.763407)), (81, 263, (0.255290, 0.366206))],
)
def test_wilson_interval_of_published_examples(successes, trials, expected):
    """The last row is the worked example of Newcombe 1998 (method 3: 0.2553 to 0.3662)."""
    assert wilson_interval(successes, trials, confidence=0.95) == pytest.approx(expected, abs=1e-5)


@settings(max_examples=40, deadline=None)
@given(trials=st.integers(1, 500), share=st.floats(0, 1), confidence=st.floats(0.5, 0.999))
def test_the_ends_of_the_wilson_interval_are_z_standard_errors_away(trials, share, confidence):
    """At each end q the observed share lies exactly z * sqrt(q (1 - q) / n) away: the score test inverted."""
    successes = share * trials
    z = statistics.NormalDist().inv_cdf((1 + confidence) / 2)
    low, high = wilson_interval(successes, trials, confidence=confidence)
    assert 0 <= low <= share + 1e-12
    assert share - 1e-12 <= high <= 1
    for end in (low, high):
        assert abs(successes / trials - end) == pytest.approx(z * math.sqrt(end * (1 - end) / trials), abs=1e-7)


def test_impossible_counts_and_confidences_are_refused():
    with pytest.raises(ValueError, match="11 successes of 10 trials"):
        wilson_interval(11, 10, confidence=0.95)
    with pytest.raises(ValueError, match="0 successes of 0 trials"):
        wilson_interval(0, 0, confidence=0.95)
    with pytest.raises(ValueError, match="confidence is 95"):
        wilson_interval(5, 10, confidence=95)
    with pytest.raises(ValueError, match="resamples is 0"):
        bootstrap_interval(torch.ones(2), confidence=0.9, resamples=0, generator=generator())


def test_calibration_error_by_hand():
    """Bins (.5,.6], (.6,.7], (.8,.9], (.9,1]: gaps of sums .55-1, (.65+.7)-1, .85-0, (.95+1)-2 over six values."""
    confidence = torch.tensor([0.55, 0.65, 0.7, 0.85, 0.95, 1.0])
    correct = torch.tensor([True, True, False, False, True, True])
    assert expected_calibration_error(confidence, correct) == pytest.approx((0.45 + 0.35 + 0.85 + 0.05) / 6, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    pairs=st.lists(st.tuples(st.integers(50, 100), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=30),
    bins=st.sampled_from([1, 2, 5, 10]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_calibration_error_is_the_sum_over_bins_closed_on_the_right(pairs, bins, dtype):
    """Confidences in whole percent, so that the oracle can bin them in exact integers."""
    groups = {}
    for percent, right in pairs:
        groups.setdefault(max(0, -(-(percent - 50) * bins // 50) - 1), []).append((percent / 100, right))
    expected = sum(abs(sum(right - c for c, right in group)) for group in groups.values()) / len(pairs)
    confidence = torch.tensor([percent / 100 for percent, _ in pairs], dtype=dtype)
    correct = torch.tensor([right for _, right in pairs])
    assert expected_calibration_error(confidence, correct, bins=bins) == pytest.approx(expected, abs=1e-6)


def test_calibration_takes_the_confidence_in_the_likelier_side():
    with pytest.raises(ValueError, match=r"confidence\[1\] is 0.3 .*numbers from 0.5 to 1"):
        expected_calibration_error(torch.tensor([0.7, 0.3]), torch.tensor([True, True]))
    with pytest.raises(ValueError, match="bins is 0"):
        expected_calibration_error(torch.tensor([0.7]), torch.tensor([True]), bins=0)
