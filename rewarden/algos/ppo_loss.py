"""The batch of a round and the terms of PPO's objective on it.

    policy   max(-A * rho, -A * clip(rho, 1 - cliprange, 1 + cliprange_high)),   rho = pi / pi_rollout
    value    0.5 * max((V - G)^2, (clip(V, V_old +- cliprange_value) - G)^2),    times vf_coef

Per sampled token and unreduced: `rewarden.runtime.step.update` divides by what `Batch.counts` says. Schulman et al. 2017
(arXiv:1707.06347), eq. 7; value clip as in Zheng et al. 2023 (arXiv:2307.04964).
"""

from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rewarden.algos.actors import Actors
from rewarden.algos.ppo_config import PPO
from rewarden.maths import clipped_surrogate, clipped_value_loss, is_clipped, is_value_clipped, k3
from rewarden.models.forward import sequence_logp, sequence_values
from rewarden.types import Term, TokenBatch

TERMS = ("policy", "value", "policy/clip_fraction", "policy/approx_kl", "policy/ratio", "value/clip_fraction")
"""What `loss` returns: the objective, and statistics of weight 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """All that one round of learning needs, fixed before the first gradient."""

    tokens: TokenBatch
    mask_BT: Bool[Tensor, "B T"]
    logp_old_BT: Float[Tensor, "B T"]
    value_old_BT: Float[Tensor, "B T"]
    advantage_BT: Float[Tensor, "B T"]
    return_BT: Float[Tensor, "B T"]

    def __len__(self) -> int:
        return len(self.mask_BT)

    def counts(self) -> dict[str, Tensor]:
        """Sampled tokens, for every term."""
        num_tokens = self.mask_BT.sum()
        return dict.fromkeys(TERMS, num_tokens)

    def rows(self, index_b: Tensor) -> "Batch":
        """The sub-batch of these rollouts, trimmed to its longest."""
        tokens = self.tokens.rows(index_b)
        width = tokens.ids_BT.shape[1]
        rest = {f.name: getattr(self, f.name)[index_b, :width] for f in fields(self) if f.name != "tokens"}
        return Batch(tokens=tokens, **rest)


def loss(actors: Actors, batch: Batch, cfg: PPO) -> dict[str, Term]:
    """The two terms of the objective and their statistics, per sampled token."""
    assert actors.critic is not None
    mask_BT, old_BT, advantage_BT = batch.mask_BT, batch.logp_old_BT, batch.advantage_BT
    clips = {"clip_low": cfg.cliprange, "clip_high": cfg.cliprange_high or cfg.cliprange}
    logp_BT = sequence_logp(actors.policy, batch.tokens, mask_BT, temperature=actors.sampler.sampling.temperature)
    value_BT = torch.where(mask_BT, sequence_values(actors.critic.model, batch.tokens), 0.0)
    surrogate_BT = clipped_surrogate(logp_BT, old_BT, advantage_BT, **clips)
    value_loss_BT = clipped_value_loss(value_BT, batch.value_old_BT, batch.return_BT, clip=cfg.cliprange_value)
    new_BT = logp_BT.detach()
    cut_BT = is_value_clipped(value_BT.detach(), batch.value_old_BT, batch.return_BT, clip=cfg.cliprange_value)
    statistics = {
        "policy/clip_fraction": is_clipped(new_BT, old_BT, advantage_BT, **clips).float(),
        "policy/approx_kl": k3(old_BT, new_BT),
        "policy/ratio": (new_BT - old_BT).exp(),
        "value/clip_fraction": cut_BT.float(),
    }
    return {
        "policy": Term(value_BT=surrogate_BT, mask_BT=mask_BT),
        "value": Term(value_BT=value_loss_BT, mask_BT=mask_BT, weight=cfg.vf_coef),
        **{key: Term(value_BT=value, mask_BT=mask_BT, weight=0.0) for key, value in statistics.items()},
    }
