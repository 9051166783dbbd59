"""The demo over five seeds: PPO gains gold over SFT on held-out prompts, measured in pairs with the same sampling seeds."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import world_runs as runs

pytestmark = pytest.mark.slow

SEEDS = (0, 1, 2, 3, 4)
WORST = -0.05


@pytest.fixture(scope="module")
def chains() -> dict[int, Path]:
    """The demo's chain of every seed."""
    return runs.chains(SEEDS)


@pytest.fixture(scope="module")
def tables(chains) -> dict[int, dict[str, dict[str, Any]]]:
    """seed -> measure -> its row of the demo's comparison."""
    return {
        seed: {row["name"]: row for row in runs.read_json(chain / "compare" / "comparison.json")}
        for seed, chain in chains.items()
    }


def record_gains(record_property: Any, tables: dict[int, dict[str, dict[str, Any]]], name: str) -> dict[int, float]:
    """The paired gain of every seed, its interval over prompts, and the interval of the mean over seeds."""
    gains = {seed: table[name]["difference"] for seed, table in tables.items()}
    runs.record(record_property, f"gain in {name}", gains)
    for seed, table in tables.items():
        record_property(f"95 % interval over prompts, seed {seed}", [table[name]["low"], table[name]["high"]])
        record_property(f"prompts, seed {seed}", table[name]["num_prompts"])
    _, low, high = runs.t_interval(list(gains.values()))
    record_property("95 % t-interval over seeds", [low, high])
    record_property("n seeds", len(gains))
    return gains


def test_the_demo_gains_gold_over_five_seeds_and_no_seed_loses(chains, tables, record_property):
    record_property(
        "point", "1 demo: mean paired gain in gold of the trained turn over 5 seeds > 0 by its 95 % interval, none < -.05"
    )
    gains = record_gains(record_property, tables, "gold_turn")
    for seed, chain in chains.items():
        last = runs.read_lines(chain / "ppo" / "metrics.jsonl")[-1]
        record_property(f"exported step, seed {seed}", last.get("selection/best_step"))
    for name in ("proxy", "kl", "length", "malformed"):
        for when in ("before", "after"):
            record_property(f"{name} {when}, by seed", [round(table[name][when], 3) for table in tables.values()])
    middle, low, _ = runs.t_interval(list(gains.values()))
    shown = ", ".join(f"seed {seed}: {gain:+.3f}" for seed, gain in gains.items())
    assert low > 0, f"mean gain {middle:+.4f}, lower end of its interval {low:+.4f}; {shown}"
    assert min(gains.values()) >= WORST, f"a seed is below {WORST}; {shown}"


def test_gold_at_the_last_turn_is_reported(tables, record_property):
    record_property("point", "1 demo: paired gain in gold at turn 5 over 5 seeds (reported, no range)")
    gains = record_gains(record_property, tables, "gold_end")
    assert len(gains) == len(SEEDS)


def test_the_time_of_the_demo_is_reported(chains, record_property):
    record_property("point", "1 demo: own time at most 6 min on two cores (asserted only with REWARDEN_SLOW_QUIET=1)")
    seconds = runs.stage_seconds(chains[0])
    for stage, value in seconds.items():
        record_property(f"seconds, seed 0, {stage}", value)
    total = sum(seconds.values())
    record_property("seconds, seed 0, all stages, two threads", total)
    record_property("load average before", runs.load_before(chains[0]))
    record_property("cores", os.cpu_count())
    for seed in SEEDS[1:]:
        record_property(f"seconds, seed {seed}, one thread beside another run", sum(runs.stage_seconds(chains[seed]).values()))
    quiet = os.environ.get("REWARDEN_SLOW_QUIET") == "1"
    record_property("asserted", quiet)
    assert not quiet or total <= 360, f"the chain of seed 0 took {total:.0f} s"
