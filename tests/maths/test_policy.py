import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rewarden.maths import clipped_surrogate, is_clipped, k1


def surrogate(ratio, advantage, low=0.2, high=0.2, formula=clipped_surrogate):
    logp_old = torch.full((len(ratio),), -1.3, dtype=torch.float64)
    logp = logp_old + torch.tensor(ratio, dtype=torch.float64).log()
    return formula(logp, logp_old, torch.tensor(advantage, dtype=torch.float64), clip_low=low, clip_high=high)


def close(actual, expected):
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=actual.dtype), rtol=0, atol=1e-6)


def test_t11_terms_mean_and_clip_fraction():
    ratio, advantage = [1.5, 1.5, 0.5, 0.5], [1, -1, 1, -1]
    loss = surrogate(ratio, advantage)
    close(loss, [-1.2, 1.5, -0.5, 0.8])
    assert float(loss.mean()) == pytest.approx(0.15, abs=1e-6)
    assert float(surrogate(ratio, advantage, None, None).mean()) == pytest.approx(0.0, abs=1e-6)
    clipped = surrogate(ratio, advantage, formula=is_clipped)
    assert clipped.tolist() == [True, False, False, True]
    assert float(clipped.double().mean()) == 0.5


def test_t15_policy_loss_joins_value_loss_entropy_and_ptx():
    pg = float(surrogate([1.5, 1.5, 0.5, 0.5], [1, -1, 1, -1]).mean())
    assert pg + 0.1625 == pytest.approx(0.3125, abs=1e-6)
    assert pg + 0.1625 + 0.01 * 0.386294 == pytest.approx(0.316363, abs=1e-6)
    assert pg + 0.1625 + 0.5 * 2.0 == pytest.approx(1.3125, abs=1e-6)


def test_t15b_ratio_to_a_fixed_reference():
    logp, ref = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.2, -1.5, -0.5])
    close(k1(logp, ref).exp(), [1.221403, 0.606531, 1.0])
    unclipped = clipped_surrogate(logp, ref, -torch.ones(3), clip_low=None, clip_high=None)
    close(unclipped, [1.221403, 0.606531, 1.0])


def test_ensemble_t12_terms_and_mean():
    loss = surrogate([1.5, 0.7, 1.0], [1, -1, 2])
    close(loss, [-1.2, 0.8, -2.0])
    assert float(loss.mean()) == pytest.approx(-0.8, abs=1e-6)


def test_the_two_sides_clip_apart_and_none_leaves_one_open():
    close(surrogate([2.0, 0.1], [1, -1], low=0.5, high=0.25), [-1.25, 0.5])
    close(surrogate([2.0, 0.1], [1, -1], low=None, high=0.25), [-1.25, 0.1])
    close(surrogate([2.0, 0.1], [1, -1], low=0.5, high=None), [-2.0, 0.5])


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_at_ratio_one_the_loss_is_minus_the_advantage_with_the_policy_gradient(seed):
    generator = torch.Generator().manual_seed(seed)
    logp = torch.randn(3, 4, generator=generator).requires_grad_()
    advantage = torch.randn(3, 4, generator=generator)
    loss = clipped_surrogate(logp, logp.detach(), advantage, clip_low=0.2, clip_high=0.2)
    loss.sum().backward()
    torch.testing.assert_close(loss.detach(), -advantage, rtol=0, atol=0)
    torch.testing.assert_close(logp.grad, -advantage, rtol=0, atol=1e-7)
    assert not is_clipped(logp, logp.detach(), advantage, clip_low=0.2, clip_high=0.2).any()


@settings(max_examples=60, deadline=None)
@given(log_ratio=st.floats(-3, 3), advantage=st.floats(-5, 5), low=st.floats(0, 0.9), high=st.floats(0, 2))
def test_the_loss_is_the_written_maximum(log_ratio, advantage, low, high):
    ratio = math.exp(log_ratio)
    clipped = min(max(ratio, 1 - low), 1 + high)
    expected = max(-advantage * ratio, -advantage * clipped)
    args = [torch.tensor([v], dtype=torch.float64) for v in (log_ratio, 0.0, advantage)]
    assert float(clipped_surrogate(*args, clip_low=low, clip_high=high)) == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_a_clipped_token_has_no_gradient_and_an_unclipped_one_has():
    logp = torch.tensor([0.5, 0.5, -0.9, -0.9], requires_grad=True)
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0])
    clipped_surrogate(logp, torch.zeros(4), advantage, clip_low=0.2, clip_high=0.2).sum().backward()
    clipped = is_clipped(logp, torch.zeros(4), advantage, clip_low=0.2, clip_high=0.2)
    assert clipped.tolist() == [True, False, False, True]
    assert logp.grad[clipped].tolist() == [0.0, 0.0]
    torch.testing.assert_close(logp.grad[~clipped], torch.tensor([math.exp(0.5), -math.exp(-0.9)]))


def test_a_log_ratio_that_overflows_gives_no_nan():
    logp = torch.tensor([100.0, 100.0, 100.0], requires_grad=True)
    advantage = torch.tensor([1.0, 0.0, -1.0])
    loss = clipped_surrogate(logp, torch.zeros(3), advantage, clip_low=0.2, clip_high=0.2)
    loss.sum().backward()
    assert loss[:2].tolist() == pytest.approx([-1.2, 0.0])
    assert bool(torch.isfinite(loss[2]))
    assert bool(torch.isfinite(logp.grad).all())
    assert logp.grad[:2].tolist() == [0.0, 0.0]
