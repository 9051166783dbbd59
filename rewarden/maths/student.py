"""An interval for a mean of few values: Student's t, without a table."""

import math

from jaxtyping import Float
from torch import Tensor

from rewarden.maths.precision import Real
from rewarden.maths.stats import standard_error


def student_within(t: Real, df: int) -> float:
    """P(|T| <= t) for Student's t with `df` degrees of freedom, t >= 0.

    With theta = atan(t / sqrt(df)), s = sin(theta), c = cos(theta):
        df odd:   (2 / pi) * (theta + s * (c + 2/3 c^3 + 2/3 * 4/5 c^5 + ... up to c^(df - 2)))
        df even:  s * (1 + 1/2 c^2 + 1/2 * 3/4 c^4 + ... up to c^(df - 2))

    Abramowitz and Stegun 1964, 26.7.3 and 26.7.4. Raises ValueError for df below 1.
    """
    if df < 1:
        raise ValueError(f"df is {df}; Student's t needs 1 or more degrees of freedom, which is two or more values")
    theta = math.atan(t / math.sqrt(df))
    sine, cosine = math.sin(theta), math.cos(theta)
    odd = df % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for power in range(odd, df - 1, 2):
        total += term
        term *= cosine * cosine * (power + 1) / (power + 2)
    return (2 / math.pi) * (theta + sine * total) if odd else sine * total


def student_interval(values_N: Float[Tensor, " N"], *, confidence: Real) -> tuple[float, float]:
    """Interval for the mean of few independent values: mean +- t * std / sqrt(N), t with N - 1 degrees of freedom.

    Where the bootstrap of five values is far too narrow this one is right for values that are about normal, such as the means
    of runs with different seeds. Student 1908. Raises ValueError for fewer than two values, or a confidence outside 0 to 1.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}; it is the share of intervals that hold the truth: use e.g. 0.95")
    half = standard_error(values_N)
    df = values_N.numel() - 1
    low, high = 0.0, 1.0
    while student_within(high, df) < confidence:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if student_within(middle, df) < confidence else (low, middle)
    mean = float(values_N.double().mean())
    return mean - high * half, mean + high * half
