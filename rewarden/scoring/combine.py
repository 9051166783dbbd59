"""A weighted sum of rewards.

    value = sum over scorers that apply of weight * score

A scorer that does not apply to a row is left out of that row, without rescaling the others (TRL sums with NaN as 0 in the same
way); a row to which none applies is "not_applicable" itself. Any other status of one scorer, such as "too_long", becomes
the status of the sum: leaving that part out would change what the value means. A scorer of weight 0 only watches: it is logged
and has no say in value or status.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from pydantic import Field, model_validator

from rewarden.protocols import Scorer
from rewarden.scoring.answer import ok, scores_of
from rewarden.spec import Spec
from rewarden.types import Conversation, Score


class Weighted(Spec):
    """One scorer of a sum."""

    scorer: dict[str, Any]
    """Any reward: {kind: ..., ...}."""
    weight: float = Field(1.0, allow_inf_nan=False)
    """Factor on its score; may be negative, and 0 to log it only."""
    name: str | None = Field(None, min_length=1)
    """Name in logs; the kind (with a number when it occurs twice) when not given."""


class SumReward(Spec):
    """A weighted sum of rewards; each one is logged raw and weighted."""

    scorers: tuple[Weighted, ...] = Field(min_length=1)
    """The rewards and their weights."""

    @model_validator(mode="after")
    def _parts_are_rewards(self) -> "SumReward":
        # The table of rewards holds this class, so it can be imported only once this class exists.
        from rewarden.scoring import parse_scorer

        for index, part in enumerate(self.scorers):
            parse_scorer(part.scorer, f"scorers.{index}.scorer")
        twice = [name for name, count in Counter(self.names()).items() if count > 1]
        if not any(part.weight for part in self.scorers):
            raise ValueError("every weight is 0; give at least one scorer a weight")
        if twice:
            raise ValueError(f"two scorers are named {twice[0]!r}; give each its own name")
        return self

    def names(self) -> list[str]:
        """The name of each scorer in the logs."""
        kinds = [_kind_name(part.scorer) for part in self.scorers]
        return [
            part.name or (kind if kinds.count(kind) == 1 else f"{kind}_{kinds[:index].count(kind) + 1}")
            for index, (part, kind) in enumerate(zip(self.scorers, kinds, strict=True))
        ]

    def build(self) -> "SumScorer":
        """Build every part."""
        from rewarden.scoring import build_scorer

        return SumScorer(
            [
                Part(name, part.weight, build_scorer(part.scorer, f"scorers.{index}.scorer"))
                for index, (name, part) in enumerate(zip(self.names(), self.scorers, strict=True))
            ]
        )


class Part(NamedTuple):
    """A named, weighted scorer."""

    name: str
    weight: float
    scorer: Scorer


class SumScorer:
    """The weighted sum of scorers.

    `parts["NAME"]` is a scorer's own value, `parts["NAME/weighted"]` its share of the sum, `parts["NAME/PART"]` its parts. With
    one ensemble among the scorers the members of the sum are the sums with each of its members as it scores; their mean is the
    value where the ensemble's own aggregate is the mean.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)
        self.notes = tuple(f"{part.name}: {note}" for part in self.parts for note in getattr(part.scorer, "notes", ()))

    def score(self, conversations: Sequence[Conversation]) -> list[Score]:
        """One score per conversation; every scorer sees all of them at once."""
        columns = []
        for part in self.parts:
            columns.append(scores_of(part.scorer, conversations, f"scorer {part.name!r}"))
        return [self._sum(row, [column[i] for column in columns]) for i, row in enumerate(conversations)]

    def _sum(self, row: Conversation, scores: Sequence[Score]) -> Score:
        named = list(zip(self.parts, scores, strict=True))
        parts = {name: number for part, score in named for name, number in _explained(part, score).items()}
        deciding = [(part.weight, score) for part, score in named if part.weight]
        failed = [score.status for _, score in deciding if score.status not in {"ok", "not_applicable"}]
        applicable = [(weight, score) for weight, score in deciding if score.status == "ok"]
        if failed or not applicable:
            return Score(value=math.nan, parts=parts, status=failed[0] if failed else "not_applicable")
        value = math.fsum(weight * score.value for weight, score in applicable)
        return ok(value, row, "sum", members=_members(applicable), parts=parts)


def _explained(part: Part, score: Score) -> dict[str, float]:
    inner = {f"{part.name}/{name}": number for name, number in score.parts.items()}
    if score.status != "ok":
        return inner
    return inner | {part.name: score.value, f"{part.name}/weighted": part.weight * score.value}


def _members(applicable: Sequence[tuple[float, Score]]) -> tuple[float, ...]:
    """Members of the sum; none when ensembles of different sizes meet, since their members do not pair up."""
    sizes = {len(score.members) for _, score in applicable if len(score.members) > 1}
    if len(sizes) != 1:
        return ()
    columns = [
        [weight * member for member in (score.members if len(score.members) > 1 else [score.value] * max(sizes))]
        for weight, score in applicable
    ]
    return tuple(math.fsum(column) for column in zip(*columns, strict=True))


def _kind_name(raw: dict[str, Any]) -> str:
    """ "function" for a kind of the table, "MyReward" for "my_file.py:MyReward"."""
    return str(raw.get("kind")).rsplit(":", 1)[-1]
