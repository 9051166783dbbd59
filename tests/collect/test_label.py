import math

import pytest

from rewarden.collect.label import noisy_preference

N = 4000


def share(gold_a, gold_b, flip):
    return sum(noisy_preference(gold_a, gold_b, slope=4.0, flip=flip, seed=seed) for seed in range(N)) / N


@pytest.mark.parametrize(
    ("gap", "flip", "expected"),
    [
        (0.0, 0.25, 0.5),
        (0.5, 0.0, 1 / (1 + math.exp(-2.0))),
        (0.5, 0.25, 0.75 / (1 + math.exp(-2.0)) + 0.25 / (1 + math.exp(2.0))),
        (1000.0, 0.25, 0.75),
        (-1000.0, 0.25, 0.25),
        (1000.0, 0.0, 1.0),
    ],
)
def test_labels_follow_the_logistic_of_the_gap_and_are_then_turned_round(gap, flip, expected):
    """Net flip probability: a sure label is right in 75 of 100 cases at flip .25 (ensemble specification T24)."""
    assert share(gap, 0.0, flip) == pytest.approx(expected, abs=4 * math.sqrt(0.25 / N))


def test_a_label_is_a_function_of_its_seed():
    first = [noisy_preference(0.3, 0.1, slope=4.0, flip=0.25, seed=seed) for seed in range(50)]
    assert first == [noisy_preference(0.3, 0.1, slope=4.0, flip=0.25, seed=seed) for seed in range(50)]
    assert len(set(first)) == 2
