"""Win rates, accuracies, intervals and calibration; Python floats, as shares of 1, computed in float64."""

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch
from jaxtyping import Bool, Float
from torch import Generator, Tensor

from rewarden.maths.precision import Real

# Resampled values held at a time by the bootstrap.
_RESAMPLED_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class WinCounts:
    """Comparisons won, lost and drawn; a probability above 0.5 is won, exactly 0.5 drawn."""

    num_wins: int
    num_losses: int
    num_draws: int


def _checked(values: Tensor, *, name: str, at_least: int, low: Real = -math.inf, high: Real = math.inf) -> Tensor:
    """The values on the CPU in float64; refused if there are too few or one is not finite or out of range."""
    checked = values.detach().cpu().double()
    if checked.numel() < at_least:
        raise ValueError(f"{name} has {checked.numel()} values; this statistic needs {at_least} or more")
    bad = ~(checked.isfinite() & (checked >= low) & (checked <= high))
    if bool(bad.any()):
        row = int(bad.nonzero()[0, 0])
        allowed = "finite numbers" if math.isinf(low) else f"numbers from {low:g} to {high:g}"
        raise ValueError(
            f"{name}[{row}] is {float(checked[row]):g} ({int(bad.sum())} such of {checked.numel()}); allowed are {allowed}: "
            "leave out what has no value, and count it"
        )
    return checked


def _confidence(confidence: Real) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}; it is the share of intervals that hold the truth: use e.g. 0.95")
    return float(confidence)


def alpaca_eval_preference(code_N: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """AlpacaEval's preference codes as probabilities that the model wins: code - 1.

    1 means the reference wins, 2 the model, 1.5 or 0 a tie, in between a weighted judge. NaN (no verdict) stays NaN: leave
    those out, and count them, before asking for a rate.

    Raises ValueError for any other code.
    """
    code = code_N.detach().double()
    tie_N, missing_N = code == 0, code.isnan()
    bad_N = ~(tie_N | missing_N | ((code >= 1) & (code <= 2)))
    if bool(bad_N.any()):
        row = int(bad_N.nonzero()[0, 0])
        raise ValueError(f"preference[{row}] is {float(code[row]):g}; AlpacaEval's codes are 1 to 2, 0 for a tie, or NaN")
    return torch.where(tie_N, 0.5, code - 1)


def win_rate(preference_N: Float[Tensor, " N"]) -> float:
    """Mean probability, over comparisons, that ours is better (1 won, 0.5 tie, 0 lost); between 0 and 1.

    AlpacaEval's win rate is 100 times this on `alpaca_eval_preference`; its standard error is `standard_error` likewise.

    Raises ValueError when there is none, or one is NaN or not a probability.
    """
    return float(_checked(preference_N, name="preference", at_least=1, low=0, high=1).mean())


def win_counts(preference_N: Float[Tensor, " N"]) -> WinCounts:
    """How many comparisons were won (above 0.5), lost (below) and drawn (exactly 0.5).

    Raises ValueError for NaN or what is not a probability.
    """
    preference = _checked(preference_N, name="preference", at_least=0, low=0, high=1)
    wins, losses = int((preference > 0.5).sum()), int((preference < 0.5).sum())
    return WinCounts(num_wins=wins, num_losses=losses, num_draws=preference.numel() - wins - losses)


def discrete_win_rate(preference_N: Float[Tensor, " N"]) -> float:
    """Share of comparisons won, a draw counting half, however narrow each win was; between 0 and 1.

    Raises ValueError when there is none, or one is NaN or not a probability.
    """
    preference = _checked(preference_N, name="preference", at_least=1, low=0, high=1)
    return float(((preference - 0.5).sign() + 1).mean() / 2)


def accuracy_with_ties(score_chosen: Float[Tensor, " B"], score_rejected: Float[Tensor, " B"]) -> float:
    """Share of pairs in which the chosen one scores higher; equal scores count half.

    Counting ties as wrong makes an undecided model look worse than chance.

    Raises ValueError when there is no pair or a score is not finite.
    """
    chosen = _checked(score_chosen, name="score_chosen", at_least=1)
    rejected = _checked(score_rejected, name="score_rejected", at_least=1)
    return float(((chosen - rejected).sign() + 1).mean() / 2)


def standard_error(values_N: Float[Tensor, " N"]) -> float:
    """Standard error of the mean of independent values: std (ddof 1) / sqrt(N), in the unit of the values.

    Raises ValueError for fewer than two values, which have no spread, and for NaN or infinity.
    """
    values = _checked(values_N, name="values", at_least=2)
    return float(values.std(correction=1)) / math.sqrt(values.numel())


def bootstrap_interval(
    values_N: Float[Tensor, " N"], *, confidence: Real, resamples: int, generator: Generator
) -> tuple[float, float]:
    """Percentile interval of the mean: resample the values with replacement, take the middle `confidence` of the means.

    Values must be independent: pass one number per prompt (a paired difference, say), not per token. `generator` is a CPU
    generator and fixes the result. One value gives an interval of width 0. Efron 1979.

    Raises ValueError for no values, NaN, a confidence outside 0 to 1, or fewer than one resample.
    """
    values = _checked(values_N, name="values", at_least=1)
    tail = (1 - _confidence(confidence)) / 2
    if resamples < 1:
        raise ValueError(f"resamples is {resamples}; use 1 or more (2000 is usual)")
    num_values = values.numel()
    rows = max(1, _RESAMPLED_ELEMENTS // num_values)
    means = [
        values[torch.randint(num_values, (min(rows, resamples - start), num_values), generator=generator)].mean(dim=1)
        for start in range(0, resamples, rows)
    ]
    low, high = torch.cat(means).quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return low, high


def wilson_interval(num_successes: Real, num_trials: int, *, confidence: Real) -> tuple[float, float]:
    """Interval for a share of successes that stays inside 0 to 1, and has width even at 0 or all successes.

        z = normal quantile of (1 + confidence) / 2,    p = num_successes / num_trials,    n = num_trials
        (p + z^2 / 2n +- z * sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)

    Half successes (ties) are accepted. Wilson 1927.

    Raises ValueError for no trials, successes outside 0 to num_trials, or a confidence outside 0 to 1.
    """
    if num_trials < 1 or not 0 <= num_successes <= num_trials:
        raise ValueError(f"{num_successes} successes of {num_trials} trials; use 1 trial or more and 0 to that many successes")
    z = NormalDist().inv_cdf((1 + _confidence(confidence)) / 2)
    n, p = num_trials, num_successes / num_trials
    center = p + z * z / (2 * n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    # Rounding can step past the ends that the formula touches.
    return max(0.0, (center - half) / scale), min(1.0, (center + half) / scale)


def expected_calibration_error(
    confidence: Float[Tensor, " N"], correct: Bool[Tensor, " N"] | Float[Tensor, " N"], *, bins: int = 5
) -> float:
    """How far stated confidence is from the share that is right: sum over bins of (n_b / n) * |accuracy_b - confidence_b|.

    `confidence` is max(p, 1 - p) of a two-way choice, `correct` whether the likelier side was right (0.5 for a tie). Bins
    have equal width on (0.5, 1], closed on the right; 0.5 itself falls into the first; empty bins add nothing. Between 0
    and 1. Guo et al. 2017 (arXiv:1706.04599), eq. 3, on the half line that a two-way choice can reach.

    Raises ValueError for no values, NaN, a confidence outside 0.5 to 1, or fewer than one bin.
    """
    if bins < 1:
        raise ValueError(f"bins is {bins}; use 1 or more")
    stated = _checked(confidence, name="confidence", at_least=1, low=0.5, high=1)
    right = _checked(correct.double(), name="correct", at_least=1, low=0, high=1)
    # Edges in the precision of the input, so that 0.6 lies on the edge 0.6 in float32 as well.
    edges = torch.tensor([(bins + i) / (2 * bins) for i in range(1, bins)], dtype=confidence.dtype)
    bin_N = torch.bucketize(confidence.detach().cpu(), edges, right=False)
    gap = torch.zeros(bins, dtype=torch.float64).index_add(0, bin_N, right - stated)
    return float(gap.abs().sum()) / stated.numel()
