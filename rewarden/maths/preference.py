"""Losses over pairs of which one is preferred: Bradley-Terry for reward models, DPO and IPO for policies; all unreduced."""

import torch
from jaxtyping import Float
from torch import Tensor

from rewarden.maths.precision import Real, at_least_float32
from rewarden.maths.relative import log_ratio_gap


def _smoothed_logistic(logit_B: Tensor, label_smoothing: Real | Tensor) -> Tensor:
    """(1 - p) * softplus(-logit) + p * softplus(logit), p = label_smoothing."""
    p = torch.as_tensor(label_smoothing, dtype=logit_B.dtype, device=logit_B.device)
    if not bool(((p >= 0) & (p <= 1)).all()):
        raise ValueError(
            f"label_smoothing has {p.min():g} to {p.max():g}; it is the probability that the label is wrong: use 0 to 1"
        )
    # softplus(x) = -logsigmoid(-x), which is exact for large x too.
    return -(1 - p) * torch.nn.functional.logsigmoid(logit_B) - p * torch.nn.functional.logsigmoid(-logit_B)


def bradley_terry(
    score_chosen: Float[Tensor, " B"],
    score_rejected: Float[Tensor, " B"],
    *,
    margin: Real | Float[Tensor, " B"] | None,
    label_smoothing: Real | Float[Tensor, " B"],
) -> Float[Tensor, " B"]:
    """Negative log-likelihood per pair that the chosen one wins, for a model whose score difference is the log-odds.

        d    = score_chosen - score_rejected - margin
        loss = (1 - label_smoothing) * softplus(-d) + label_smoothing * softplus(d)

    `margin` (None: 0) is by how much the chosen one should lead; `label_smoothing` is the probability that the label is
    wrong, one for all or one per pair: 1 - preference for a soft label, 0.5 for a tie, 1 for a flip. At least float32,
    and no epsilon inside a logarithm: -log(sigmoid(d) + 1e-5) would cap the loss at 11.5 and silence the worst pairs.
    Zheng et al. 2023 (arXiv:2307.04964), eq. 2; margin and smoothing from part II (arXiv:2401.06080).

    Raises ValueError for a label_smoothing outside 0 to 1.
    """
    d_B = at_least_float32(score_chosen) - at_least_float32(score_rejected)
    return _smoothed_logistic(d_B if margin is None else d_B - margin, label_smoothing)


def reward_centering(score_chosen: Float[Tensor, " B"], score_rejected: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Penalty that pins a pair's scores around 0: (score_chosen + score_rejected)^2 per pair.

    Bradley-Terry leaves a free offset per prompt; a small weight on this removes it, which rules over several models
    (minimum, spread) need. Eisenstein et al. 2023 (arXiv:2312.09244).
    """
    return (at_least_float32(score_chosen) + at_least_float32(score_rejected)).square()


def dpo_loss(
    logp_chosen: Float[Tensor, " B"],
    logp_ref_chosen: Float[Tensor, " B"],
    logp_rejected: Float[Tensor, " B"],
    logp_ref_rejected: Float[Tensor, " B"],
    *,
    beta: Real,
    label_smoothing: Real | Float[Tensor, " B"],
) -> Float[Tensor, " B"]:
    """DPO: Bradley-Terry on the policy's own log-ratios.

        h    = (logp_chosen - logp_ref_chosen) - (logp_rejected - logp_ref_rejected)
        loss = (1 - label_smoothing) * softplus(-beta * h) + label_smoothing * softplus(beta * h)

    Log-probabilities are sums over response tokens. log 2 where policy and reference agree. Rafailov et al. 2023
    (arXiv:2305.18290), eq. 7; label_smoothing 0 is the paper's loss, above it is "conservative DPO".

    Raises ValueError for a label_smoothing outside 0 to 1.
    """
    h_B = log_ratio_gap(logp_chosen, logp_ref_chosen, logp_rejected, logp_ref_rejected)
    return _smoothed_logistic(beta * h_B, label_smoothing)


def ipo_loss(
    logp_chosen: Float[Tensor, " B"],
    logp_ref_chosen: Float[Tensor, " B"],
    logp_rejected: Float[Tensor, " B"],
    logp_ref_rejected: Float[Tensor, " B"],
    *,
    beta: Real,
) -> Float[Tensor, " B"]:
    """IPO: regress the difference of log-ratios onto a fixed gap instead of pushing it to infinity.

        h    = (logp_chosen - logp_ref_chosen) - (logp_rejected - logp_ref_rejected)
        loss = (h - 1 / (2 * beta))^2

    `beta` is the paper's tau. Log-probabilities are sums over response tokens, as in the paper; some libraries pass means
    per token, which the caller can too. Azar et al. 2023 (arXiv:2310.12036), eq. 17.

    Raises ValueError unless beta is above 0.
    """
    if beta <= 0:
        raise ValueError(f"beta is {beta}; IPO's target gap is 1 / (2 * beta): use a value above 0")
    h_B = log_ratio_gap(logp_chosen, logp_ref_chosen, logp_rejected, logp_ref_rejected)
    return (h_B - 1 / (2 * beta)).square()
