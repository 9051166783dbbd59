import itertools
import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rewarden.maths import (
    best_of_n_kl,
    bootstrap_interval,
    expected_best_of_n,
    first_best,
    measured_best_of_n_kl,
    selection_weights,
)


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


def enumerated_kl(p, proxy, n):
    """KL from the best of n to one answer: every n-tuple of answers in turn, the first of equal proxies chosen."""
    chosen = [0.0] * len(p)
    for draws in itertools.product(range(len(p)), repeat=n):
        best = max(draws, key=lambda y: proxy[y])  # max keeps the first of equal ones
        chosen[best] += math.prod(p[y] for y in draws)
    return sum(c * math.log(c / q) for c, q in zip(chosen, p, strict=True) if c > 0)


def level_kl(p, proxy, n):
    """The same for any n, from the shares at or below and below each proxy."""
    total = 0.0
    for s in set(proxy):
        upto = sum(q for q, t in zip(p, proxy, strict=True) if t <= s)
        under = sum(q for q, t in zip(p, proxy, strict=True) if t < s)
        chosen = upto**n - under**n
        total += chosen * math.log(chosen / (upto - under))
    return total


TOYS = [
    ((0.5, 0.2, 0.2, 0.1), (0.0, 1.0, 1.0, 2.0)),
    ((0.1, 0.4, 0.1, 0.3, 0.1), (3.0, -1.0, 0.5, 0.5, 2.0)),
    ((0.7, 0.3), (0.0, 1.0)),
    ((0.02, 0.08, 0.3, 0.6), (4.0, 3.0, 1.0, 1.0)),
    ((0.25, 0.25, 0.25, 0.25), (1.0, 1.0, 2.0, 2.0)),
]
"""Answers of a policy that can be enumerated: their probabilities and proxy scores, with ties between different answers."""


def test_the_two_ways_to_the_exact_kl_agree():
    for p, proxy in TOYS:
        for n in (1, 2, 3, 5):
            assert level_kl(p, proxy, n) == pytest.approx(enumerated_kl(p, proxy, n), abs=1e-12)


def drawn(num_samples, seed, prompts_per_toy):
    """Proxy scores of answers drawn from every toy, one prompt per row."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for p, proxy in TOYS:
        index = torch.multinomial(torch.tensor(p), prompts_per_toy * num_samples, replacement=True, generator=generator)
        rows.append(torch.tensor(proxy)[index].view(prompts_per_toy, num_samples))
    return torch.cat(rows)


@pytest.mark.parametrize(("num_samples", "ns"), [(24, (2, 3, 5)), (200, (2, 5, 16, 64, 200))])
def test_the_interval_of_the_measured_kl_covers_the_exact_one(num_samples, ns):
    """95 % intervals over 100 prompts of enumerable policies with ties, 20 times: 16 or more must hold the exact mean."""
    for n in ns:
        exact = statistics.fmean((enumerated_kl if n <= 3 else level_kl)(p, proxy, n) for p, proxy in TOYS)
        covered = 0
        for seed in range(20):
            proxy_PN = drawn(num_samples, seed, 20)
            measured_P = measured_best_of_n_kl(proxy_PN, torch.ones_like(proxy_PN, dtype=torch.bool), n=n)
            low, high = bootstrap_interval(
                measured_P, confidence=0.95, resamples=400, generator=torch.Generator().manual_seed(seed)
            )
            covered += low <= exact <= high
        assert covered >= 16, (n, covered)


def test_without_ties_the_measured_kl_is_the_bound_and_with_nothing_but_ties_zero():
    distinct = torch.randperm(50, generator=torch.Generator().manual_seed(0)).float()
    scored = torch.ones(50, dtype=torch.bool)
    for n in (1, 2, 7, 50):
        assert float(measured_best_of_n_kl(distinct, scored, n=n)) == pytest.approx(best_of_n_kl(n), abs=1e-12)
        assert float(measured_best_of_n_kl(torch.zeros(50), scored, n=n)) == pytest.approx(0, abs=1e-12)


def test_answers_without_a_score_are_never_chosen_in_the_kl_either():
    """30 % of the answers fail; of the others two levels. The chosen one follows the policy given that some answer has a score."""
    p, n = (0.3, 0.5, 0.2), 3
    under, upto = 0.3**n, 0.8**n
    chosen = [(upto - under) / (1 - under), (1 - upto) / (1 - under)]
    exact = sum(c * math.log(c / q) for c, q in zip(chosen, p[1:], strict=True))
    index = torch.multinomial(torch.tensor(p), 200 * 400, replacement=True, generator=torch.Generator().manual_seed(1))
    proxy = torch.tensor([math.nan, 1.0, 2.0])[index].view(200, 400)
    measured = measured_best_of_n_kl(proxy, proxy.isfinite(), n=n)
    assert float(measured.mean()) == pytest.approx(exact, abs=4 * float(measured.std()) / math.sqrt(200))
    assert float(measured.std()) / math.sqrt(200) < 0.01
    assert measured_best_of_n_kl(torch.full((2, 4), math.nan), torch.zeros(2, 4, dtype=torch.bool), n=2).isnan().all()


def weights_oracle(proxy, scored, n):
    """How often each sample is chosen over all subsets, those of nothing but unscored samples left out."""
    chosen = [0.0] * len(proxy)
    for subset in itertools.combinations(range(len(proxy)), n):
        there = [i for i in subset if scored[i]]
        best = [i for i in there if proxy[i] == max(proxy[j] for j in there)]
        for i in best:
            chosen[i] += 1 / len(best)
    return [c / max(sum(chosen), 1e-300) for c in chosen]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), num_samples=st.integers(1, 7))
def test_weights_are_the_share_of_subsets_that_choose_a_sample(data, num_samples):
    values = st.sampled_from([0.0, 0.5, 1.0, -3.0, math.nan, -math.inf, math.inf])
    proxy = data.draw(st.lists(values, min_size=num_samples, max_size=num_samples))
    scored = [not math.isnan(value) for value in proxy]
    for n in range(1, num_samples + 1):
        ours = selection_weights(torch.tensor(proxy), torch.tensor(scored), n=n)
        assert ours.tolist() == pytest.approx(weights_oracle(proxy, scored, n), abs=1e-12)
        assert float(ours.sum()) == pytest.approx(float(any(scored)), abs=1e-12)


def test_the_first_of_equal_bests_among_the_first_n_is_chosen():
    """The values of the specification of the original pipeline."""
    proxy = torch.tensor([0.2, 0.9, 0.4, 1.1, 0.9])
    scored = torch.ones(5, dtype=torch.bool)
    assert [int(first_best(proxy, scored, n=n)) for n in (1, 2, 3, 4, 5)] == [0, 1, 1, 3, 3]
    rows = torch.tensor([[1.0, 1.0, 1.0], [0.0, 2.0, 2.0], [math.nan, math.nan, -math.inf], [math.nan] * 3])
    assert first_best(rows, ~rows.isnan(), n=3).tolist() == [0, 1, 2, -1]
    assert first_best(rows, ~rows.isnan(), n=2).tolist() == [0, 1, -1, -1]
    with pytest.raises(ValueError, match="n is 6 with 5 samples"):
        first_best(proxy, scored, n=6)


def test_a_scored_proxy_that_is_nan_is_refused():
    with pytest.raises(ValueError, match="marked as scored is NaN"):
        selection_weights(torch.tensor([1.0, math.nan]), torch.tensor([True, True]), n=1)
