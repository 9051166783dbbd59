"""Choosing the next token of each row: what may be drawn, the draw itself, and the log-probability that is kept.

Two distributions live here. The *policy* is softmax(logits / temperature): its log-probability is recorded, it is what
training recomputes. The *behavior* is what tokens are drawn from: the policy after repetition penalty, top-k and top-p.
They are equal when those three are off.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rewarden.errors import ConfigError

GREEDY_BELOW = 1e-6
"""Temperatures under this are zero: logits divided by less leave float32."""

_NUCLEUS_HEAD = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One token per row: its id, log p under the policy, log p under the behavior."""

    id_B: Tensor
    logp_B: Tensor
    behavior_logp_B: Tensor


def uniforms(seeds: Sequence[int], num: int) -> np.ndarray:
    """The first `num` uniform numbers in (0, 1] of each row's own stream: [B, num] float64.

    Stream of a row: numpy's Philox, keyed by the row's seed. Asking for more numbers leaves the earlier ones unchanged, so a
    higher length limit only continues a text. Zero is left out because it would select a token of probability 0.
    """
    out = np.empty((len(seeds), num))
    for row, seed in enumerate(seeds):
        if not 0 <= seed < 2**128:
            raise ConfigError(f"seed of row {row} is {seed}; allowed: 0 <= seed < 2**128; make seeds with runtime.seed.seed_of")
        out[row] = np.random.Generator(np.random.Philox(key=seed)).random(num)
    return 1.0 - out


def choose(
    logits_BV: Float[Tensor, "B V"],
    generated_BT: Int[Tensor, "B T"],
    uniform_B: Float[Tensor, " B"],
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    repetition_penalty: float,
) -> Choice:
    """Draw one token per row.

    policy   log pi(v) = logits_v / temperature - logsumexp(logits / temperature)
    behavior penalize(logits, generated) / temperature, then top-k, then nucleus; order as in transformers' generate

    Under a temperature of 1e-6 the choice is the argmax of the penalized logits: the behavior is a point mass (log p = 0) and
    log pi is taken at temperature 1, since at 0 it says nothing. Off: top_k=0, top_p=1, repetition_penalty=1.
    """
    logits_BV = logits_BV.float()
    greedy = temperature < GREEDY_BELOW
    policy_BV = logits_BV if greedy or temperature == 1.0 else logits_BV / temperature
    norm_B1 = policy_BV.logsumexp(-1, keepdim=True)
    penalized_BV = logits_BV if repetition_penalty == 1.0 else penalize(logits_BV, generated_BT, penalty=repetition_penalty)
    if greedy:
        id_B1 = penalized_BV.argmax(-1, keepdim=True)
        behavior_logp_B = torch.zeros_like(norm_B1[:, 0])
    elif repetition_penalty == 1.0 and not top_k and top_p >= 1.0:
        id_B1 = _inverse_cdf((policy_BV - norm_B1).exp(), uniform_B)
        behavior_logp_B = None
    else:
        probs_BV = keep_top_k(penalized_BV / temperature, k=top_k).softmax(-1)
        probs_BV = nucleus(probs_BV, p=top_p)
        id_B1 = _inverse_cdf(probs_BV, uniform_B)
        behavior_logp_B = probs_BV.gather(1, id_B1)[:, 0].log()
    logp_B = (policy_BV.gather(1, id_B1) - norm_B1)[:, 0]
    return Choice(id_B=id_B1[:, 0], logp_B=logp_B, behavior_logp_B=logp_B if behavior_logp_B is None else behavior_logp_B)


def penalize(logits_BV: Float[Tensor, "B V"], generated_BT: Int[Tensor, "B T"], *, penalty: float) -> Float[Tensor, "B V"]:
    """CTRL's repetition penalty (Keskar et al. 2019, section 4.1) in its signed form: z < 0 -> z * penalty, else z / penalty.

    `generated_BT` holds the tokens of this response only; a token that occurs several times is penalized once.
    """
    seen_BT = logits_BV.gather(1, generated_BT)
    # Every occurrence of a token writes the same number, computed from the untouched logit: so once per distinct token.
    return logits_BV.scatter(1, generated_BT, torch.where(seen_BT < 0, seen_BT * penalty, seen_BT / penalty))


def keep_top_k(logits_BV: Float[Tensor, "B V"], *, k: int) -> Float[Tensor, "B V"]:
    """Logits below the k-th largest become -inf; ties with it stay, as in transformers. k = 0 or k >= V keeps all."""
    if not 0 < k < logits_BV.shape[1]:
        return logits_BV
    return logits_BV.masked_fill(logits_BV < logits_BV.topk(k).values[:, -1:], -torch.inf)


def nucleus(probs_BV: Float[Tensor, "B V"], *, p: float) -> Float[Tensor, "B V"]:
    """Top-p (Holtzman et al. 2020): by falling probability, keep token i iff the sum ranked before it is < p; renormalized.

    The most probable token always stays. Equal probabilities rank by id. p >= 1 keeps all.
    """
    if p >= 1.0:
        return probs_BV
    num = probs_BV.shape[1]
    # A nucleus is rarely wider than its head, and finding the head is far cheaper than sorting 50,000 numbers per row.
    falling_BV = probs_BV.topk(min(num, _NUCLEUS_HEAD)).values.to(wide(probs_BV.device))
    if falling_BV.shape[1] < num and bool((falling_BV.sum(-1) < p).any()):
        falling_BV = probs_BV.sort(descending=True).values.to(falling_BV.dtype)
    before_BV = torch.nn.functional.pad(falling_BV.cumsum(-1)[:, :-1], (1, 0))
    size_B1 = (before_BV < p).sum(-1, keepdim=True).clamp(min=1)
    least_B1 = falling_BV.gather(1, size_B1 - 1).to(probs_BV.dtype)
    keep_BV = _first(probs_BV > least_B1, probs_BV == least_B1, size_B1)
    kept_BV = probs_BV.masked_fill(~keep_BV, 0.0)
    return kept_BV / kept_BV.sum(-1, keepdim=True)


def _first(above_BV: Bool[Tensor, "B V"], tied_BV: Bool[Tensor, "B V"], size_B1: Int[Tensor, "B 1"]) -> Bool[Tensor, "B V"]:
    """All of `above`, then as many of `tied`, lowest id first, as `size` has room for."""
    room_B1 = size_B1 - above_BV.sum(-1, keepdim=True)
    return above_BV | (tied_BV & (tied_BV.cumsum(-1) <= room_B1))


def _inverse_cdf(probs_BV: Float[Tensor, "B V"], uniform_B: Float[Tensor, " B"]) -> Int[Tensor, "B 1"]:
    """The first token whose cumulative probability reaches uniform * total: never one of probability 0."""
    sums_BV = probs_BV.cumsum(-1, dtype=wide(probs_BV.device))
    target_B1 = uniform_B.to(sums_BV.dtype)[:, None] * sums_BV[:, -1:]
    # The clamp only matters for NaN rows, which the caller reports by name.
    return torch.searchsorted(sums_BV, target_B1).clamp(max=probs_BV.shape[1] - 1)


def wide(device: torch.device) -> torch.dtype:
    """float64 where the device has it: sums over a large vocabulary then do not swallow its rare tokens."""
    return torch.float32 if device.type == "mps" else torch.float64
