"""From raw scores to the reward a policy sees: running moments, normalisation, clipping."""

from jaxtyping import Float
from torch import Tensor, zeros_like

from rewarden.maths import Moments
from rewarden.runtime.ranks import Ranks


def process_scores(
    raw_B: Float[Tensor, " B"], moments: Moments, *, normalize: bool, clip: float | None
) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
    """(processed scores, 1.0 where clipped): subtract the running mean, divide by the running std, cut to +- clip.

    `moments` already hold this batch. The std has ddof 1; where there is no spread it divides by 1 (the reference code
    divides by 1e-12 or infinity there). Zheng et al. 2023 (arXiv:2307.04964), eq. 18 and section 5.3.
    """
    score_B = raw_B
    if normalize:
        score_B = (raw_B - moments.mean) / moments.std(ddof=1)
    if clip is None:
        return score_B, zeros_like(score_B)
    return score_B.clamp(-clip, clip), (score_B.abs() > clip).float()


def merged(moments: Moments, ranks: Ranks) -> Moments:
    """The moments of all ranks together."""
    total = Moments()
    for part in ranks.gather_objects(moments):
        total = total.merge(part)
    return total
