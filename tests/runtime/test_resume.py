"""N steps equal N/2, kill -9, resume and the rest, bit for bit; a kill inside a checkpoint write loses nothing older."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from toy_job import make_job

from rewarden.runtime.job import Drive, drive
from rewarden.runtime.metrics import read_metrics
from rewarden.runtime.ranks import Ranks
from rewarden.runtime.report import RunFolder
from rewarden.runtime.samples import Samples

STEPS = 30
MANY_STEPS = 80


def start(folder: Path, steps: int, *, resume: str = "auto", pause_at_save: int = 0) -> subprocess.Popen:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TOY_PAUSE_AT_SAVE": str(pause_at_save)}
    command = [sys.executable, "-c", "import toy_job; toy_job.main()", str(folder), str(steps), resume]
    return subprocess.Popen(
        command, env=env, cwd=Path(__file__).parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen) -> str:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    return output


def wait_for(condition, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "the toy job did not get there in 60 s"
        time.sleep(0.003)


def kill(process: subprocess.Popen) -> str:
    process.kill()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == -9, f"the job had ended before it was killed: {output}"
    return output


def num_lines(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_at_steps(folder: Path, steps: int, rng: random.Random, *, ahead: int) -> None:
    """Start or resume the job and kill it a random while after it has done 1 to `ahead` more steps."""
    newest = max((int(p.name[5:]) for p in (folder / "checkpoints").glob("step-*")), default=0)
    target = newest + rng.randint(1, ahead)
    env = folder / "env.json"
    before = env.read_bytes() if env.exists() else b""
    process = start(folder, steps)
    # env.json is written after the metrics have been cut back to the checkpoint
    wait_for(lambda: env.exists() and env.read_bytes() != before and num_lines(folder) >= target, process)
    time.sleep(rng.uniform(0, 0.02))
    kill(process)


def kill_in_save(folder: Path, steps: int, save: int) -> None:
    """Start or resume the job and kill it inside its `save`-th checkpoint write."""
    (folder / "paused").unlink(missing_ok=True)
    process = start(folder, steps, pause_at_save=save)
    wait_for((folder / "paused").exists, process)
    before = sorted(p.name for p in (folder / "checkpoints").iterdir())
    kill(process)
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == before
    assert any(name.startswith(".tmp-step-") for name in before)
    if save > 1:
        assert any(name.startswith("step-") for name in before), "the older checkpoint must outlive the kill"


def without_times(rows: list[dict]) -> list[dict]:
    return [{k: repr(v) for k, v in row.items() if not k.startswith("time/")} for row in rows]


def assert_same_run(ours: Path, reference: Path, steps: int) -> None:
    final = f"checkpoints/step-{steps:08d}"
    for name in (f"{final}/policy/weights.safetensors", f"{final}/critic/weights.safetensors", "model/weights.safetensors"):
        assert (ours / name).read_bytes() == (reference / name).read_bytes(), name
    a, b = (torch.load(folder / final / "optimizer/optimizer.pt", weights_only=True) for folder in (ours, reference))
    assert {k: v for k, v in a.items() if isinstance(v, int)} == {k: v for k, v in b.items() if isinstance(v, int)}
    assert a["moments"].keys() == b["moments"].keys()
    for key, state in a["moments"].items():
        assert state.keys() == b["moments"][key].keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(value, b["moments"][key][name]) for name, value in state.items()), key
    states = [json.loads((folder / final / "checkpoint.json").read_text())["state"] for folder in (ours, reference)]
    assert states[0] == states[1]
    rng = [torch.load(folder / final / "rng.pt", weights_only=True)[0]["torch"] for folder in (ours, reference)]
    assert torch.equal(*rng)
    rows = [read_metrics(folder / "metrics.jsonl") for folder in (ours, reference)]
    assert [row["step"] for row in rows[0]] == list(range(1, steps + 1))
    assert without_times(rows[0]) == without_times(rows[1])
    assert Samples(ours / "samples.parquet").read() == Samples(reference / "samples.parquet").read()


def kill_seed() -> int:
    seed = int(os.environ.get("REWARDEN_KILL_SEED", random.SystemRandom().randrange(10**6)))
    print(f"kill times drawn from REWARDEN_KILL_SEED={seed}")
    return seed


def never_stopped(folder: Path, steps: int) -> Path:
    """The same run, to its end in one go, in this process."""
    ranks = Ranks.single("cpu")
    job, _, _ = make_job(steps, ranks)
    outcome = drive(job, RunFolder(folder), ranks, cfg=Drive(save_steps=4, view="off"), recipe={"toy": {"steps": steps}})
    assert outcome.step == steps
    return folder


def test_killed_and_resumed_equals_never_stopped(tmp_path):
    rng = random.Random(kill_seed())
    run = tmp_path / "run"
    kill_at_steps(run, STEPS, rng, ahead=10)
    kill_in_save(run, STEPS, 2)
    output = finish(start(run, STEPS, resume="must"))
    assert "resuming after step" in output
    assert "removed" in output
    assert ".tmp-step-" in output
    assert "took over the lock of pid" in output
    assert not list(run.glob("checkpoints/.*"))
    assert_same_run(run, never_stopped(tmp_path / "reference", STEPS), STEPS)


@pytest.mark.slow
def test_ten_kills_and_resumes_equal_never_stopped(tmp_path):
    rng = random.Random(kill_seed())
    run = tmp_path / "run"
    for index in range(10):
        if index % 4 == 2:
            kill_in_save(run, MANY_STEPS, 1 + index % 2)
        else:
            kill_at_steps(run, MANY_STEPS, rng, ahead=5)
    finish(start(run, MANY_STEPS))
    assert_same_run(run, never_stopped(tmp_path / "reference", MANY_STEPS), MANY_STEPS)
