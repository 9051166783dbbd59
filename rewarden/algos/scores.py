"""From raw scores to the reward a policy sees: running or fixed moments, normalisation, clipping."""

from collections.abc import Mapping
from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor, zeros_like

from rewarden.errors import ConfigError
from rewarden.maths import Moments
from rewarden.models.load import read_card
from rewarden.runtime.ranks import Ranks
from rewarden.scoring.aggregate import Aggregate
from rewarden.scoring.registry import resolve

RewardNorm = Literal["none", "fixed", "running"]


def calibration(reward: Mapping[str, Any]) -> tuple[float, float]:
    """(mean, std) of a reward model's scores on its held-out texts, as its own evaluation left them in its card.

    They are of the members' mean as it is, so they fit no other aggregate.
    Errors: ConfigError for another kind of reward or aggregate, or a reward model that was not evaluated.
    """
    reward = resolve(reward)
    learned = reward.get("kind") == "reward_model"
    found = read_card(str(reward["path"])).get("evaluation", {}) if learned else {}
    aggregate = Aggregate.model_validate(reward.get("aggregate", {})) if learned else Aggregate()
    if aggregate.rule != "mean" or aggregate.center not in ("auto", "none") or aggregate.scale:
        raise ConfigError(
            f"reward_norm is fixed, and the mean and std in {reward['path']!r} are of the mean of its members, not of their "
            f"{aggregate}; set reward_moments: [mean, std], or use reward_norm: running"
        )
    if not found.get("eval/score_std"):
        raise ConfigError(
            f"reward_norm is fixed, and {reward.get('path', reward.get('kind'))!r} brings no mean and std of its scores; set "
            "reward_moments: [mean, std], or train the reward model with eval_data"
        )
    return float(found["eval/score_mean"]), float(found["eval/score_std"])


def fixed_moments(mean: float, std: float) -> Moments:
    """Moments whose mean and std (ddof 1) are these."""
    return Moments(count=2, mean=mean, m2=std**2)


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
