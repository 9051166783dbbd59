"""What `rewarden score` says about its results: a table of rows, and the summary under it."""

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from rewarden.maths import wilson_interval, wins_with_ties


class Table:
    """Results as lines of columns, each wide enough for its rows before they are known."""

    def __init__(self, ids: Sequence[str]) -> None:
        self.width = max([2, *map(len, ids)])
        self.headed = False

    def line(self, row: Mapping[str, Any]) -> str:
        """One row, under a header if it is the first."""
        columns = [key for key in row if key != "id"]
        text = "  ".join([f"{row['id']:<{self.width}}", *(f"{_cell(row[key]):>{_width(key)}}" for key in columns)]).rstrip()
        if self.headed:
            return text
        self.headed = True
        return "  ".join([f"{'id':<{self.width}}", *(f"{key:>{_width(key)}}" for key in columns)]) + "\n" + text


def _width(key: str) -> int:
    return max(10, len(key))


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(f"{number:.4f}" for number in value)
    return "-" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


def summary_lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Statuses, mean and spread, and how the scores agree with the data's own preferences."""
    statuses = Counter(row["status"] for row in rows)
    yield f"{len(rows)} rows: " + ", ".join(f"{count} {status}" for status, count in sorted(statuses.items()))
    values = [row[key] for row in rows for key in ("score", "chosen_score", "rejected_score") if row.get(key) is not None]
    if values:
        mean = math.fsum(values) / len(values)
        spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
        yield f"scores: mean {mean:.4f}, standard deviation {spread:.4f}"
    decided = [row for row in rows if row.get("chosen_wins") is not None]
    if decided:
        yield from _pair_lines(decided)
    labeled = [row for row in rows if "label" in row and row["score"] is not None]
    if labeled:
        yield _label_line(labeled)


def _pair_lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    labeled = [row for row in rows if row.get("preference", 1.0) != 0.5]
    right = [row["chosen_wins"] if row.get("preference", 1.0) > 0.5 else 1.0 - row["chosen_wins"] for row in labeled]
    if right:
        low, high = wilson_interval(math.fsum(right), len(right), confidence=0.95)
        yield (
            f"{len(right)} pairs, accuracy {math.fsum(right) / len(right):.3f} (the preferred side scores higher, ties half; "
            f"95 % interval {low:.3f} to {high:.3f})"
        )
    if labeled and labeled[0].get("chosen_members"):
        sign_B1 = torch.tensor([[1.0 if row.get("preference", 1.0) > 0.5 else -1.0] for row in labeled])
        chosen_BK, rejected_BK = (
            torch.tensor([row[f"{side}_members"] for row in labeled], dtype=torch.float64) for side in ("chosen", "rejected")
        )
        shares_K = wins_with_ties(sign_B1 * (chosen_BK - rejected_BK)).mean(0)
        yield "accuracy by member: " + ", ".join(f"{share:.3f}" for share in shares_K.tolist())
    if len(labeled) < len(rows):
        yield f"{len(rows) - len(labeled)} pairs labeled as ties, left out of the accuracy"


def _label_line(rows: Sequence[Mapping[str, Any]]) -> str:
    good, bad = ([row["score"] for row in rows if row["label"] is wanted] for wanted in (True, False))
    means = ", ".join(
        f"{len(scores)} {name} with mean {math.fsum(scores) / len(scores):.4f}"
        for name, scores in (("good", good), ("bad", bad))
        if scores
    )
    if not good or not bad:
        return f"labels: {means}"
    # The share of (good, bad) pairs that the score puts in order, from the ranks of all scores: no pair is written out.
    ranked = math.fsum(_half_ranks(sorted(bad), score) for score in good)
    return (
        f"labels: {means}; a good one scores above a bad one in {ranked / (len(good) * len(bad)):.3f} of all pairs (ties half)"
    )


def _half_ranks(ascending: Sequence[float], score: float) -> float:
    return (bisect_left(ascending, score) + bisect_right(ascending, score)) / 2
