import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rewarden.maths import clipped_value_loss, explained_variance, is_value_clipped

NAN = float("nan")


def test_ensemble_t12_value_loss():
    value, old, target = torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.1]), torch.tensor([0.9, -0.3])
    loss = clipped_value_loss(value, old, target, clip=0.2)
    torch.testing.assert_close(loss, torch.tensor([0.5 * 0.2**2, 0.5 * 0.3**2]))
    assert float(loss.mean()) == pytest.approx(0.0325, abs=1e-6)
    assert is_value_clipped(value, old, target, clip=0.2).tolist() == [True, False]


@settings(max_examples=60, deadline=None)
@given(value=st.floats(-3, 3), old=st.floats(-3, 3), target=st.floats(-3, 3), clip=st.floats(0, 2))
def test_the_loss_is_half_the_worse_square(value, old, target, clip):
    near = min(max(value, old - clip), old + clip)
    args = [torch.tensor([x], dtype=torch.float64) for x in (value, old, target)]
    expected = 0.5 * max((value - target) ** 2, (near - target) ** 2)
    assert float(clipped_value_loss(*args, clip=clip)) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert float(clipped_value_loss(*args, clip=None)) == pytest.approx(0.5 * (value - target) ** 2, abs=1e-12)
    assert not is_value_clipped(*args, clip=None).any()


def test_at_the_old_value_loss_and_gradient_are_those_of_the_plain_square():
    value = torch.tensor([0.4, -1.0], requires_grad=True)
    target = torch.tensor([1.0, 1.0])
    loss = clipped_value_loss(value, value.detach(), target, clip=0.2)
    loss.sum().backward()
    torch.testing.assert_close(loss.detach(), torch.tensor([0.18, 2.0]))
    torch.testing.assert_close(value.grad, torch.tensor([-0.6, -2.0]))


def test_explained_variance_by_hand():
    """Returns 1..4 have variance 1.25; errors (0, 1, 0, 1) have 0.25: 1 - 0.25 / 1.25 = 0.8."""
    target = torch.tensor([[1.0, 2.0, 3.0, 4.0, NAN]])
    value = torch.tensor([[1.0, 1.0, 3.0, 3.0, NAN]])
    mask = torch.tensor([[True, True, True, True, False]])
    assert float(explained_variance(value, target, mask)) == pytest.approx(0.8, abs=1e-9)
    assert float(explained_variance(target, target, mask)) == 1.0
    assert float(explained_variance(target + 7, target, mask)) == pytest.approx(1.0, abs=1e-9)
    assert float(explained_variance(torch.zeros(1, 5), target, mask)) == pytest.approx(0.0, abs=1e-9)
    assert float(explained_variance(-target, target, mask)) == pytest.approx(-3.0, abs=1e-9)


@pytest.mark.parametrize("keep", [True, False])
def test_returns_without_spread_leave_nothing_to_explain(keep):
    target, mask = torch.full((2, 50), 0.1), torch.full((2, 50), keep)
    assert float(explained_variance(torch.randn(2, 50), target, mask)) == 0.0


def test_rounding_noise_in_the_returns_is_not_explained():
    target = 1000 + 1e-5 * torch.tensor([[1.0, -1.0, 1.0, -1.0]], dtype=torch.float64)
    assert float(explained_variance(torch.zeros(1, 4), target, torch.ones(1, 4, dtype=torch.bool))) == 0.0


def test_a_value_inside_the_band_is_never_counted_as_clipped():
    """In float32 value_old + (value - value_old) differs from value in the last bit, and the two squares with it."""
    value = torch.tensor([0.08073103427886963])
    value_old = torch.tensor([-0.10156487673521042])
    target = torch.tensor([-0.025008268654346466])
    assert not is_value_clipped(value, value_old, target, clip=0.2).any()
    assert is_value_clipped(torch.tensor([0.4]), torch.tensor([0.1]), torch.tensor([0.5]), clip=0.2).all()
    assert is_value_clipped(torch.tensor([0.4]), torch.tensor([0.1]), torch.tensor([-0.5]), clip=0.2).logical_not().all()
    assert is_value_clipped(torch.tensor([0.6]), torch.tensor([0.1]), torch.tensor([0.9]), clip=0.2).all()
