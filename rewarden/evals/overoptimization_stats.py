"""Effects of an over-optimisation study, each with two intervals: over the prompts of these seeds, and over seeds.

Seeds are the unit: prompts of one seed share its policy, pairs and reward models, so only the spread between seeds says what
another seed would give. That interval is Student's t of the seeds' means: wide with two seeds, and none with one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rewarden.maths import bootstrap_interval, student_interval
from rewarden.runtime.seed import generator

NAN = float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """A mean over seeds of means over prompts.

    low_prompts, high_prompts: bootstrap over the prompts within each seed. low, high: Student's t over the seeds' means, NaN
    with fewer than two seeds.
    """

    mean: float
    low_prompts: float
    high_prompts: float
    low: float
    high: float
    num_seeds: int
    num_prompts: int

    @property
    def above_zero(self) -> bool:
        """Whether the interval over seeds lies above 0."""
        return self.low > 0

    @property
    def below_zero(self) -> bool:
        """Whether the interval over seeds lies below 0."""
        return self.high < 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Of the intervals."""

    confidence: float
    resamples: int
    seed: int


def effect(values_SP: Sequence[Tensor], settings: Settings) -> Effect:
    """The effect of one number per prompt, a tensor [P] a seed; prompts without a finite value are left out."""
    kept = [value_P[value_P.isfinite()].double() for value_P in values_SP]
    kept = [value_P for value_P in kept if len(value_P)]
    if not kept:
        return Effect(mean=NAN, low_prompts=NAN, high_prompts=NAN, low=NAN, high=NAN, num_seeds=0, num_prompts=0)
    means_S = torch.stack([value_P.mean() for value_P in kept])
    low_prompts, high_prompts = _over_prompts(kept, settings)
    low, high = student_interval(means_S, confidence=settings.confidence) if len(kept) > 1 else (NAN, NAN)
    return Effect(
        mean=float(means_S.mean()),
        low_prompts=low_prompts,
        high_prompts=high_prompts,
        low=low,
        high=high,
        num_seeds=len(kept),
        num_prompts=sum(len(value_P) for value_P in kept),
    )


def _over_prompts(kept: Sequence[Tensor], settings: Settings) -> tuple[float, float]:
    """Resample the prompts of each seed by themselves; the middle of the means of the seeds' means."""
    random = generator(settings.seed, "overoptimization", "bootstrap")
    if len(kept) == 1:
        return bootstrap_interval(kept[0], confidence=settings.confidence, resamples=settings.resamples, generator=random)
    total_R = torch.zeros(settings.resamples, dtype=torch.float64)
    for value_P in kept:
        drawn = torch.randint(len(value_P), (settings.resamples, len(value_P)), generator=random)
        total_R += value_P[drawn].mean(1)
    tail = (1 - settings.confidence) / 2
    low, high = (total_R / len(kept)).quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return low, high


def peak(gold_nP: Sequence[Tensor]) -> int:
    """Place on the curve where gold is highest ([n, P] for each seed), by the mean over seeds of the means over prompts."""
    return int(torch.stack([gold.nanmean(1) for gold in gold_nP]).mean(0).argmax())


def rise_and_fall(
    gold_nP: Sequence[Tensor],
) -> tuple[list[Tensor], list[Tensor]]:
    """For every prompt of every seed: gold at the peak less that at the start, and gold at the end less that at the peak.

    The peak that a prompt is measured at is that of the other half of the prompts. A peak chosen on the prompts themselves is
    high by luck too, and would make any noisy curve rise and fall.
    """
    rises, falls = [], []
    halves = [[gold[:, half::2] for gold in gold_nP] for half in (0, 1)]
    places = [
        peak([part if part.shape[1] else gold for part, gold in zip(halves[half], gold_nP, strict=True)]) for half in (0, 1)
    ]
    for gold in gold_nP:
        place_P = torch.tensor([places[1 - prompt % 2] for prompt in range(gold.shape[1])], dtype=torch.long)
        top_P = gold.gather(0, place_P.unsqueeze(0))[0]
        rises.append(top_P - gold[0])
        falls.append(gold[-1] - top_P)
    return rises, falls
