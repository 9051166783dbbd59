"""What a round of sampling says in numbers, over all ranks, and the check that an untrained step changes nothing."""

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rewarden.algos.actors import Actors
from rewarden.errors import DataError
from rewarden.maths import explained_variance
from rewarden.models.forward import sequence_logp
from rewarden.rollout.hf import HFSampler
from rewarden.runtime.ranks import Ranks
from rewarden.scoring import score_report
from rewarden.types import Rollout, ScoredRollout, TokenBatch

log = logging.getLogger(__name__)

LOGP_GAP = 1e-4
"""Log-probs of the same token further apart than this are counted, or warned about before the first step (nats)."""


@runtime_checkable
class Sampled(Protocol):
    """The part of an algorithm's batch that `self_check` reads."""

    @property
    def tokens(self) -> TokenBatch:
        """The ids."""
        ...

    @property
    def mask_BT(self) -> Tensor:
        """The sampled tokens."""
        ...

    @property
    def logp_old_BT(self) -> Tensor:
        """Their log-probs before the first step."""
        ...


def global_means(values: Mapping[str, Tensor], mask: Tensor, ranks: Ranks) -> dict[str, float]:
    """The mean of each tensor over its masked positions on all ranks; 0 when there is none."""
    sums = {key: float(torch.where(mask, value, 0.0).double().sum()) for key, value in values.items()}
    total = ranks.sum({**sums, "count": float(mask.sum())})
    return {key: total[key] / max(total["count"], 1.0) for key in values}


def global_explained_variance(
    value_BT: Float[Tensor, "B T"], return_BT: Float[Tensor, "B T"], mask_BT: Bool[Tensor, "B T"], ranks: Ranks
) -> float:
    """`explained_variance` of the masked tokens of all ranks together; a mean over ranks would be another number."""
    value_1N, return_1N = (torch.cat(ranks.gather_objects(x_BT[mask_BT].cpu())).unsqueeze(0) for x_BT in (value_BT, return_BT))
    return float(explained_variance(value_1N, return_1N, torch.ones_like(value_1N, dtype=torch.bool)))


def score_facts(scored: Sequence[ScoredRollout], ranks: Ranks) -> dict[str, float]:
    """Statuses, parts and disagreement of the round's scores, and how many rollouts have none."""
    scores = [score for part in ranks.gather_objects([item.score for item in scored]) for score in part]
    return score_report(scores) | {"score/unscored": float(sum(score.status != "ok" for score in scores))}


def sampling_facts(sampler: HFSampler, scored: Sequence[ScoredRollout], ranks: Ranks) -> dict[str, float]:
    """Length and endings of all sampled turns, whether scored or not, and how far the draw was from the policy."""
    rows, tokens, cut, gap = (
        float(ranks.sum(value))
        for value in (
            len(scored),
            sum(len(item.rollout.logp_sampler) for item in scored),
            sum(item.rollout.stop == "length" for item in scored),
            sampler.stats.behavior_gap * sampler.stats.generated_tokens,
        )
    )
    return {
        "length/mean": tokens / max(rows, 1.0),
        "eos_rate": 1.0 - cut / max(rows, 1.0),
        "rollout/behavior_gap": gap / max(tokens, 1.0),
        "num_tokens": tokens,
    }


def logp_gap(
    rollouts: Sequence[Rollout], logp_BT: Float[Tensor, "B T"], mask_BT: Bool[Tensor, "B T"], ranks: Ranks
) -> dict[str, float]:
    """How far the sampler's log-probs are from those of the training forward.

    Errors: DataError naming a rollout whose log-probs are not one per sampled token: all that follows would be shifted.
    """
    for rollout, sampled in zip(rollouts, mask_BT.sum(1).tolist(), strict=True):
        if len(rollout.logp_sampler) != sampled:
            raise DataError(
                f"conversation {rollout.conversation.id!r}: {len(rollout.logp_sampler)} log-probs for {sampled} sampled "
                "tokens; a sampler gives one for each token it adds"
            )
    sampler_N = torch.tensor([logp for rollout in rollouts for logp in rollout.logp_sampler], device=logp_BT.device)
    gap_N = (sampler_N - logp_BT[mask_BT]).abs()
    return {
        "rollout/logp_gap_tokens": float(ranks.sum(int((gap_N > LOGP_GAP).sum()))),
        "rollout/logp_gap_max": ranks.max(float(gap_N.max()) if len(gap_N) else 0.0),
    }


@torch.no_grad()
def self_check(actors: Actors, microbatches: Sequence[Sampled], ranks: Ranks) -> dict[str, float]:
    """Before any step: the largest |log ratio| and |log pi - log pi_ref| of a minibatch, both 0 in theory.

    Warns, with the likely causes, when one is above LOGP_GAP.
    """
    temperature = actors.sampler.sampling.temperature
    gap = kl = 0.0
    for part in microbatches:
        again_BT = sequence_logp(actors.policy, part.tokens, part.mask_BT, temperature=temperature)
        reference_BT = actors.reference_logp(part.tokens, part.mask_BT, temperature=temperature)
        gap = max(gap, _largest(again_BT - part.logp_old_BT, part.mask_BT))
        kl = max(kl, _largest(part.logp_old_BT - reference_BT, part.mask_BT))
    gap, kl = ranks.max(gap), ranks.max(kl)
    if max(gap, kl) > LOGP_GAP and ranks.is_main:
        log.warning(
            "before the first step |log ratio| is up to %.1e and |log pi - log pi_ref| up to %.1e, both should be 0: %s",
            gap,
            kl,
            "; ".join(causes(actors, gap, kl)),
        )
    return {"check/log_ratio_max": gap, "check/kl_max": kl}


def causes(actors: Actors, gap: float, kl: float) -> list[str]:
    """What explains a first ratio that is not 1, or a first KL that is not 0, by what can be seen of the models."""
    found = []
    for name, model in (("policy", actors.policy), ("reference", actors.reference)):
        if model is not None and any(module.training for module in model.modules()):
            found.append(f"dropout may be on, the {name} is in training mode")
    dtypes = {p.dtype for p in actors.policy.parameters()} - {torch.float32, torch.float64}
    if dtypes:
        found.append(f"the policy computes in low precision ({', '.join(sorted(map(str, dtypes)))})")
    if kl > LOGP_GAP >= gap:
        found.append("the reference is not the starting policy")
    return found or ["neither dropout nor precision nor the reference explains it; is the forward of this model deterministic?"]


def _largest(difference_BT: Tensor, mask_BT: Tensor) -> float:
    return float(difference_BT[mask_BT].abs().max()) if bool(mask_BT.any()) else 0.0
