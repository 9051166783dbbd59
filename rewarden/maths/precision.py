"""What number types the formulas accept and compute in."""

import torch
from jaxtyping import Float
from torch import Tensor

# An int is a fine value for a hyperparameter (gamma=1), and the run-time checker of the tests takes `float` literally.
Real = float | int


def at_least_float32(x: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
    """The same numbers in float32, or in float64 if they already are; half precision cannot hold a log-probability."""
    return x if x.dtype == torch.float64 else x.float()
