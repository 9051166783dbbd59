"""Short runs and small files, for the tests of PPO and the reproductions of user reports."""

import json
from collections.abc import Sequence
from pathlib import Path

from rewarden.algos.actors import Actors, build_actors, load_prompt_rollouts
from rewarden.algos.evaluation import sample_and_score
from rewarden.algos.ppo_config import PPO
from rewarden.algos.ppo_loss import Batch
from rewarden.algos.ppo_prepare import prepare
from rewarden.data.sources import Data
from rewarden.maths import Moments
from rewarden.models.load import Model
from rewarden.rollout.hf import Sampling
from rewarden.runtime.ranks import Ranks
from rewarden.runtime.seed import seed_of
from rewarden.types import Conversation, Message, ScoredRollout
from tests.algos.conftest import Files

ALONE = Ranks.single("cpu")


def talk(*texts: str, **meta: object) -> Conversation:
    """User and assistant in turn."""
    roles = ("user", "assistant")
    messages = tuple(Message(role=roles[i % 2], text=text) for i, text in enumerate(texts))
    return Conversation(id="row", messages=messages, meta=meta)


def write_rows(path: Path, rows: Sequence[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def ppo_config(files: Files, **changes: object) -> PPO:
    """The smallest PPO of the miniature world."""
    fields = {
        "policy": Model(model_name_or_path=str(files.policy)),
        "reward": {"kind": "length", "target": 0, "penalty": 0.1, "side": "over"},
        "data": Data(path=str(files.prompts)),
        "sampling": Sampling(max_completion_length=6),
        "max_steps": 2,
        "rollout_batch_size": 8,
        "mini_batch_size": 4,
        "num_ppo_epochs": 1,
    }
    return PPO(**{**fields, **changes})


def ppo_actors(cfg: PPO) -> Actors:
    return build_actors(
        policy=cfg.policy,
        reward=cfg.reward,
        critic=cfg.critic,
        critic_head=cfg.critic_head,
        with_critic=True,
        sampling=cfg.sampling,
        head_seed=cfg.seed,
        ranks=ALONE,
    )


def scored_rollouts(cfg: PPO, actors: Actors) -> list[ScoredRollout]:
    """One sampled and scored round."""
    prompts = load_prompt_rollouts(cfg.data, actors.template, cfg.max_prompt_length).rollouts[: cfg.rollout_batch_size]
    return sample_and_score(actors, prompts, seeds=[seed_of("reports", i) for i in range(len(prompts))], policy_version=0)


def prepared(cfg: PPO) -> tuple[Actors, list[ScoredRollout], Batch, dict[str, float]]:
    """Actors, scored rollouts, the batch of the first round and its facts."""
    actors = ppo_actors(cfg)
    scored = scored_rollouts(cfg, actors)
    batch, _, facts = prepare(actors, scored, Moments(), cfg, ALONE)
    return actors, scored, batch, facts


def ticks(spec: object, state: object = None) -> list:
    """All ticks of a job, driven by nobody."""
    job = spec.build(ALONE)
    return list(job.train(job.start if state is None else state))


def without_times(report: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in report.items() if not key.startswith("time/")}
