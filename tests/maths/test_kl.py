import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rewarden.maths import k1, k2, k3

LOGP, REF = torch.tensor([[-1.0, -2.0, -0.5]]), torch.tensor([[-1.2, -1.5, -0.5]])


def test_t1_k1_is_the_log_ratio_and_may_be_negative():
    torch.testing.assert_close(k1(LOGP, REF), torch.tensor([[0.2, -0.5, 0.0]]), rtol=0, atol=1e-6)
    assert float(k1(LOGP, REF).mean()) == pytest.approx(-0.1, abs=1e-6)


def test_t2_k3_of_the_same_tokens():
    torch.testing.assert_close(k3(LOGP, REF), torch.tensor([[0.018731, 0.148721, 0.0]]), rtol=0, atol=1e-6)
    assert float(k3(LOGP, REF).mean()) == pytest.approx(0.055817, abs=1e-6)


def test_t12_k3_from_old_to_new_policy_is_ratio_minus_one_minus_log_ratio():
    ratio = torch.tensor([1.5, 0.5], dtype=torch.float64)
    approx_kl = k3(torch.zeros(2, dtype=torch.float64), ratio.log())
    torch.testing.assert_close(approx_kl, torch.tensor([0.094535, 0.193147]).double(), rtol=0, atol=1e-6)
    assert float(approx_kl.mean()) == pytest.approx(0.143841, abs=1e-6)


@given(d=st.floats(-20, 20))
def test_each_estimator_is_its_formula(d):
    logp, ref = torch.tensor([d], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    assert float(k1(logp, ref)) == d
    assert float(k2(logp, ref)) == pytest.approx(d * d / 2, rel=1e-12)
    assert float(k3(logp, ref)) == pytest.approx(math.expm1(-d) + d, rel=1e-9, abs=1e-15)


def test_k3_is_never_negative_even_where_rounding_would_make_it_so():
    d = torch.cat([torch.linspace(-3, 3, 20001), torch.logspace(-12, 1, 20001), -torch.logspace(-12, 1, 20001)])
    assert float(k3(d, torch.zeros_like(d)).min()) >= 0.0


def test_all_are_zero_where_the_policies_agree():
    for estimator in (k1, k2, k3):
        assert estimator(LOGP, LOGP).abs().max() == 0.0


def test_k1_and_k3_average_to_the_exact_divergence():
    p, q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    exact = sum(a * math.log(a / b) for a, b in zip(p.tolist(), q.tolist(), strict=True))
    for estimator in (k1, k3):
        assert float((p * estimator(p.log(), q.log())).sum()) == pytest.approx(exact, abs=1e-12)


def test_gradient_of_k2_is_the_log_ratio():
    logp = torch.tensor([0.3, -0.7], requires_grad=True)
    k2(logp, torch.tensor([0.1, 0.1])).sum().backward()
    torch.testing.assert_close(logp.grad, torch.tensor([0.2, -0.8]))
