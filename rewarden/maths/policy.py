"""The clipped policy objective of PPO, per token and unreduced."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rewarden.maths.precision import Real, at_least_float32

LARGEST_LOG_RATIO = 80.0
"""Log-ratios above this count as this: e^80 is beyond any clip and still finite in float32."""


def _terms(
    logp: Tensor, logp_old: Tensor, advantage: Tensor, clip_low: Real | None, clip_high: Real | None
) -> tuple[Tensor, Tensor]:
    """The loss without the clip and the loss with the clipped ratio."""
    # exp overflows near 88 in float32, and infinity times a zero gradient would be NaN: one wild token must not do that.
    ratio = (at_least_float32(logp) - at_least_float32(logp_old)).clamp(max=LARGEST_LOG_RATIO).exp()
    clipped = ratio
    if clip_low is not None:
        clipped = clipped.clamp(min=1 - clip_low)
    if clip_high is not None:
        clipped = clipped.clamp(max=1 + clip_high)
    return -advantage * ratio, -advantage * clipped


def clipped_surrogate(
    logp: Float[Tensor, "*S"],
    logp_old: Float[Tensor, "*S"],
    advantage: Float[Tensor, "*S"],
    *,
    clip_low: Real | None,
    clip_high: Real | None,
) -> Float[Tensor, "*S"]:
    """PPO's surrogate as a loss per token: the worse of the plain and the clipped one.

        ratio = exp(logp - logp_old)
        loss  = max(-advantage * ratio, -advantage * clip(ratio, 1 - clip_low, 1 + clip_high))

    None leaves that side unclipped. At ratio 1 the loss is -advantage and its gradient that of -advantage * logp. Any
    shape, unreduced. Schulman et al. 2017 (arXiv:1707.06347), eq. 7.
    """
    plain, clipped = _terms(logp, logp_old, advantage, clip_low, clip_high)
    return torch.maximum(plain, clipped)


def is_clipped(
    logp: Float[Tensor, "*S"],
    logp_old: Float[Tensor, "*S"],
    advantage: Float[Tensor, "*S"],
    *,
    clip_low: Real | None,
    clip_high: Real | None,
) -> Bool[Tensor, "*S"]:
    """Where `clipped_surrogate` took the clipped term because it is strictly larger: these tokens have no gradient."""
    plain, clipped = _terms(logp, logp_old, advantage, clip_low, clip_high)
    return clipped > plain
