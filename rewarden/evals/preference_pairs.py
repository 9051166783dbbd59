"""The pairs of a reward report: what their labels and lengths are, and the groups they are split into."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rewarden.data.records import Loaded
from rewarden.errors import shortened
from rewarden.maths import quantile_bins, relative_gap
from rewarden.types import Comparison, Conversation

MOST_VALUES = 20
"""Groups of one column; the rarer values share a last one."""

LENGTH_EDGES = (-0.5, -0.1, 0.1, 0.5)
LENGTH_NAMES = ("-100 to -50 %", "-50 to -10 %", "-10 to 10 %", "10 to 50 %", "50 to 100 %")
"""By how much the preferred answer is longer than the other, as a share of the longer one."""

GOLD = ("gold_chosen", "gold_rejected")
"""Columns with the true value of both sides, as the built-in worlds write them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSet:
    """The pairs of one data set, and what became of the rows that were read."""

    name: str
    rows: tuple[Comparison, ...]
    read: str

    def sides(self) -> list[Conversation]:
        """Both texts of each pair, to be scored: chosen, rejected, chosen, ..."""
        return [
            Conversation(id=row.id, messages=(*row.prompt, *side), meta=row.meta)
            for row in self.rows
            for side in (row.chosen, row.rejected)
        ]

    def kept(self, keep_B: Bool[Tensor, " B"]) -> "PairSet":
        """The pairs that are marked."""
        rows = tuple(row for row, keep in zip(self.rows, keep_B.tolist(), strict=True) if keep)
        return PairSet(name=self.name, rows=rows, read=self.read)


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """What is known of B pairs; columns are (chosen, rejected)."""

    preference_B: Float[Tensor, " B"]
    """Probability that the chosen side is better."""
    sign_B: Float[Tensor, " B"]
    """1 where the chosen side is the better one, -1 where the other is, 0 for a tie."""
    length_B2: Float[Tensor, "B 2"]
    """Of the last answer, in characters: the same for every scorer, whatever its tokenizer."""
    num_prompts: int

    @property
    def decided_B(self) -> Bool[Tensor, " B"]:
        """Pairs whose label is no tie: those that one can be right or wrong about."""
        return self.sign_B != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Pairs by group; -1 is in none."""

    name: str
    groups: tuple[str, ...]
    group_B: Int[Tensor, " B"]


def pair_set(name: str, loaded: Loaded[Comparison]) -> PairSet:
    """The pairs that were read under the name of their data set."""
    return PairSet(name=name, rows=loaded.rows, read=loaded.summary())


def labels_of(pairs: PairSet) -> Labels:
    """Labels and lengths of pairs."""
    preference_B = torch.tensor([row.preference for row in pairs.rows], dtype=torch.float64)
    lengths = [[len(side[-1].text) for side in (row.chosen, row.rejected)] for row in pairs.rows]
    return Labels(
        preference_B=preference_B,
        sign_B=(preference_B - 0.5).sign(),
        length_B2=torch.tensor(lengths, dtype=torch.float64).view(-1, 2),
        num_prompts=len({row.prompt for row in pairs.rows}),
    )


def splits_of(pairs: PairSet, labels: Labels, *, by: Sequence[str], bins: int) -> tuple[Split, ...]:
    """The groups that say something about these pairs: by the gap in gold, the margin, the gap in length, and by column.

    Gold and margin are cut at quantiles; a split for which the data have no numbers is left out.
    """
    gold = [_gold_gap(row) for row in pairs.rows]
    found = [
        _by_quantile("gold gap", gold, bins=bins),
        _by_quantile("margin", [_number(row.margin) for row in pairs.rows], bins=bins),
        _by_length(labels),
        *(_by_column(column, [row.meta.get(column) for row in pairs.rows]) for column in by),
    ]
    return tuple(split for split in found if split is not None)


def quantile_names(ends: Sequence[float]) -> tuple[str, ...]:
    """The groups of `quantile_bins` in words, by their upper ends: three digits, or as many as it takes to tell them apart."""
    shown = [f"{end:.3g}" for end in ends]
    for digits in range(4, 18):
        if len(set(shown)) == len(shown):
            break
        shown = [f"{end:.{digits}g}" for end in ends]
    return tuple(f"to {end}" if not place else f"{shown[place - 1]} to {end}" for place, end in enumerate(shown))


def _by_length(labels: Labels) -> Split:
    swapped_B2 = torch.where(labels.sign_B.unsqueeze(1) < 0, labels.length_B2.flip(1), labels.length_B2)
    gap_B = relative_gap(swapped_B2[:, 0], swapped_B2[:, 1])
    group_B = torch.bucketize(gap_B, torch.tensor(LENGTH_EDGES, dtype=torch.float64))
    return Split(name="preferred answer longer by", groups=LENGTH_NAMES, group_B=group_B)


def _by_quantile(name: str, values: Sequence[float | None], *, bins: int) -> Split | None:
    """Groups of the pairs that have a value; None when no pair has one, or all have the same."""
    known = torch.tensor([value is not None for value in values], dtype=torch.bool)
    if not bool(known.any()):
        return None
    values_N = torch.tensor([value for value in values if value is not None], dtype=torch.float64)
    if bool((values_N == values_N[0]).all()):
        return None
    bin_N, ends = quantile_bins(values_N, bins=bins)
    group_B = torch.full((len(values),), -1)
    group_B[known] = bin_N
    return Split(name=name, groups=quantile_names(ends), group_B=group_B)


def _by_column(column: str, values: Sequence[Any]) -> Split | None:
    """Groups of equal values, the most frequent ones; None for a column that no row has."""
    if all(value is None for value in values):
        return None
    texts = ["(none)" if value is None else shortened(str(value), 40) for value in values]
    common = Counter(texts).most_common()
    shown = [text for text, _ in (common if len(common) <= MOST_VALUES else common[: MOST_VALUES - 1])]
    shown.sort(key=lambda text: (not text.isdecimal(), int(text) if text.isdecimal() else 0, text))
    groups = (*shown, *(["(others)"] if len(shown) < len(common) else []))
    place = {text: number for number, text in enumerate(shown)}
    group_B = torch.tensor([place.get(text, len(shown)) for text in texts])
    return Split(name=column, groups=groups, group_B=group_B)


def _gold_gap(row: Comparison) -> float | None:
    sides = [_number(row.meta.get(column)) for column in GOLD]
    return abs(sides[0] - sides[1]) if sides[0] is not None and sides[1] is not None else None


def _number(value: Any) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < float("inf") else None
