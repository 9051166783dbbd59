"""Exact running mean and variance as a value: what scales rewards, what a checkpoint stores."""

import math
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

# Scores closer together than this are equal for the purpose of scaling.
_FLAT_STD = 1e-6


@dataclass(frozen=True, slots=True)
class Moments:
    """How many numbers were seen, their mean, and their sum of squared deviations from it (`m2`), in float64.

    `Moments()` has seen nothing. Updating in any order and grouping gives the moments of all numbers together. Chan, Golub
    and LeVeque 1979, the parallel update; Zheng et al. 2023 (arXiv:2307.04964) keep the same moments but start from a
    made-up variance and divide by whatever comes out.
    """

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0

    def update(self, x: Float[Tensor, "*S"]) -> "Moments":
        """These moments with every element of `x` added.

        Raises ValueError if an element is not finite: it would spoil the moments for good.
        """
        if x.numel() == 0:
            return self
        values = x.detach().double().flatten()
        num_bad = int((~values.isfinite()).sum())
        if num_bad:
            raise ValueError(f"{num_bad} of {values.numel()} values are not finite; leave them out and count them")
        center = values.mean()
        return self.merge(Moments(values.numel(), float(center), float((values - center).square().sum())))

    def merge(self, other: "Moments") -> "Moments":
        """The moments of both sets of numbers together.

        count = n_a + n_b
        mean  = mean_a + (mean_b - mean_a) * n_b / count
        m2    = m2_a + m2_b + (mean_b - mean_a)^2 * n_a * n_b / count
        """
        if self.count == 0 or other.count == 0:
            return other if self.count == 0 else self
        count, gap = self.count + other.count, other.mean - self.mean
        mean = self.mean + gap * other.count / count
        return Moments(count, mean, self.m2 + other.m2 + gap * gap * (self.count * other.count / count))

    def var(self, ddof: int) -> float:
        """m2 / (count - ddof), as it is; 0 when `ddof` or fewer numbers were seen."""
        return self.m2 / (self.count - ddof) if self.count > ddof else 0.0

    def std(self, ddof: int) -> float:
        """The standard deviation to divide by: sqrt(m2 / (count - ddof)).

        1 while fewer than two numbers were seen or they lie within 1e-6 of each other, so that dividing changes nothing
        instead of blowing up. `var` tells the plain truth.
        """
        std = math.sqrt(self.var(ddof))
        return std if std >= _FLAT_STD else 1.0
