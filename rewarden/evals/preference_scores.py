"""What scorers say of the pairs of a reward report: read with a check of every score."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rewarden.errors import DataError, ScoreError
from rewarden.evals.preference_pairs import PairSet
from rewarden.protocols import Scorer
from rewarden.scoring.answer import scores_of, where_of
from rewarden.types import Conversation, Score


@dataclass(frozen=True, slots=True, kw_only=True)
class PairScores:
    """One scorer's scores of B pairs; columns are (chosen, rejected). NaN where there is none."""

    value_B2: Float[Tensor, "B 2"]
    """What the scorer makes of its members."""
    members_B2K: Float[Tensor, "B 2 K"] | None
    """The members' own scores; None for a scorer with fewer than two."""
    failed: Mapping[str, int]
    """Pairs without a score by the status that says why, such as "too_long"."""

    @property
    def scored_B(self) -> Bool[Tensor, " B"]:
        """Pairs with a score on both sides."""
        return self.value_B2.isfinite().all(dim=1)

    def kept(self, keep_B: Bool[Tensor, " B"]) -> "PairScores":
        """The scores of the pairs that are marked."""
        members = None if self.members_B2K is None else self.members_B2K[keep_B]
        return PairScores(value_B2=self.value_B2[keep_B], members_B2K=members, failed=self.failed)


def score_pairs(name: str, scorer: Scorer, pairs: PairSet) -> PairScores:
    """Score both sides of every pair.

    Errors: ScoreError for a score that is "ok" and not finite, and where texts have different numbers of members.
    """
    texts = pairs.sides()
    scores = scores_of(scorer, texts, f"scorer {name!r}")
    for text, score in zip(texts, scores, strict=True):
        if score.status == "ok" and not all(math.isfinite(number) for number in (score.value, *score.members)):
            got = f"{score.value} (members {list(score.members)})" if score.members else f"{score.value}"
            raise ScoreError(
                f"scorer {name!r}: got {got} for {where_of(text)} of data.{pairs.name}; a score is a finite number: mend the "
                "scorer, or give the text another status than ok"
            )
    num_members = _members(name, texts, scores)
    nothing = [math.nan] * num_members
    value_B2 = torch.tensor([s.value if s.status == "ok" else math.nan for s in scores], dtype=torch.float64).view(-1, 2)
    members = torch.tensor([s.members if s.status == "ok" else nothing for s in scores], dtype=torch.float64)
    sides = zip(scores[::2], scores[1::2], strict=True)
    failed = Counter(next(s.status for s in pair if s.status != "ok") for pair in sides if any(s.status != "ok" for s in pair))
    return PairScores(
        value_B2=value_B2,
        members_B2K=members.view(-1, 2, num_members) if num_members > 1 else None,
        failed=dict(failed),
    )


def scored_by_all(pairs: PairSet, scores: Mapping[str, PairScores]) -> Bool[Tensor, " B"]:
    """The pairs that every scorer has a score for: all are measured on the same ones.

    Errors: DataError when there is none, naming who could not score how many, and why.
    """
    keep_B = torch.ones(len(pairs.rows), dtype=torch.bool)
    for found in scores.values():
        keep_B &= found.scored_B
    if not bool(keep_B.any()):
        raise DataError(
            f"data.{pairs.name}: none of its {len(pairs.rows)} pairs has a score of every scorer ({left_out(scores)}); leave "
            "such a scorer out, or take pairs that all of them can score"
        )
    return keep_B


def left_out(scores: Mapping[str, PairScores]) -> str:
    """Who could not score how many pairs, and why: "long: 12 too_long"; "" when all could."""
    return "; ".join(
        f"{name}: " + ", ".join(f"{count} {status}" for status, count in sorted(found.failed.items()))
        for name, found in scores.items()
        if found.failed
    )


def _members(name: str, texts: Sequence[Conversation], scores: Sequence[Score]) -> int:
    """How many members each score has; they must be the same ones throughout."""
    first: tuple[int, Conversation] | None = None
    for text, score in zip(texts, scores, strict=True):
        if score.status != "ok":
            continue
        first = first or (len(score.members), text)
        if len(score.members) != first[0]:
            raise ScoreError(
                f"scorer {name!r}: {len(score.members)} member(s) for {where_of(text)} and {first[0]} for "
                f"{where_of(first[1])}; a scorer has the same members for every text, or none"
            )
    return first[0] if first else 0
