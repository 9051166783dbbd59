import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rewarden.maths import brier_score, expected_calibration_error, reliability

# ECE by hand and against integer bins: test_stats.py.


def test_ensemble_t15_calibration_error():
    """Bins of width .1: (.5,.6] holds .55 and .6, one of two right; (.9,1] holds .95, right. Gaps of sums 1 - 1.15, 1 - .95."""
    confidence, correct = torch.tensor([0.55, 0.6, 0.95]), torch.tensor([True, False, True])
    assert expected_calibration_error(confidence, correct) == pytest.approx((0.15 + 0.05) / 3, abs=1e-6)


def test_the_reliability_table_by_hand():
    """Two bins: (.5, .75] holds .5 (right), .7 (a tie) and .75 (wrong); (.75, 1] holds .9 (right)."""
    low, high = reliability(torch.tensor([0.5, 0.7, 0.75, 0.9]), torch.tensor([1.0, 0.5, 0.0, 1.0]), bins=2)
    assert (low.low, low.high, low.num, low.num_right, low.accuracy) == (0.5, 0.75, 3, 1.5, 0.5)
    assert low.confidence == pytest.approx(0.65, abs=1e-6)
    assert (high.low, high.high, high.num, high.accuracy) == (0.75, 1.0, 1, 1.0)
    assert high.confidence == pytest.approx(0.9, abs=1e-6)


def test_an_empty_bin_is_there_and_says_nothing():
    table = reliability(torch.tensor([0.95]), torch.tensor([True]), bins=5)
    assert [row.num for row in table] == [0, 0, 0, 0, 1]
    assert table[0].accuracy is None
    assert table[0].confidence is None


def test_brier_score_by_hand():
    """(.8 - 1)^2 = .04, (.3 - 0)^2 = .09, (.5 - .5)^2 = 0."""
    assert brier_score(torch.tensor([0.8, 0.3, 0.5]), torch.tensor([1.0, 0.0, 0.5])) == pytest.approx(0.13 / 3, abs=1e-7)
    assert brier_score(torch.full((4,), 0.5), torch.tensor([1.0, 0.0, 0.0, 1.0])) == 0.25


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), num=st.integers(1, 60))
def test_murphy_1973_brier_is_reliability_minus_resolution_plus_uncertainty(seed, num):
    """The exact decomposition over groups of equal probabilities."""
    generator = torch.Generator().manual_seed(seed)
    p = torch.randint(0, 6, (num,), generator=generator).double() / 5
    y = torch.randint(0, 2, (num,), generator=generator).double()
    rate, terms = float(y.mean()), []
    for value in set(p.tolist()):
        group = y[p == value]
        share = len(group) / num
        terms.append(share * ((value - float(group.mean())) ** 2 - (float(group.mean()) - rate) ** 2))
    assert brier_score(p, y) == pytest.approx(math.fsum(terms) + rate * (1 - rate), abs=1e-12)


def test_what_is_no_probability_is_refused():
    with pytest.raises(ValueError, match=r"probability\[1\] is 1.2 .*numbers from 0 to 1"):
        brier_score(torch.tensor([0.5, 1.2]), torch.tensor([1.0, 0.0]))
    with pytest.raises(ValueError, match="probability has 0 values"):
        brier_score(torch.zeros(0), torch.zeros(0))
    with pytest.raises(ValueError, match=r"outcome\[0\] is nan"):
        brier_score(torch.tensor([0.5]), torch.tensor([float("nan")]))
    with pytest.raises(ValueError, match="bins is 0"):
        reliability(torch.tensor([0.7]), torch.tensor([True]), bins=0)
