"""Statistics of comparisons: rates, intervals over prompts, and what is said about them."""

import random

import pytest

from rewarden.errors import DataError
from rewarden.evals.winrate import Judged, rate_interval, summarize

ASKED = {"confidence": 0.95, "resamples": 500, "seed": 0}


def judged(preferences, *, prompts=None, length=10, reference=7):
    return [
        Judged(prompt=i if prompts is None else prompts[i], preference=p, length=length, length_reference=reference)
        for i, p in enumerate(preferences)
    ]


def test_figures_by_hand_in_percent():
    found = summarize(judged([1, 0, 0.5, 0.5, 1, 0.25]), **ASKED)
    assert found.win_rate == pytest.approx(54.1666667, abs=1e-6)
    assert found.standard_error == pytest.approx(16.3511807, abs=1e-6)
    assert found.discrete_win_rate == pytest.approx(50)
    assert (found.n_wins, found.n_wins_base, found.n_draws, found.n_total) == (2, 2, 2, 6)
    assert (found.length, found.length_reference, found.length_difference) == (10, 7, 3)
    assert found.intervals["length_difference"] == (3, 3)


def test_the_interval_holds_the_middle_of_the_resampled_rates():
    """400 prompts, 30 % won: the binomial standard error is 2.29 points."""
    found = summarize(judged([1] * 120 + [0] * 280), confidence=0.95, resamples=4000, seed=3)
    low, high = found.intervals["win_rate"]
    assert low == pytest.approx(30 - 1.96 * 2.29, abs=0.6)
    assert high == pytest.approx(30 + 1.96 * 2.29, abs=0.6)
    assert found.warnings == ()


def test_missing_verdicts_are_left_out_counted_and_said():
    found = summarize(judged([1, None, 0, None] * 10), **ASKED)
    assert (found.win_rate, found.n_total, found.n_without_verdict) == (50, 20, 20)
    assert "20 of 40 comparisons have no verdict" in found.warnings[0]
    with pytest.raises(DataError, match=r"none of 3 comparisons has a verdict .*run the judge again"):
        summarize(judged([None] * 3), **ASKED)


def test_only_ties_are_said_and_keep_an_interval_with_a_width():
    found = summarize(judged([0.5] * 50), **ASKED)
    assert (found.win_rate, found.standard_error, found.discrete_win_rate) == (50, 0, 50)
    assert any("all 50 comparisons are ties" in w for w in found.warnings)
    assert any("Wilson" in w for w in found.warnings)
    assert any("within noise" in w for w in found.warnings)


def test_only_wins_get_the_wilson_interval():
    """Ten of ten: Wilson's interval is 72.2467 to 100."""
    found = summarize(judged([1.0] * 10), **ASKED)
    assert found.intervals["win_rate"] == pytest.approx((72.2467, 100), abs=1e-3)
    assert any("same outcome" in w for w in found.warnings)


def test_one_comparison_has_no_standard_error_and_says_so():
    found = summarize(judged([1.0]), **ASKED)
    assert found.standard_error is None
    assert any("standard_error is null" in w for w in found.warnings)
    assert any("1 prompts are few" in w for w in found.warnings)


def test_a_difference_within_noise_is_said_and_one_outside_is_not():
    close = summarize(judged([1] * 52 + [0] * 48), **ASKED)
    assert any("holds 50: the difference is within noise" in w for w in close.warnings)
    clear = summarize(judged([1] * 80 + [0] * 20), **ASKED)
    assert not any("noise" in w for w in clear.warnings)


def test_repeating_every_comparison_is_no_new_evidence():
    preferences = [random.Random(0).random() for _ in range(60)]
    once = summarize(judged(preferences), **ASKED)
    thrice = summarize(judged(preferences * 3, prompts=list(range(60)) * 3), **ASKED)
    assert thrice.win_rate == pytest.approx(once.win_rate)
    assert thrice.intervals["win_rate"] == pytest.approx(once.intervals["win_rate"])
    assert any("180 comparisons are of 60 different prompts" in w for w in thrice.warnings)


def test_the_same_seed_repeats_and_another_differs():
    rows = judged([1, 0, 1, 1, 0, 0.5] * 10)
    first = summarize(rows, **ASKED).intervals["win_rate"]
    assert summarize(rows, **ASKED).intervals["win_rate"] == first
    assert summarize(rows, confidence=0.95, resamples=500, seed=1).intervals["win_rate"] != first


NUM_COMPARISONS = 10_000
TIES = 0.2


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.5, 0.8])
@pytest.mark.parametrize(("n", "low", "high"), [(50, 92.5, 97), (200, 93.5, 96.5), (805, 93.5, 96.5)])
def test_the_95_percent_interval_holds_the_true_rate_about_that_often(n, rate, low, high, record_property):
    """10,000 simulated comparisons of n prompts each, 20 % ties: won with probability rate - 10 %, lost otherwise.

    The interval depends on how many prompts were won, tied and lost only, so each such count is asked once.
    """
    draw = random.Random(f"{n} {rate}")
    chance = {1.0: rate - TIES / 2, 0.5: TIES, 0.0: 1 - rate - TIES / 2}
    drawn = {}
    for _ in range(NUM_COMPARISONS):
        outcomes = tuple(sorted(draw.choices(list(chance), weights=list(chance.values()), k=n)))
        drawn[outcomes] = drawn.get(outcomes, 0) + 1
    held = 0
    for seed, (outcomes, times) in enumerate(drawn.items()):
        below, above = rate_interval(outcomes, confidence=0.95, resamples=1000, seed=seed)
        held += times * (below - 1e-9 <= 100 * rate <= above + 1e-9)
    coverage = 100 * held / NUM_COMPARISONS
    record_property("point", f"the 95 % interval of the win rate holds the truth, n = {n}, win rate {rate}")
    record_property("coverage in percent", coverage)
    record_property("allowed", [low, high])
    assert low <= coverage <= high
