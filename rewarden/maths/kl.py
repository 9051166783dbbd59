"""Per-token estimators of KL(policy || reference) from tokens the policy sampled, in nats.

Schulman 2020, "Approximating KL divergence" (http://joschu.net/blog/kl-approx.html). With d = logp - logp_ref, averaged
over samples of the policy: k1 and k3 are unbiased, k2 is biased but close when the policies are. One sample's k1 may well
be negative. Unreduced: sum or average over a mask afterwards.
"""

from jaxtyping import Float
from torch import Tensor

from rewarden.maths.precision import at_least_float32


def k1(logp: Float[Tensor, "*S"], logp_ref: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
    """The plain log-ratio, k1 = logp - logp_ref; unbiased, either sign."""
    return at_least_float32(logp) - at_least_float32(logp_ref)


def k2(logp: Float[Tensor, "*S"], logp_ref: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
    """Half the squared log-ratio, k2 = (logp - logp_ref)^2 / 2; biased, never negative."""
    return 0.5 * k1(logp, logp_ref).square()


def k3(logp: Float[Tensor, "*S"], logp_ref: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
    """Unbiased and never negative: k3 = exp(-d) - 1 + d, d = logp - logp_ref.

    Overflows to inf in float32 where the reference is more than 88 nats above the policy.
    """
    d = k1(logp, logp_ref)
    # expm1 keeps the small values, which exp(-d) - 1 would lose; the clamp removes its last rounding step below 0.
    return ((-d).expm1() + d).clamp(min=0.0)
