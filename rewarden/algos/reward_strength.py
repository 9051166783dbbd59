"""What preference strength does to the pairs a reward model learns: labels turned round, made soft, or given a margin.

mu is how much more the members of a vote like the chosen side (`rewarden.collect.vote`). In this order:

    flip      the lowest `flip_share` of pairs by mu, where mu < 0: the sides change places, and mu its sign
    soft      preference = sigmoid(mu)
    margin    margin = mu, which `margin_scale` and `margin_clip` then scale and clip

Wang et al. 2024 (arXiv:2401.06080).
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from pydantic import Field, model_validator

from rewarden.collect.strata import MEAN
from rewarden.errors import DataError
from rewarden.maths import to_flip
from rewarden.spec import Spec
from rewarden.types import Comparison


class Strength(Spec):
    """How the preference strength of a vote changes what is learned."""

    column: str = Field(MEAN, min_length=1)
    """The column with mu; `kind: vote` writes it, and so has fnlp/hh-rlhf-strength-cleaned."""
    flip_share: float = Field(0.0, ge=0, le=0.5)
    """Turn the label of this share of the pairs round, those of lowest mu, as far as mu is below 0."""
    soft_labels: bool = False
    """Learn sigmoid(mu) as the probability that the chosen side is better, instead of 1."""
    margin: bool = False
    """Take mu as the margin by which the chosen side should lead; see margin_scale and margin_clip."""

    @model_validator(mode="after")
    def _does_something(self) -> "Strength":
        if not (self.flip_share or self.soft_labels or self.margin):
            raise ValueError("strength changes nothing; set flip_share, soft_labels or margin, or leave strength out")
        return self


class Strengthened(NamedTuple):
    """The pairs as they are learned, and a line for people on what became of them."""

    rows: tuple[Comparison, ...]
    note: str


def strengthened(rows: Sequence[Comparison], cfg: Strength) -> Strengthened:
    """The pairs with labels and margins by their mu.

    Errors: DataError for a pair without mu, or one whose own soft label or margin this would have to overrule.
    """
    mu = [_mu(row, cfg) for row in rows]
    flips = to_flip(torch.tensor(mu, dtype=torch.float64), share=cfg.flip_share).tolist()
    out = [_changed(row, value, cfg, flip=flip) for row, value, flip in zip(rows, mu, flips, strict=True)]
    negative = sum(value < 0 for value in mu)
    words = [f"strength: mu < 0 in {negative} of {len(rows)} pairs"]
    if cfg.flip_share:
        words.append(f"labels turned round: {sum(flips)} (of the lowest {cfg.flip_share:.0%})")
    if cfg.soft_labels:
        words.append("labels are sigmoid(mu)")
    if cfg.margin:
        words.append("margins are mu")
    return Strengthened(tuple(out), ", ".join(words))


def _changed(row: Comparison, mu: float, cfg: Strength, *, flip: bool) -> Comparison:
    if flip:
        row, mu = replace(row, chosen=row.rejected, rejected=row.chosen), -mu
    if cfg.soft_labels:
        row = replace(row, preference=_sigmoid(mu))
    return replace(row, margin=mu) if cfg.margin else row


def _mu(row: Comparison, cfg: Strength) -> float:
    where = row.meta.get("where", row.id)
    value = row.meta.get(cfg.column)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(
            f"{where}: column {cfg.column!r} is {value!r}, and strength needs a number there: the mean difference of scores. "
            "Write it with kind: vote, or leave strength out"
        )
    if row.preference != 1.0:
        raise DataError(
            f"{where}: preference is {row.preference:g}, and strength makes the label from mu; take the column out, or leave "
            "strength out"
        )
    if row.margin is not None:
        raise DataError(
            f"{where}: margin is {row.margin:g}, of the side that strength may turn round or give another margin; take the "
            "column out (columns: {other: margin}), or leave strength out"
        )
    return float(value)


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
