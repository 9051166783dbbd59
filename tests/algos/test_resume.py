"""N steps of SFT, reward and PPO equal N/2, kill -9, resume and the rest, bit for bit: real commands, killed at drawn times."""

import json
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
import yaml

from rewarden.runtime.metrics import read_metrics
from rewarden.runtime.report import RunFolder
from rewarden.runtime.samples import Samples

ROOT = Path(__file__).parents[2]
CHILD = Path(__file__).with_name("resume_child.py")
POINT = "4: N steps equal N/2 + kill -9 + resume, 10 kills each"


@dataclass(frozen=True)
class Case:
    """A recipe without its length; `files` is the number of tensor files in one of its checkpoints."""

    recipe: dict
    save_steps: int
    files: int
    slow_s: float
    members: int = 1
    """Members, each of which takes a share of the steps."""


def cases(world) -> dict[str, Case]:
    """Dropout wherever it can be on, evaluations between steps, and data that ends inside the run."""
    model = {"model_name_or_path": str(world.policy)}
    sft = {
        "kind": "sft",
        "model": model,
        "data": {"path": str(world.dialogues), "max_rows": 20},
        "eval_data": {"path": str(world.heldout), "max_rows": 2},
        "optim": {"learning_rate": 4e-3, "lr_scheduler_type": "cosine", "warmup_steps": 3},
        "train_batch_size": 4,
        "per_device_train_batch_size": 3,
        "length_window": 2,
        "eval_steps": 3,
        "num_train_epochs": 100,
    }
    reward = {
        "kind": "reward",
        "model": {**model, "lora_r": 4, "lora_dropout": 0.3},
        "data": {"path": str(world.pairs), "max_rows": 20},
        "eval_data": {"path": str(world.pairs), "max_rows": 4},
        "optim": {"learning_rate": 2e-3, "lr_scheduler_type": "cosine", "warmup_steps": 3},
        "train_batch_size": 6,
        "per_device_train_batch_size": 4,
        "disable_dropout": False,
        "eval_steps": 3,
        "num_train_epochs": 100,
    }
    ppo = {
        "kind": "ppo",
        "policy": model,
        "reward": {"kind": "reward_model", "path": str(world.reward)},
        "data": {"path": str(world.prompts), "max_rows": 10},
        "eval_data": {"path": str(world.selection), "max_rows": 4},
        "optim": {"learning_rate": 1e-3},
        "critic_optim": {"learning_rate": 1e-3},
        "sampling": {"max_completion_length": 5},
        "rollout_batch_size": 6,
        "mini_batch_size": 3,
        "per_device_train_batch_size": 2,
        "num_ppo_epochs": 2,
        "eval_steps": 2,
        "selection": {"beta": 0.0, "max_kl": 2.0},
        "beta": 0.1,
        "num_sample_generations": 2,
    }
    independent = {
        **{key: value for key, value in reward.items() if key not in ("model", "disable_dropout")},
        "model": model,
        "num_members": 3,
        "bootstrap": True,
        "eval_steps": 2,
    }
    lora = {**reward, "num_members": 3}
    return {
        "sft": Case(sft, save_steps=2, files=1, slow_s=0.1),
        "reward": Case(reward, save_steps=2, files=1, slow_s=0.1),
        "independent members": Case(independent, save_steps=2, files=1, slow_s=0.1, members=3),
        "adapted members": Case(lora, save_steps=2, files=1, slow_s=0.1, members=3),
        "ppo": Case({**ppo, "policy": {**model, "lora_r": 4}}, save_steps=1, files=3, slow_s=0.03),
        "ppo of all weights": Case(ppo, save_steps=2, files=3, slow_s=0.03),
    }


@dataclass
class Victim:
    """One run folder whose process is started, killed and started again."""

    case: Case
    recipe: Path
    folder: Path
    rng: random.Random
    starts: int = 0
    kills: list[str] = field(default_factory=list)

    def start(self, resume: str = "auto", **kill: str) -> subprocess.Popen:
        """The command line as a user types it, or, for a victim, the same in `resume_child.py`."""
        self.starts += 1
        program = [str(CHILD)] if kill else ["-m", "rewarden.cli"]
        command = [sys.executable, *program, "run", str(self.recipe), f"output_dir={self.folder.parent}", "--resume", resume]
        with self.log().open("w") as log:
            env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **kill}
            return subprocess.Popen(command, env=env, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)

    def log(self) -> Path:
        return self.folder.parent / f"log-{self.starts}.txt"

    def finish(self, resume: str = "auto") -> str:
        """Run to the end without a kill; returns what was printed."""
        process = self.start(resume)
        try:
            code = process.wait(timeout=300)
        finally:
            process.kill()
        assert code == 0, self.log().read_text()
        return self.log().read_text()

    def kill(self, process: subprocess.Popen, reached) -> None:
        """SIGKILL as soon as `reached()`, and a note of what the disk held then."""
        deadline = time.monotonic() + 600
        try:
            while not reached():
                assert process.poll() is None, f"the run ended before it was to be killed:\n{self.log().read_text()}"
                assert time.monotonic() < deadline, f"not there in 600 s:\n{self.log().read_text()}"
                time.sleep(0.003)
        finally:
            process.kill()
        assert process.wait(timeout=60) == -9, f"the run had ended before it was killed:\n{self.log().read_text()}"
        self.kills.append(f"{num_lines(self.folder)} steps logged, {', '.join(names(self.folder)) or 'no checkpoint'}")

    def kill_between(self, first: int, last: int, *, slow_s: float) -> None:
        """Kill at a drawn moment after `first` to `last` more steps than the newest checkpoint holds, on a disk as slow as that."""
        target = self.newest() + self.rng.randint(first, last)
        delay_s = self.rng.uniform(0, 0.15)
        env = self.folder / "env.json"
        before = env.read_bytes() if env.exists() else b""
        process = self.start(KILL_SLOW_S=str(slow_s))

        def reached() -> bool:
            # env.json is written after the metrics have been cut back to the checkpoint
            if not env.exists() or env.read_bytes() == before or num_lines(self.folder) < target:
                return False
            time.sleep(delay_s)
            return True

        self.kill(process, reached)

    def kill_at(self, step: int, *, slow_s: float) -> None:
        """Kill as soon as the checkpoint of a step is whole."""
        process = self.start(KILL_SLOW_S=str(slow_s))
        self.kill(process, lambda: self.newest() >= step)

    def kill_in(self, place: str, at: int) -> None:
        """Kill while half of the `at`-th tensor file below a checkpoint ("checkpoint") or the results ("export") is written."""
        mark = self.folder.parent / "half-written"
        mark.unlink(missing_ok=True)
        process = self.start(KILL_IN=place, KILL_AT=str(at), KILL_MARK=str(mark), KILL_SLOW_S="0")
        self.kill(process, mark.exists)
        if place == "checkpoint":
            assert any(name.startswith(".tmp-step-") for name in names(self.folder))
        else:
            assert (self.folder / ".tmp-export").is_dir()
            assert not (self.folder / "model").exists()

    def newest(self) -> int:
        return max((int(name[5:]) for name in names(self.folder) if name.startswith("step-")), default=0)


def names(folder: Path) -> list[str]:
    checkpoints = folder / "checkpoints"
    return sorted(path.name for path in checkpoints.iterdir()) if checkpoints.is_dir() else []


def num_lines(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def without_times(rows: list[dict]) -> list[dict]:
    return [{key: repr(value) for key, value in row.items() if not key.startswith("time/")} for row in rows]


def flat(value, key: str = "") -> dict:
    """Nested dicts, lists and tensors as one dict, tensors as bytes: equal means bit-equal."""
    if isinstance(value, dict):
        return {k: v for name, inner in value.items() for k, v in flat(inner, f"{key}/{name}").items()}
    if isinstance(value, list | tuple):
        return {k: v for i, inner in enumerate(value) for k, v in flat(inner, f"{key}/{i}").items()}
    if isinstance(value, torch.Tensor):
        return {key: (value.dtype, tuple(value.shape), value.numpy().tobytes())}
    return {key: repr(value)}


def adapter_config(path: Path) -> dict:
    """PEFT keeps the names of adapted layers as a set: their order changes from process to process."""
    raw = json.loads(path.read_text())
    return {**raw, "target_modules": sorted(raw["target_modules"])}


def assert_same_run(ours: Path, reference: Path, steps: int) -> None:
    """Results, every part of the last checkpoint, metrics and samples; only `time/` metrics may differ."""
    assert names(ours) == names(reference) == [f"step-{steps:08d}"]
    trees = [folder / "checkpoints" / f"step-{steps:08d}" for folder in (ours, reference)]
    for a, b in (trees, [ours / "model", reference / "model"]):
        files = sorted(path.relative_to(a) for path in a.rglob("*") if path.is_file())
        assert files == sorted(path.relative_to(b) for path in b.rglob("*") if path.is_file())
        assert any(path.suffix == ".safetensors" for path in files)
        for path in files:
            if path.suffix == ".pt":
                mine, theirs = (flat(torch.load(tree / path, weights_only=True)) for tree in (a, b))
                assert mine == theirs, path
            elif path.name == "adapter_config.json":
                assert adapter_config(a / path) == adapter_config(b / path)
            else:
                assert (a / path).read_bytes() == (b / path).read_bytes(), path
    for file in (trees[0] / "optimizer").rglob("optimizer.pt"):
        moments = torch.load(file, weights_only=True)["moments"]
        assert all({*state} == {"step", "exp_avg", "exp_avg_sq"} for state in moments.values())
    rows = [read_metrics(folder / "metrics.jsonl") for folder in (ours, reference)]
    assert [row["step"] for row in rows[0]] == list(range(1, steps + 1))
    assert without_times(rows[0]) == without_times(rows[1])
    if (reference / "samples.parquet").exists():
        assert Samples(ours / "samples.parquet").read() == Samples(reference / "samples.parquet").read()
    if (reference / "evaluation.json").exists():
        assert (ours / "evaluation.json").read_bytes() == (reference / "evaluation.json").read_bytes()


@pytest.mark.parametrize("at", ["just after", "one step before"])
def test_a_kill_at_the_boundary_between_two_members_changes_nothing(world_files, tmp_path, at):
    """Four steps a member, and a checkpoint after every second one or every third: the second begins at a boundary, or not."""
    case = cases(world_files)["independent members"]
    case = replace(case, save_steps=4 if at == "just after" else 3)
    victim, once = two_runs(case, 12, tmp_path, 0)
    victim.kill_at(case.save_steps, slow_s=0.3)
    if at == "just after":
        assert (victim.folder / "work" / "member_0").is_dir()
    victim.finish("must")
    assert_same_run(victim.folder, once, 12)
    assert not (victim.folder / "work").exists()
    saved = json.loads((victim.folder / "model" / "ensemble.json").read_text())
    assert saved["family"] == "independent"


def kill_seed() -> int:
    seed = int(os.environ.get("REWARDEN_KILL_SEED", random.SystemRandom().randrange(10**6)))
    print(f"kill times drawn from REWARDEN_KILL_SEED={seed}")
    return seed


def two_runs(case: Case, steps: int, folder: Path, seed: int) -> tuple[Victim, Path]:
    """A run that is to be killed, and the folder of the same run, done in one go."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        yaml.safe_dump({**case.recipe, "max_steps": steps // case.members, "save_steps": case.save_steps, "name": "run"})
    )
    (folder / "once").mkdir()
    (folder / "killed").mkdir()
    once = Victim(case, recipe, folder / "once" / "run", random.Random(seed))
    once.finish("never")
    return Victim(case, recipe, folder / "killed" / "run", random.Random(seed)), once.folder


@pytest.mark.parametrize("kind", ["sft", "reward", "independent members", "adapted members", "ppo"])
def test_two_kills_and_resumes_equal_never_stopped(world_files, tmp_path, kind):
    """The first kill comes at a drawn time, the second inside a checkpoint write, the older checkpoint beside it."""
    case = cases(world_files)[kind]
    steps = 6 * case.save_steps
    victim, once = two_runs(case, steps, tmp_path, kill_seed())
    victim.kill_between(case.save_steps + 1, case.save_steps + 2, slow_s=victim.rng.uniform(0.2, 1) * case.slow_s)
    before = victim.newest()
    assert before > 0
    victim.kill_in("checkpoint", victim.rng.randint(1, case.files))
    assert victim.newest() == before
    print(*victim.kills, sep="\n")
    output = victim.finish("must")
    assert f"resuming after step {before} from" in output
    assert "the last run did not finish writing or deleting it" in output
    assert_same_run(victim.folder, once, steps)


def test_a_start_from_the_beginning_keeps_no_transcripts_of_the_policy_before_training(tmp_path):
    """PPO evaluates before its first step and stamps those rows with step 0; a run without a checkpoint does so again."""
    folder = RunFolder(tmp_path)
    rows = [{"step": 0, "kind": "eval"}, {"step": 1, "kind": "rollout"}, {"step": 1, "kind": "eval"}]
    folder.samples.append(1, rows)
    assert folder.truncate(1) == []
    assert folder.samples.read() == rows
    assert "dropped 3 rows" in folder.truncate(0)[0]
    assert folder.samples.read() == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "reward", "independent members", "adapted members", "ppo", "ppo of all weights"])
def test_ten_kills_and_resumes_equal_never_stopped(world_files, tmp_path, kind, record_property):
    """Seven kills at drawn times, two inside checkpoint writes, the last while the results are written."""
    case = cases(world_files)[kind]
    steps = 80 if case.members == 1 else 78
    seed = kill_seed()
    record_property("point", POINT)
    record_property("kind", kind)
    record_property("seed", seed)
    victim, once = two_runs(case, steps, tmp_path, seed)
    for number in range(9):
        if number in (2, 6):
            victim.kill_in("checkpoint", victim.rng.randint(1, 2 * case.files))
        else:
            victim.kill_between(0 if number == 4 else 1, 6, slow_s=victim.rng.choice([0, case.slow_s]))
    victim.kill_in("export", 1)
    print(*victim.kills, sep="\n")
    victim.finish("must")
    assert_same_run(victim.folder, once, steps)
    record_property("kills", len(victim.kills))
    record_property("kills_inside_a_checkpoint_write", sum(".tmp-step-" in kill for kill in victim.kills))
    record_property("kills_while_exporting", 1)
    record_property("steps", steps)
    record_property("differences", 0)
    if kind.startswith("ppo"):
        state = json.loads((once / "checkpoints" / f"step-{steps:08d}" / "checkpoint.json").read_text())["state"]
        record_property("best_step", state["best_step"])
