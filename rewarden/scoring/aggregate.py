"""One score from the scores of K members: which rule, and how the members are made comparable before it.

    seen_k = (score_k - center_k) / std_k        value = rule(seen_1, ..., seen_K)

The rules are `rewarden.maths`. Bradley-Terry scores float: a member may differ from another by any constant per prompt,
which the mean cannot tell but the minimum, the median and the spread can. Centering takes such a constant away, scaling gives
members of different spread the same weight. Zhang et al. 2024 (arXiv:2401.16635); Coste et al. 2023 (arXiv:2310.02743).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field, model_validator
from torch import Tensor

from rewarden.errors import ConfigError, ScoreError
from rewarden.maths import (
    Moments,
    lower_bound,
    mean,
    median,
    soft_worst_case,
    variance_penalty,
    worst_case,
)
from rewarden.maths.precision import at_least_float32
from rewarden.spec import Spec

Rule = Literal["mean", "median", "worst_case", "lower_bound", "variance_penalty", "soft_worst_case"]
Center = Literal["none", "group", "calibration", "reference"]

PENALTIES = ("lower_bound", "variance_penalty")
"""The rules that have a coefficient and a ddof."""


GROUP_NEEDED = (
    "center is group, which needs all answers to a prompt together, as best-of-n has them; use auto, calibration, reference "
    "or none"
)
"""What to say where a group is asked for and there is none."""


NO_SCALE = (
    "scale is true, and the reward model holds no moments of its scores to divide by; use scale: false, or train it with "
    "Rewarden"
)
"""What to say where there is nothing to scale by."""


class Aggregate(Spec):
    """How the scores of an ensemble's members become one score; with one member every rule gives its score."""

    rule: Rule = "mean"
    """mean, median, worst_case, lower_bound (mean - coef * std), variance_penalty (mean - coef * var), soft_worst_case."""
    coef: float | None = Field(None, ge=0)
    """Weight of the spread in lower_bound (no unit) and variance_penalty (1 / score); not comparable between them. 0 is 0."""
    ddof: int = Field(0, ge=0, le=1)
    """0: population spread of the members; 1: divided by K - 1, which needs two members."""
    temperature: float | None = Field(None, gt=0)
    """Of soft_worst_case, in the unit of the score: near 0 the worst case, large the mean."""
    center: Literal["auto", "none", "group", "calibration", "reference"] = "auto"
    """What is subtracted from each member: its mean over the answers to the prompt (group), over its calibration texts, its
    score of a reference answer, or nothing. auto: nothing for the mean, else group in best-of-n, else calibration if known."""
    scale: bool = False
    """Divide each member by the standard deviation of its calibration scores."""

    @model_validator(mode="after")
    def _numbers_belong_to_the_rule(self) -> "Aggregate":
        if self.rule in PENALTIES and self.coef is None:
            raise ConfigError(f"coef is missing: rule {self.rule} is the mean minus coef times the spread; write coef: 0.5")
        if self.rule not in PENALTIES and self.coef is not None:
            raise ConfigError(
                f"coef is {self.coef}, and rule {self.rule} has none; leave it out, or use {' or '.join(PENALTIES)}"
            )
        if self.rule not in PENALTIES and self.ddof:
            raise ConfigError(f"ddof is {self.ddof}, and rule {self.rule} has no spread; leave it out")
        if self.rule == "soft_worst_case" and self.temperature is None:
            raise ConfigError("temperature is missing: rule soft_worst_case needs one, in the unit of the score")
        if self.rule != "soft_worst_case" and self.temperature is not None:
            raise ConfigError(f"temperature is {self.temperature}, and rule {self.rule} has none; leave it out")
        return self

    def check_members(self, num_members: int) -> None:
        """Errors: ConfigError when the rule cannot be computed from so many members."""
        if self.ddof >= num_members:
            raise ConfigError(
                f"ddof is {self.ddof} with {num_members} member: a spread divided by {num_members - self.ddof}; use "
                "ddof: 0, or more members"
            )

    def centering(self, num_members: int, *, has_group: bool, has_calibration: bool) -> Center:
        """What `center` comes to where these are at hand; with one member "auto" is "none", so that the score stays itself.

        Errors: ConfigError for a calibration that is not there.
        """
        if self.center == "calibration" and not has_calibration:
            raise ConfigError(
                "center is calibration, and the reward model holds no moments of its scores; use center: none or reference, "
                "or train it with Rewarden"
            )
        if self.center != "auto":
            return self.center
        if self.rule == "mean" or num_members == 1:
            return "none"
        return "group" if has_group else "calibration" if has_calibration else "none"

    def of_members(self) -> Callable[[Tensor], Tensor]:
        """The rule as a function of scores [B, K]."""
        if self.coef is not None:
            penalized = lower_bound if self.rule == "lower_bound" else variance_penalty
            return partial(penalized, coef=self.coef, ddof=self.ddof)
        if self.temperature is not None:
            return partial(soft_worst_case, temperature=self.temperature)
        return {"mean": mean, "median": median, "worst_case": worst_case}[self.rule]

    def __str__(self) -> str:
        """In a few words, such as "lower_bound (coef 0.5, ddof 0)"."""
        given = [f"coef {self.coef:g}, ddof {self.ddof}"] if self.coef is not None else []
        given += [f"temperature {self.temperature:g}"] if self.temperature is not None else []
        given += [f"center {self.center}"] if self.center != "auto" else []
        given += ["scaled"] if self.scale else []
        return f"{self.rule} ({', '.join(given)})" if given else self.rule


def combine(
    score_BK: Float[Tensor, "B K"],
    aggregate: Aggregate,
    *,
    calibration: Sequence[Moments] | None = None,
    group_B: Int[Tensor, " B"] | None = None,
    reference_BK: Float[Tensor, "B K"] | None = None,
) -> Float[Tensor, " B"]:
    """The aggregate of each row of member scores: `aggregate.of_members()` of `comparable(...)`.

    group_B: which rows are answers to one prompt. calibration: the moments of each member's calibration scores.
    reference_BK: the members' scores of a reference answer to the row's prompt.

    A row that is NaN throughout has no score: it stays NaN, and out of the means of its group.
    Errors: ConfigError for a transform whose numbers are not given, a rule that K members do not allow, calibration of
    another number of members; ScoreError for a row in which only some members are finite.
    """
    seen_BK = comparable(score_BK, aggregate, calibration=calibration, group_B=group_B, reference_BK=reference_BK)
    return aggregate.of_members()(seen_BK) if len(seen_BK) else seen_BK.new_zeros(0)


def comparable(
    score_BK: Float[Tensor, "B K"],
    aggregate: Aggregate,
    *,
    calibration: Sequence[Moments] | None = None,
    group_B: Int[Tensor, " B"] | None = None,
    reference_BK: Float[Tensor, "B K"] | None = None,
) -> Float[Tensor, "B K"]:
    """The members' scores as the rule sees them, centered and scaled; arguments and errors as of `combine`."""
    num_members = score_BK.shape[1]
    aggregate.check_members(num_members)
    if calibration is not None and len(calibration) != num_members:
        raise ConfigError(
            f"calibration is of {len(calibration)} members, the scores of {num_members}; take that of this ensemble"
        )
    refuse_partial(score_BK)
    seen_BK = at_least_float32(score_BK)
    center = aggregate.centering(num_members, has_group=group_B is not None, has_calibration=calibration is not None)
    if center == "group":
        if group_B is None:
            raise ConfigError(GROUP_NEEDED)
        seen_BK = seen_BK - group_mean(seen_BK, group_B)
    elif center == "reference":
        if reference_BK is None:
            raise ConfigError("center is reference, and no scores of reference answers are given; use another center")
        refuse_partial(reference_BK, "the reference answer of row")
        seen_BK = seen_BK - at_least_float32(reference_BK)
    elif center == "calibration":
        assert calibration is not None
        seen_BK = seen_BK - seen_BK.new_tensor([moments.mean for moments in calibration])
    if aggregate.scale:
        if calibration is None:
            raise ConfigError(NO_SCALE)
        seen_BK = seen_BK / seen_BK.new_tensor([moments.std(ddof=0) for moments in calibration])
    return seen_BK


def group_mean(score_BK: Float[Tensor, "B K"], group_B: Int[Tensor, " B"]) -> Float[Tensor, "B K"]:
    """Each member's mean over the rows of the row's group, in float64; rows without a score do not count."""
    group_G, place_B = group_B.unique(return_inverse=True)
    there_BK = score_BK.isfinite()
    zero_GK = torch.zeros(len(group_G), score_BK.shape[1], dtype=torch.float64, device=score_BK.device)
    count_GK = zero_GK.index_add(0, place_B, there_BK.double())
    sum_GK = zero_GK.index_add(0, place_B, torch.where(there_BK, score_BK, 0.0).double())
    return (sum_GK / count_GK.clamp(min=1))[place_B].to(score_BK.dtype)


def refuse_partial(score_BK: Float[Tensor, "B K"], row: str = "row") -> None:
    """ScoreError for a row with an infinite score, or in which some members are NaN and others are not: which, and where."""
    bad_BK = ~score_BK.isfinite()
    whole_B1 = score_BK.isnan().all(dim=1, keepdim=True)
    for place, member in (bad_BK & ~whole_B1).nonzero().tolist():
        members = f"members 0 to {score_BK.shape[1] - 1}"
        raise ScoreError(
            f"{row} {place}: member {member} (of {members}) gave {float(score_BK[place, member])}; a row has a finite score "
            "of every member, or NaN of all where it has none"
        )
