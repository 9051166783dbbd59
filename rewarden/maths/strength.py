"""How strongly several reward models prefer the chosen side of a pair, and what a label becomes by it.

Wang et al. 2024, "Secrets of RLHF in Large Language Models Part II: Reward Modeling" (arXiv:2401.06080).
"""

from itertools import pairwise

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rewarden.maths.precision import Real, at_least_float32, finite_values


def preference_strength(
    score_chosen_BM: Float[Tensor, "B M"], score_rejected_BM: Float[Tensor, "B M"]
) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
    """(mu, sigma) per pair, over the M models that vote.

        d_m = score_chosen_m - score_rejected_m;    mu = mean_m d_m;    sigma = sqrt(mean_m (d_m - mu)^2)

    Differences, in which each model's free offset per prompt cancels. mu below 0 says that the models would turn the label
    round. The paper does not say which standard deviation; this is the population's.

    Raises ValueError when nobody votes.
    """
    difference_BM = at_least_float32(score_chosen_BM) - at_least_float32(score_rejected_BM)
    if difference_BM.shape[1] == 0:
        raise ValueError(f"scores of shape {tuple(difference_BM.shape)} have no models; a vote needs 1 or more")
    return difference_BM.mean(dim=1), difference_BM.std(dim=1, correction=0)


def to_flip(mu_B: Float[Tensor, " B"], *, share: Real) -> Bool[Tensor, " B"]:
    """Which labels to turn round: those of the lowest `share` of pairs by mu, as far as their mu is below 0.

    Of floor(share * B) pairs the earlier one goes first where mu is equal.

    Raises ValueError for a share outside 0 to 1, and for a mu that is not finite.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share is {share}; it is the part of all pairs that may be turned round: use 0 to 1")
    mu = finite_values(mu_B, name="mu", at_least=0)
    lowest = mu.sort(stable=True).indices[: int(share * len(mu) + 1e-9)]
    chosen_B = torch.zeros(len(mu), dtype=torch.bool)
    chosen_B[lowest] = True
    return (chosen_B & (mu < 0)).to(mu_B.device)


def strata(mu_B: Float[Tensor, " B"], *, groups: int) -> list[Tensor]:
    """The places of pairs sorted by mu, lowest first, in `groups` parts of equal size up to one; equal mu in their order.

    Raises ValueError below 1 group, and for a mu that is not finite.
    """
    if groups < 1:
        raise ValueError(f"groups is {groups}; use 1 or more")
    order = finite_values(mu_B, name="mu", at_least=0).sort(stable=True).indices
    edges = [part * len(order) // groups for part in range(groups + 1)]
    return [order[start:stop] for start, stop in pairwise(edges)]
