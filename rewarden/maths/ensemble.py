"""One score from the scores of K ensemble members, along the last dimension.

All rules but the mean depend on each member's free offset per prompt (Bradley-Terry scores float): center the members
first where they may differ in it. With one member every rule returns its score. A NaN member gives NaN.
"""

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from rewarden.maths.precision import Real, at_least_float32


def _members(score_BK: Tensor, ddof: int = 0) -> Tensor:
    """The scores in at least float32, refused when there are too few members for `ddof`."""
    num_members = score_BK.shape[-1]
    if num_members == 0:
        raise ValueError(f"scores of shape {tuple(score_BK.shape)} have no members; the last dimension holds 1 or more")
    if not 0 <= ddof < num_members:
        raise ValueError(
            f"ddof is {ddof} with {num_members} ensemble member(s), so the spread would be divided by {num_members - ddof}; "
            f"use ddof from 0 to {num_members - 1}, or more members"
        )
    return at_least_float32(score_BK)


def mean(score_BK: Float[Tensor, "*B K"]) -> Float[Tensor, "*B"]:
    """Average of the members. The rule of the main results of Zhang et al. 2024 (arXiv:2401.16635)."""
    return _members(score_BK).mean(dim=-1)


def worst_case(score_BK: Float[Tensor, "*B K"]) -> Float[Tensor, "*B"]:
    """The lowest member's score. "WCO" of Coste et al. 2023 (arXiv:2310.02743)."""
    return _members(score_BK).amin(dim=-1)


def median(score_BK: Float[Tensor, "*B K"]) -> Float[Tensor, "*B"]:
    """The middle member's score; with an even number of members, halfway between the two middle ones."""
    score = _members(score_BK)
    # torch's median takes the lower of two middle values; that of the negated scores is the upper.
    lower, upper = score.median(dim=-1).values, -(-score).median(dim=-1).values
    return lower + (upper - lower) / 2


def lower_bound(score_BK: Float[Tensor, "*B K"], *, coef: Real, ddof: int) -> Float[Tensor, "*B"]:
    """Lower confidence bound: mean - coef * std over the members.

    `coef` has no unit and is not comparable with that of `variance_penalty`. `ddof` 0 is the population std (the paper does
    not say which). Members that agree give the mean, with zero gradient through the std. Zhang et al. 2024
    (arXiv:2401.16635), "LCB".

    Raises ValueError unless 0 <= ddof < K.
    """
    score = _members(score_BK, ddof)
    return score.mean(dim=-1) - coef * score.std(dim=-1, correction=ddof)


def variance_penalty(score_BK: Float[Tensor, "*B K"], *, coef: Real, ddof: int) -> Float[Tensor, "*B"]:
    """Mean minus the members' variance: mean - coef * var. `coef` is one over a score.

    `ddof` 0 is the paper's; its code uses 0 for best-of-n and 1 for PPO. "UWO" of Coste et al. 2023 (arXiv:2310.02743).

    Raises ValueError unless 0 <= ddof < K.
    """
    score = _members(score_BK, ddof)
    return score.mean(dim=-1) - coef * score.var(dim=-1, correction=ddof)


def soft_worst_case(score_BK: Float[Tensor, "*B K"], *, temperature: Real) -> Float[Tensor, "*B"]:
    """Between the mean and the worst case: the worst expected score over re-weightings of the members, at a KL price.

        -temperature * log(mean_k exp(-score_k / temperature))

    The mean as temperature grows (to second order mean - var / (2 * temperature)), the minimum as it goes to 0; in the
    unit of the score. The dual of KL-constrained distributionally robust averaging ("KL-DRO").

    Raises ValueError unless temperature is above 0.
    """
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; use a value above 0, or worst_case for its limit at 0")
    score = _members(score_BK)
    lowest = score.amin(dim=-1, keepdim=True)
    # Relative to the lowest member no exponential overflows; expm1 and log1p keep the digits at a high temperature.
    excess = (-(score - lowest) / temperature).expm1().mean(dim=-1).log1p()
    return lowest.squeeze(-1) - temperature * excess


def disagreement(score_BK: Float[Tensor, "*B K"]) -> Float[Tensor, "*B"]:
    """How far the members are apart: their population standard deviation, 0 for one member."""
    return _members(score_BK).std(dim=-1, correction=0)


def mixture_logit(difference_BK: Float[Tensor, "*B K"]) -> Float[Tensor, "*B"]:
    """Log-odds of the members' mean probability that the first of two answers is better.

        logit(mean_k sigmoid(difference_k))

    `sigmoid(mean(difference_BK))` is another probability: the mixture is nearer to one half where members disagree. Computed
    from log-probabilities, so that sure members do not round to 0 or 1. A linear opinion pool (Stone 1961).
    """
    difference = _members(difference_BK)
    sides = [logsigmoid(sign * difference).logsumexp(dim=-1) for sign in (1, -1)]
    return sides[0] - sides[1]
