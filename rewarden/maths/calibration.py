"""What a stated probability is worth: calibration and squared error; Python floats, computed in float64."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rewarden.maths.precision import finite_values


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfidenceBin:
    """One bin of a reliability table; an empty one has no accuracy and no confidence."""

    low: float
    high: float
    num: int
    num_right: float
    """How many were right, a tie as half."""
    sum_confidence: float

    @property
    def accuracy(self) -> float | None:
        """Share that was right."""
        return self.num_right / self.num if self.num else None

    @property
    def confidence(self) -> float | None:
        """Mean stated confidence."""
        return self.sum_confidence / self.num if self.num else None


def reliability(
    confidence: Float[Tensor, " N"], correct: Bool[Tensor, " N"] | Float[Tensor, " N"], *, bins: int = 5
) -> tuple[ConfidenceBin, ...]:
    """Stated confidence against the share that is right, bin by bin.

    `confidence` is max(p, 1 - p) of a two-way choice, `correct` whether the likelier side was right (0.5 for a tie). Bins
    have equal width on (0.5, 1], closed on the right; 0.5 itself falls into the first.

    Raises ValueError for no values, NaN, a confidence outside 0.5 to 1, or fewer than one bin.
    """
    if bins < 1:
        raise ValueError(f"bins is {bins}; use 1 or more")
    stated = finite_values(confidence, name="confidence", at_least=1, low=0.5, high=1)
    right = finite_values(correct.double(), name="correct", at_least=1, low=0, high=1)
    ends = [(bins + i) / (2 * bins) for i in range(bins + 1)]
    # Edges in the precision of the input, so that 0.6 lies on the edge 0.6 in float32 as well.
    bin_N = torch.bucketize(confidence.detach().cpu(), torch.tensor(ends[1:-1], dtype=confidence.dtype), right=False)
    num, num_right, total = (
        torch.zeros(bins, dtype=torch.float64).index_add(0, bin_N, x).tolist() for x in (torch.ones_like(stated), right, stated)
    )
    return tuple(
        ConfidenceBin(low=ends[i], high=ends[i + 1], num=int(num[i]), num_right=num_right[i], sum_confidence=total[i])
        for i in range(bins)
    )


def expected_calibration_error(
    confidence: Float[Tensor, " N"], correct: Bool[Tensor, " N"] | Float[Tensor, " N"], *, bins: int = 5
) -> float:
    """How far stated confidence is from the share that is right: sum over bins of (n_b / n) * |accuracy_b - confidence_b|.

    Over the bins of `reliability`; empty bins add nothing. Between 0 and 1. Guo et al. 2017 (arXiv:1706.04599), eq. 3, on the
    half line that a two-way choice can reach.

    Raises ValueError where `reliability` does.
    """
    table = reliability(confidence, correct, bins=bins)
    return sum(abs(row.num_right - row.sum_confidence) for row in table) / sum(row.num for row in table)


def brier_score(probability_N: Float[Tensor, " N"], outcome_N: Float[Tensor, " N"]) -> float:
    """Mean squared error of probabilities: mean((p - y)^2), y in 0 to 1; 0.25 for a coin's p = 0.5 on decided outcomes.

    Brier 1950, in its form for two outcomes.

    Raises ValueError when there is none, or one is NaN or no probability.
    """
    stated = finite_values(probability_N, name="probability", at_least=1, low=0, high=1)
    happened = finite_values(outcome_N, name="outcome", at_least=1, low=0, high=1)
    return float((stated - happened).square().mean())
