"""Win rates, accuracies, correlations and intervals; Python floats, as shares of 1, computed in float64."""

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor

from rewarden.maths.precision import Real, finite_values

# Resampled values held at a time by the bootstrap.
_RESAMPLED_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class WinCounts:
    """Comparisons won, lost and drawn; a probability above 0.5 is won, exactly 0.5 drawn."""

    num_wins: int
    num_losses: int
    num_draws: int


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
    return float(finite_values(preference_N, name="preference", at_least=1, low=0, high=1).mean())


def win_counts(preference_N: Float[Tensor, " N"]) -> WinCounts:
    """How many comparisons were won (above 0.5), lost (below) and drawn (exactly 0.5).

    Raises ValueError for NaN or what is not a probability.
    """
    preference = finite_values(preference_N, name="preference", at_least=0, low=0, high=1)
    wins, losses = int((preference > 0.5).sum()), int((preference < 0.5).sum())
    return WinCounts(num_wins=wins, num_losses=losses, num_draws=preference.numel() - wins - losses)


def discrete_win_rate(preference_N: Float[Tensor, " N"]) -> float:
    """Share of comparisons won, a draw counting half, however narrow each win was; between 0 and 1.

    Raises ValueError when there is none, or one is NaN or not a probability.
    """
    preference = finite_values(preference_N, name="preference", at_least=1, low=0, high=1)
    return float(wins_with_ties(preference - 0.5).mean())


def wins_with_ties(difference: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
    """How much of each comparison is won by the side whose lead is `difference`: 1 above 0, 0.5 at 0, and 0 below or for NaN.

    In the precision of `difference`, with no gradient; `accuracy_with_ties` is the mean.
    """
    return (difference > 0).to(difference.dtype) + 0.5 * (difference == 0).to(difference.dtype)


def accuracy_with_ties(score_chosen: Float[Tensor, " B"], score_rejected: Float[Tensor, " B"]) -> float:
    """Share of pairs in which the chosen one scores higher; equal scores count half.

    Counting ties as wrong makes an undecided model look worse than chance.

    Raises ValueError when there is no pair or a score is not finite.
    """
    chosen = finite_values(score_chosen, name="score_chosen", at_least=1)
    rejected = finite_values(score_rejected, name="score_rejected", at_least=1)
    return float(wins_with_ties(chosen - rejected).mean())


def standard_error(values_N: Float[Tensor, " N"]) -> float:
    """Standard error of the mean of independent values: std (ddof 1) / sqrt(N), in the unit of the values.

    Raises ValueError for fewer than two values, which have no spread, and for NaN or infinity.
    """
    values = finite_values(values_N, name="values", at_least=2)
    return float(values.std(correction=1)) / math.sqrt(values.numel())


def correlation(x_N: Float[Tensor, " N"], y_N: Float[Tensor, " N"]) -> float:
    """Pearson's correlation of paired values, between -1 and 1; 0 where either has no spread.

        sum (x - mean x) (y - mean y) / sqrt(sum (x - mean x)^2 * sum (y - mean y)^2)

    Pearson 1895.
    """
    x_N, y_N = x_N.double() - x_N.double().mean(), y_N.double() - y_N.double().mean()
    scale = float(x_N.norm() * y_N.norm())
    return float(x_N @ y_N) / scale if scale > 0 else 0.0


def sign_disagreement(x_N: Float[Tensor, " N"], y_N: Float[Tensor, " N"]) -> float:
    """Share of comparisons in which two judges prefer different sides, by the signs of their leads; between 0 and 1.

    A lead of 0 prefers neither side, and differs by half from one that does.

    Raises ValueError when there is none, or one is not finite.
    """
    x = finite_values(x_N, name="x", at_least=1)
    y = finite_values(y_N, name="y", at_least=1)
    return float((wins_with_ties(x) - wins_with_ties(y)).abs().mean())


def auroc(score_N: Float[Tensor, " N"], positive_N: Bool[Tensor, " N"]) -> float:
    """Probability that a positive scores higher than a negative, equal scores as half: the area under the ROC curve.

    0.5 says that the score tells nothing, below 0.5 that it points the other way. Mann and Whitney 1947; Hanley, McNeil 1982.

    Raises ValueError unless there is a positive and a negative, or when a score is not finite.
    """
    above_positive, _ = _placements(score_N, positive_N)
    return float(above_positive.mean())


def auroc_interval(score_N: Float[Tensor, " N"], positive_N: Bool[Tensor, " N"], *, confidence: Real) -> tuple[float, float]:
    """Normal interval of `auroc` with the variance of DeLong, DeLong and Clarke-Pearson 1988, cut to 0 to 1.

        v_i = share of negatives below positive i,    w_j = share of positives above negative j    (equal scores as half)
        auroc +- z * sqrt(var(v) / num_positive + var(w) / num_negative)                             (ddof 1)

    Where every positive scores above every negative it has no width, however few there are.

    Raises ValueError unless there are two positives and two negatives, or when a score is not finite.
    """
    above_positive, below_negative = _placements(score_N, positive_N)
    if min(above_positive.numel(), below_negative.numel()) < 2:
        raise ValueError(
            f"{above_positive.numel()} positives and {below_negative.numel()} negatives; the interval needs two of each or more"
        )
    variance = sum(float(share.var(correction=1)) / share.numel() for share in (above_positive, below_negative))
    center = float(above_positive.mean())
    half = NormalDist().inv_cdf((1 + _confidence(confidence)) / 2) * math.sqrt(variance)
    return max(0.0, center - half), min(1.0, center + half)


def _placements(score_N: Tensor, positive_N: Tensor) -> tuple[Tensor, Tensor]:
    """Share of negatives below each positive, and of positives above each negative; equal scores count half."""
    score = finite_values(score_N, name="score", at_least=1)
    positive = positive_N.detach().cpu()
    sides = score[positive].sort().values, score[~positive].sort().values
    if not all(side.numel() for side in sides):
        raise ValueError(
            f"{sides[0].numel()} positives and {sides[1].numel()} negatives; an area under the ROC curve needs one of each"
        )

    def share_below(of: Tensor, among: Tensor) -> Tensor:
        low, high = (torch.searchsorted(among, of, right=right).double() for right in (False, True))
        return (low + high) / (2 * among.numel())

    return share_below(*sides), 1 - share_below(*reversed(sides))


def relative_gap(x_N: Float[Tensor, " N"], y_N: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """How much longer x is than y, as a share of the longer one: (x - y) / max(x, y), from -1 to 1; for lengths of 0 or more.

    Two lengths of 0 are equally long: 0.
    """
    return (x_N - y_N) / torch.maximum(x_N, y_N).clamp(min=torch.finfo(x_N.dtype).tiny)


def quantile_bins(values_N: Float[Tensor, " N"], *, bins: int) -> tuple[Int[Tensor, " N"], list[float]]:
    """Which of `bins` equally large groups, by size, each value belongs to, and the upper end of each group.

    Group i holds what is above the i/bins quantile (linear between values) and not above the next. Equal values share a group,
    so that groups may be unequal, and fewer than `bins`, where values repeat.

    Raises ValueError when there is no value, one is not finite, or `bins` is below 1.
    """
    if bins < 1:
        raise ValueError(f"bins is {bins}; use 1 or more")
    values = finite_values(values_N, name="values", at_least=1)
    inner = values.quantile(torch.linspace(0, 1, bins + 1, dtype=torch.float64)[1:-1])
    found, bin_N = torch.bucketize(values, inner).unique(return_inverse=True)
    return bin_N, torch.cat([inner, values.max().view(1)])[found].tolist()


def bootstrap_interval(
    values_N: Float[Tensor, " N"], *, confidence: Real, resamples: int, generator: Generator
) -> tuple[float, float]:
    """Percentile interval of the mean: resample the values with replacement, take the middle `confidence` of the means.

    Values must be independent: pass one number per prompt (a paired difference, say), not per token. `generator` is a CPU
    generator and fixes the result. One value gives an interval of width 0. Efron 1979.

    Raises ValueError for no values, NaN, a confidence outside 0 to 1, or fewer than one resample.
    """
    values = finite_values(values_N, name="values", at_least=1)
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


def newcombe_interval(successes: tuple[Real, Real], trials: tuple[int, int], *, confidence: Real) -> tuple[float, float]:
    """Interval for the difference of two independent shares of successes, the first minus the second.

        p_i +- = wilson_interval,    d = p_1 - p_2
        d - sqrt((p_1 - low_1)^2 + (high_2 - p_2)^2)    to    d + sqrt((high_1 - p_1)^2 + (p_2 - low_2)^2)

    For shares over different pairs (two data sets); paired shares go through `bootstrap_interval` of their differences.
    Newcombe 1998, "Interval estimation for the difference between independent proportions", method 10.

    Raises ValueError where `wilson_interval` does.
    """
    ends = [wilson_interval(s, n, confidence=confidence) for s, n in zip(successes, trials, strict=True)]
    shares = [s / n for s, n in zip(successes, trials, strict=True)]
    difference = shares[0] - shares[1]
    below = math.hypot(shares[0] - ends[0][0], ends[1][1] - shares[1])
    above = math.hypot(ends[0][1] - shares[0], shares[1] - ends[1][0])
    return max(-1.0, difference - below), min(1.0, difference + above)
