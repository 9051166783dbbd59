"""Sampling and scoring during training, and the evaluation of a policy on fixed prompts with fixed seeds."""

from collections.abc import Sequence
from typing import Any

import torch

from rewarden.algos.actors import Actors
from rewarden.errors import RewardenError, ScoreError
from rewarden.maths import disagreement, k1, k3
from rewarden.models.forward import sequence_logp
from rewarden.runtime.clock import phase
from rewarden.runtime.ranks import Ranks
from rewarden.runtime.seed import seed_of
from rewarden.scoring.answer import scores_of
from rewarden.text.collate import collate, role_mask
from rewarden.types import Rollout, Score, ScoredRollout


def sample_and_score(
    actors: Actors, prompts: Sequence[Rollout], *, seeds: Sequence[int], policy_version: int
) -> list[ScoredRollout]:
    """One sampled and scored turn per prompt, in order.

    Errors: ScoreError when a score is not finite though its status says ok; RewardenError when the sampler stamped its answers
    with other weights than those asked for, as an engine does that was not given the new ones.
    """
    with phase("rollout"):
        rollouts = actors.sampler.sample(prompts, seeds=seeds, policy_version=policy_version)
    stale = [rollout for rollout in rollouts if rollout.policy_version != policy_version]
    if stale:
        raise RewardenError(
            f"{len(stale)} of {len(rollouts)} answers were sampled from policy version {stale[0].policy_version}, the policy "
            f"is at {policy_version}; give the sampler the new weights before it samples"
        )
    with phase("score"):
        scores = scores_of(actors.scorer, [rollout.conversation for rollout in rollouts])
    for rollout, score in zip(rollouts, scores, strict=True):
        if score.status == "ok" and not torch.isfinite(torch.tensor(score.value)):
            raise ScoreError(f"{rollout.conversation.id}: score is {score.value}; return a finite number, or None for no score")
    return [
        ScoredRollout(rollout=rollout, score=score, through_turn=rollout.spans[-1].turn)
        for rollout, score in zip(rollouts, scores, strict=True)
    ]


@torch.no_grad()
def evaluate_policy(
    actors: Actors, prompts: Sequence[Rollout], ranks: Ranks, *, seed: int, step: int, keep: int
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Raw score, KL to the reference, length and truncation on fixed prompts; the seeds are the same at every step.

    Returns the report (`eval/...`, means over prompts of all ranks) and the first `keep` transcripts.
    """
    mine = list(enumerate(prompts))[ranks.rank :: ranks.world]
    scored = sample_and_score(
        actors,
        [rollout for _, rollout in mine],
        seeds=[seed_of(seed, "eval", place, rollout.conversation.id) for place, rollout in mine],
        policy_version=step,
    )
    rollouts = [item.rollout for item in scored]
    tokens = collate([rollout.token_ids for rollout in rollouts]).to(ranks.device)
    mask_BT = role_mask([r.spans for r in rollouts], tokens.ids_BT.shape[1], sampled=True).to(ranks.device)
    temperature = actors.sampler.sampling.temperature
    logp_BT = sequence_logp(actors.policy, tokens, mask_BT, temperature=temperature)
    logp_ref_BT = actors.reference_logp(tokens, mask_BT, temperature=temperature)
    usable = [item.score.value for item in scored if item.score.status == "ok"]
    sums = ranks.sum(
        {
            "rows": torch.tensor(float(len(rollouts)), device=ranks.device),
            "usable": torch.tensor(float(len(usable)), device=ranks.device),
            "score": torch.tensor(float(sum(usable)), device=ranks.device),
            "k1": (k1(logp_BT, logp_ref_BT) * mask_BT).sum(),
            "k3": (k3(logp_BT, logp_ref_BT) * mask_BT).sum(),
            "tokens": mask_BT.sum().float(),
            "cut": torch.tensor(float(sum(r.stop == "length" for r in rollouts)), device=ranks.device),
        }
    )
    total = {key: float(value) for key, value in sums.items()}
    rows = max(total["rows"], 1.0)
    if not total["usable"]:
        raise ScoreError(f"none of the {rows:.0f} evaluation answers at step {step} has a score; check the reward")
    report = {
        "eval/score": total["score"] / total["usable"],
        "eval/unscored": total["rows"] - total["usable"],
        "eval/kl_sequence": total["k1"] / rows,
        "eval/kl_k3": total["k3"] / max(total["tokens"], 1.0),
        "eval/length": total["tokens"] / rows,
        "eval/truncated": total["cut"] / rows,
    }
    return report, transcripts(scored, ranks, step, keep, kind="eval")


def transcripts(scored: Sequence[ScoredRollout], ranks: Ranks, step: int, count: int, *, kind: str) -> list[dict[str, Any]]:
    """The first `count` rollouts of all ranks as rows for samples.parquet, on rank 0; nothing on the others.

    Row i of rank r is row i * world + r of the round or of the evaluation.
    """
    rows = [
        {
            "step": step,
            "kind": kind,
            "id": item.rollout.conversation.id,
            "prompt": item.rollout.conversation.messages[-2].text,
            "response": item.rollout.conversation.messages[-1].text,
            "score": item.score.value,
            "status": item.score.status,
            "length": len(item.rollout.logp_sampler),
            "stop": item.rollout.stop,
            **_members(item.score),
        }
        for item in scored[: len(ranks.share(count))]
    ]
    numbered = list(zip(ranks.share(count), rows, strict=False))
    everywhere = [pair for part in ranks.gather_objects(numbered) for pair in part]
    return [row for _, row in sorted(everywhere, key=lambda pair: pair[0])] if ranks.is_main else []


def _members(score: Score) -> dict[str, Any]:
    """What each member of an ensemble gave, and how far they are apart; nothing for a single reward."""
    if len(score.members) < 2:
        return {}
    apart = disagreement(torch.tensor([score.members], dtype=torch.float64))
    return {"members": list(score.members), "disagreement": float(apart)}
