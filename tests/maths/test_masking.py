import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rewarden.maths import masked_mean, masked_var, whiten

NAN = float("nan")


def draw(seed, rows=4, length=7, keep=0.6):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, length, generator=generator, dtype=torch.float64) * 3 + 1
    return x, torch.rand(rows, length, generator=generator) < keep


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), keep=st.floats(0.05, 1.0))
def test_mean_and_variance_are_those_of_the_kept_numbers(seed, keep):
    x, mask = draw(seed, keep=keep)
    kept = x.numpy()[mask.numpy()]
    if kept.size:
        assert float(masked_mean(x, mask)) == pytest.approx(kept.mean(), rel=1e-12)
        assert float(masked_var(x, mask, ddof=0)) == pytest.approx(kept.var(), rel=1e-12, abs=1e-14)
    if kept.size > 1:
        assert float(masked_var(x, mask, ddof=1)) == pytest.approx(kept.var(ddof=1), rel=1e-12)


def test_an_empty_mask_gives_zero_with_zero_gradient():
    x = torch.tensor([[1.0, NAN]], requires_grad=True)
    nothing = torch.zeros(1, 2, dtype=torch.bool)
    total = masked_mean(x, nothing) + masked_var(x, nothing, ddof=0) + masked_var(x, nothing, ddof=1)
    total = total + whiten(x, nothing, eps=1e-6).sum()
    total.backward()
    assert total.item() == 0.0
    assert x.grad.tolist() == [[0.0, 0.0]]


def test_one_kept_number_has_no_variance_under_either_convention():
    x, mask = torch.tensor([[5.0, 9.0]]), torch.tensor([[True, False]])
    assert float(masked_var(x, mask, ddof=0)) == 0.0
    assert float(masked_var(x, mask, ddof=1)) == 0.0
    assert whiten(x, mask, eps=1e-8).tolist() == [[0.0, 0.0]]
    assert float(masked_var(x, torch.ones(1, 2, dtype=torch.bool), ddof=2)) == 0.0


def test_refuel_case_29_whitening_and_the_pair_difference():
    x, mask = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.ones(1, 4, dtype=torch.bool)
    white = whiten(x, mask, eps=0)
    torch.testing.assert_close(white, torch.tensor([[-1.341641, -0.447214, 0.447214, 1.341641]]), rtol=0, atol=1e-6)
    assert float(white[0, 0] - white[0, 1]) == pytest.approx(-0.894427, abs=1e-6)
    shifted = white + x.mean()
    assert float(shifted[0, 0] - shifted[0, 1]) == pytest.approx(-0.894427, abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_whitening_leaves_mean_zero_and_population_std_one(seed):
    x, mask = draw(seed, keep=0.8)
    kept = whiten(x, mask, eps=1e-12).numpy()[mask.numpy()]
    assert kept.size > 1
    assert abs(kept.mean()) < 1e-10
    assert kept.std() == pytest.approx(1.0, abs=1e-8)


def test_whitening_with_eps_is_the_written_formula():
    x, mask = draw(3)
    kept = x.numpy()[mask.numpy()]
    expected = np.where(mask.numpy(), (x.numpy() - kept.mean()) / np.sqrt(kept.var() + 0.5), 0.0)
    np.testing.assert_allclose(whiten(x, mask, eps=0.5).numpy(), expected, rtol=1e-12)


def test_whitening_equal_numbers_gives_zero():
    x = torch.full((2, 3), 0.1)
    white = whiten(x, torch.ones(2, 3, dtype=torch.bool), eps=1e-6)
    assert white.abs().max() < 1e-4


@pytest.mark.parametrize("poison", [NAN, math.inf, 1e30])
@pytest.mark.parametrize("formula", [
    lambda x, m: masked_mean(x, m),
    lambda x, m: masked_var(x, m, ddof=1),
    lambda x, m: whiten(x, m, eps=1e-6).square().mul(torch.arange(7)).sum(),
])  # fmt: skip
def test_what_lies_off_the_mask_reaches_neither_result_nor_gradient(formula, poison):
    x, mask = draw(5)
    results = []
    for filler in (0.0, poison):
        filled = torch.where(mask, x, filler).requires_grad_()
        value = formula(filled, mask)
        value.backward()
        results.append((value.detach(), filled.grad))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    assert torch.all(results[1][1][~mask] == 0)


def test_bfloat16_is_averaged_in_float32():
    x = torch.full((1, 4096), 1.0, dtype=torch.bfloat16)
    x[0, 0] = 3.0
    mean = masked_mean(x, torch.ones(1, 4096, dtype=torch.bool))
    assert mean.dtype == torch.float32
    assert float(mean) == pytest.approx(1 + 2 / 4096, abs=1e-7)


def test_shapes_are_checked_while_tests_run():
    with pytest.raises(Exception, match=r"(?i)type-check|jaxtyping|beartype"):
        masked_mean(torch.zeros(2, 3), torch.ones(2, 4, dtype=torch.bool))


@pytest.mark.parametrize(("value", "count"), [(0.1, 7), (123.456, 1000), (10000.3, 1000)])
def test_equal_values_whiten_to_zero_whatever_their_size(value, count):
    x = torch.full((1, count), value)
    assert float(whiten(x, torch.ones_like(x, dtype=torch.bool), eps=1e-8).abs().max()) < 1e-6
