"""The memory that `rewarden show` works out, against what SFT, reward training and PPO on SmolLM2 really take."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import world_runs as runs

from rewarden.recipe.jobs import parse_recipe
from rewarden.recipe.memory import estimate
from rewarden.recipe.read import read_recipe

pytestmark = pytest.mark.slow

CHILD = Path(__file__).parent / "memory_child.py"
ALLOWED = 0.15
THREADS = 2

# Few steps of the shipped recipes, on so few rows that the plan of batches is known and not guessed from a sample.
STEPS = {
    "sft_hh": ("data.max_rows=128", "eval_data.max_rows=16", "max_steps=4"),
    "reward_hh": ("data.max_rows=64", "eval_data.max_rows=32", "max_steps=3"),
    "ppo_hh": (
        "data.max_rows=128",
        "eval_data.max_rows=8",
        "max_steps=1",
        "rollout_batch_size=16",
        "num_ppo_epochs=1",
        "eval_steps=1",
    ),
}


@pytest.fixture(scope="module")
def measured(shared, smollm2):
    """(measured, estimated) bytes above the imports by recipe; one process after the other, each from the models before it."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the peak of a process can be reset on Linux only")
    root = Path(tempfile.mkdtemp(prefix="memory-"))
    data = shared / "data" / "hh_rlhf_helpful" / "resplit"
    paths = [f"{key}.{part}" for key in ("data", "eval_data") for part in (f"path={data}", "subset=null")]
    models = {"sft_hh": [f"model.model_name_or_path={smollm2}"]}
    env = {**os.environ, "PYTHONPATH": str(runs.ROOT), "OMP_NUM_THREADS": str(THREADS)}
    found, before = {}, Path.cwd()
    os.chdir(root)  # the recipes name each other's models by relative paths
    try:
        for name, more in STEPS.items():
            words = [*paths, "view=off", *models.get(name, []), *more]
            recipe = runs.RECIPES / f"{name}.yaml"
            ((spec, _),) = parse_recipe(read_recipe(recipe, words))
            expected = estimate(spec)
            command = [sys.executable, str(CHILD), str(recipe), *words]
            done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr[-3000:]
            found[name] = (json.loads(done.stdout.splitlines()[-1])["peak"], expected)
    finally:
        os.chdir(before)
    return found


def test_the_estimate_is_within_15_percent_of_the_measured_peak(measured, record_property):
    record_property("point", "Memory estimate of `rewarden show` within 15 % for SmolLM2 SFT, reward model and PPO")
    errors = {}
    for name, (peak, expected) in measured.items():
        errors[name] = expected.peak.total / peak - 1
        record_property(
            name,
            f"measured {peak / 1e6:,.0f} MB, estimated {expected.peak.total / 1e6:,.0f} MB ({errors[name]:+.1%}), "
            f"peak in {expected.peak.name}, {expected.notes[0]}",
        )
    assert {name: error for name, error in errors.items() if abs(error) > ALLOWED} == {}
