"""Mean, variance and whitening over the positions a mask keeps.

What lies off the mask never reaches a result or a gradient, not even a NaN: it is selected away, never multiplied by 0.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rewarden.maths.precision import Real, at_least_float32


def masked_mean(x: Float[Tensor, "*S"], mask: Bool[Tensor, "*S"]) -> Float[Tensor, ""]:
    """Mean of the kept positions: sum(x[mask]) / count(mask).

    Any shape. An empty mask gives 0 with zero gradient. Half precision is averaged in float32.
    """
    kept = torch.where(mask, at_least_float32(x), 0.0)
    return kept.sum() / mask.sum().clamp(min=1)


def masked_var(x: Float[Tensor, "*S"], mask: Bool[Tensor, "*S"], *, ddof: int) -> Float[Tensor, ""]:
    """Variance of the kept positions: sum((x[mask] - mean)^2) / (count(mask) - ddof).

    `ddof` 0 is the population variance, 1 the unbiased one. With `ddof` or fewer positions kept there is no spread to
    speak of: 0 with zero gradient.
    """
    centered = torch.where(mask, at_least_float32(x) - masked_mean(x, mask), 0.0)
    count = mask.sum()
    var = centered.square().sum() / (count - ddof).clamp(min=1)
    return torch.where(count > ddof, var, 0.0)


def whiten(x: Float[Tensor, "*S"], mask: Bool[Tensor, "*S"], *, eps: Real) -> Float[Tensor, "*S"]:
    """Shift and scale the kept positions to mean 0 and population standard deviation 1; 0 elsewhere.

        whiten(x) = (x - mean) / sqrt(var + eps),    mean and var (ddof 0) over the mask

    `eps` has the unit of the variance. One position, or equal ones, become 0. Zheng et al. 2023 (arXiv:2307.04964),
    advantage normalization; the reference sums without the mask, here what lies off it does not count.
    """
    # In float64: the rounding of a float32 mean, divided by sqrt(eps), would turn equal values into spread.
    # Selected before it is scaled: the gradient of `scale` is a sum over all positions.
    wide = x.double()
    centered = torch.where(mask, wide - masked_mean(wide, mask), 0.0)
    return (centered * torch.rsqrt(masked_var(wide, mask, ddof=0) + eps)).to(at_least_float32(x).dtype)
