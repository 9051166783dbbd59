import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rewarden.maths import accuracy_with_ties, clipped_surrogate, log_ratio_gap, relative_loss


def loss_of(nc, oc, nr, old_r, return_a, return_b, eta):
    """One pair; returns the loss and its gradients by the two new log-probs."""
    new_c, new_r = (torch.tensor([x], dtype=torch.float64, requires_grad=True) for x in (nc, nr))
    rest = [torch.tensor([x], dtype=torch.float64) for x in (oc, old_r, return_a, return_b)]
    loss = relative_loss(new_c, rest[0], new_r, rest[1], rest[2], rest[3], eta=eta)
    loss.sum().backward()
    return float(loss.detach()), float(new_c.grad), float(new_r.grad)


def test_refuel_case_1_loss_and_gradients():
    assert loss_of(-10, -11, -12, -11.5, 1.0, 0.4, 1) == pytest.approx((0.81, 1.8, -1.8), abs=1e-6)


def test_refuel_case_3_a_fresh_policy_at_the_two_scales():
    loss, grad_c, grad_r = loss_of(-10, -10, -12, -12, 0.15, 0.12, 1000)
    assert (loss, grad_c, grad_r) == pytest.approx((900, -60, 60), abs=1e-6)
    assert loss / 1000**2 == pytest.approx(9e-4, abs=1e-9)


def test_refuel_case_4_swapping_the_sides_swaps_the_gradients():
    assert loss_of(-12, -11.5, -10, -11, 0.4, 1.0, 1) == pytest.approx((0.81, -1.8, 1.8), abs=1e-6)


def test_refuel_case_5_adding_a_constant_to_both_returns_changes_nothing():
    assert loss_of(-10, -11, -12, -11.5, 8.3, 7.7, 1) == pytest.approx((0.81, 1.8, -1.8), abs=1e-6)


def test_refuel_case_6_the_optimum_has_no_gradient():
    assert loss_of(-9.5, -10, -12.1, -12, 0.6, 0.0, 1) == pytest.approx((0, 0, 0), abs=1e-6)


def test_refuel_case_8_a_tie_still_pulls_the_gap_to_zero():
    loss, grad_c, _ = loss_of(-9.7, -10, -12, -12, 0.5, 0.5, 1)
    assert loss == pytest.approx(0.09, abs=1e-6)
    assert grad_c > 0


def test_refuel_case_9_with_one_turn_it_is_rebel_bit_for_bit():
    """REBEL (arXiv:2404.16767) regresses (log-ratio gap - eta * reward gap) to 0, written here on its own."""
    torch.manual_seed(0)
    new_a, old_a, new_b, old_b, reward_a, reward_b = (torch.randn(16) for _ in range(6))
    rebel = (((new_a - old_a) - (new_b - old_b)) - 0.7 * (reward_a - reward_b)) ** 2
    ours = relative_loss(new_a, old_a, new_b, old_b, reward_a, reward_b, eta=0.7)
    assert torch.equal(ours, rebel)


@pytest.mark.parametrize(("eta", "expected"), [(1, 0.731059), (2, 0.880797)])
def test_refuel_case_28_descent_reaches_the_closed_form(eta, expected):
    """Two actions, uniform old policy, values (1, 0): the new policy is proportional to exp(eta * value)."""
    logits = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    old, one, zero = torch.full((2,), 0.5, dtype=torch.float64).log(), torch.ones(1).double(), torch.zeros(1).double()
    optimizer = torch.optim.SGD([logits], lr=0.1)
    for _ in range(200):
        logp = logits.log_softmax(0)
        loss = relative_loss(logp[:1], old[:1], logp[1:], old[1:], one, zero, eta=eta).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(logits.detach().softmax(0)[0]) == pytest.approx(expected, abs=1e-6)


def test_refuel_case_37_share_of_pairs_moved_the_right_way():
    delta = log_ratio_gap(torch.tensor([0.3, -0.1, 0.0, 2.0]), torch.zeros(4), torch.zeros(4), torch.zeros(4))
    assert float((delta > 0).double().mean()) == 0.5
    assert accuracy_with_ties(delta, torch.zeros(4)) == 0.625


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), shift=st.floats(-5, 5), eta=st.floats(0.01, 100))
def test_swap_and_shift_leave_the_loss_alone(seed, shift, eta):
    generator = torch.Generator().manual_seed(seed)
    na, oa, nb, ob, ra, rb = (torch.randn(6, generator=generator, dtype=torch.float64) for _ in range(6))
    base = relative_loss(na, oa, nb, ob, ra, rb, eta=eta)
    torch.testing.assert_close(relative_loss(nb, ob, na, oa, rb, ra, eta=eta), base, rtol=1e-10, atol=1e-10)
    shifted = relative_loss(na, oa, nb, ob, ra + shift, rb + shift, eta=eta)
    torch.testing.assert_close(shifted, base, rtol=1e-6, atol=1e-6)


def test_at_the_old_policy_the_gradient_is_the_two_sample_policy_gradient():
    """-2 eta (R - R') (grad log pi(y) - grad log pi(y')): twice eta times a leave-one-out surrogate."""
    torch.manual_seed(1)
    features, returns = torch.randn(2, 5), torch.tensor([0.9, 0.2])
    theta = torch.zeros(5, requires_grad=True)
    logp = features @ theta
    old = logp.detach()
    relative_loss(logp[:1], old[:1], logp[1:], old[1:], returns[:1], returns[1:], eta=3.0).sum().backward()
    regression = theta.grad.clone()
    theta.grad = None
    logp = features @ theta
    advantage = returns - returns.flip(0)
    clipped_surrogate(logp, old, advantage, clip_low=None, clip_high=None).sum().backward()
    torch.testing.assert_close(regression, 2 * 3.0 * theta.grad)


def test_half_precision_returns_are_subtracted_in_float32():
    zero = torch.zeros(1)
    returns = torch.tensor([0.15]).bfloat16(), torch.tensor([0.12]).bfloat16()
    expected = (1000 * (float(returns[0]) - float(returns[1]))) ** 2
    loss = relative_loss(zero, zero, zero, zero, *returns, eta=1000)
    assert float(loss) == pytest.approx(expected, rel=1e-6)
