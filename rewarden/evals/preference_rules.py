"""Every rule of a scorer on the pairs of one data set: each member, a member at random, the aggregates, the scorer's own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rewarden.errors import ConfigError, ScoreError
from rewarden.evals.preference_measure import LONGER, Estimate, Measured, Row, Ruler
from rewarden.evals.preference_members import Members, measure_members
from rewarden.evals.preference_scores import PairScores
from rewarden.maths import Moments, mixture_logit, newcombe_interval
from rewarden.protocols import Scorer
from rewarden.scoring import RewardModelScorer
from rewarden.scoring.aggregate import Aggregate, combine

MIXTURE = "mean probability"
"""The rule whose probability is the mean of the members' probabilities; it has no score of a single text."""

SAME = 1e-5
"""Scores nearer than this, relative to 1 + their size, come from the same rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerFacts:
    """What is known of a scorer apart from its scores."""

    name: str
    num_members: int
    aggregate: str | None = None
    """How it makes one score of its members, in words; None for a scorer that is no reward model."""
    calibration: tuple[Moments, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Accuracy of the first scorer minus that of the second on the same pairs, both by their own rule."""

    first: str
    second: str
    accuracy: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReport:
    """All rows of one data set; the longer-answer rule first."""

    rows: tuple[Row, ...]
    members: tuple[Members, ...]
    comparisons: tuple[Comparison, ...]


def facts_of(name: str, scorer: Scorer, scores: Sequence[PairScores]) -> ScorerFacts:
    """Members, aggregate and calibration of a scorer, from what it gave for each data set.

    Errors: ScoreError when it has other members for one data set than for another.
    """
    sizes = {1 if s.members_B2K is None else s.members_B2K.shape[2] for s in scores if bool(s.scored_B.any())}
    if len(sizes) > 1:
        raise ScoreError(
            f"scorer {name!r}: {min(sizes)} member(s) for one data set and {max(sizes)} for another; "
            "a scorer has the same members for every text, or none"
        )
    num_members = max(sizes, default=1)
    if not isinstance(scorer, RewardModelScorer):
        return ScorerFacts(name=name, num_members=num_members)
    return ScorerFacts(
        name=name, num_members=num_members, aggregate=str(scorer.aggregate), calibration=scorer.members.calibration
    )


def check_aggregates(facts: ScorerFacts, aggregates: Sequence[Aggregate]) -> list[str]:
    """Try the rules on this scorer's number of members; notes for those that see members with their free offsets.

    Errors: ConfigError naming the scorer and the rule that it cannot be judged by.
    """
    notes = []
    for aggregate in aggregates if facts.num_members > 1 else ():
        try:
            aggregated(torch.zeros(1, 2, facts.num_members), aggregate, facts.calibration)
        except ConfigError as error:
            raise ConfigError(f"aggregates: {aggregate} of scorer {facts.name!r}: {error}") from error
        center = aggregate.centering(facts.num_members, has_group=False, has_calibration=facts.calibration is not None)
        if aggregate.center == "auto" and aggregate.rule != "mean" and center == "none":
            notes.append(
                f"{facts.name}: its {facts.num_members} members are not centered before {aggregate}, since the scorer holds no "
                "calibration scores; where members differ by a constant, that constant decides"
            )
    return notes


def aggregated(
    members_B2K: Float[Tensor, "B 2 K"], aggregate: Aggregate, calibration: Sequence[Moments] | None
) -> Float[Tensor, "B 2"]:
    """The aggregate of both sides of every pair; a group, where one is asked for, is the two sides."""
    score_NK = members_B2K.flatten(0, 1)
    group_N = torch.arange(len(members_B2K)).repeat_interleave(2) if aggregate.center == "group" else None
    return combine(score_NK, aggregate, calibration=calibration, group_B=group_N).view(-1, 2)


def report_data(
    scores: Mapping[str, PairScores], facts: Mapping[str, ScorerFacts], aggregates: Sequence[Aggregate], ruler: Ruler
) -> DataReport:
    """Every scorer by every rule, their members, and the scorers against one another."""
    measured = {name: measure_rules(facts[name], found, aggregates, ruler) for name, found in scores.items()}
    longer = ruler.longer_answer()
    own = {name: next(item for item in items if item.row.own) for name, items in measured.items()}
    comparisons = []
    for first, second in combinations(own, 2):
        accuracy = ruler.paired(own[first].right_D, own[second].right_D)
        if accuracy is not None:
            comparisons.append(Comparison(first=first, second=second, accuracy=accuracy))
    return DataReport(
        rows=(longer.row, *(item.row for items in measured.values() for item in items)),
        members=tuple(
            measure_members(name, found.members_B2K[:, 0] - found.members_B2K[:, 1], ruler)
            for name, found in scores.items()
            if found.members_B2K is not None
        ),
        comparisons=tuple(comparisons),
    )


def measure_rules(facts: ScorerFacts, scores: PairScores, aggregates: Sequence[Aggregate], ruler: Ruler) -> list[Measured]:
    """The rows of one scorer. Exactly one is marked as its own rule: an equal aggregate, or a row of its own at the end."""
    name, value_B2, members_B2K = facts.name, scores.value_B2, scores.members_B2K
    own_B = value_B2[:, 0] - value_B2[:, 1]
    if members_B2K is None:
        return [ruler.measure(name, "score", own_B, value_B2, own=True)]
    difference_BK = members_B2K[:, 0] - members_B2K[:, 1]
    members = [ruler.measure(name, f"member {k}", difference_BK[:, k], members_B2K[:, :, k]) for k in range(facts.num_members)]
    average = ruler.one_member(name, members)
    rows = [*members, average]
    found = False
    for aggregate in aggregates:
        seen_B2 = aggregated(members_B2K, aggregate, facts.calibration)
        seen_B = seen_B2[:, 0] - seen_B2[:, 1]
        own = not found and torch.allclose(seen_B, own_B, rtol=SAME, atol=SAME)
        found = found or own
        rows.append(ruler.measure(name, str(aggregate), seen_B, seen_B2, members_right_D=average.right_D, own=own))
    rows.append(ruler.measure(name, MIXTURE, mixture_logit(difference_BK), members_right_D=average.right_D))
    if not found:
        rule = f"own: {facts.aggregate}" if facts.aggregate else "own"
        rows.append(ruler.measure(name, rule, own_B, value_B2, members_right_D=average.right_D, own=True))
    return rows


def with_drops(inside: DataReport, outside: DataReport, *, confidence: float) -> DataReport:
    """The outside report with each row's loss of accuracy from the data set that the scorers were trained on."""
    before = {(row.scorer, row.rule): row for row in inside.rows}
    rows = tuple(replace(row, drop=_drop(before.get((row.scorer, row.rule)), row, confidence)) for row in outside.rows)
    return replace(outside, rows=rows)


def _drop(inside: Row | None, outside: Row, confidence: float) -> Estimate | None:
    if inside is None or inside.accuracy.value is None or outside.accuracy.value is None:
        return None
    a, b = inside.accuracy, outside.accuracy
    low, high = newcombe_interval((a.num_right, b.num_right), (a.num, b.num), confidence=confidence)
    return Estimate(num=min(a.num, b.num), value=inside.accuracy.value - outside.accuracy.value, low=low, high=high)


def own_rows(report: DataReport) -> list[Row]:
    """Each scorer by its own rule, without the longer-answer rule."""
    return [row for row in report.rows if row.own and row.scorer != LONGER]


def plain(value: Any) -> Any:
    """Dataclasses, tuples and numbers as JSON takes them."""
    if hasattr(value, "__dataclass_fields__"):
        names = [*value.__dataclass_fields__, *(("accuracy", "confidence") if hasattr(value, "sum_confidence") else ())]
        return {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value
