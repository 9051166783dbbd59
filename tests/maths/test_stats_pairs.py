"""Statistics of pairs and of judges: rankings, signs, bins, and differences of shares."""

import itertools
import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rewarden.maths import (
    auroc,
    auroc_interval,
    mixture_logit,
    newcombe_interval,
    quantile_bins,
    relative_gap,
    sign_disagreement,
    wilson_interval,
)


def random(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_auroc_by_hand():
    """Positives .9 and .4, negatives .5, .4 and .1: won 3 of 3, and 1.5 of 3 (one below, one equal)."""
    score = torch.tensor([0.9, 0.5, 0.4, 0.4, 0.1])
    positive = torch.tensor([True, False, True, False, False])
    assert auroc(score, positive) == pytest.approx(4.5 / 6, abs=1e-12)
    assert auroc(-score, positive) == pytest.approx(1.5 / 6, abs=1e-12)


def test_auroc_is_the_area_under_the_published_curve():
    """Scores .1, .4, .35, .8 with labels 0, 0, 1, 1: area .75, the example in scikit-learn's manual."""
    assert auroc(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([False, False, True, True])) == 0.75


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(st.tuples(st.integers(-4, 4), st.booleans()), min_size=2, max_size=25))
def test_auroc_is_the_trapezoidal_area_of_the_curve_drawn_threshold_by_threshold(rows):
    score = torch.tensor([float(value) for value, _ in rows])
    positive = torch.tensor([label for _, label in rows])
    if not 0 < int(positive.sum()) < len(rows):
        with pytest.raises(ValueError, match="an area under the ROC curve needs one of each"):
            auroc(score, positive)
        return
    points = [(0.0, 0.0)]
    for threshold in sorted(set(score.tolist()), reverse=True):
        above = score >= threshold
        points.append((float(above[~positive].double().mean()), float(above[positive].double().mean())))
    area = sum((x1 - x0) * (y0 + y1) / 2 for (x0, y0), (x1, y1) in itertools.pairwise(points))
    assert auroc(score, positive) == pytest.approx(area, abs=1e-12)


def test_the_interval_of_auroc_by_hand():
    """v = (1, .5) of the positives, w = (.5, .75, 1) of the negatives: variances .125 / 2 and .0625 / 3."""
    score = torch.tensor([0.9, 0.5, 0.4, 0.4, 0.1])
    positive = torch.tensor([True, False, True, False, False])
    half = 1.6448536269514722 * math.sqrt(0.125 / 2 + 0.0625 / 3)
    assert auroc_interval(score, positive, confidence=0.9) == pytest.approx((0.75 - half, 1.0), abs=1e-9)
    assert 0.75 + half > 1


def test_the_interval_of_auroc_covers_the_truth_about_as_often_as_it_says():
    """Two normal populations one standard deviation apart: area Phi(1 / sqrt 2) = .7602."""
    covered = 0
    for seed in range(300):
        score = random(seed, 120)
        score[:50] += 1
        low, high = auroc_interval(score, torch.arange(120) < 50, confidence=0.9)
        covered += low <= statistics.NormalDist().cdf(1 / math.sqrt(2)) <= high
    assert 0.85 <= covered / 300 <= 0.95


def test_an_interval_of_auroc_needs_two_of_each():
    with pytest.raises(ValueError, match="1 positives and 2 negatives; the interval needs two of each"):
        auroc_interval(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([True, False, False]), confidence=0.9)
    with pytest.raises(ValueError, match=r"score\[1\] is nan"):
        auroc(torch.tensor([1.0, float("nan")]), torch.tensor([True, False]))


def test_sign_disagreement_by_hand():
    """Signs (+, +, -, 0) and (+, -, 0, 0): agree, differ, differ by half, agree."""
    x, y = torch.tensor([2.0, 0.1, -3.0, 0.0]), torch.tensor([0.5, -0.1, 0.0, 0.0])
    assert sign_disagreement(x, y) == sign_disagreement(y, x) == pytest.approx(1.5 / 4, abs=1e-12)
    assert sign_disagreement(x, x) == 0.0
    with pytest.raises(ValueError, match=r"y\[1\] is nan"):
        sign_disagreement(x[:2], torch.tensor([1.0, float("nan")]))


def test_ensemble_t5_two_probabilities_of_one_ensemble():
    """Differences (.4, -1.1, 1.5): sigmoids .598688, .249740, .817574 have the mean .555334; sigmoid(.266667) is .566274."""
    difference = torch.tensor([[0.4, -1.1, 1.5]], dtype=torch.float64)
    assert float(mixture_logit(difference).sigmoid()) == pytest.approx(0.555334, abs=1e-6)
    assert float(difference.mean().sigmoid()) == pytest.approx(0.566274, abs=1e-6)


def test_one_member_or_equal_members_mix_to_themselves():
    for size in (1, 4):
        difference = random(0, 7, 1).expand(7, size)
        torch.testing.assert_close(mixture_logit(difference), difference[:, 0], rtol=1e-12, atol=1e-12)


def test_sure_members_keep_their_digits_in_the_mixture():
    """One member at 60, one at 0: probability (1 + .5) / 2 = .75; both at 60: odds e^60; both at -60: e^-60."""
    rows = torch.tensor([[60.0, 0.0], [60.0, 60.0], [-60.0, -60.0]])
    assert mixture_logit(rows).tolist() == pytest.approx([math.log(3), 60.0, -60.0], abs=1e-5)


def test_relative_gap_by_hand():
    gap = relative_gap(torch.tensor([10.0, 5.0, 0.0, 0.0, 3.0]), torch.tensor([5.0, 10.0, 0.0, 4.0, 3.0]))
    assert gap.tolist() == [0.5, -0.5, 0.0, -1.0, 0.0]


def test_quantile_bins_of_distinct_values_are_equally_large():
    values = torch.tensor([5.0, 1.0, 4.0, 2.0, 3.0, 6.0])
    group, ends = quantile_bins(values, bins=3)
    assert group.tolist() == [2, 0, 1, 0, 1, 2]
    assert ends == pytest.approx([1 + 5 / 3, 1 + 10 / 3, 6.0])


def test_equal_values_share_a_quantile_bin_and_empty_bins_are_left_out():
    """The quartiles of 0, 0, 0, 0, 1, 2 are 0, 0 and .75."""
    group, ends = quantile_bins(torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, 2.0]), bins=4)
    assert group.tolist() == [0, 0, 0, 0, 1, 1]
    assert ends == [0.0, 2.0]
    assert quantile_bins(torch.full((5,), 0.1), bins=4)[0].tolist() == [0] * 5


@settings(max_examples=40, deadline=None)
@given(values=st.lists(st.floats(-5, 5), min_size=1, max_size=40), bins=st.integers(1, 6))
def test_quantile_bins_put_each_value_between_its_ends(values, bins):
    tensor = torch.tensor(values, dtype=torch.float64)
    group, ends = quantile_bins(tensor, bins=bins)
    assert sorted(set(group.tolist())) == list(range(len(ends)))
    assert ends == sorted(ends)
    for value, place in zip(tensor.tolist(), group.tolist(), strict=True):
        assert value <= ends[place]
        assert place == 0 or value > ends[place - 1]
    cuts = np.quantile(tensor.numpy(), np.arange(1, bins) / bins)
    expected = np.searchsorted(cuts, tensor.numpy(), side="left")
    assert np.unique(expected, return_inverse=True)[1].tolist() == group.tolist()


def test_quantile_bins_of_nothing_are_refused():
    with pytest.raises(ValueError, match="bins is 0"):
        quantile_bins(torch.ones(2), bins=0)
    with pytest.raises(ValueError, match="values has 0 values"):
        quantile_bins(torch.zeros(0), bins=2)


@pytest.mark.parametrize(
    ("successes", "trials", "expected"),
    [
        ((56, 48), (70, 80), (0.0524, 0.3339)),
        ((9, 3), (10, 10), (0.1705, 0.8090)),
        ((5, 0), (56, 29), (-0.0381, 0.1926)),
        ((0, 0), (10, 20), (-0.1611, 0.2775)),
    ],
)
def test_the_interval_of_a_difference_of_published_examples(successes, trials, expected):
    """Newcombe 1998, table II, method 10."""
    assert newcombe_interval(successes, trials, confidence=0.95) == pytest.approx(expected, abs=5e-5)


def test_the_interval_of_a_difference_turns_round_with_its_sides():
    low, high = newcombe_interval((30, 45.5), (60, 70), confidence=0.9)
    assert newcombe_interval((45.5, 30), (70, 60), confidence=0.9) == pytest.approx((-high, -low))
    assert low < 0.5 - 0.65 < high
    assert wilson_interval(30, 60, confidence=0.9)[0] < 0.5
