"""The clipped value objective of PPO, and how much of the returns a critic explains."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rewarden.maths.masking import masked_mean, masked_var
from rewarden.maths.precision import Real, at_least_float32


def _squares(value: Tensor, value_old: Tensor, target: Tensor, clip: Real | None) -> tuple[Tensor, Tensor]:
    """The squared error without the clip and with the clipped value."""
    value, value_old = at_least_float32(value), at_least_float32(value_old)
    near = value if clip is None else value_old + (value - value_old).clamp(-clip, clip)
    return (value - target).square(), (near - target).square()


def clipped_value_loss(
    value: Float[Tensor, "*S"], value_old: Float[Tensor, "*S"], target: Float[Tensor, "*S"], *, clip: Real | None
) -> Float[Tensor, "*S"]:
    """Half the squared error of the critic, the worse of the plain and the clipped one.

        near = value_old + clip(value - value_old, -clip, clip)
        loss = 0.5 * max((value - target)^2, (near - target)^2)

    None means no clip: 0.5 * (value - target)^2. `clip` has the unit of the returns. Any shape, unreduced. Zheng et al.
    2023 (arXiv:2307.04964), value-function loss clipping.
    """
    plain, clipped = _squares(value, value_old, target, clip)
    return 0.5 * torch.maximum(plain, clipped)


def is_value_clipped(
    value: Float[Tensor, "*S"], value_old: Float[Tensor, "*S"], target: Float[Tensor, "*S"], *, clip: Real | None
) -> Bool[Tensor, "*S"]:
    """Where `clipped_value_loss` took the clipped term because it is strictly larger; never inside the band of the clip."""
    plain, clipped = _squares(value, value_old, target, clip)
    # Inside the band both terms are equal but for rounding: value_old + (value - value_old) is not value to the last bit.
    outside = torch.zeros_like(plain, dtype=torch.bool) if clip is None else (value - value_old).abs() > clip
    return outside & (clipped > plain)


def explained_variance(
    value_BT: Float[Tensor, "B T"], return_BT: Float[Tensor, "B T"], mask_BT: Bool[Tensor, "B T"]
) -> Float[Tensor, ""]:
    """Share of the variance of the returns that the critic predicts: 1 - Var(return - value) / Var(return), over the mask.

    1 is a perfect critic up to a constant, 0 no better than a constant, negative worse. Population variances in float64.
    An empty mask, or returns that differ by less than a millionth of their size, leave nothing to explain: 0.
    """
    value, target = value_BT.double(), return_BT.double()
    spread = masked_var(target, mask_BT, ddof=0)
    flat = spread <= 1e-12 * masked_mean(target.square(), mask_BT)
    share = 1 - masked_var(target - value, mask_BT, ddof=0) / torch.where(flat, 1.0, spread)
    return torch.where(flat, 0.0, share)
