"""Logistic regression with an L1 penalty and weighted soft labels, to convergence, many fits at once."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import softplus

_MAX_STEPS = 100
_MAX_GUESSES = 100
_SWEEPS = 5
_MAX_HALVINGS = 40
# Keeps a coefficient that no row speaks of (a column of zeros) at 0 instead of 0/0.
_RIDGE = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class LogisticFit:
    """Coefficients of each fit, and how far each is from its optimum."""

    coefficients_BD: Float[Tensor, "B D"]
    violation_B: Float[Tensor, " B"]
    """Largest breach of the optimality conditions, divided by the total weight of the rows."""

    def converged(self, *, tolerance: float = 1e-8) -> Tensor:
        """Which fits reached their optimum, [B]."""
        return self.violation_B <= tolerance


def l1_logistic(
    features_BND: Float[Tensor, "B N D"],
    label_BN: Float[Tensor, "B N"],
    weight_BN: Float[Tensor, "B N"],
    *,
    penalty_B: Float[Tensor, " B"],
    start_D: Float[Tensor, " D"] | None = None,
    tolerance: float = 1e-10,
) -> LogisticFit:
    """Minimize, for each of B fits and with no intercept, in float64

        penalty * sum_d |w_d| + sum_n weight_n * [softplus(z_n) - label_n * z_n],    z_n = sum_d features_nd * w_d

    The bracket is the cross-entropy of sigmoid(z) against a label between 0 and 1. liblinear's C is 1 / penalty; penalty 0 is
    no penalty; `start_D` is where all fits begin (0 when absent). Proximal Newton with an Armijo line search, each step
    exactly the minimum of the second-order model plus the L1 term; meant for a handful of coefficients. Lee, Sun and Saunders
    2014, algorithm 1.

    Edge cases: a column of zeros gets coefficient 0. Labels that a plane separates have no finite optimum without penalty;
    the coefficients then stop growing once the gradient is below `tolerance`, with predictions as near to 0 and 1. A fit that
    has not converged is returned with its `violation_B`, never silently.

    Raises ValueError for a negative penalty or weight, or what is not finite.
    """
    features, label, weight, penalty = (x.detach().double() for x in (features_BND, label_BN, weight_BN, penalty_B))
    _check(features=features, label=label, weight=weight, penalty=penalty)
    begin_D = torch.zeros(features.shape[2]) if start_D is None else start_D.detach()
    w = begin_D.to(features).repeat(features.shape[0], 1)
    scale_B = weight.sum(1).clamp_min(1e-300)
    violation_B = torch.full_like(scale_B, float("inf"))
    for _ in range(_MAX_STEPS):
        gradient_BD, hessian_BDD = _derivatives(features, label, weight, w)
        violation_B = _violation(w, gradient_BD, penalty) / scale_B
        if bool((violation_B <= tolerance).all()):
            break
        step_BD = _newton_step(w, gradient_BD, hessian_BDD, penalty)
        w, moved = _line_search(features, label, weight, penalty, w, step_BD, gradient_BD)
        if not moved:
            break
    gradient_BD, _ = _derivatives(features, label, weight, w)
    return LogisticFit(coefficients_BD=w, violation_B=_violation(w, gradient_BD, penalty) / scale_B)


def _check(**tensors: Tensor) -> None:
    for name, x in tensors.items():
        if not bool(x.isfinite().all()):
            raise ValueError(f"{name} holds a value that is not finite; leave out rows without one, and count them")
        if name in ("weight", "penalty") and bool((x < 0).any()):
            raise ValueError(f"{name} is {float(x.min()):g}; it must be 0 or more")


def _derivatives(features: Tensor, label: Tensor, weight: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient [B, D] and Hessian [B, D, D] of the smooth part."""
    p_BN = torch.matmul(features, w[..., None])[..., 0].sigmoid()
    gradient_BD = torch.matmul((weight * (p_BN - label))[:, None, :], features)[:, 0]
    curved = features * (weight * p_BN * (1 - p_BN))[..., None]
    return gradient_BD, torch.matmul(features.transpose(1, 2), curved)


def _violation(w: Tensor, gradient_BD: Tensor, penalty_B: Tensor) -> Tensor:
    """Largest distance of 0 from the subdifferential, over the coefficients of each fit."""
    lam = penalty_B[:, None]
    at_zero = (gradient_BD.abs() - lam).clamp_min(0)
    return torch.where(w == 0, at_zero, (gradient_BD + lam * w.sign()).abs()).amax(1)


def _newton_step(w: Tensor, gradient_BD: Tensor, hessian_BDD: Tensor, penalty_B: Tensor) -> Tensor:
    """The step to the v that minimizes slope * v + v * hessian * v / 2 + penalty * |v|, slope = gradient - hessian * w.

    Guess which coefficients are 0 and the signs of the others, solve the equations that then hold, and keep the solution if
    it agrees with the guess; otherwise improve the guess by coordinate descent.
    """
    diagonal_BD = hessian_BDD.diagonal(dim1=1, dim2=2)
    hessian_BDD = hessian_BDD + torch.diag_embed(_RIDGE * (diagonal_BD.amax(1, keepdim=True) + 1).expand_as(w))
    slope_BD = gradient_BD - torch.matmul(hessian_BDD, w[..., None])[..., 0]
    v = w
    for _ in range(_MAX_GUESSES):
        solved, agrees_B = _solve_guess(v, slope_BD, hessian_BDD, penalty_B)
        v = torch.where(agrees_B[:, None], solved, v)
        if bool(agrees_B.all()):
            break
        v = torch.where(agrees_B[:, None], v, _descend(v, slope_BD, hessian_BDD, penalty_B))
    return v - w


def _solve_guess(guess: Tensor, slope_BD: Tensor, hessian_BDD: Tensor, penalty_B: Tensor) -> tuple[Tensor, Tensor]:
    """The minimum with the zeros and signs of `guess`, and whether it is the minimum of all."""
    lam = penalty_B[:, None]
    free_BD = (guess != 0) | (lam == 0)
    sign_BD = guess.sign()
    both_BDD = free_BD[:, :, None] & free_BD[:, None, :]
    system = torch.where(both_BDD, hessian_BDD, torch.eye(guess.shape[1], dtype=guess.dtype, device=guess.device))
    target = torch.where(free_BD, -(slope_BD + lam * sign_BD), 0.0)
    v, failed_B = torch.linalg.solve_ex(system, target)
    left_BD = slope_BD + torch.matmul(hessian_BDD, v[..., None])[..., 0]
    agrees_BD = torch.where(free_BD, (lam == 0) | (v.sign() == sign_BD), left_BD.abs() <= lam)
    return v, agrees_BD.all(1) & (failed_B == 0) & v.isfinite().all(1)


def _descend(v: Tensor, slope_BD: Tensor, hessian_BDD: Tensor, penalty_B: Tensor) -> Tensor:
    """A few sweeps of coordinate descent from v."""
    v = v.clone()
    for _ in range(_SWEEPS):
        for d in range(v.shape[1]):
            curvature_B = hessian_BDD[:, d, d]
            target_B = v[:, d] - (slope_BD[:, d] + (hessian_BDD[:, d] * v).sum(1)) / curvature_B
            v[:, d] = target_B.sign() * (target_B.abs() - penalty_B / curvature_B).clamp_min(0)
    return v


def _objective(features: Tensor, label: Tensor, weight: Tensor, penalty: Tensor, w: Tensor) -> Tensor:
    z_BN = torch.matmul(features, w[..., None])[..., 0]
    return penalty * w.abs().sum(1) + (weight * (softplus(z_BN) - label * z_BN)).sum(1)


def _line_search(
    features: Tensor, label: Tensor, weight: Tensor, penalty: Tensor, w: Tensor, step: Tensor, gradient: Tensor
) -> tuple[Tensor, bool]:
    """The longest of 1, 1/2, 1/4, ... times the step with enough descent, per fit; whether any fit moved."""
    start_B = _objective(features, label, weight, penalty, w)
    promised_B = (gradient * step).sum(1) + penalty * ((w + step).abs().sum(1) - w.abs().sum(1))
    length_B = torch.ones_like(start_B)
    # Near the optimum the promised descent is below the rounding of the objective.
    slack_B = 1e-14 * (1 + start_B.abs())
    for _ in range(_MAX_HALVINGS):
        now_B = _objective(features, label, weight, penalty, w + length_B[:, None] * step)
        ok_B = now_B <= start_B + 0.25 * length_B * promised_B + slack_B
        if bool(ok_B.all()):
            break
        length_B = torch.where(ok_B, length_B, length_B / 2)
    else:
        length_B = torch.where(ok_B, length_B, 0.0)
    # w + 1 * (0 - w) is exactly 0, so coefficients at 0 stay told apart from small ones.
    moved = w + length_B[:, None] * step
    return moved, bool((moved != w).any())
