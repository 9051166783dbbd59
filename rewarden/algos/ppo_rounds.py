"""The rounds of PPO: sample, score, prepare, learn, compare; and the small state that a round hands to the next.

One `Tick` per round. All that the loop carries is in `State`, so saving it is resuming; what depends on earlier rounds
(moments, the best step, signs of trouble) is read from it and written to the next one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rewarden.algos.actors import Actors
from rewarden.algos.evaluation import evaluate_policy, sample_and_score, transcripts
from rewarden.algos.facts import self_check
from rewarden.algos.health import alarms, first_facts, warn
from rewarden.algos.ppo_config import PPO
from rewarden.algos.ppo_loss import Batch, loss
from rewarden.algos.ppo_prepare import prepare, score_scale
from rewarden.algos.selection import BestWeights, criterion
from rewarden.algos.shares import Held, held, shuffled_parts
from rewarden.data.stream import Cursor, Stream
from rewarden.maths import Moments
from rewarden.runtime.clock import phase
from rewarden.runtime.job import Tick
from rewarden.runtime.optim import Optimizer
from rewarden.runtime.ranks import Ranks
from rewarden.runtime.seed import seed_of
from rewarden.runtime.step import split_batch, summarize, update
from rewarden.types import Rollout, ScoredRollout


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
    best: Mapping[str, float] = field(default_factory=dict)

    def dump(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    @classmethod
    def restore(cls, raw: Mapping[str, Any]) -> "State":
        """From what `dump` gave."""
        return cls(**{**raw, "cursor": Cursor(**raw["cursor"]), "moments": Moments(**raw["moments"])})


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
    samples: list[dict[str, Any]] = []
    if eval_prompts and not state.start:
        start, samples = measure(actors, eval_prompts, ranks, cfg, 0)
        state = replace(state, start=start, best=start, best_step=0, best_criterion=start["eval/score"])
        best.take(0)
    while state.step < cfg.max_steps and state.refused_in_a_row < (cfg.selection.patience or cfg.max_steps + 1):
        index, cursor = stream.take(state.cursor, cfg.rollout_batch_size)
        scored, places = collect(actors, [prompts[row] for row in index], ranks, cfg, state)
        with phase("prepare"):
            batch, moments, facts = prepare(actors, scored, state.moments, cfg, ranks)
            rows = held(places, ranks)
        if state.step == 0:
            facts |= check_first(actors, batch, rows, ranks, cfg)
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
        samples += transcripts(scored, ranks, state.step, cfg.num_sample_generations, kind="rollout")
        if state.step == 1:
            facts |= {key.replace("eval/", "start/"): value for key, value in state.start.items()}
        if eval_prompts and (state.step % cfg.eval_steps == 0 or state.step == cfg.max_steps):
            measured, more = measure(actors, eval_prompts, ranks, cfg, state.step)
            state, chosen = consider(state, measured, cfg)
            if state.best_step == state.step:
                best.take(state.step)
            facts |= measured | chosen
            samples += more
        facts |= {"episode": float(state.step * cfg.rollout_batch_size), "policy_version": float(state.policy_version)}
        yield Tick(state=state, report={**facts, **learnt}, samples=samples)
        samples = []


def collect(
    actors: Actors, prompts: Sequence[Rollout], ranks: Ranks, cfg: PPO, state: State
) -> tuple[list[ScoredRollout], list[int]]:
    """This rank's share of the round's prompts, answered and scored, and the places in the round of those with a score."""
    mine = list(enumerate(prompts))[ranks.rank :: ranks.world]
    seeds = [seed_of(cfg.seed, "ppo", state.step, place, rollout.conversation.id) for place, rollout in mine]
    scored = sample_and_score(actors, [rollout for _, rollout in mine], seeds=seeds, policy_version=state.policy_version)
    places = [place for (place, _), item in zip(mine, scored, strict=True) if item.score.status == "ok"]
    return scored, places


def check_first(actors: Actors, batch: Batch, rows: Held, ranks: Ranks, cfg: PPO) -> dict[str, float]:
    """`self_check` of the first minibatch before anything was learned."""
    mini = next(minibatches(batch, min(cfg.num_minibatches, rows.total), seed_of(cfg.seed, "minibatch", 0, 0), rows))
    # Dropout, precision or a wrong reference show in one microbatch as well as in all.
    return self_check(actors, split_batch(mini, cfg.per_device_train_batch_size)[:1], ranks)


def learn(
    actors: Actors, batch: Batch, rows: Held, optimizer: Optimizer, ranks: Ranks, cfg: PPO, step: int
) -> tuple[dict[str, float], int]:
    """All optimizer steps of a round: their summary, and how many changed the policy."""
    reports: list[dict[str, float]] = []
    count = min(cfg.num_minibatches, rows.total)  # unscored rollouts may leave fewer rows than minibatches
    for epoch in range(cfg.num_ppo_epochs):
        for mini in minibatches(batch, count, seed_of(cfg.seed, "minibatch", step, epoch), rows):
            parts = split_batch(mini, cfg.per_device_train_batch_size)
            reports.append(update(optimizer, parts, lambda b: loss(actors, b, cfg), ranks=ranks))
    report = summarize(reports)
    return report, len(reports) - int(report["skipped_steps"])


def minibatches(batch: Batch, count: int, seed: int, rows: Held | None = None) -> Iterator[Batch]:
    """A fresh shuffle of the round's rollouts on all ranks, cut into `count` parts; of each part the rows in `batch`.

    rows: which of all rollouts the batch holds; None: it holds all of them.
    """
    rows = rows or Held(numbers=tuple(range(len(batch))), total=len(batch))
    for index_b in shuffled_parts(rows, count, seed):
        yield batch.rows(index_b.to(batch.mask_BT.device))


def measure(
    actors: Actors, prompts: Sequence[Rollout], ranks: Ranks, cfg: PPO, step: int
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """`evaluate_policy` as the policy is after `step` rounds."""
    with phase("evaluate"):
        return evaluate_policy(actors, prompts, ranks, seed=cfg.seed, step=step, keep=cfg.num_sample_generations)


def consider(state: State, measured: Mapping[str, float], cfg: PPO) -> tuple[State, dict[str, float]]:
    """Is this the best step so far by the guarded criterion? The policy before training is step 0, with KL 0."""
    moments = score_scale(state.moments, cfg)
    scale = moments.std(ddof=1) if cfg.reward_norm != "none" and moments.count >= 2 else 1.0
    beta = cfg.beta * scale if cfg.selection.beta is None else cfg.selection.beta
    value, _ = criterion(measured, state.start, cfg.selection, beta=beta)
    if value > state.best_criterion:
        state = replace(state, best_step=state.step, best_criterion=value, best=dict(measured))
    refused = value == float("-inf")
    state = replace(state, refused_in_a_row=state.refused_in_a_row + 1 if refused else 0)
    report = {"selection/best_step": float(state.best_step), "selection/refused": float(refused)}
    return state, report if refused else {**report, "selection/criterion": value}
