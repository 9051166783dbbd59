"""REFUEL and REBEL: regress the difference of two log-ratios onto the difference of two returns."""

from jaxtyping import Float
from torch import Tensor

from rewarden.maths.precision import Real, at_least_float32


def log_ratio_gap(
    logp_a: Float[Tensor, " B"], logp_old_a: Float[Tensor, " B"], logp_b: Float[Tensor, " B"], logp_old_b: Float[Tensor, " B"]
) -> Float[Tensor, " B"]:
    """How much more a policy has moved towards a than towards b, in nats.

        delta = (logp_a - logp_old_a) - (logp_b - logp_old_b)

    Each log-probability is the sum over the tokens of one response. `old` is the policy that is moved away from: the one
    that sampled in REFUEL, the reference in DPO. 0 when nothing has moved.
    """
    a = at_least_float32(logp_a) - at_least_float32(logp_old_a)
    return a - (at_least_float32(logp_b) - at_least_float32(logp_old_b))


def relative_loss(
    logp_a: Float[Tensor, " B"],
    logp_old_a: Float[Tensor, " B"],
    logp_b: Float[Tensor, " B"],
    logp_old_b: Float[Tensor, " B"],
    return_a: Float[Tensor, " B"],
    return_b: Float[Tensor, " B"],
    *,
    eta: Real,
) -> Float[Tensor, " B"]:
    """REFUEL's squared error per pair of continuations a, b that share a prefix and differ from one turn on.

        delta = (logp_a - logp_old_a) - (logp_b - logp_old_b)
        loss  = (delta - eta * (return_a - return_b))^2

    Log-probabilities are sums over the sampled turn's tokens and its end of turn, in nats, under the sampling
    temperature; returns are realized scores of the two dialogues. This is the *code* scale, eta multiplying the returns;
    the paper's form (delta / eta - (return_a - return_b))^2 is this over eta^2. Symmetric in a and b, unchanged by adding
    a constant to both returns; a tie pulls delta to 0. With one turn it is REBEL. Gao et al. 2024 (arXiv:2410.04612;
    REBEL: arXiv:2404.16767).
    """
    target_B = eta * (at_least_float32(return_a) - at_least_float32(return_b))
    return (log_ratio_gap(logp_a, logp_old_a, logp_b, logp_old_b) - target_B).square()
