"""A round of scored rollouts becomes the batch that PPO learns from.

    score_B   = clip((raw - mean) / std, +- reward_clip),   raw = the scorer's value, less missing_eos_penalty where cut
    reward_t  = -beta * (logp_t - logp_ref_t),   plus score_B on the last sampled token
    A, G      = GAE(gamma, lambda) over sampled tokens;  A whitened over the whole round, on all ranks

Processing of scores: Zheng et al. 2023 (arXiv:2307.04964), eq. 18; advantages: Schulman et al. 2016 (arXiv:1506.02438).
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rewarden.algos.actors import Actors
from rewarden.algos.facts import global_explained_variance, global_means, logp_gap, sampling_facts, score_facts
from rewarden.algos.health import text_facts
from rewarden.algos.ppo_config import PPO
from rewarden.algos.ppo_loss import Batch
from rewarden.algos.scores import fixed_moments, merged, process_scores
from rewarden.errors import ScoreError
from rewarden.maths import Moments, gae, k1, k3, token_rewards
from rewarden.models.forward import sequence_logp_entropy, sequence_values
from rewarden.runtime.ranks import Ranks
from rewarden.text.collate import collate, role_mask
from rewarden.types import ScoredRollout


@torch.no_grad()
def prepare(
    actors: Actors, scored: Sequence[ScoredRollout], moments: Moments, cfg: PPO, ranks: Ranks
) -> tuple[Batch, Moments, dict[str, float]]:
    """Scored rollouts -> tensors, advantages, and the round's facts. No gradient, no randomness.

    Rollouts whose score does not apply stay out of the batch and are counted.
    """
    usable = with_a_score(scored, ranks)
    rollouts = [item.rollout for item in usable]
    tokens = collate([rollout.token_ids for rollout in rollouts]).to(ranks.device)
    mask_BT = role_mask([rollout.spans for rollout in rollouts], tokens.ids_BT.shape[1], sampled=True).to(ranks.device)
    temperature = actors.sampler.sampling.temperature
    logp_BT, entropy_BT = sequence_logp_entropy(actors.policy, tokens, mask_BT, temperature=temperature)
    logp_ref_BT = actors.reference_logp(tokens, mask_BT, temperature=temperature)
    assert actors.critic is not None
    value_BT = torch.where(mask_BT, sequence_values(actors.critic.model, tokens), 0.0)

    raw_B = raw_scores(usable, cfg, ranks.device)
    moments = moments.merge(merged(Moments().update(raw_B), ranks))
    scale = score_scale(moments, cfg)
    score_B, clipped_B = process_scores(raw_B, scale, normalize=cfg.reward_norm != "none", clip=cfg.reward_clip)
    reward_BT = token_rewards(score_B, logp_BT, logp_ref_BT, mask_BT, beta=cfg.beta)
    advantage_BT, return_BT = gae(reward_BT, value_BT, mask_BT, gamma=cfg.gamma, lam=cfg.lam)
    scaled_BT, spread = scaled_advantages(advantage_BT, mask_BT, cfg, ranks)
    batch = Batch(
        tokens=tokens,
        mask_BT=mask_BT,
        logp_old_BT=logp_BT,
        value_old_BT=value_BT,
        advantage_BT=scaled_BT,
        return_BT=return_BT,
    )
    facts = {
        "score/running_mean": moments.mean,
        "score/running_std": moments.var(ddof=1) ** 0.5,
        "advantage/std": spread.var(ddof=0) ** 0.5,
        "value/explained_variance": global_explained_variance(value_BT, return_BT, mask_BT, ranks),
    }
    kl_BT = k1(logp_BT, logp_ref_BT)
    per_token = {
        "kl/k1": kl_BT,
        "kl/k3": k3(logp_BT, logp_ref_BT),
        "entropy/mean": entropy_BT,
        "value/mean": value_BT,
        "return/mean": return_BT,
    }
    per_rollout = {
        "score/mean": raw_B,
        "score/processed_mean": score_B,
        "score/clip_fraction": clipped_B,
        "reward/rlhf": reward_BT.sum(1),
        "kl/sequence": (kl_BT * mask_BT).sum(1),
    }
    facts |= global_means(per_token, mask_BT, ranks)
    facts |= global_means(per_rollout, torch.ones_like(raw_B, dtype=torch.bool), ranks)
    facts |= {"score/std": merged(Moments().update(raw_B), ranks).var(ddof=0) ** 0.5}
    facts |= logp_gap(rollouts, logp_BT, mask_BT, ranks) | sampling_facts(actors.sampler, scored, ranks)
    facts |= text_facts(scored, ranks)
    return batch, moments, score_facts(scored, ranks) | facts


def with_a_score(scored: Sequence[ScoredRollout], ranks: Ranks) -> list[ScoredRollout]:
    """The rollouts whose score applies.

    Errors: ScoreError when no rank has one.
    """
    usable = [item for item in scored if item.score.status == "ok"]
    if not ranks.sum(len(usable)):
        states = sorted({item.score.status for item in scored})
        raise ScoreError(f"none of the round's rollouts has a score ({', '.join(states)}); check the reward and its limits")
    return usable


def raw_scores(usable: Sequence[ScoredRollout], cfg: PPO, device: torch.device) -> Float[Tensor, " B"]:
    """What the scorer said, less missing_eos_penalty where the answer was cut by the token limit."""
    raw_B = torch.tensor([item.score.value for item in usable], device=device)
    if cfg.missing_eos_penalty is None:
        return raw_B
    cut_B = torch.tensor([item.rollout.stop == "length" for item in usable], device=device)
    return raw_B - cfg.missing_eos_penalty * cut_B


def score_scale(running: Moments, cfg: PPO) -> Moments:
    """What scores are normalised by: the running moments, or the fixed ones."""
    fixed = cfg.resolved().reward_moments
    return running if fixed is None else fixed_moments(*fixed)


def scaled_advantages(
    advantage_BT: Float[Tensor, "B T"], mask_BT: Bool[Tensor, "B T"], cfg: PPO, ranks: Ranks
) -> tuple[Float[Tensor, "B T"], Moments]:
    """Advantages as the policy loss takes them, and the moments of the raw ones over the sampled tokens of all ranks."""
    spread = merged(Moments().update(advantage_BT[mask_BT]), ranks)
    if not cfg.whiten_advantages:
        return advantage_BT, spread
    return torch.where(mask_BT, (advantage_BT - spread.mean) / spread.std(ddof=0), 0.0), spread
