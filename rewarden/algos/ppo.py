"""Proximal policy optimisation of a language model against a scorer, with a learned critic.

    reward_t  = -beta * (logp_t - logp_ref_t),   plus the processed score on the last sampled token
    A, G      = GAE(gamma, lambda) over sampled tokens;  A whitened over the whole rollout
    L_policy  = mean max(-A * rho, -A * clip(rho, 1 - cliprange, 1 + cliprange_high)),   rho = pi / pi_rollout
    L_value   = mean 0.5 * max((V - G)^2, (clip(V, V_old +- cliprange_value) - G)^2)
    L         = L_policy + vf_coef * L_value

Schulman et al. 2017 (arXiv:1707.06347); score normalisation and clipping by running moments, value clipping and separate
critic settings: Zheng et al. 2023 (arXiv:2307.04964). Means are over sampled tokens of the optimizer step, over every
microbatch and rank. `logp_old` is recomputed by the training forward; the sampler's own log-probs are compared with it and
gaps are counted. docs/algorithms/ppo.md lists every detail and where we differ.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from rewarden.algos.actors import Actors, Head, build_actors, load_prompt_rollouts
from rewarden.algos.evaluation import evaluate_policy, sample_and_score, transcripts
from rewarden.algos.facts import (
    global_explained_variance,
    global_means,
    logp_gap,
    sampling_facts,
    score_facts,
    self_check,
)
from rewarden.algos.health import alarms, first_facts, text_facts
from rewarden.algos.rows import check_dropout, within
from rewarden.algos.scores import RewardNorm, calibration, fixed_moments, merged, process_scores
from rewarden.algos.selection import BestWeights, Selection, criterion
from rewarden.algos.shares import Held, held, shuffled_parts
from rewarden.data.sources import Data
from rewarden.data.stream import Cursor, Stream
from rewarden.errors import ConfigError, ScoreError
from rewarden.maths import (
    Moments,
    clipped_surrogate,
    clipped_value_loss,
    gae,
    is_clipped,
    is_value_clipped,
    k1,
    k3,
    token_rewards,
)
from rewarden.models.forward import sequence_logp, sequence_logp_entropy, sequence_values
from rewarden.models.load import Model, save_model, template_of, trainable
from rewarden.models.parts import ModelPart
from rewarden.rollout.hf import Sampling
from rewarden.runtime.clock import phase
from rewarden.runtime.job import Job, Tick
from rewarden.runtime.optim import Group, Optim, Optimizer
from rewarden.runtime.ranks import Ranks
from rewarden.runtime.seed import seed_of
from rewarden.runtime.step import split_batch, summarize, update
from rewarden.scoring import parse_scorer
from rewarden.spec import Spec
from rewarden.text.collate import collate, role_mask
from rewarden.types import Rollout, ScoredRollout, Term, TokenBatch

log = logging.getLogger(__name__)


class PPO(Spec):
    """PPO with a critic, a frozen reference and any scorer."""

    policy: Model
    """The SFT model. With lora_r > 0 the reference is the policy with its adapter off; else a frozen copy."""
    reward: dict[str, Any]
    """A scorer: {kind: reward_model, path: ...}, {kind: function, ...}, rules, or "my_file.py:MyReward"."""
    data: Data
    """Prompts; other columns are passed on to the scorer."""
    eval_data: Data | None = None
    """Separate prompts on which steps are compared; without them the last step is exported."""
    critic: Model | None = None
    """What the critic starts from; None takes the reward model (same tokenizer) or else the policy with a fresh head."""
    critic_head: Head | None = None
    """Whether the critic's head is read from its checkpoint, drawn (fresh) or zero; None reads it where there is one."""
    optim: Optim = Optim(learning_rate=3e-6)
    """Optimizer and schedule of the policy."""
    critic_optim: Optim = Optim(learning_rate=9e-6)
    """Optimizer and schedule of the critic; its gradient is clipped on its own."""
    sampling: Sampling = Sampling(max_completion_length=128)
    """How answers are drawn; the policy that is optimised is the one at this temperature, without filters."""
    max_prompt_length: int | None = Field(512, ge=1)
    """Longer prompts are dropped and counted."""
    max_steps: int = Field(20, ge=1)
    """Rounds of sampling and learning."""
    rollout_batch_size: int = Field(128, ge=2)
    """Prompts per round, over all ranks."""
    mini_batch_size: int = Field(32, ge=1)
    """Rollouts per optimizer step, over all ranks."""
    num_ppo_epochs: int = Field(2, ge=1)
    """Passes over each round's rollouts."""
    per_device_train_batch_size: int = Field(32, ge=1)
    """Rollouts per forward and backward pass on one rank; changes memory, never the gradient."""
    beta: float = Field(0.05, ge=0)
    """Weight of the per-token KL penalty to the reference, relative to processed scores."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount per token."""
    lam: float = Field(0.95, ge=0, le=1)
    """GAE lambda."""
    cliprange: float | None = Field(0.2, gt=0, lt=1)
    """Lower (and, unless cliprange_high is set, upper) clip of the ratio; None does not clip."""
    cliprange_high: float | None = Field(None, gt=0)
    """Upper clip of the ratio."""
    cliprange_value: float | None = Field(0.2, gt=0)
    """How far the value may move from its old value; None does not clip."""
    vf_coef: float = Field(1.0, ge=0)
    """Weight of the value loss."""
    reward_norm: RewardNorm = "running"
    """Scores less a mean, over a std: of all scores so far (running), of `reward_moments` (fixed), or as they are (none)."""
    reward_moments: tuple[float, float] | None = None
    """Mean and std for reward_norm: fixed; None takes those of the reward model's own evaluation."""
    reward_clip: float | None = Field(3.0, gt=0)
    """Processed scores are cut to +- this (counted); None does not cut."""
    whiten_advantages: bool = True
    """Advantages get mean 0 and std 1 over all sampled tokens of the round."""
    missing_eos_penalty: float | None = Field(None, ge=0)
    """Subtracted from the raw score of an answer that was cut by the token limit."""
    eval_steps: int = Field(1, ge=1)
    """Rounds between evaluations on eval_data."""
    selection: Selection = Selection()
    """How the exported step is chosen."""
    num_sample_generations: int = Field(4, ge=0)
    """Transcripts kept per round in samples.parquet."""
    seed: int = 0
    """Order of prompts, sampling and minibatches."""

    @field_validator("sampling")
    @classmethod
    def _a_distribution(cls, sampling: Sampling) -> Sampling:
        if sampling.temperature <= 0:
            raise ValueError("temperature 0 has no probabilities to take a ratio of; use a temperature above 0")
        return sampling

    @field_validator("policy", "critic")
    @classmethod
    def _no_dropout(cls, model: Model | None) -> Model | None:
        if model is not None:
            check_dropout(model, disable_dropout=True)  # the ratio of an unchanged policy must be 1
        return model

    @field_validator("reward_norm", mode="before")
    @classmethod
    def _switch(cls, value: Any) -> Any:
        return {True: "running", False: "none"}[value] if isinstance(value, bool) else value

    @field_validator("reward_moments")
    @classmethod
    def _has_a_spread(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        if value is not None and value[1] <= 0:
            raise ValueError("the std must be above 0")
        return value

    @field_validator("reward")
    @classmethod
    def _known_scorer(cls, raw: dict[str, Any]) -> dict[str, Any]:
        parse_scorer(raw, "reward")
        return raw

    @model_validator(mode="after")
    def _minibatches_fit(self) -> "PPO":
        if self.mini_batch_size > self.rollout_batch_size:
            got, most = self.mini_batch_size, self.rollout_batch_size
            raise ConfigError(f"mini_batch_size is {got}; give at most rollout_batch_size={most}")
        if self.reward_moments is not None and self.reward_norm != "fixed":
            raise ConfigError(f"reward_moments is set and reward_norm is {self.reward_norm}; they belong to reward_norm: fixed")
        return self

    def build(self, ranks: Ranks) -> Job:
        """Load models and prompts; see `build`."""
        return build(self, ranks)


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


TERMS = ("policy", "value", "policy/clip_fraction", "policy/approx_kl", "policy/ratio", "value/clip_fraction")


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What the loop carries from round to round; saving it is resuming."""

    step: int = 0
    policy_version: int = 0
    cursor: Cursor = field(default_factory=Cursor)
    moments: Moments = field(default_factory=Moments)
    start: Mapping[str, float] = field(default_factory=dict)
    first: Mapping[str, float] = field(default_factory=dict)
    refused_in_a_row: int = 0
    best_step: int = -1
    best_criterion: float = float("-inf")

    def dump(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    @classmethod
    def restore(cls, raw: Mapping[str, Any]) -> "State":
        """From what `dump` gave."""
        return cls(**{**raw, "cursor": Cursor(**raw["cursor"]), "moments": Moments(**raw["moments"])})


@torch.no_grad()
def prepare(
    actors: Actors, scored: Sequence[ScoredRollout], moments: Moments, cfg: PPO, ranks: Ranks
) -> tuple[Batch, Moments, dict[str, float]]:
    """Scored rollouts -> tensors, advantages, and the round's facts. No gradient, no randomness.

    Rollouts whose score does not apply stay out of the batch and are counted.
    """
    usable = [item for item in scored if item.score.status == "ok"]
    if not ranks.sum(len(usable)):
        states = sorted({item.score.status for item in scored})
        raise ScoreError(f"none of the round's rollouts has a score ({', '.join(states)}); check the reward and its limits")
    rollouts = [item.rollout for item in usable]
    tokens = collate([rollout.token_ids for rollout in rollouts]).to(ranks.device)
    mask_BT = role_mask([rollout.spans for rollout in rollouts], tokens.ids_BT.shape[1], sampled=True).to(ranks.device)
    temperature = actors.sampler.sampling.temperature
    logp_BT, entropy_BT = sequence_logp_entropy(actors.policy, tokens, mask_BT, temperature=temperature)
    logp_ref_BT = actors.reference_logp(tokens, mask_BT, temperature=temperature)
    assert actors.critic is not None
    value_BT = torch.where(mask_BT, sequence_values(actors.critic.model, tokens), 0.0)

    raw_B = torch.tensor([item.score.value for item in usable], device=ranks.device)
    if cfg.missing_eos_penalty is not None:
        cut_B = torch.tensor([rollout.stop == "length" for rollout in rollouts], device=ranks.device)
        raw_B = raw_B - cfg.missing_eos_penalty * cut_B
    moments = moments.merge(merged(Moments().update(raw_B), ranks))
    score_B, clipped_B = process_scores(raw_B, _scale(moments, cfg), normalize=cfg.reward_norm != "none", clip=cfg.reward_clip)

    reward_BT = token_rewards(score_B, logp_BT, logp_ref_BT, mask_BT, beta=cfg.beta)
    advantage_BT, return_BT = gae(reward_BT, value_BT, mask_BT, gamma=cfg.gamma, lam=cfg.lam)
    spread = merged(Moments().update(advantage_BT[mask_BT]), ranks)
    whitened_BT = torch.where(mask_BT, (advantage_BT - spread.mean) / spread.std(ddof=0), 0.0)
    batch = Batch(
        tokens=tokens,
        mask_BT=mask_BT,
        logp_old_BT=logp_BT,
        value_old_BT=value_BT,
        advantage_BT=whitened_BT if cfg.whiten_advantages else advantage_BT,
        return_BT=return_BT,
    )
    facts = {
        "score/running_mean": moments.mean,
        "score/running_std": moments.var(ddof=1) ** 0.5,
        "advantage/std": spread.var(ddof=0) ** 0.5,
        "value/explained_variance": global_explained_variance(value_BT, return_BT, mask_BT, ranks),
    }
    facts |= global_means(
        {
            "kl/k1": k1(logp_BT, logp_ref_BT),
            "kl/k3": k3(logp_BT, logp_ref_BT),
            "entropy/mean": entropy_BT,
            "value/mean": value_BT,
            "return/mean": return_BT,
        },
        mask_BT,
        ranks,
    )
    facts |= global_means(
        {
            "score/mean": raw_B,
            "score/processed_mean": score_B,
            "score/clip_fraction": clipped_B,
            "reward/rlhf": reward_BT.sum(1),
            "kl/sequence": (k1(logp_BT, logp_ref_BT) * mask_BT).sum(1),
        },
        torch.ones_like(raw_B, dtype=torch.bool),
        ranks,
    )
    facts |= {"score/std": merged(Moments().update(raw_B), ranks).var(ddof=0) ** 0.5}
    facts |= logp_gap(rollouts, logp_BT, mask_BT, ranks) | sampling_facts(actors.sampler, scored, ranks)
    facts |= text_facts(scored, ranks)
    return batch, moments, score_facts(scored, ranks) | facts


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


def minibatches(batch: Batch, count: int, seed: int, rows: Held | None = None) -> Iterator[Batch]:
    """A fresh shuffle of the round's rollouts on all ranks, cut into `count` parts; of each part the rows in `batch`.

    rows: which of all rollouts the batch holds; None: it holds all of them.
    """
    rows = rows or Held(numbers=tuple(range(len(batch))), total=len(batch))
    for index_b in shuffled_parts(rows, count, seed):
        yield batch.rows(index_b.to(batch.mask_BT.device))


def train(
    actors: Actors,
    prompts: Sequence[Rollout],
    eval_prompts: Sequence[Rollout],
    optimizer: Optimizer,
    best: BestWeights,
    ranks: Ranks,
    cfg: PPO,
    state: State,
) -> Iterator[Tick]:
    """One tick per round: sample, score, prepare, learn; before the first round, an evaluation of the start."""
    stream = Stream(len(prompts), seed=cfg.seed)
    told: set[str] = set()
    first_samples: list[dict[str, Any]] = []
    if eval_prompts and not state.start:
        with phase("evaluate"):
            start, first_samples = evaluate_policy(
                actors, eval_prompts, ranks, seed=cfg.seed, step=0, keep=cfg.num_sample_generations
            )
        state = replace(state, start=start, best_step=0, best_criterion=start["eval/score"])
        best.take()
    while state.step < cfg.max_steps and state.refused_in_a_row < (cfg.selection.patience or cfg.max_steps + 1):
        index, cursor = stream.take(state.cursor, cfg.rollout_batch_size)
        mine = [(place, prompts[row]) for place, row in enumerate(index)][ranks.rank :: ranks.world]
        seeds = [seed_of(cfg.seed, "ppo", state.step, place, rollout.conversation.id) for place, rollout in mine]
        scored = sample_and_score(actors, [rollout for _, rollout in mine], seeds=seeds, policy_version=state.policy_version)
        with phase("prepare"):
            batch, moments, facts = prepare(actors, scored, state.moments, cfg, ranks)
            places = [place for (place, _), item in zip(mine, scored, strict=True) if item.score.status == "ok"]
            rows = held(places, ranks)
        if state.step == 0:
            first = min(_num_minibatches(cfg), rows.total)
            mini = next(minibatches(batch, first, seed_of(cfg.seed, "minibatch", 0, 0), rows))
            # Dropout, precision or a wrong reference show in one microbatch as well as in all.
            facts |= self_check(actors, split_batch(mini, cfg.per_device_train_batch_size)[:1], ranks)
            state = replace(state, first=first_facts(facts))
        facts["alarms"] = float(warn(alarms(facts, state.first, cfg.sampling, cfg.selection), told, ranks))
        with phase("update"):
            learnt, num_updates = learn(actors, batch, rows, optimizer, ranks, cfg, state.step)
        state = replace(
            state,
            step=state.step + 1,
            policy_version=state.policy_version + num_updates,
            cursor=cursor,
            moments=moments,
        )
        samples = [*first_samples, *transcripts(scored, ranks, state.step, cfg.num_sample_generations, kind="rollout")]
        if state.step == 1:
            facts |= {key.replace("eval/", "start/"): value for key, value in state.start.items()}
        first_samples = []
        if eval_prompts and (state.step % cfg.eval_steps == 0 or state.step == cfg.max_steps):
            with phase("evaluate"):
                measured, more = evaluate_policy(
                    actors, eval_prompts, ranks, seed=cfg.seed, step=state.step, keep=cfg.num_sample_generations
                )
            state, chosen = consider(state, measured, cfg)
            if state.best_step == state.step:
                best.take()
            facts |= measured | chosen
            samples += more
        facts |= {"episode": float(state.step * cfg.rollout_batch_size), "policy_version": float(state.policy_version)}
        yield Tick(state=state, report={**facts, **learnt}, samples=samples)


def warn(found: Mapping[str, str], told: set[str], ranks: Ranks) -> int:
    """Say each new sign of trouble once, on rank 0; returns how many there are."""
    for name in [name for name in found if name not in told]:
        told.add(name)
        if ranks.is_main:
            log.warning("%s", found[name])
    return len(found)


def learn(
    actors: Actors, batch: Batch, rows: Held, optimizer: Optimizer, ranks: Ranks, cfg: PPO, step: int
) -> tuple[dict[str, float], int]:
    """All optimizer steps of a round: their summary, and how many changed the policy."""
    reports: list[dict[str, float]] = []
    count = min(_num_minibatches(cfg), rows.total)  # unscored rollouts may leave fewer rows than minibatches
    for epoch in range(cfg.num_ppo_epochs):
        for mini in minibatches(batch, count, seed_of(cfg.seed, "minibatch", step, epoch), rows):
            parts = split_batch(mini, cfg.per_device_train_batch_size)
            reports.append(update(optimizer, parts, lambda b: loss(actors, b, cfg), ranks=ranks))
    report = summarize(reports)
    return report, len(reports) - int(report["skipped_steps"])


def consider(state: State, measured: Mapping[str, float], cfg: PPO) -> tuple[State, dict[str, float]]:
    """Is this the best step so far by the guarded criterion? The policy before training is step 0, with KL 0."""
    moments = _scale(state.moments, cfg)
    scale = moments.std(ddof=1) if cfg.reward_norm != "none" and moments.count >= 2 else 1.0
    beta = cfg.beta * scale if cfg.selection.beta is None else cfg.selection.beta
    value, _ = criterion(measured, state.start, cfg.selection, beta=beta)
    if value > state.best_criterion:
        state = replace(state, best_step=state.step, best_criterion=value)
    refused = value == float("-inf")
    state = replace(state, refused_in_a_row=state.refused_in_a_row + 1 if refused else 0)
    report = {"selection/best_step": float(state.best_step), "selection/refused": float(refused)}
    return state, report if refused else {**report, "selection/criterion": value}


def _scale(moments: Moments, cfg: PPO) -> Moments:
    """What scores are normalised by: the running moments, or the fixed ones."""
    if cfg.reward_norm != "fixed":
        return moments
    return fixed_moments(*(cfg.reward_moments or calibration(cfg.reward)))


def _num_minibatches(cfg: PPO) -> int:
    return -(-cfg.rollout_batch_size // cfg.mini_batch_size)


def build(cfg: PPO, ranks: Ranks) -> Job:
    """Load models and prompts and return the job that trains them."""
    actors = build_actors(
        policy=cfg.policy,
        reward=cfg.reward,
        critic=cfg.critic,
        critic_head=cfg.critic_head,
        with_critic=True,
        sampling=cfg.sampling,
        head_seed=cfg.seed,
        ranks=ranks,
    )
    assert actors.critic is not None
    if cfg.reward_norm == "fixed" and cfg.reward_moments is None:
        cfg = cfg.model_copy(update={"reward_moments": calibration(cfg.reward)})
    room = actors.sampler.num_positions  # a prompt must leave some for the answer
    longest = within(cfg.max_prompt_length, None if room is None else room - 1)
    prompts = load_prompt_rollouts(cfg.data, actors.template, longest)
    notes = [f"prompts: {prompts.summary()}"]
    eval_prompts: tuple[Rollout, ...] = ()
    if cfg.eval_data is not None:
        held = load_prompt_rollouts(cfg.eval_data, actors.template, longest)
        eval_prompts = held.rollouts
        notes.append(f"selection prompts: {held.summary()}")
    else:
        notes.append("no eval_data: the last step is exported, unguarded")
    updates = cfg.max_steps * cfg.num_ppo_epochs * _num_minibatches(cfg)
    optimizer = Optimizer(
        [
            Group("policy", trainable(actors.policy), cfg.optim),
            Group("critic", trainable(actors.critic.model), cfg.critic_optim),
        ],
        updates,
    )
    best = BestWeights(actors.policy)

    def export(folder: Path) -> None:
        best.put_back()
        save_model(
            actors.policy,
            actors.template.tokenizer,
            folder / "model",
            extra={"role": "policy", "template": template_of(cfg.policy)},
        )

    return Job(
        title="PPO",
        steps=cfg.max_steps,
        start=State(),
        train=lambda state: train(actors, prompts.rollouts, eval_prompts, optimizer, best, ranks, cfg, state),
        parts={
            "policy": ModelPart(actors.policy),
            "critic": ModelPart(actors.critic.model),
            "optimizer": optimizer,
            "best": best,
        },
        export=export,
        notes=notes,
        restore_state=State.restore,
        dump_state=State.dump,
    )
