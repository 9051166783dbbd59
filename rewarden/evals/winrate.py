"""What a set of judged comparisons says: win rate, intervals over prompts, lengths, and when to say nothing."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from rewarden.errors import DataError
from rewarden.maths import bootstrap_interval, discrete_win_rate, standard_error, wilson_interval, win_counts, win_rate
from rewarden.runtime.seed import generator

Interval = tuple[float, float]

FEW_PROMPTS = 30
"""Below this many prompts the bootstrap's intervals are known to be too narrow, which is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One comparison of ours with another answer to the same prompt."""

    prompt: Hashable
    """What tells prompts apart: comparisons of one prompt are resampled together."""
    preference: float | int | None
    """Probability that ours is better (0.5: a tie), or None without a verdict."""
    length: int
    """Of our answer, in characters (or any unit, the same for both)."""
    length_reference: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WinRate:
    """Rates in percent, lengths in the unit they came in, intervals over prompts by name of the figure."""

    win_rate: float
    standard_error: float | None
    """100 * std (ddof 1) / sqrt(n) of the preferences; None for one comparison."""
    discrete_win_rate: float
    """Share won, a draw counting half, however narrow each win was."""
    n_wins: int
    n_wins_base: int
    n_draws: int
    n_total: int
    """Comparisons with a verdict."""
    n_without_verdict: int
    n_prompts: int
    """Different prompts among those with a verdict."""
    length: float
    length_reference: float
    length_difference: float
    """Ours minus the other, mean over all comparisons."""
    intervals: dict[str, Interval]
    warnings: tuple[str, ...]


def summarize(comparisons: Sequence[Judged], *, confidence: float, resamples: int, seed: int, where: str = "") -> WinRate:
    """Statistics of comparisons with percentile bootstrap intervals over prompts.

    Comparisons of one prompt are averaged before resampling, since they are not independent. Where every prompt has the same
    outcome the bootstrap has no width; the Wilson interval takes its place, and a warning says so. The result warns of missing
    verdicts, ties only, few prompts, repeated prompts, and of a win rate that is within noise of 50.

    where: the file they are of, for messages. Errors: DataError when no comparison has a verdict.
    """
    judged = [c for c in comparisons if c.preference is not None]
    if not judged:
        place = f"{where}: " if where else ""
        raise DataError(
            f"{place}none of {len(comparisons)} comparisons has a verdict (every preference is null), so there is no win rate: "
            "run the judge again, and look at its raw replies"
        )
    preference_N = torch.tensor([c.preference for c in judged], dtype=torch.float64)
    counts = win_counts(preference_N)
    by_prompt = _prompt_means([(c.prompt, float(c.preference)) for c in judged if c.preference is not None])
    signs = _prompt_means([(c.prompt, _outcome(c.preference)) for c in judged if c.preference is not None])
    longer = _prompt_means([(c.prompt, float(c.length - c.length_reference)) for c in comparisons])
    intervals = {
        "win_rate": rate_interval(by_prompt, confidence=confidence, resamples=resamples, seed=seed),
        "discrete_win_rate": rate_interval(signs, confidence=confidence, resamples=resamples, seed=seed),
        "length_difference": bootstrap_interval(
            torch.tensor(longer, dtype=torch.float64),
            confidence=confidence,
            resamples=resamples,
            generator=generator(seed, "bootstrap", "length"),
        ),
    }
    return WinRate(
        win_rate=100 * win_rate(preference_N),
        standard_error=100 * standard_error(preference_N) if len(judged) > 1 else None,
        discrete_win_rate=100 * discrete_win_rate(preference_N),
        n_wins=counts.num_wins,
        n_wins_base=counts.num_losses,
        n_draws=counts.num_draws,
        n_total=len(judged),
        n_without_verdict=len(comparisons) - len(judged),
        n_prompts=len(by_prompt),
        length=sum(c.length for c in comparisons) / len(comparisons),
        length_reference=sum(c.length_reference for c in comparisons) / len(comparisons),
        length_difference=sum(c.length - c.length_reference for c in comparisons) / len(comparisons),
        intervals=intervals,
        warnings=tuple(_warnings(comparisons, judged, by_prompt, intervals["win_rate"], confidence)),
    )


def _outcome(preference: float | int) -> float:
    return 0.5 if preference == 0.5 else float(preference > 0.5)


def _prompt_means(values: Sequence[tuple[Hashable, float]]) -> list[float]:
    groups: dict[Hashable, list[float]] = {}
    for prompt, value in values:
        groups.setdefault(prompt, []).append(value)
    return [sum(group) / len(group) for group in groups.values()]


def rate_interval(shares: Sequence[float], *, confidence: float, resamples: int, seed: int) -> Interval:
    """Interval of the mean of one share (0 to 1) per prompt, in percent: bootstrap, or Wilson where all are equal."""
    if min(shares) == max(shares):
        low, high = wilson_interval(len(shares) * shares[0], len(shares), confidence=confidence)
    else:
        values = torch.tensor(shares, dtype=torch.float64)
        random = generator(seed, "bootstrap", "win_rate")
        low, high = bootstrap_interval(values, confidence=confidence, resamples=resamples, generator=random)
    return 100 * low, 100 * high


def _warnings(
    comparisons: Sequence[Judged], judged: Sequence[Judged], shares: Sequence[float], interval: Interval, confidence: float
) -> list[str]:
    found = []
    if len(judged) < len(comparisons):
        found.append(
            f"{len(comparisons) - len(judged)} of {len(comparisons)} comparisons have no verdict (preference null) and are "
            f"left out of the rates; n_total is {len(judged)}"
        )
    if all(c.preference == 0.5 for c in judged):
        found.append(
            f"all {len(judged)} comparisons are ties: the judge told nothing apart, or both sides are the same answers"
        )
    if len(judged) == 1:
        found.append("one comparison has no spread: standard_error is null")
    if min(shares) == max(shares):
        found.append(
            f"all {len(shares)} prompts have the same outcome, of which a bootstrap has no width; the intervals of the rates "
            "are Wilson intervals"
        )
    if len(shares) < FEW_PROMPTS:
        found.append(f"{len(shares)} prompts are few: the intervals are too narrow below {FEW_PROMPTS}, and say little")
    if len(shares) < len(judged):
        found.append(
            f"{len(judged)} comparisons are of {len(shares)} different prompts; the intervals resample prompts, averaging "
            "their comparisons"
        )
    if interval[0] <= 50 <= interval[1]:
        found.append(
            f"the {confidence:.0%} interval of the win rate, {interval[0]:.2f} to {interval[1]:.2f}, holds 50: the difference "
            "is within noise"
        )
    return found
