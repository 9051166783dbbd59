"""Running a grid: every stage whose inputs are ready, `jobs` at a time, in processes of their own.

A stage that fails takes those that read it along; the others are finished, and what failed is said at the end. Stages are known
by their fingerprints, so the same command goes on where a grid stopped, however it was stopped.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from rewarden.errors import RewardenError
from rewarden.recipe.cells import CELLS_FILE, LOGS
from rewarden.recipe.chain import Recipe
from rewarden.recipe.grid_view import GridView
from rewarden.recipe.pool import Pool
from rewarden.recipe.run_stage import Ready, clear_changed, finished
from rewarden.runtime.checkpoint import Resume
from rewarden.runtime.disk import write_atomic
from rewarden.runtime.report import RunFolder

TIMES_FILE = "grid.json"
"""What became of each stage, and how long it took: from it a later start estimates the time left."""


def run_grid(recipe: Recipe, ready: Sequence[Ready], *, resume: Resume, console: Console) -> None:
    """Run every stage of every cell, then those that gather them.

    Errors: RewardenError at the end that lists the stages that failed; all that do not read one of them are finished then.
    """
    (recipe.folder / LOGS).mkdir(exist_ok=True)
    write_atomic(recipe.folder / CELLS_FILE, json.dumps(_cells(recipe), indent=2))
    for line in missing_stages(recipe):
        console.print(line)
    _Grid(recipe, ready, resume, console).run()


def cells_print(recipe: Recipe) -> str:
    """Hash of what CELLS_FILE says of the cells: their keys and which stages they have."""
    plain = [{"keys": dict(cell.keys), "stages": dict(cell.stages)} for cell in recipe.cells]
    return hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode()).hexdigest()


def missing_stages(recipe: Recipe) -> list[str]:
    """A line for each stage of the recipe that no cell has, because its `only:` holds nowhere."""
    there = {stage.base for stage in recipe.stages}
    return [f"{name}: in no cell, because its `only:` holds in none" for name in recipe.written if name not in there]


def _cells(recipe: Recipe) -> list[dict[str, Any]]:
    folders = {stage.name: str(stage.folder) for stage in recipe.stages}
    return [
        {"keys": dict(cell.keys), "stages": {base: folders[name] for base, name in cell.stages.items()}}
        for cell in recipe.cells
    ]


class _Grid:
    """One run of a grid: what is waiting, running, done and failed."""

    def __init__(self, recipe: Recipe, ready: Sequence[Ready], resume: Resume, console: Console) -> None:
        self.recipe, self.resume, self.console = recipe, resume, console
        self.waiting = {item.stage.name: item for item in ready}
        self.done: set[str] = set()
        self.failed: dict[str, str] = {}
        self.times = _read_times(recipe.folder / TIMES_FILE)
        self.view = GridView(recipe, self.times, console)

    def run(self) -> None:
        """Until nothing is waiting that could run."""
        self.skip_finished()
        with self.view, Pool(self.recipe.jobs, threads_each(self.recipe.jobs)) as pool:
            try:
                while self.start(pool) or pool.running:
                    for name, answer in pool.wait(0.25):
                        self.take(name, answer, pool)
                    self.view.draw(pool.running)
            except KeyboardInterrupt:
                left = len(self.recipe.stages) - len(self.done)
                self.view.note(f"stopped with {left} of {len(self.recipe.stages)} stages left; run the same command to go on")
                raise
        self.finish()

    def skip_finished(self) -> None:
        """Take out what is done and unchanged; it costs no process."""
        if self.resume == "never":
            return
        for name, item in list(self.waiting.items()):
            if finished(RunFolder(item.stage.folder), item.print_):
                del self.waiting[name]
                self.done.add(name)
                self.view.skipped(name)
        if self.done:
            self.view.note(f"{len(self.done)} of {len(self.recipe.stages)} stages are finished and unchanged, skipped")

    def start(self, pool: Pool) -> bool:
        """Give every free process a stage whose inputs are there; whether any stage was started."""
        started = False
        for name, item in list(self.waiting.items()):
            broken = [other for other in item.stage.reads if other in self.failed]
            if broken:
                del self.waiting[name]
                self.failed[name] = ""  # not run: the one it reads has the message
                continue
            if not pool.free or not all(other in self.done for other in item.stage.reads):
                continue
            del self.waiting[name]
            started = True
            try:
                clear_changed(item, self.console)
            except RewardenError as error:
                self.take(name, {"error": str(error), "seconds": 0.0}, pool)
                continue
            pool.give(name, self.order(item))
            self.view.started(name)
        return started

    def order(self, item: Ready) -> dict[str, Any]:
        """What a process is told."""
        stage = item.stage
        return {
            "name": stage.name,
            "folder": str(stage.folder),
            "raw": dict(stage.raw),
            "print": item.print_,
            "resume": self.resume,
            "where": f"{self.recipe.path}: stage {stage.name}",
            "log": str(self.log(stage.name)),
        }

    def log(self, name: str) -> Path:
        """Where a stage's output goes."""
        return self.recipe.folder / LOGS / f"{name}.log"

    def take(self, name: str, answer: Mapping[str, Any], pool: Pool) -> None:
        """A stage has ended."""
        if answer["error"] is None:
            self.done.add(name)
        else:
            self.failed[name] = answer["error"]
        self.times[name] = {key: value for key, value in answer.items() if value is not None}
        write_atomic(self.recipe.folder / TIMES_FILE, json.dumps(self.times, indent=2))
        self.view.ended(name, answer["error"], answer["seconds"], self.log(name), pool.running)

    def finish(self) -> None:
        """Say that all is done, or raise with what failed."""
        if not self.failed:
            self.console.print(f"{self.recipe.name}: {len(self.done)} stages done; results in {self.recipe.folder}")
            return
        own = {name: error for name, error in self.failed.items() if error}
        taken = len(self.failed) - len(own)
        lines = [f"  {name}: {error}\n    log: {self.log(name)}" for name, error in own.items()]
        also = f"; {taken} that read one of them did not run" if taken else ""
        raise RewardenError(
            f"{len(own)} of {len(self.recipe.stages)} stages failed{also}, the other {len(self.done)} are finished:\n"
            + "\n".join(lines)
            + "\nmend what is wrong and run the same command again, or leave those cells out of the grid"
        )


def threads_each(jobs: int) -> int:
    """Threads of each process: the processors this command may use, shared out; fewer where OMP_NUM_THREADS says so."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    given = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, min(cores // jobs, int(given) if given.isdigit() else cores))


def _read_times(path: Path) -> dict[str, Any]:
    """What an earlier start wrote; nothing when it is not there or damaged, for it only feeds an estimate."""
    try:
        times = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return times if isinstance(times, dict) else {}
