"""Running a recipe: stages in order, finished ones skipped, an interrupted one resumed."""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import cast

from rich.console import Console
from rich.markdown import Markdown

from rewarden.errors import ConfigError, ResumeError
from rewarden.recipe.cells import CELLS_FILE
from rewarden.recipe.grid_run import cells_print, run_grid
from rewarden.recipe.jobs import parse_recipe
from rewarden.recipe.read import Recipe, read_recipe
from rewarden.recipe.references import strings
from rewarden.recipe.run_stage import Ready, clear_changed, run_stage, saved_run
from rewarden.recipe.stages import fingerprint, resolved
from rewarden.runtime.checkpoint import Resume
from rewarden.runtime.disk import writing
from rewarden.runtime.job import Drive
from rewarden.runtime.lock import FolderLock
from rewarden.runtime.ranks import Ranks, launched
from rewarden.runtime.report import RunFolder
from rewarden.runtime.voice import one_voice
from rewarden.spec import Spec

MODES = ("auto", "must", "never")


def run_recipe(path: Path, overrides: Sequence[str] = (), *, resume: str = "auto") -> Path:
    """Run every stage; returns the run folder.

    All stages are parsed before the first one starts, so a misspelt key in the last costs nothing. A stage is skipped when it
    is finished and its config, inputs and the stages it reads are unchanged; in a chain a changed one is moved aside
    (STAGE.1, ...) and run anew. resume: "auto" goes on where a stage stopped, "must" fails when nothing can be resumed,
    "never" starts anew and keeps the old results beside. Under a launcher every rank calls it; an error is raised on one of
    them, the others leave.

    Errors: ConfigError for the recipe; ResumeError when the folder is in use, or holds another run, or nothing under "must".
    """
    if launched() == 1:
        return _run(path, overrides, resume, Ranks.start)
    ranks = Ranks.start()
    with one_voice(ranks):
        return _run(path, overrides, resume, lambda: ranks)


def _run(path: Path, overrides: Sequence[str], resume: str, start: Callable[[], Ranks]) -> Path:
    """`run_recipe` with `start` to join the ranks once the recipe is known to be right."""
    if resume not in MODES:
        raise ConfigError(f"resume is {resume!r}; use one of {', '.join(MODES)}")
    recipe = read_recipe(path, overrides)
    parsed = parse_recipe(recipe)
    _refuse_other_kind(recipe)
    for stage in recipe.stages:
        _refuse_foreign(stage.folder)
    if recipe.cells:
        return _run_cells(recipe, parsed, resume)
    ranks = start()
    console = Console(soft_wrap=True, highlight=False, markup=False, quiet=not ranks.is_main)
    ready = _ready(recipe, parsed, ranks.on_main(lambda: fingerprints(recipe, parsed)))
    if not recipe.is_chain:
        run_stage(ready[0], ranks, resume=cast(Resume, resume), console=console)
        return recipe.folder
    lock = FolderLock(recipe.folder / ".lock")
    ranks.on_main(lambda: _open_chain(recipe, ready, lock, resume, console))
    try:
        for number, item in enumerate(ready, start=1):
            console.rule(f"{recipe.name}: {item.stage.name} ({number} of {len(ready)})", align="left")
            ranks.on_main(partial(clear_changed, item, console))
            # "must" was about the chain: a stage that it has not reached yet has nothing to resume.
            run_stage(item, ranks, resume="never" if resume == "never" else "auto", console=console)
    finally:
        if ranks.is_main:
            lock.release()
    return recipe.folder


def _ready(recipe: Recipe, parsed: Sequence[tuple[Spec, Drive]], prints: Mapping[str, str]) -> list[Ready]:
    return [
        Ready(stage=stage, spec=spec, how=how, config=resolved(str(stage.raw["kind"]), spec), print_=prints[stage.name])
        for stage, (spec, how) in zip(recipe.stages, parsed, strict=True)
    ]


def _run_cells(recipe: Recipe, parsed: Sequence[tuple[Spec, Drive]], resume: str) -> Path:
    """A grid: its stages run in processes of their own, several at a time."""
    if launched() > 1:
        raise ConfigError(f"{recipe.path} has a grid, which starts processes of its own; run it without a launcher")
    ready = _ready(recipe, parsed, fingerprints(recipe, parsed))
    console = Console(soft_wrap=True, highlight=False, markup=False)
    lock = FolderLock(recipe.folder / ".lock")
    _open_chain(recipe, ready, lock, resume, console)
    try:
        run_grid(recipe, ready, resume="never" if resume == "never" else "auto", console=console)
    finally:
        lock.release()
    return recipe.folder


def _refuse_other_kind(recipe: Recipe) -> None:
    """A job and a chain in one folder would take each other's files: a stage named `model` is where a job exports to."""
    folder = recipe.folder
    alone = (folder / "recipe.yaml").exists()
    stages = sorted({path.parent.name for path in folder.glob("*/recipe.yaml")} - {p.name for p in folder.glob("earlier-*")})
    if recipe.is_chain == alone and (alone or stages):
        held = "the run of a single job" if alone else f"the stages of a chain ({', '.join(stages)})"
        mine = "a chain" if recipe.is_chain else "a single job"
        raise ResumeError(f"{folder} holds {held}, and {recipe.path} is {mine}; choose another name or output_dir")


OWN = ("metrics.jsonl", "samples.parquet", "model", "evaluation.json", "env.json", "done.json")
"""What most runs write into their folder."""


def _refuse_foreign(folder: Path) -> None:
    """A folder of somebody else's that has files of our names: a run would write over them."""
    ours = any((folder / name).exists() for name in ("recipe.yaml", "lock", "checkpoints", "earlier-1"))
    there = ", ".join(name for name in OWN if (folder / name).exists())
    if there and not ours:
        raise ResumeError(
            f"{folder} holds {there} and no recipe.yaml, so it is no run folder; choose another name or output_dir"
        )


def fingerprints(recipe: Recipe, parsed: Sequence[tuple[Spec, Drive]]) -> dict[str, str]:
    """By stage; each covers those of the stages it reads."""
    folders = {stage.name: stage.folder for stage in recipe.stages}
    prints: dict[str, str] = {}
    for stage, (spec, _) in zip(recipe.stages, parsed, strict=True):
        upstream = {folders[name]: prints[name] for name in stage.reads}
        if recipe.cells and str(recipe.folder / CELLS_FILE) in strings(stage.raw):
            upstream[recipe.folder / CELLS_FILE] = cells_print(recipe)
        prints[stage.name] = fingerprint(str(stage.raw["kind"]), spec, upstream)
    return prints


def _open_chain(recipe: Recipe, ready: Sequence[Ready], lock: FolderLock, resume: str, console: Console) -> None:
    """Lock the chain's folder: a second run with other overrides would move stages aside under the first one."""
    with writing(recipe.folder):
        recipe.folder.mkdir(parents=True, exist_ok=True)
    notice = lock.acquire()
    if notice:
        console.print(notice)
    if resume == "must" and not any(saved_run(RunFolder(r.stage.folder)).get("fingerprint") == r.print_ for r in ready):
        lock.release()
        raise ResumeError(
            f"{recipe.folder} holds no stage of this recipe that is finished or has a checkpoint, and resume is 'must'; "
            "check output_dir and name, or use --resume auto to start"
        )


def show_comparison(folder: Path) -> None:
    """Print the table and the dialogues that a `compare` stage wrote; under a launcher on the first rank only."""
    if os.environ.get("RANK", "0") != "0":
        return
    console = Console()
    for name in ("examples.md", "comparison.md"):
        console.print(Markdown((folder / name).read_text(encoding="utf-8")))
    console.print(f"files: {folder}", highlight=False)
