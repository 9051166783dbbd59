"""The runs in the built-in world that several slow tests read: made once, kept, and skipped while finished and unchanged.

    RUNS/seed0/start sft pairs reward ppo compare   the demo's chain
               reward_plain reward_large            reward models from 2,000 and 4,300 of its pairs
               ppo_safe                             PPO with its safeguards against reward_plain: the recipe that ships
               ppo_safe_fast ppo_vanilla            with and without them at one learning rate; checkpoints of every step
    RUNS/spec_rate0/...                             an SFT policy at the rate of the specification and a reward model from it
    RUNS/measured/...json                           what a policy said, or how it scored step by step
    RUNS/logs/...log                                what every process printed

REWARDEN_SLOW_RUNS names RUNS; it is slow/runs below the repository otherwise. Everything that trains or samples runs in a process
of its own, because the shape checks of the tests would slow it down: seed 0's chain alone on two threads, as a user runs it, all
others two side by side on one thread each.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
RUNS = Path(os.environ.get("REWARDEN_SLOW_RUNS") or ROOT / "slow" / "runs").resolve()
STAGES = ("start", "sft", "pairs", "reward", "ppo", "compare")

KEEP_STEPS = ("save_steps=1", "save_total_limit=null")
REWARDS = {
    "plain": ("data.max_rows=2000", "num_train_epochs=2", "optim.learning_rate=7e-4"),
    "large": ("data.max_rows=4300", "num_train_epochs=2", "optim.learning_rate=7e-4"),
}
AS_VANILLA = ("learning_rate=1e-3", "lr_scheduler_type=constant", "min_lr_ratio=0", "warmup_steps=0")
PPO = {
    "safe": ("ppo_world.yaml", ("max_steps=10",)),
    "safe_fast": (
        "ppo_world.yaml",
        ("max_steps=10", *(f"{group}.{key}" for group in ("optim", "critic_optim") for key in AS_VANILLA)),
    ),
    "vanilla": ("ppo_world_vanilla.yaml", ()),
}

TIMEOUT = 3600
OTHER_RUN = ("was made by another recipe", "holds a run of the same recipe on other inputs")
# 97.5 % quantile of Student's t by degrees of freedom (any table of it)
T975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


@dataclass(frozen=True, kw_only=True)
class Task:
    """A process to run: its name (also of its log) and its command."""

    name: str
    command: tuple[str, ...]
    threads: int = 1


def folder(seed: int) -> Path:
    """Where the runs of a seed lie."""
    return RUNS / f"seed{seed}"


def recipe_task(name: str, recipe: str, overrides: Sequence[str], threads: int = 1) -> Task:
    """`rewarden run` on one of the recipes that ship."""
    command = (sys.executable, "-m", "rewarden.cli", "run", str(RECIPES / recipe), *overrides)
    return Task(name=name, command=command, threads=threads)


def chains(seeds: Sequence[int]) -> dict[int, Path]:
    """The whole demo for each seed; returns its folder by seed."""
    tasks = {
        seed: recipe_task(
            f"seed{seed}-demo",
            "demo.yaml",
            (f"name=seed{seed}", f"output_dir={RUNS}", f"seed={seed}"),
            threads=2 if seed == 0 else 1,
        )
        for seed in seeds
    }
    if 0 in tasks:
        note_load(folder(0))
        side_by_side([tasks[0]])
    side_by_side([task for seed, task in tasks.items() if seed != 0])
    return {seed: folder(seed) for seed in seeds}


def reward_models(kind: str, seeds: Sequence[int]) -> dict[int, Path]:
    """The reward model of this kind (plain, large) on each seed's chain."""
    chains(seeds)
    side_by_side(
        [
            recipe_task(
                f"seed{seed}-reward_{kind}",
                "reward_world.yaml",
                (
                    f"name=reward_{kind}",
                    f"output_dir={folder(seed)}",
                    f"model.model_name_or_path={folder(seed)}/sft/model",
                    f"data.path={folder(seed)}/pairs/pairs.jsonl",
                    f"eval_data.path={folder(seed)}/pairs/pairs_test.jsonl",
                    f"head_seed={seed}",
                    f"seed={seed}",
                    *REWARDS[kind],
                ),
            )
            for seed in seeds
        ]
    )
    return {seed: folder(seed) / f"reward_{kind}" for seed in seeds}


def at_spec_rate(seeds: Sequence[int]) -> dict[int, Path]:
    """The plain reward model of each seed on an SFT policy trained at the rate of the specification."""
    recipe = str(Path(__file__).with_name("spec_rate.yaml"))
    side_by_side(
        [recipe_task(f"seed{s}-spec_rate", recipe, (f"name=spec_rate{s}", f"output_dir={RUNS}", f"seed={s}")) for s in seeds]
    )
    return {seed: RUNS / f"spec_rate{seed}" / "reward" for seed in seeds}


def ppo_runs(kind: str, seeds: Sequence[int]) -> dict[int, Path]:
    """PPO with ("safe", "safe_fast") or without ("vanilla") its safeguards: same SFT policy, reward model, prompts and seed."""
    rewards = reward_models("plain", seeds)
    recipe, extra = PPO[kind]
    side_by_side(
        [
            recipe_task(
                f"seed{seed}-ppo_{kind}",
                recipe,
                (
                    f"name=ppo_{kind}",
                    f"output_dir={folder(seed)}",
                    f"policy.model_name_or_path={folder(seed)}/sft/model",
                    f"reward.path={rewards[seed]}/model",
                    f"data.path={folder(seed)}/pairs/prompts.jsonl",
                    f"seed={seed}",
                    *KEEP_STEPS,
                    *extra,
                ),
            )
            for seed in seeds
        ]
    )
    return {seed: folder(seed) / f"ppo_{kind}" for seed in seeds}


def measure(kind: str, asked: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Run world_measure.py's `kind` once per name with the arguments given; its answers by name."""
    out = {name: RUNS / "measured" / f"{name}.json" for name in asked}
    script = str(Path(__file__).with_name("world_measure.py"))
    for path in out.values():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
    side_by_side(
        [
            Task(name=f"measure-{name}", command=(sys.executable, script, kind, json.dumps(dict(arguments)), str(out[name])))
            for name, arguments in asked.items()
        ]
    )
    return {name: read_json(path) for name, path in out.items()}


_done: set[Task] = set()


def side_by_side(tasks: Sequence[Task]) -> None:
    """Run the tasks, two at a time; those this process has already run are left out, measurements excepted."""
    todo = [task for task in tasks if task not in _done]
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(_run, task) for task in todo]:
            future.result()
    _done.update(task for task in todo if not task.name.startswith("measure-"))


def _run(task: Task) -> None:
    code, text = _process(task, task.command, "w")
    if code and any(words in text for words in OTHER_RUN) and task.command[3] == "run":
        # A single recipe is not moved aside by itself when its inputs have changed; a chain is.
        code, text = _process(task, (*task.command, "--resume", "never"), "a")
    if code:
        raise RuntimeError(
            f"{task.name} ended with {code}\n{' '.join(task.command)}\n{text[-3000:]}\n(all of it: {_log(task)})"
        )


def _process(task: Task, command: Sequence[str], mode: str) -> tuple[int, str]:
    log = _log(task)
    log.parent.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "OMP_NUM_THREADS": str(task.threads), "PYTHONPATH": str(ROOT)}
    with log.open(mode, encoding="utf-8") as file:
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=env, cwd=ROOT, timeout=TIMEOUT, check=False)
    return done.returncode, log.read_text(encoding="utf-8")


def _log(task: Task) -> Path:
    return RUNS / "logs" / f"{task.name}.log"


def note_load(run: Path) -> None:
    """Keep the load average found before a chain begins: its times mean little on a busy machine."""
    if not (run / "start" / "done.json").exists():
        run.mkdir(parents=True, exist_ok=True)
        (run / "load.json").write_text(json.dumps(os.getloadavg()), encoding="utf-8")


def load_before(run: Path) -> float | None:
    """The 1-minute load average before the chain began; None when its beginning was not seen."""
    path = run / "load.json"
    return read_json(path)[0] if path.exists() else None


def stage_seconds(run: Path, stages: Sequence[str] = STAGES) -> dict[str, float]:
    """Wall time of each stage from the files it left, loading included; import time of the process is not.

    A stage that was interrupted and resumed counts from its last start.
    """
    seconds: dict[str, float] = {}
    before = None
    for stage in stages:
        env = read_json(run / stage / "env.json")
        begun = datetime.strptime(env["started"], "%Y-%m-%dT%H:%M:%S%z").timestamp()
        ended = (run / stage / "done.json").stat().st_mtime
        follows = before is not None and -1 <= begun - before < 60
        seconds[stage] = ended - (before if follows and before is not None else begun)
        before = ended
    return seconds


def read_json(path: Path) -> Any:
    """One JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a jsonl file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def t_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and its 95 % interval by Student's t over independent values."""
    middle = mean(values)
    half = T975[len(values) - 1] * stdev(values) / sqrt(len(values))
    return middle, middle - half, middle + half


def record(record_property: Any, name: str, by_seed: Mapping[int, float]) -> None:
    """Every seed's number, their mean and their standard deviation."""
    for seed, value in by_seed.items():
        record_property(f"{name}, seed {seed}", float(value))
    record_property(f"{name}, mean", mean(by_seed.values()))
    if len(by_seed) > 1:
        record_property(f"{name}, sd over seeds", stdev(by_seed.values()))


def within(name: str, by_seed: Mapping[int, float], low: float, high: float) -> list[str]:
    """A line for each seed whose number is outside low..high."""
    return [
        f"{name}, seed {seed}: {value:.4f} is not in {low}..{high}"
        for seed, value in by_seed.items()
        if not low <= value <= high
    ]
