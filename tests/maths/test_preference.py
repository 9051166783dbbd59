import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rewarden.maths import bradley_terry, dpo_loss, ipo_loss, mean, reward_centering


def loss_of(chosen, rejected, margin=None, label_smoothing=0.0):
    chosen, rejected = torch.tensor(chosen), torch.tensor(rejected)
    return bradley_terry(chosen, rejected, margin=margin, label_smoothing=label_smoothing)


def close(actual, expected, atol=1e-6):
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=actual.dtype), rtol=0, atol=atol)


def test_t16_the_exact_loss_and_the_gradient_of_a_badly_wrong_pair():
    chosen = torch.tensor([1.0, 0.0, -20.0], requires_grad=True)
    loss = bradley_terry(chosen, torch.zeros(3), margin=None, label_smoothing=0)
    loss.sum().backward()
    close(loss, [0.313262, 0.693147, 20.0])
    assert float(chosen.grad[2]) == pytest.approx(-1.0, abs=1e-6)


def test_t17_losses_of_three_pairs():
    loss = loss_of([2.0, 0.5, 1.0], [1.0, 1.0, 1.0])
    close(loss, [0.313262, 0.974077, 0.693147])
    assert float(loss.mean()) == pytest.approx(0.660162, abs=1e-6)


def test_t18_with_a_language_model_term():
    assert float(loss_of([2.0, 0.5, 1.0], [1.0, 1.0, 1.0]).mean()) + 1.0 * (1 + 2 + 3) / 3 == pytest.approx(2.660162, abs=1e-6)


def test_t19_label_smoothing_and_its_minimum():
    close(loss_of([1.0], [0.0], label_smoothing=0.1), [0.413262])
    d = torch.tensor([2.197225], requires_grad=True)
    at_minimum = bradley_terry(d, torch.zeros(1), margin=None, label_smoothing=0.1)
    at_minimum.sum().backward()
    close(at_minimum, [0.325083])
    assert float(d.grad) == pytest.approx(0.0, abs=1e-6)


def test_t20b_a_flipped_label():
    close(loss_of([1.0], [0.0], label_smoothing=1.0), [1.313262])
    close(loss_of([0.0], [1.0]), [1.313262])


def test_ensemble_t3_losses_and_their_cross_entropy_form():
    close(loss_of([1.0, 0.3, 2.0, -1.5], [0.0, 0.8, 2.0, 2.5]), [0.3132617, 0.9740770, 0.6931472, 4.0181499])
    first, second, choice = torch.tensor([0.2, 1.0, -0.5]), torch.tensor([0.7, 0.4, -0.5]), torch.tensor([1, 1, 0]).bool()
    chosen, rejected = torch.where(choice, second, first), torch.where(choice, first, second)
    assert float(bradley_terry(chosen, rejected, margin=None, label_smoothing=0.0).mean()) == pytest.approx(0.7349040, abs=1e-6)


def test_ensemble_t4_heads_are_trained_on_the_mean_of_losses_not_the_loss_of_the_mean():
    heads = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, -1.0]], requires_grad=True)
    chosen = torch.tensor([0.5, -0.2], requires_grad=True)
    rejected = torch.tensor([0.1, 0.9], requires_grad=True)
    scores = [heads @ h for h in (chosen, rejected)]
    close(scores[0] - scores[1], [0.4, -1.1, 1.5])
    losses = bradley_terry(*scores, margin=None, label_smoothing=0.0)
    close(losses, [0.5130153, 1.3873353, 0.2014133])
    assert float(losses.detach().sum()) == pytest.approx(2.1017639, abs=1e-6)
    losses.mean().backward()
    assert float(losses.detach().mean()) == pytest.approx(0.7005880, abs=1e-6)
    close(chosen.grad, [-0.1945793, -0.1892782])
    close(rejected.grad, [0.1945793, 0.1892782])
    close(heads.grad, [[-0.0535083, 0.1471479], [-0.1000347, 0.2750954], [-0.0243234, 0.0668894]])
    together = bradley_terry(*[mean(s.unsqueeze(0)) for s in scores], margin=None, label_smoothing=0.0)
    close(together, [0.5686765])


@settings(max_examples=60, deadline=None)
@given(d=st.floats(-30, 30), margin=st.floats(-3, 3), p=st.floats(0, 1))
def test_bradley_terry_is_the_smoothed_cross_entropy(d, margin, p):
    pair = torch.tensor([d], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    expected = (1 - p) * math.log1p(math.exp(-(d - margin))) + p * math.log1p(math.exp(d - margin))
    assert float(bradley_terry(*pair, margin=margin, label_smoothing=p)) == pytest.approx(expected, rel=1e-11, abs=1e-13)


def test_margin_and_smoothing_may_differ_per_pair():
    margin, smoothing = torch.tensor([0.5, 0.0]), torch.tensor([0.0, 1.0])
    loss = loss_of([1.5, 1.0], [0.0, 0.0], margin=margin, label_smoothing=smoothing)
    close(loss, [0.313262, 1.313262])


def test_a_soft_label_is_least_where_the_model_states_it():
    d = torch.tensor([math.log(0.7 / 0.3)], requires_grad=True)
    bradley_terry(d, torch.zeros(1), margin=None, label_smoothing=1 - torch.tensor([0.7])).sum().backward()
    assert float(d.grad) == pytest.approx(0.0, abs=1e-6)


def test_half_precision_scores_are_compared_in_float32():
    loss = bradley_terry(torch.tensor([2.0]).bfloat16(), torch.tensor([1.0]).bfloat16(), margin=None, label_smoothing=0.0)
    assert loss.dtype == torch.float32
    close(loss, [0.313262])


@pytest.mark.parametrize("smoothing", [-0.1, 1.5, float("nan")])
def test_a_label_smoothing_that_is_no_probability_is_refused(smoothing):
    with pytest.raises(ValueError, match=r"label_smoothing.*use 0 to 1"):
        loss_of([1.0], [0.0], label_smoothing=smoothing)
    with pytest.raises(ValueError, match=r"label_smoothing.*use 0 to 1"):
        loss_of([1.0, 1.0], [0.0, 0.0], label_smoothing=torch.tensor([0.0, smoothing]))


def test_centering_is_the_squared_sum_of_the_pair():
    chosen = torch.tensor([1.0, -2.0], requires_grad=True)
    penalty = reward_centering(chosen, torch.tensor([0.5, 2.0]))
    penalty.sum().backward()
    close(penalty, [2.25, 0.0])
    close(chosen.grad, [3.0, 0.0])


LOGP = (torch.tensor([-10.0]), torch.tensor([-11.0]), torch.tensor([-12.0]), torch.tensor([-11.5]))


def test_dpo_by_hand():
    """Log-ratios +1 and -0.5, gap 1.5, times beta 2: softplus(-3) = log(1 + e^-3) = 0.048587."""
    close(dpo_loss(*LOGP, beta=2, label_smoothing=0.0), [0.048587])
    close(dpo_loss(*LOGP, beta=2, label_smoothing=0.1), [0.9 * 0.048587 + 0.1 * 3.048587])


def test_dpo_where_nothing_has_moved_is_log_two_with_half_beta_as_gradient():
    logp = [x.clone().requires_grad_() for x in (torch.tensor([-3.0]), torch.tensor([-5.0]))]
    loss = dpo_loss(logp[0], torch.tensor([-3.0]), logp[1], torch.tensor([-5.0]), beta=0.1, label_smoothing=0.0)
    loss.sum().backward()
    close(loss, [math.log(2)])
    assert float(logp[0].grad) == pytest.approx(-0.05, abs=1e-7)
    assert float(logp[1].grad) == pytest.approx(0.05, abs=1e-7)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), beta=st.floats(0.01, 3))
def test_dpo_is_bradley_terry_on_scaled_log_ratios(seed, beta):
    generator = torch.Generator().manual_seed(seed)
    c, rc, r, rr = (torch.randn(5, generator=generator, dtype=torch.float64) for _ in range(4))
    for i, loss in enumerate(dpo_loss(c, rc, r, rr, beta=beta, label_smoothing=0.2).tolist()):
        h = beta * (float(c[i]) - float(rc[i]) - float(r[i]) + float(rr[i]))
        expected = 0.8 * math.log1p(math.exp(-h)) + 0.2 * math.log1p(math.exp(h))
        assert loss == pytest.approx(expected, rel=1e-10)


def test_ipo_by_hand_and_at_its_optimum():
    """Gap 1.5; beta 0.5 asks for 1, beta 1/3 for exactly 1.5."""
    close(ipo_loss(*LOGP, beta=0.5), [0.25])
    close(ipo_loss(*LOGP, beta=1 / 3), [0.0])
    with pytest.raises(ValueError, match=r"beta is 0.*above 0"):
        ipo_loss(*LOGP, beta=0)
