import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rewarden.maths import gae, token_rewards

NAN = float("nan")
LOGP, REF = torch.tensor([[-1.0, -2.0, -0.5]]), torch.tensor([[-1.2, -1.5, -0.5]])
REWARD, VALUE = torch.tensor([[-0.02, 0.05, 2.0]]), torch.tensor([[0.5, 0.8, 1.0]])
ALL = torch.ones(1, 3, dtype=torch.bool)


def close(actual, expected, atol=1e-5):
    torch.testing.assert_close(actual, torch.tensor([expected], dtype=actual.dtype), rtol=0, atol=atol)


def oracle_gae(reward, value, mask, gamma, lam):
    """The definition: advantage_t = sum_k (gamma lam)^k delta_{t+k}, over the masked positions alone."""
    advantage, returns = torch.zeros_like(reward), torch.zeros_like(reward)
    for b in range(reward.shape[0]):
        kept = [t for t in range(reward.shape[1]) if mask[b, t]]
        r, v = [float(reward[b, t]) for t in kept], [float(value[b, t]) for t in kept] + [0.0]
        delta = [r[i] + gamma * v[i + 1] - v[i] for i in range(len(kept))]
        for i, t in enumerate(kept):
            advantage[b, t] = sum((gamma * lam) ** k * delta[i + k] for k in range(len(kept) - i))
            returns[b, t] = advantage[b, t] + v[i]
    return advantage, returns


def draw(seed, rows=3, length=8, keep=0.6):
    generator = torch.Generator().manual_seed(seed)
    reward, value = (torch.randn(rows, length, generator=generator, dtype=torch.float64) for _ in range(2))
    return reward, value, torch.rand(rows, length, generator=generator) < keep


def test_t1_per_token_rewards():
    reward = token_rewards(torch.tensor([2.0]), LOGP, REF, ALL, beta=0.1)
    close(reward, [-0.02, 0.05, 2.0], atol=1e-6)
    assert float(reward.sum()) == pytest.approx(2.03, abs=1e-6)


def test_ensemble_t9_padding_gets_nothing_and_the_penalty_is_not_clamped():
    """The reference clamps the log-ratio at 0, so its second token has 0 and its sum 1.2; the true sum is 1.1."""
    logp, ref = torch.tensor([[-1.0, -0.5, -2.0, 0.0]]), torch.tensor([[-1.2, -0.4, -3.0, 0.0]])
    mask = torch.tensor([[True, True, True, False]])
    close(token_rewards(torch.tensor([1.5]), logp, ref, mask, beta=0.02), [-0.004, 0.002, 1.48, 0.0], atol=1e-6)
    bare = token_rewards(torch.tensor([0.0]), logp, ref, mask, beta=1)
    assert float(-bare.sum()) == pytest.approx(1.1, abs=1e-6)


def test_the_score_is_added_on_the_last_sampled_token_of_each_row():
    mask = torch.tensor([[False, True, False, True, False], [True, False, False, False, False]])
    zero = torch.zeros(2, 5)
    reward = token_rewards(torch.tensor([3.0, -1.0]), zero, zero, mask, beta=0.5)
    assert reward.tolist() == [[0, 0, 0, 3, 0], [-1, 0, 0, 0, 0]]


def test_a_row_without_a_sampled_token_is_refused_because_its_score_would_vanish():
    mask = torch.tensor([[True, True, True], [False, False, False]])
    with pytest.raises(ValueError, match=r"rows \[1\] have no sampled token"):
        token_rewards(torch.zeros(2), LOGP.expand(2, 3), REF.expand(2, 3), mask, beta=0.1)


@pytest.mark.parametrize(
    ("lam", "advantage", "returns"),
    [
        (0.95, [1.42, 1.2, 1.0], [1.92, 2.0, 2.0]),
        (1, [1.53, 1.25, 1.0], [2.03, 2.05, 2.0]),
        (0, [0.28, 0.25, 1.0], [0.78, 1.05, 2.0]),
    ],
    ids=["T3", "T4-lambda-1", "T4-lambda-0"],
)
def test_t3_and_t4_gae_at_three_lambdas(lam, advantage, returns):
    ours = gae(REWARD, VALUE, ALL, gamma=1, lam=lam)
    close(ours[0], advantage)
    close(ours[1], returns)


def test_t6_a_response_of_one_token():
    advantage, returns = gae(torch.tensor([[2.0]]), torch.tensor([[0.3]]), torch.tensor([[True]]), gamma=1.0, lam=0.95)
    close(advantage, [1.7])
    close(returns, [2.0])


@pytest.mark.parametrize(("left", "right"), [(5, 0), (0, 4), (5, 4)])
def test_t6b_padding_on_either_side_changes_nothing(left, right):
    def pad(x, filler):
        return torch.nn.functional.pad(x, (left, right), value=filler)

    advantage, returns = gae(pad(REWARD, NAN), pad(VALUE, NAN), pad(ALL, False), gamma=1.0, lam=0.95)
    close(advantage, [0.0] * left + [1.42, 1.2, 1.0] + [0.0] * right)
    close(returns, [0.0] * left + [1.92, 2.0, 2.0] + [0.0] * right)


@pytest.mark.parametrize(
    ("lam", "advantage", "returns"),
    [(1, [0.9, 0.8, 0.7], [1.0, 1.0, 1.0]), (0.95, [0.82675, 0.765, 0.7], [0.92675, 0.965, 1.0])],
)
def test_ensemble_t11_gae(lam, advantage, returns):
    ours = gae(torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.1, 0.2, 0.3]]), ALL, gamma=1, lam=lam)
    close(ours[0], advantage)
    close(ours[1], returns)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 4),
    length=st.integers(1, 9),
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
    keep=st.floats(0, 1),
)
def test_gae_is_the_double_sum(seed, rows, length, gamma, lam, keep):
    reward, value, mask = draw(seed, rows, length, keep)
    ours = gae(reward, value, mask, gamma=gamma, lam=lam)
    torch.testing.assert_close(ours, oracle_gae(reward, value, mask, gamma, lam), rtol=1e-10, atol=1e-10)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_user_turns_in_between_take_no_time(seed):
    """A row with gaps equals the same tokens put side by side."""
    reward, value, mask = draw(seed, rows=1, length=12)
    mask[0, 3] = True
    advantage, returns = gae(reward, value, mask, gamma=0.97, lam=0.9)
    dense = gae(reward[mask][None], value[mask][None], torch.ones(1, int(mask.sum()), dtype=torch.bool), gamma=0.97, lam=0.9)
    torch.testing.assert_close((advantage[mask][None], returns[mask][None]), dense, rtol=0, atol=0)


def test_with_lambda_one_and_no_discount_the_return_is_the_sum_of_rewards_to_come():
    reward, value, _ = draw(1)
    mask = torch.ones_like(reward, dtype=torch.bool)
    _, returns = gae(reward, value, mask, gamma=1.0, lam=1.0)
    torch.testing.assert_close(returns, reward.flip(1).cumsum(1).flip(1), rtol=1e-12, atol=1e-12)


def test_rows_do_not_see_each_other():
    reward, value, mask = draw(2, rows=5)
    order = torch.tensor([3, 0, 4, 1, 2])
    whole = gae(reward, value, mask, gamma=1.0, lam=0.95)
    shuffled = gae(reward[order], value[order], mask[order], gamma=1.0, lam=0.95)
    torch.testing.assert_close(shuffled, (whole[0][order], whole[1][order]), rtol=0, atol=0)


@pytest.mark.parametrize("poison", [NAN, float("inf"), 1e30])
def test_what_lies_off_the_mask_reaches_neither_result_nor_gradient(poison):
    reward, value, mask = draw(4)
    mask[:, 2] = True
    logp, ref, score = value * 0.3, reward * 0.3, torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)

    def both(filler):
        leaves = [torch.where(mask, x, filler).requires_grad_() for x in (reward, value, logp, ref)]
        advantage, returns = gae(leaves[0], leaves[1], mask, gamma=0.9, lam=0.8)
        shaped = token_rewards(score, leaves[2], leaves[3], mask, beta=0.1)
        (advantage.square() + returns + shaped.square()).sum().backward()
        return [advantage, returns, shaped] + [leaf.grad for leaf in leaves]

    for clean, poisoned in zip(both(0.0), both(poison), strict=True):
        torch.testing.assert_close(poisoned, clean, rtol=0, atol=0)
        assert torch.all(poisoned[~mask] == 0)


def test_a_row_that_keeps_nothing_and_a_batch_without_positions_are_zero():
    nothing = torch.zeros(1, 3, dtype=torch.bool)
    advantage, returns = gae(REWARD, VALUE, nothing, gamma=1.0, lam=1.0)
    assert advantage.abs().sum() == 0
    assert returns.abs().sum() == 0
    empty = gae(torch.zeros(2, 0), torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.bool), gamma=1.0, lam=1.0)
    assert empty[0].shape == (2, 0)
