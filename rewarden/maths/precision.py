"""What number types the formulas accept and compute in."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

# An int is a fine value for a hyperparameter (gamma=1), and the run-time checker of the tests takes `float` literally.
Real = float | int


def at_least_float32(x: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
    """The same numbers in float32, or in float64 if they already are; half precision cannot hold a log-probability."""
    return x if x.dtype == torch.float64 else x.float()


def finite_values(
    values: Float[Tensor, " N"], *, name: str, at_least: int, low: Real = -math.inf, high: Real = math.inf
) -> Float[Tensor, " N"]:
    """The values on the CPU in float64, as statistics are computed.

    Raises ValueError naming `name` and the place when there are too few, or one is not finite or out of range.
    """
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
