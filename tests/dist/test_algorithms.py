"""One step of SFT and reward and one round of PPO on two gloo processes with unequal shards do what one process does.

Run as `python test_algorithms.py FOLDER`, with the variables a launcher sets, this file is one of the two ranks.
"""

import dataclasses
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from launching import TOLERANCE, spawn

from rewarden.algos import ppo_prepare, ppo_rounds, reward, sft
from rewarden.algos.actors import Actors, build_actors, load_prompt_rollouts
from rewarden.algos.evaluation import sample_and_score
from rewarden.algos.facts import self_check
from rewarden.algos.ppo_config import PPO
from rewarden.algos.shares import held
from rewarden.collect.world import WorldPairs, WorldStart
from rewarden.data.sources import Data
from rewarden.maths import Moments
from rewarden.models.ensemble import load_ensemble
from rewarden.models.load import Model, save_model, trainable
from rewarden.models.reward import load_reward_model
from rewarden.rollout.hf import Sampling
from rewarden.runtime.job import Drive, drive
from rewarden.runtime.metrics import read_metrics
from rewarden.runtime.optim import Group, Optim, Optimizer
from rewarden.runtime.ranks import Ranks
from rewarden.runtime.report import RunFolder
from rewarden.runtime.seed import seed_of
from rewarden.types import Score, ScoredRollout

ROLLOUTS = 7
SHARES = [range(5), range(5, ROLLOUTS)]

# Adam's first step is lr * g / (|g| + eps): with the usual eps a gradient of 0 up to rounding still moves a weight by +-lr.
# This eps keeps what rounding does to a gradient as small in the weight, while real gradients move it by up to lr.
OPTIM = Optim(learning_rate=1e-2, eps=1e-2, max_grad_norm=1.0)


def sft_step(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """One optimizer step on five dialogues (three and two on two ranks) and an evaluation on three."""
    cfg = sft.SFT(
        model=Model(model_name_or_path=str(folder / "start/model")),
        data=Data(path=str(folder / "start/sft.jsonl"), max_rows=9),
        eval_data=Data(path=str(folder / "start/sft_heldout.jsonl"), max_rows=3),
        optim=OPTIM,
        train_batch_size=5,
        per_device_train_batch_size=2,
        max_steps=1,
    )
    job = sft.build(cfg, ranks)
    before = weights(job.parts["policy"].model)
    (tick,) = job.train(job.start)
    return {"before": before, "after": weights(job.parts["policy"].model), "report": dict(tick.report)}


def reward_step(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """One optimizer step on five pairs (three and two on two ranks) and an evaluation on three."""
    cfg = reward.Reward(
        model=Model(model_name_or_path=str(folder / "start/model")),
        data=Data(path=str(folder / "pairs/pairs.jsonl"), max_rows=9),
        eval_data=Data(path=str(folder / "pairs/pairs.jsonl"), max_rows=3),
        optim=OPTIM,
        train_batch_size=5,
        per_device_train_batch_size=2,
        center_rewards_coefficient=0.1,
        max_steps=1,
    )
    job = reward.build(cfg, ranks)
    before = weights(job.parts["reward"].model)
    (tick,) = job.train(job.start)
    return {"before": before, "after": weights(job.parts["reward"].model), "report": dict(tick.report)}


def members_run(folder: Path, ranks: Ranks, *, lora_r: int = 0) -> dict[str, Any]:
    """Two members of two steps each, to the end: what they weigh at the start, and the files that they leave."""
    cfg = reward.Reward(
        model=Model(model_name_or_path=str(folder / "start/model"), lora_r=lora_r),
        data=Data(path=str(folder / "pairs/pairs.jsonl"), max_rows=9),
        eval_data=Data(path=str(folder / "pairs/pairs.jsonl"), max_rows=3),
        optim=OPTIM,
        train_batch_size=5,
        per_device_train_batch_size=2,
        max_steps=2,
        num_members=2,
    )
    family = cfg.family
    target = folder / f"{family} on {ranks.world}"
    job = reward.build(cfg, ranks)
    before = weights(job.parts["reward"].model)
    drive(job, RunFolder(target), ranks, cfg=Drive(save_steps=1, view="off"), recipe={"family": family})
    ranks.barrier()
    ensemble = load_ensemble(Model(model_name_or_path=str(target / "model")))
    after = {f"{index}/{key}": p for index, module in enumerate(ensemble.modules()) for key, p in weights(module).items()}
    rows = read_metrics(target / "metrics.jsonl")
    report = {f"{row['step']}/{key}": value for row in rows for key, value in row.items() if not key.startswith("time/")}
    first = {key: before[key] if key in before else torch.zeros_like(p) for key, p in after.items()}
    return {"before": first, "after": after, "report": report}


def ppo_config(folder: Path) -> PPO:
    """Three minibatches of seven rollouts: some hold rows of one rank only."""
    return PPO(
        policy=Model(model_name_or_path=str(folder / "start/model")),
        reward={"kind": "reward_model", "path": str(folder / "reward/model")},
        data=Data(path=str(folder / "pairs/prompts.jsonl")),
        optim=OPTIM,
        critic_optim=OPTIM,
        sampling=Sampling(max_completion_length=6),
        rollout_batch_size=ROLLOUTS,
        mini_batch_size=3,
        num_ppo_epochs=2,
        per_device_train_batch_size=2,
        missing_eos_penalty=0.3,
    )


def actors_of(cfg: PPO, ranks: Ranks) -> Actors:
    return build_actors(
        policy=cfg.policy, reward=cfg.reward, critic=None, critic_head=None, with_critic=True, sampling=cfg.sampling,
        head_seed=0, ranks=ranks,
    )  # fmt: skip


def ppo_round(folder: Path, ranks: Ranks, scored: list[ScoredRollout]) -> dict[str, Any]:
    """`prepare`, `self_check` and `learn` on the fixed rollouts, five and two on two ranks."""
    cfg = ppo_config(folder)
    actors = actors_of(cfg, ranks)
    assert actors.critic is not None
    models = {"policy": actors.policy, "critic": actors.critic.model}
    optimizer = Optimizer([Group(name, trainable(model), OPTIM) for name, model in models.items()], 6)
    before = {f"{name}/{key}": p for name, model in models.items() for key, p in weights(model).items()}
    places = range(ROLLOUTS) if ranks.world == 1 else SHARES[ranks.rank]
    mine = [scored[place] for place in places]
    earlier = Moments().update(torch.tensor([0.5, -1.0, 0.25]))
    batch, moments, facts = ppo_prepare.prepare(actors, mine, earlier, cfg, ranks)
    usable = [place for place, item in zip(places, mine, strict=True) if item.score.status == "ok"]
    rows = held(usable, ranks)
    check = self_check(actors, [batch], ranks)
    report, num_updates = ppo_rounds.learn(actors, batch, rows, optimizer, ranks, cfg, step=0)
    after = {f"{name}/{key}": p for name, model in models.items() for key, p in weights(model).items()}
    counts = {
        "num_updates": num_updates,
        "moments/mean": moments.mean,
        "moments/m2": moments.m2,
        "moments/count": moments.count,
    }
    return {"before": before, "after": after, "report": {**facts, **check, **report, **counts}}


def without_scores(scored: list[ScoredRollout], places: range) -> list[ScoredRollout]:
    none = Score(value=float("nan"), status="not_applicable")
    return [dataclasses.replace(item, score=none) if place in places else item for place, item in enumerate(scored)]


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def all_cases(folder: Path, ranks: Ranks) -> dict[str, dict[str, Any]]:
    scored = pickle.loads((folder / "scored.pickle").read_bytes())
    return {
        "sft": sft_step(folder, ranks),
        "reward": reward_step(folder, ranks),
        "independent members": members_run(folder, ranks),
        "adapted members": members_run(folder, ranks, lora_r=2),
        "ppo": ppo_round(folder, ranks, scored),
        "ppo, one rank without a score": ppo_round(folder, ranks, without_scores(scored, SHARES[1])),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """An untrained policy, a reward model on it, dialogues, pairs, and the rollouts all ranks learn from."""
    root = tmp_path_factory.mktemp("algorithms")
    for name in ("start", "pairs", "reward"):
        (root / name).mkdir()
    WorldStart(num_dialogues=9, num_heldout=3).run(root / "start")
    policy = Model(model_name_or_path=str(root / "start/model"))
    job = WorldPairs(
        policy=policy, num_pairs=12, num_test_pairs=0, num_prompts=ROLLOUTS, num_selection=0, num_heldout=0,
        sampling=Sampling(max_completion_length=6),
    )  # fmt: skip
    job.run(root / "pairs")
    model = load_reward_model(policy, num_heads=1, head="fresh", head_seed=3)
    save_model(
        model.model, model.tokenizer, root / "reward/model", extra={"role": "reward", "template": "chat", "num_heads": 1}
    )
    cfg = ppo_config(root)
    actors = actors_of(cfg, Ranks.single("cpu"))
    prompts = load_prompt_rollouts(cfg.data, actors.template, None).rollouts
    seeds = [seed_of("fixed", place) for place in range(ROLLOUTS)]
    scored = sample_and_score(actors, prompts, seeds=seeds, policy_version=0)
    (root / "scored.pickle").write_bytes(pickle.dumps(scored))
    return root


@pytest.fixture(scope="module")
def one(folder) -> dict[str, dict[str, Any]]:
    return all_cases(folder, Ranks.single("cpu"))


@pytest.fixture(scope="module")
def two(folder) -> list[dict[str, dict[str, Any]]]:
    """What each of two processes saw."""
    spawn(Path(__file__), str(folder), world=2)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


CASES = ["sft", "reward", "independent members", "adapted members", "ppo", "ppo, one rank without a score"]


@pytest.mark.parametrize("case", CASES)
def test_two_processes_reach_the_parameters_of_one(one, two, case):
    expected = one[case]
    moved = max(float((expected["after"][name] - p).abs().max()) for name, p in expected["before"].items())
    assert moved > 100 * TOLERANCE, "the step must be far larger than the tolerance"
    for seen in two:
        for name, p in expected["before"].items():
            assert torch.equal(seen[case]["before"][name], p)
            torch.testing.assert_close(seen[case]["after"][name], expected["after"][name], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("case", CASES)
def test_both_ranks_hold_the_same_parameters(two, case):
    for name, p in two[0][case]["after"].items():
        assert torch.equal(p, two[1][case]["after"][name]), name


@pytest.mark.parametrize("case", CASES)
def test_both_ranks_report_the_numbers_of_one_process(one, two, case):
    expected = one[case]["report"]
    for seen in two:
        report = seen[case]["report"]
        assert report.keys() == expected.keys()
        for name, value in expected.items():
            assert report[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


def main() -> None:
    torch.set_num_threads(1)
    ranks = Ranks.start()
    folder = Path(sys.argv[1])
    torch.save(all_cases(folder, ranks), folder / f"rank{ranks.rank}.pt")
    ranks.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
