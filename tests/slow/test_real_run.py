"""SFT, a reward model and PPO on a real model and real data, by the three commands of the README."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import world_runs as runs

pytestmark = pytest.mark.slow

MINUTES = 60


@pytest.fixture(scope="module")
def finished(shared, smollm2) -> dict[str, float]:
    """Minutes of each command; the runs lie in RUNS/hh and are made anew every time, or their times would mean nothing."""
    root = runs.RUNS / f"hh-{int(time.time())}"
    root.mkdir(parents=True)
    data = shared / "data" / "hh_rlhf_helpful" / "resplit"
    paths = [f"{key}.{part}" for key in ("data", "eval_data") for part in (f"path={data}", "subset=null")]
    extra = {"sft_hh": [f"model.model_name_or_path={smollm2}"], "reward_hh": [], "ppo_hh": []}
    minutes = {"root": root}
    for name, more in extra.items():
        begun = time.time()
        command = [sys.executable, "-m", "rewarden.cli", "run", str(runs.RECIPES / f"{name}.yaml"), *paths, *more]
        env = {**os.environ, "PYTHONPATH": str(runs.ROOT), "OMP_NUM_THREADS": str(os.cpu_count())}
        with (root / f"{name}.log").open("w", encoding="utf-8") as log:
            done = subprocess.run(command, cwd=root, env=env, stdout=log, stderr=subprocess.STDOUT, check=False)
        assert done.returncode == 0, (root / f"{name}.log").read_text(encoding="utf-8")[-3000:]
        minutes[name] = (time.time() - begun) / 60
    return minutes


def kept(log: Path, pattern: str) -> int:
    """The count a run printed about its data."""
    return int(re.search(pattern, log.read_text(encoding="utf-8")).group(1))


def test_the_three_commands_run_end_to_end_on_real_input(finished, record_property):
    record_property("point", "2 SmolLM2 and HH helpful: SFT, reward model and PPO by three commands in at most 60 minutes")
    root = finished["root"] / "runs"
    minutes = {name: value for name, value in finished.items() if name != "root"}
    for name, value in minutes.items():
        record_property(f"minutes, {name}", round(value, 1))
    record_property("load average after", os.getloadavg()[2])
    dialogues = kept(finished["root"] / "sft_hh.log", r"encoding: (\d+) of")
    pairs = kept(finished["root"] / "reward_hh.log", r"encoding: (\d+) pairs kept")
    ppo = runs.read_lines(root / "ppo_hh" / "metrics.jsonl")
    evaluation = runs.read_json(root / "reward_hh" / "evaluation.json")
    sft = runs.read_lines(root / "sft_hh" / "metrics.jsonl")
    record_property("dialogues, pairs, PPO steps", [dialogues, pairs, len(ppo)])
    for key in ("accuracy", "accuracy_low", "accuracy_high", "longer_wins_accuracy", "num_pairs"):
        record_property(f"reward {key}", evaluation[f"eval/{key}"])
    record_property("SFT held-out nll", sft[-1]["eval/nll"])
    for key in ("score/mean", "kl/k3", "length/mean", "eos_rate"):
        record_property(f"PPO {key} by step", [round(row[key], 4) for row in ppo])
    assert dialogues >= 200
    assert pairs >= 600
    assert len(ppo) >= 6
    assert ppo[0]["check/log_ratio_max"] <= 1e-5
    assert ppo[0]["check/kl_max"] <= 1e-5
    assert all(row["rollout/logp_gap_tokens"] == 0 for row in ppo)
    assert sum(minutes.values()) <= MINUTES, f"{minutes}"
