import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rewarden.maths import Moments

numbers = st.lists(st.floats(-1e3, 1e3, width=32), max_size=12)


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


@settings(max_examples=60, deadline=None)
@given(batches=st.lists(numbers, max_size=5))
def test_updating_by_batches_gives_the_moments_of_all_numbers(batches):
    moments = Moments()
    for batch in batches:
        moments = moments.update(tensor(batch))
    everything = np.array([x for batch in batches for x in batch])
    assert moments.count == everything.size
    if everything.size:
        assert moments.mean == pytest.approx(everything.mean(), rel=1e-9, abs=1e-9)
        assert moments.var(0) == pytest.approx(everything.var(), rel=1e-9, abs=1e-9)
    if everything.size > 1:
        assert moments.var(1) == pytest.approx(everything.var(ddof=1), rel=1e-9, abs=1e-9)
        if everything.std(ddof=1) > 1e-5:
            assert moments.std(1) == pytest.approx(everything.std(ddof=1), rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(a=numbers, b=numbers, c=numbers)
def test_merging_is_the_same_in_any_order_and_grouping(a, b, c):
    parts = [Moments().update(tensor(x)) for x in (a, b, c)]
    left = parts[0].merge(parts[1]).merge(parts[2])
    right = parts[2].merge(parts[1].merge(parts[0]))
    assert dataclasses.astuple(left) == pytest.approx(dataclasses.astuple(right), rel=1e-9, abs=1e-9)


def test_t9_a_first_batch_of_one_or_of_equal_scores_divides_by_one():
    for scores in ([3.0], [3.0, 3.0]):
        moments = Moments().update(tensor(scores))
        for ddof in (0, 1):
            assert moments.std(ddof) == 1.0
            assert 3.0 / moments.std(ddof) == 3.0
    assert Moments().std(1) == 1.0
    assert Moments().update(tensor([0.1] * 7)).std(0) == 1.0


def test_var_tells_the_spread_as_it_is():
    assert Moments().var(0) == 0.0
    assert Moments().update(tensor([3.0])).var(1) == 0.0
    assert Moments().update(tensor([3.0, 3.0])).var(1) == 0.0
    assert Moments().update(tensor([1.0, 3.0])).var(1) == 2.0


def test_t33_ranks_with_unequal_shares_weigh_by_their_counts():
    ranks = Moments().update(tensor([1.0])), Moments().update(tensor([2.0, 2.0, 2.0]))
    assert ranks[0].merge(ranks[1]).mean == pytest.approx(1.75, abs=1e-12)


def test_float32_scores_with_a_large_mean_keep_their_variance():
    generator = torch.Generator().manual_seed(0)
    scores = 1e4 + torch.randn(1000, generator=generator)
    expected = scores.numpy().astype(np.float64).std(ddof=1)
    moments = Moments()
    for batch in scores.split(7):
        moments = moments.update(batch)
    assert moments.std(1) == pytest.approx(expected, rel=1e-9)


def test_a_value_survives_json_bit_for_bit_and_is_never_edited():
    before = Moments().update(tensor([0.1, 0.7, -2.3]))
    copy = Moments(**json.loads(json.dumps(dataclasses.asdict(before))))
    assert copy == before
    after = before.update(tensor([1.0]))
    assert copy == before != after
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.count = 5


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_is_refused(bad):
    with pytest.raises(ValueError, match="1 of 2 values are not finite"):
        Moments().update(tensor([1.0, bad]))
