"""SFT, a reward model and PPO on a real model and real data by the three commands of the README: the recipes' own sizes, and a larger run.

Each command of the larger run is killed once (SIGKILL, at a metrics line drawn from a printed seed) and given again.
The runs lie in RUNS/hh-TIME and RUNS/hh-large-TIME and are made anew every time, or their times would mean nothing.
"""

import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import world_runs as runs

pytestmark = pytest.mark.slow

NAMES = ("sft_hh", "reward_hh", "ppo_hh")
LARGER = {
    "sft_hh": ("data.max_rows=920", "eval_data.max_rows=100"),
    "reward_hh": ("data.max_rows=5000", "eval_data.max_rows=1000", "max_length=192"),
    "ppo_hh": ("data.max_rows=3000", "max_steps=20", "eval_steps=5"),
}


@dataclass
class Run:
    """Where the three runs lie, the minutes each took (killed parts included) and how often each was killed."""

    root: Path
    minutes: dict[str, float] = field(default_factory=dict)
    kills: dict[str, int] = field(default_factory=dict)


def commands(shared: Path, smollm2: Path, overrides: dict[str, tuple[str, ...]]) -> dict[str, list[str]]:
    data = shared / "data" / "hh_rlhf_helpful" / "resplit"
    paths = [f"{key}.{part}" for key in ("data", "eval_data") for part in (f"path={data}", "subset=null")]
    model = {"sft_hh": [f"model.model_name_or_path={smollm2}"]}
    start = [sys.executable, "-m", "rewarden.cli", "run"]
    return {n: [*start, str(runs.RECIPES / f"{n}.yaml"), *paths, *model.get(n, []), *overrides.get(n, ())] for n in NAMES}


def go(root: Path, name: str, command: list[str], kill_at: int | None) -> tuple[float, bool]:
    """Minutes of one process, and whether it was killed when metrics.jsonl reached `kill_at` lines."""
    metrics = root / "runs" / name / "metrics.jsonl"
    env = {**os.environ, "PYTHONPATH": str(runs.ROOT), "OMP_NUM_THREADS": str(os.cpu_count())}
    begun = time.time()
    with (root / f"{name}.log").open("a", encoding="utf-8") as log:
        process = subprocess.Popen(command, cwd=root, env=env, stdout=log, stderr=subprocess.STDOUT)
        while process.poll() is None:
            if kill_at is not None and metrics.exists() and metrics.read_bytes().count(b"\n") >= kill_at:
                process.send_signal(signal.SIGKILL)
                process.wait()
                return (time.time() - begun) / 60, True
            time.sleep(0.5)
    assert process.returncode == 0, (root / f"{name}.log").read_text(encoding="utf-8")[-3000:]
    return (time.time() - begun) / 60, False


def all_three(root: Path, asked: dict[str, list[str]], kill_at: dict[str, int]) -> Run:
    run = Run(root)
    root.mkdir(parents=True, exist_ok=True)
    for name, command in asked.items():
        minutes, killed = go(root, name, command, kill_at.get(name))
        if killed:
            again, _ = go(root, name, command, None)
            minutes += again
        run.minutes[name], run.kills[name] = minutes, int(killed)
    return run


def kept(log: Path, pattern: str) -> int:
    """The count a run printed about its data."""
    return int(re.search(pattern, log.read_text(encoding="utf-8")).group(1))


def check(run: Run, record_property, *, dialogues: int, pairs: int, heldout: int, steps: int, minutes: int) -> None:
    """The sizes, the time and the checks of the first minibatch; the numbers of the page are recorded."""
    root = run.root / "runs"
    for name, value in run.minutes.items():
        record_property(f"minutes, {name}", round(value, 1))
    record_property("kills", run.kills)
    record_property("load average after", os.getloadavg()[2])
    ppo = runs.read_lines(root / "ppo_hh" / "metrics.jsonl")
    evaluation = runs.read_json(root / "reward_hh" / "evaluation.json")
    sizes = [
        kept(run.root / "sft_hh.log", r"encoding: (\d+) of"),
        kept(run.root / "reward_hh.log", r"encoding: (\d+) pairs kept"),
    ]
    record_property("dialogues, pairs, held-out pairs, PPO steps", [*sizes, evaluation["eval/num_pairs"], len(ppo)])
    for key in ("accuracy", "accuracy_low", "accuracy_high", "longer_wins_accuracy"):
        record_property(f"reward {key}", evaluation[f"eval/{key}"])
    record_property("SFT held-out nll", runs.read_lines(root / "sft_hh" / "metrics.jsonl")[-1]["eval/nll"])
    for key in ("score/mean", "kl/k3", "length/mean", "eos_rate"):
        record_property(f"PPO {key} by step", [round(row[key], 4) for row in ppo])
    assert [row["step"] for row in ppo] == list(range(1, len(ppo) + 1))
    assert sizes[0] >= dialogues
    assert sizes[1] >= pairs
    assert evaluation["eval/num_pairs"] >= heldout
    assert len(ppo) >= steps
    assert ppo[0]["check/log_ratio_max"] <= 1e-5
    assert ppo[0]["check/kl_max"] <= 1e-5
    assert all(row["rollout/logp_gap_tokens"] == 0 for row in ppo)
    assert sum(run.minutes.values()) <= minutes, f"{run.minutes}"


def folder(name: str) -> Path:
    """A new folder."""
    return runs.RUNS / f"{name}-{int(time.time())}"


def test_the_three_commands_run_end_to_end_on_real_input(shared, smollm2, record_property):
    record_property("point", "2 SmolLM2 and HH helpful: SFT, reward model and PPO by three commands in at most 60 minutes")
    root = folder("hh")
    run = all_three(root, commands(shared, smollm2, {}), {})
    check(run, record_property, dialogues=200, pairs=600, heldout=100, steps=6, minutes=60)


def test_the_larger_run_survives_a_kill_of_every_command(shared, smollm2, record_property):
    record_property("point", "3 the full real run: 600 dialogues, 1,500 pairs, 20 PPO steps, three kills, at most 150 minutes")
    root = folder("hh-large")
    seed = int(os.environ.get("REWARDEN_KILL_SEED", time.time()))
    draw = random.Random(seed)
    kill_at = {"sft_hh": draw.randint(5, 60), "reward_hh": draw.randint(5, 80), "ppo_hh": draw.randint(3, 17)}
    print(f"kill seed {seed}: killed when metrics.jsonl has {kill_at} lines")
    record_property("kill seed", seed)
    record_property("killed at line", kill_at)
    run = all_three(root, commands(shared, smollm2, LARGER), kill_at)
    assert sum(run.kills.values()) == 3
    check(run, record_property, dialogues=600, pairs=1500, heldout=300, steps=20, minutes=150)
