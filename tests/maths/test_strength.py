"""Preference strength, flips, strata and adapter diversity against worked numbers."""

import math

import pytest
import torch

from rewarden.maths import adapter_diversity, preference_strength, strata, to_flip

CHOSEN = [3.71875, 0.58984375, 3.390625, 0.006805419921875, -0.6953125, 1.0390625, 1.4140625, 0.8359375, 3.078125, 2.0]
REJECTED = [3.546875, 0.9921875, 2.125, -0.330078125, 1.171875, 1.2578125, 1.078125, 1.0546875, 3.546875, 2.265625]
"""A row of fnlp/hh-rlhf-strength-cleaned, as its card shows it."""


def test_the_strength_of_a_published_row():
    mu, sigma = preference_strength(torch.tensor([CHOSEN]).double(), torch.tensor([REJECTED]).double())
    assert float(mu) == pytest.approx(-0.133109, abs=1e-6)
    assert float(sigma) == pytest.approx(0.755961, abs=1e-6)


def test_a_free_offset_of_a_voter_changes_nothing_and_one_voter_has_no_spread():
    chosen, rejected = torch.randn(4, 3).double(), torch.randn(4, 3).double()
    offset = torch.tensor([5.0, -100.0, 0.25]).double()
    moved = preference_strength(chosen + offset, rejected + offset)
    for got, expected in zip(moved, preference_strength(chosen, rejected), strict=True):
        torch.testing.assert_close(got, expected)
    assert preference_strength(chosen[:, :1], rejected[:, :1])[1].tolist() == [0.0] * 4
    with pytest.raises(ValueError, match="no models; a vote needs 1 or more"):
        preference_strength(chosen[:, :0], rejected[:, :0])


def test_only_the_lowest_share_is_flipped_and_only_below_zero():
    mu = torch.tensor([0.5, -1.0, -3.0, 2.0, -0.1, 1.0, 1.0, 1.0, 1.0, 1.0])
    assert to_flip(mu, share=0.2).nonzero().flatten().tolist() == [1, 2]
    assert to_flip(mu, share=0.5).nonzero().flatten().tolist() == [1, 2, 4]
    assert not to_flip(mu, share=0.0).any()
    assert to_flip(torch.full((10,), -1.0), share=0.3).nonzero().flatten().tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match=r"share is 1\.5"):
        to_flip(mu, share=1.5)
    with pytest.raises(ValueError, match=r"mu\[1\] is nan"):
        to_flip(torch.tensor([0.0, math.nan]), share=0.1)


def test_strata_are_equal_parts_of_the_pairs_from_the_lowest_mu_up():
    parts = strata(torch.tensor([3.0, 1.0, 2.0, 1.0, 5.0]), groups=2)
    assert [part.tolist() for part in parts] == [[1, 3], [2, 0, 4]]
    assert [len(part) for part in strata(torch.arange(3.0), groups=5)] == [0, 1, 0, 1, 1]


def test_voting_puts_planted_wrong_labels_into_the_lowest_quarter():
    """Specification, behavioral test (i), with voters that see the truth through noise as large as itself."""
    generator = torch.Generator().manual_seed(3)
    truth = torch.ones(500, 1)
    truth[::5] = -1.0
    mu, _ = preference_strength(truth + torch.randn(500, 10, generator=generator), torch.zeros(500, 10))
    lowest = set(mu.argsort()[:125].tolist())
    assert len(lowest & set(range(0, 500, 5))) >= 80


def test_the_nuclear_norm_of_stacked_adapters_is_the_worked_one():
    """Specification T26."""
    one, other = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    assert float(adapter_diversity([[one, other]], scale_free=False)) == pytest.approx(2.0, abs=1e-6)
    assert float(adapter_diversity([[one, one]], scale_free=False)) == pytest.approx(1.4142136, abs=1e-6)
    both = adapter_diversity([[one, other], [one, one]], scale_free=False)
    assert float(both) == pytest.approx((2 + math.sqrt(2)) / 2, abs=1e-6)


def test_scale_free_diversity_does_not_see_the_size_of_the_adapters():
    """Two orthogonal rows of one length: ||W||_* / ||W||_F = sqrt(2); times sqrt(max(2, 2))."""
    one, other = torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 3.0]])
    assert float(adapter_diversity([[one, other]], scale_free=True)) == pytest.approx(2.0, abs=1e-6)
    wide = [torch.tensor([[1.0, 0, 0, 0]]), torch.tensor([[0.0, 1, 0, 0]])]
    assert float(adapter_diversity([wide], scale_free=True)) == pytest.approx(2 * math.sqrt(2), abs=1e-6)
    square = [torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 3.0]])]
    assert float(adapter_diversity([wide, square], scale_free=False)) == pytest.approx((2 + 6) / 2, abs=1e-6)
    with pytest.raises(ValueError, match="no layer"):
        adapter_diversity([], scale_free=False)


def test_the_gradient_of_diversity_turns_equal_members_apart_and_stays_finite():
    """d||W||_*/dW = U V^T; against a difference quotient in float64, and finite where singular values are 0 or repeated."""
    ours = torch.tensor([[1.0, 0.2, 0.0]], requires_grad=True)
    theirs = torch.tensor([[0.9, 0.0, 0.3]])
    adapter_diversity([[ours, theirs]], scale_free=False).backward()
    quotient = []
    for place in range(3):
        moved = [torch.linalg.matrix_norm(torch.cat([ours.detach() + s * 1e-5 * torch.eye(3)[place], theirs]).double(), "nuc")
                 for s in (1, -1)]  # fmt: skip
        quotient.append(float((moved[0] - moved[1]) / 2e-5))
    torch.testing.assert_close(ours.grad[0], torch.tensor(quotient), atol=5e-3, rtol=0)
    for equal in (torch.eye(2), torch.ones(2, 2), torch.zeros(2, 2)):
        weight = equal.clone().requires_grad_(True)
        adapter_diversity([[weight]], scale_free=True).backward()
        assert bool(weight.grad.isfinite().all())
