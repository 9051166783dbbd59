"""From raw scores to the reward a policy sees: running moments, normalisation, clipping."""

from jaxtyping import Float
from torch import Tensor, zeros_like

from rewarden.maths import Moments
from rewarden.runtime.ranks import Ranks

STD_FLOOR = 1e-6
"""A spread of scores or advantages below this never divides."""


def process_scores(
    raw_B: Float[Tensor, " B"], moments: Moments, *, normalize: bool, clip: float | None
) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
    """(processed scores, 1.0 where clipped): subtract the running mean, divide by the running std, cut to +- clip.

    `moments` already hold this batch. The std has ddof 1; below STD_FLOOR or of fewer than two scores it divides by 1
    (the reference code divides by 1e-12 or infinity there). Zheng et al. 2023 (arXiv:2307.04964), eq. 18 and section 5.3.
    """
    score_B = raw_B
    if normalize:
        std = moments.std(ddof=1) if moments.count >= 2 else 0.0
        score_B = (raw_B - moments.mean) / (std if std > STD_FLOOR else 1.0)
    if clip is None:
        return score_B, zeros_like(score_B)
    return score_B.clamp(-clip, clip), (score_B.abs() > clip).float()


def merged(moments: Moments, ranks: Ranks) -> Moments:
    """The moments of all ranks together."""
    total = Moments()
    for part in ranks.gather_objects(moments):
        total = total.merge(part)
    return total
