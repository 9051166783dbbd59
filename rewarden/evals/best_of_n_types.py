"""What a report on best-of-n holds: curves over n of measures of the chosen answers."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One measure of the chosen answers at one n, mean over prompts.

    value: over all subsets, with its interval. gain: paired difference to n = 1. first: of the first n answers.
    """

    value: float
    low: float
    high: float
    gain: float
    gain_low: float
    gain_high: float
    first: float
    num_prompts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PointAt:
    """What holds at one n: the bound and the measured KL in nats, and the measures by name."""

    n: int
    kl_bound: float
    kl: float
    kl_low: float
    kl_high: float
    measures: Mapping[str, Measure]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One way of choosing."""

    name: str
    chooses: str
    score_std: float
    """Population standard deviation of its score over all answers."""
    num_without_score: int
    """Prompts none of whose answers has a score; they are in no mean."""
    num_tied: int
    """Prompts all of whose answers have one score; the choice is then any of them."""
    num_unscored: int
    """Answers without a score; they are never chosen."""
    points: tuple[PointAt, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All curves, and what they are of."""

    num_prompts: int
    num_generations: int
    policy: str
    confidence: float
    judges: tuple[str, ...]
    curves: tuple[Curve, ...]
    warnings: tuple[str, ...]
