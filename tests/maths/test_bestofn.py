import itertools
import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rewarden.maths import best_of_n_kl, expected_best_of_n


def oracle(proxy, gold, n):
    """Every subset in turn; a tie for the best is broken at random."""
    picked = []
    for subset in itertools.combinations(range(len(proxy)), n):
        best = max(proxy[i] for i in subset)
        picked.append(statistics.fmean(gold[i] for i in subset if proxy[i] == best))
    return statistics.fmean(picked)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), num_samples=st.integers(1, 8))
def test_the_estimator_is_the_mean_over_all_subsets(data, num_samples):
    proxy = data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, -3.0]), min_size=num_samples, max_size=num_samples))
    gold = data.draw(st.lists(st.floats(-5, 5), min_size=num_samples, max_size=num_samples))
    for n in range(1, num_samples + 1):
        ours = expected_best_of_n(torch.tensor(proxy), torch.tensor(gold, dtype=torch.float64), n=n)
        assert float(ours) == pytest.approx(oracle(proxy, gold, n), abs=1e-12)


def test_three_samples_by_hand():
    """Proxy order 30, 10, 20; best of 2: the top sample in 2 of 3 subsets, the middle one in 1."""
    proxy, gold = torch.tensor([0.3, 0.1, 0.2]), torch.tensor([30.0, 10.0, 20.0])
    assert float(expected_best_of_n(proxy, gold, n=1)) == pytest.approx(20.0)
    assert float(expected_best_of_n(proxy, gold, n=2)) == pytest.approx((2 * 30 + 20) / 3)
    assert float(expected_best_of_n(proxy, gold, n=3)) == pytest.approx(30.0)


def test_samples_that_all_tie_are_worth_their_mean():
    gold = torch.tensor([1.0, 2.0, 6.0])
    for n in (1, 2, 3):
        assert float(expected_best_of_n(torch.zeros(3), gold, n=n)) == pytest.approx(3.0)


def test_prompts_are_rows_and_the_order_of_samples_does_not_matter():
    generator = torch.Generator().manual_seed(0)
    proxy, gold = torch.randn(4, 9, generator=generator).round(decimals=1), torch.randn(4, 9, generator=generator)
    rows = expected_best_of_n(proxy, gold, n=4)
    one_by_one = torch.stack([expected_best_of_n(p, g, n=4) for p, g in zip(proxy, gold, strict=True)])
    torch.testing.assert_close(rows, one_by_one, rtol=0, atol=0)
    order = torch.randperm(9, generator=generator)
    torch.testing.assert_close(expected_best_of_n(proxy[:, order], gold[:, order], n=4), rows, rtol=1e-12, atol=1e-12)


def test_twelve_thousand_samples_keep_their_digits():
    """Gold = rank: the expected maximum of n of N ranks is n (N + 1) / (n + 1)."""
    proxy = torch.arange(1, 12601, dtype=torch.float64)
    for n in (1, 2, 200, 6000, 12600):
        expected = n * 12601 / (n + 1)
        assert float(expected_best_of_n(proxy, proxy, n=n)) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("n", [0, 4, -1])
def test_n_outside_the_number_of_samples_is_refused(n):
    with pytest.raises(ValueError, match=f"n is {n} with 3 samples.*use 1 to 3"):
        expected_best_of_n(torch.zeros(3), torch.zeros(3), n=n)


def test_a_proxy_without_a_rank_is_refused():
    with pytest.raises(ValueError, match="1 of 3 proxy scores are NaN"):
        expected_best_of_n(torch.tensor([1.0, float("nan"), 2.0]), torch.zeros(3), n=2)


def test_kl_of_best_of_n():
    assert best_of_n_kl(1) == 0.0
    assert best_of_n_kl(12500) == pytest.approx(8.43, abs=0.005)
    assert best_of_n_kl(4) == pytest.approx(math.log(4) - 0.75, abs=1e-12)
    with pytest.raises(ValueError, match="n is 0"):
        best_of_n_kl(0)


def test_kl_is_that_of_the_maximum_of_n_uniform_numbers():
    """The density of the maximum is n u^(n-1); integrate n u^(n-1) log(n u^(n-1)) over (0, 1) by midpoints."""
    n, cells = 5, 200000
    u = (torch.arange(cells, dtype=torch.float64) + 0.5) / cells
    density = n * u ** (n - 1)
    assert best_of_n_kl(n) == pytest.approx(float((density * density.log()).mean()), abs=1e-6)
