"""Log-probabilities and entropies of tokens, without keeping a tensor as wide as the vocabulary.

One alignment everywhere: x_BT[b, t] speaks of token t given the tokens before it, and position 0 holds 0. A model says at
position t what it thinks of token t + 1; `align` is the one place where that is shifted.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rewarden.maths.precision import Real, at_least_float32

# Positions are visited so many at a time that a temporary has at most this many elements: 4 MiB, which a CPU cache holds.
_TEMPORARY_ELEMENTS = 1 << 20


def align(x_BT: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Move what a model says at position t, about token t + 1, onto token t + 1; position 0 gets 0."""
    return torch.cat([torch.zeros_like(x_BT[:, :1]), x_BT[:, :-1]], dim=1)


def _refuse_temperature(temperature: Real) -> None:
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; log-probabilities need a value above 0 (greedy sampling has none)")


class _SelectedLogp(torch.autograd.Function):
    """log_softmax(logits[n] / temperature)[ids[n]], a few positions at a time.

    Written by hand so that backward needs the logits and nothing else: autograd would keep a log-softmax as large as they
    are, and before it their float32 copy and their copy divided by the temperature.
    """

    @staticmethod
    def forward(ctx: Any, logits_NV: Float[Tensor, "N V"], ids_N: Int[Tensor, " N"], temperature: Real) -> Float[Tensor, " N"]:
        rows = max(1, _TEMPORARY_ELEMENTS // max(1, logits_NV.shape[-1]))
        ctx.save_for_backward(logits_NV, ids_N)
        ctx.temperature, ctx.rows = temperature, rows
        picked = [
            (at_least_float32(part_NV) / temperature).log_softmax(-1).gather(-1, part_ids_N.unsqueeze(-1)).squeeze(-1)
            for part_NV, part_ids_N in zip(logits_NV.split(rows), ids_N.split(rows), strict=True)
        ]
        return torch.cat(picked)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_N: Float[Tensor, " N"]) -> tuple[Tensor, None, None]:
        logits_NV, ids_N = ctx.saved_tensors
        grad_logits_NV = torch.empty_like(logits_NV)
        for start in range(0, logits_NV.shape[0], ctx.rows):
            part = slice(start, start + ctx.rows)
            outer = grad_N[part, None] / ctx.temperature
            grad = (at_least_float32(logits_NV[part]) / ctx.temperature).softmax(-1).mul_(-outer)
            grad.scatter_add_(-1, ids_N[part, None], outer)
            # A position nobody asked about has gradient 0 even if its logits are NaN.
            grad_logits_NV[part] = grad.masked_fill_(outer == 0, 0.0)
        return grad_logits_NV, None, None


def token_logp(logits_BTV: Float[Tensor, "B T V"], ids_BT: Int[Tensor, "B T"], *, temperature: Real) -> Float[Tensor, "B T"]:
    """log p(ids[b, t] | ids[b, :t]) for every token of every row; 0 at t = 0, which nothing predicts.

        logp[b, t] = z[ids[b, t]] - logsumexp(z),    z = logits[b, t - 1] / temperature

    `temperature` is the one the tokens were sampled with, so that this is the log-probability of the policy that acted.
    Nats, float32 (float64 stays float64): in bfloat16 -2.3456 is -2.34375. The last position's logits are not used.

    Raises ValueError unless temperature is above 0.
    """
    _refuse_temperature(temperature)
    vocabulary = logits_BTV.shape[-1]
    next_ids_BT = ids_BT.long().roll(-1, dims=1)
    logp_N = _SelectedLogp.apply(logits_BTV.reshape(-1, vocabulary), next_ids_BT.reshape(-1), temperature)
    return align(logp_N.view(ids_BT.shape))


def chunked_token_logp(
    hidden_ND: Float[Tensor, "N D"],
    weight_VD: Float[Tensor, "V D"],
    ids_N: Int[Tensor, " N"],
    *,
    temperature: Real,
    chunk: int | None,
    bias_V: Float[Tensor, " V"] | None = None,
) -> Float[Tensor, " N"]:
    """log p(ids[n] | hidden[n]) with the output projection done `chunk` positions at a time.

        logp[n] = z[ids[n]] - logsumexp(z),    z = (weight @ hidden[n] + bias) / temperature

    The caller has already aligned: hidden[n] is the state *before* token ids[n]. Logits exist for one chunk at a time and
    are recomputed in backward, so memory is chunk * V, not N * V. With chunk None all logits are computed at once and kept.
    Nats, at least float32. N may be 0.

    Raises ValueError for a chunk below 1 or a temperature not above 0.
    """
    _refuse_temperature(temperature)
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is {chunk}; it counts positions projected at a time: use 1 or more, or None")

    def project(part_ND: Tensor, weight: Tensor, bias: Tensor | None, part_ids_N: Tensor) -> Tensor:
        return _SelectedLogp.apply(torch.nn.functional.linear(part_ND, weight, bias), part_ids_N, temperature)

    if chunk is None:
        return project(hidden_ND, weight_VD, bias_V, ids_N.long())
    parts = zip(hidden_ND.split(chunk), ids_N.long().split(chunk), strict=True)
    if not torch.is_grad_enabled():
        return torch.cat([project(part_ND, weight_VD, bias_V, part_ids_N) for part_ND, part_ids_N in parts])
    # No random numbers are drawn inside, so there is no generator state to put back in backward.
    return torch.cat(
        [
            checkpoint(project, part_ND, weight_VD, bias_V, part_ids_N, use_reentrant=False, preserve_rng_state=False)
            for part_ND, part_ids_N in parts
        ]
    )


def token_entropy(logits_NV: Float[Tensor, "N V"]) -> Float[Tensor, " N"]:
    """Entropy of the next-token distribution in nats: logsumexp(z) - sum_v p_v z_v, between 0 and log V.

    A logit of -inf is a token that cannot occur and adds nothing. Divide the logits by the sampling temperature first.
    """
    logits = at_least_float32(logits_NV)
    p_NV = logits.softmax(-1)
    # p * z at z = -inf would be 0 * inf.
    expected_N = (p_NV * torch.where(p_NV > 0, logits, 0.0)).sum(-1)
    return logits.logsumexp(-1) - expected_N
