"""A chain under `accelerate launch` is the chain of one process: the same rows, samples, metrics and weights to 1e-5."""

import contextlib
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))
from launching import TOLERANCE, Finished, assert_same_numbers, largest_gap, metrics, rewarden, samples, weights

from rewarden.recipe.run import run_recipe

CHAIN = Path(__file__).with_name("chain.yaml")
TRAINED = ("sft", "reward", "ppo")
ROWS = ("pairs", "pairs_test", "prompts", "selection", "heldout")


def alone(folder: Path, *overrides: str) -> Path:
    """The chain on one process: this one."""
    with contextlib.chdir(folder):
        run_recipe(CHAIN, overrides)
    return folder / "runs/chain"


def launched(folder: Path, processes: int, *overrides: str) -> tuple[Path, Finished]:
    """The chain as a user starts it on several."""
    done = rewarden(processes, "run", str(CHAIN), *overrides, cwd=folder, timeout=900)
    assert done.code == 0, done.err
    return folder / "runs/chain", done


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Path:
    return alone(tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> tuple[Path, Finished]:
    return launched(tmp_path_factory.mktemp("two"), 2)


def assert_equal_runs(one: Path, other: Path) -> None:
    """Data files word for word, then samples, metrics and weights (the critic's too, from the last checkpoint)."""
    for name in ROWS:
        file = Path("pairs", f"{name}.jsonl")
        assert (one / file).read_text(encoding="utf-8") == (other / file).read_text(encoding="utf-8"), file
    for stage in TRAINED:
        assert_same_numbers(metrics(one / stage), metrics(other / stage))
        for folder in ("model", "checkpoints"):
            assert largest_gap(one / stage / folder, other / stage / folder) <= TOLERANCE, f"{stage}/{folder}"
    assert_same_numbers(samples(one / "ppo"), samples(other / "ppo"))


def test_two_processes_give_the_samples_metrics_and_weights_of_one(one, two):
    assert_equal_runs(one, two[0])


def test_training_moved_the_weights_far_more_than_the_tolerance(one):
    assert largest_gap(one / "start/model", one / "sft/model") > 1000 * TOLERANCE
    start = load_file(one / "sft/model/model.safetensors")
    after = load_file(one / "ppo/checkpoints/step-00000003/policy/trainable.safetensors")
    assert max(float((start[name] - p).abs().max()) for name, p in after.items()) > 100 * TOLERANCE


def test_as_many_transcripts_are_kept_as_the_recipe_says_whatever_the_number_of_ranks(one, two):
    for run_folder in (one, two[0]):
        kept = [(row["step"], row["kind"]) for row in samples(run_folder / "ppo")]
        assert len(kept) == 3 * (1 + 2 * 3)  # the evaluation before training, then a round and an evaluation for each step
        assert kept.count((1, "rollout")) == 3


def test_only_the_first_rank_writes_and_prints(one, two):
    folder, done = two
    lines = done.out.splitlines()
    for text in (
        "chain: sft (2 of 5)",
        "SFT 22/22",
        "Reward model: done",
        "PPO: done",
        "pairs: 23 rows",
        "prompts: 11 prompts",
    ):
        assert sum(text in line for line in lines) == 1, text
    said = done.err.splitlines()  # warnings of PPO, if any: each once
    assert len(said) == len(set(said))
    assert "rank" not in done.err
    assert "Traceback" not in done.err
    ours, theirs = (sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()) for root in (one, folder))
    assert ours == theirs
    cached = [len(list((root.parents[1] / "features").rglob("*.safetensors"))) for root in (one, folder)]
    assert cached[0] == cached[1] > 0
    assert json.loads((folder / "ppo/env.json").read_text(encoding="utf-8"))["num_ranks"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("processes", [2, 3])
def test_a_longer_chain_is_the_same_for_one_two_and_three_processes(tmp_path, record_property, processes, seed):
    longer = [
        "start.num_dialogues=601", "pairs.num_prompts=67", "ppo.rollout_batch_size=37", "ppo.mini_batch_size=11", "reward.optim.eps=1e-5", f"seed={seed}",
    ]  # fmt: skip
    record_property("point", f"5 a longer chain on {processes} processes, seed {seed}: samples, metrics and weights to 1e-5")
    for name in ("one", "many"):
        (tmp_path / name).mkdir()
    expected = alone(tmp_path / "one", *longer)
    got, _ = launched(tmp_path / "many", processes, *longer)
    for stage in TRAINED:
        record_property(
            f"largest weight gap, {stage}", largest_gap(expected / stage / "checkpoints", got / stage / "checkpoints")
        )
    assert_equal_runs(expected, got)


@pytest.mark.slow
def test_at_the_default_eps_of_adam_few_weights_leave_the_tolerance(tmp_path, record_property):
    """Of the policy after PPO: the whole to 1e-5 of its norm, and all but one weight in 10,000 to 1e-5 one by one."""
    default = ["ppo.optim.eps=1e-8", "ppo.critic_optim.eps=1e-8"]
    record_property("point", "5 PPO at Adam's default eps on two processes: weights to 1e-5 of their norm")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    runs = [alone(tmp_path / "one", *default), launched(tmp_path / "two", 2, *default)[0]]
    both = [weights(run / "ppo/checkpoints") for run in runs]
    ours, theirs = (torch.cat([p.flatten() for name, p in found.items() if "/policy/" in name]).double() for found in both)
    gap = (ours - theirs).abs()
    record_property("relative norm", float(gap.norm() / ours.norm()))
    record_property("largest", float(gap.max()))
    record_property("weights beyond 1e-5", int((gap > TOLERANCE).sum()))
    assert gap.norm() <= TOLERANCE * ours.norm()
    assert int((gap > TOLERANCE).sum()) <= len(gap) // 10_000
    assert_same_numbers(samples(runs[0] / "ppo"), samples(runs[1] / "ppo"))
