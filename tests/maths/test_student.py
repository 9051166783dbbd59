"""Student's t against printed tables and against numerical integration of its density."""

import math

import pytest
import torch

from rewarden.maths import student_interval, student_within

TABLE = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706, 9: 2.2622, 10: 2.2281, 30: 2.0423}
"""Two-sided 95 % points, as printed in any table of t."""


@pytest.mark.parametrize(("df", "t"), TABLE.items())
def test_the_points_of_the_printed_table_hold_95_percent(df, t):
    assert student_within(t, df) == pytest.approx(0.95, abs=1e-5)


@pytest.mark.parametrize("df", [1, 2, 3, 6, 7])
@pytest.mark.parametrize("t", [0.0, 0.3, 1.0, 4.0])
def test_the_share_within_t_is_the_integral_of_the_density(df, t):
    scale = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(df * math.pi)
    x = torch.linspace(-t, t, 20001, dtype=torch.float64)
    area = float(torch.trapezoid(scale * (1 + x * x / df) ** (-(df + 1) / 2), x))
    assert student_within(t, df) == pytest.approx(area, abs=1e-7)


def test_the_interval_of_two_and_of_five_values_worked_by_hand():
    low, high = student_interval(torch.tensor([1.0, 3.0]), confidence=0.95)
    assert (low, high) == pytest.approx((2 - 12.7062, 2 + 12.7062), abs=1e-4)  # std sqrt(2), so the standard error is 1
    low, high = student_interval(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), confidence=0.95)
    half = 2.7764 * math.sqrt(2.5 / 5)
    assert (low, high) == pytest.approx((3 - half, 3 + half), abs=1e-4)


def test_equal_values_have_an_interval_of_width_zero():
    assert student_interval(torch.tensor([2.0, 2.0, 2.0]), confidence=0.9) == (2.0, 2.0)


def test_one_value_and_a_confidence_of_one_are_refused():
    with pytest.raises(ValueError, match="needs 2 or more"):
        student_interval(torch.tensor([1.0]), confidence=0.95)
    with pytest.raises(ValueError, match="confidence is 1"):
        student_interval(torch.tensor([1.0, 2.0]), confidence=1)
    with pytest.raises(ValueError, match="df is 0"):
        student_within(1.0, 0)
