"""Running a recipe: stages in order, finished ones skipped, an interrupted one resumed."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.markdown import Markdown

from rewarden.errors import ConfigError, ResumeError
from rewarden.recipe.jobs import parse_recipe
from rewarden.recipe.read import Recipe, Stage, read_recipe
from rewarden.recipe.stages import fingerprint, inputs, move_aside, resolved
from rewarden.runtime.checkpoint import Resume, check_same_run, differences, latest, read_checkpoint
from rewarden.runtime.disk import remove, writing
from rewarden.runtime.job import Drive, drive
from rewarden.runtime.lock import FolderLock
from rewarden.runtime.ranks import Ranks, launched
from rewarden.runtime.report import RunFolder
from rewarden.runtime.voice import one_voice
from rewarden.spec import Spec

MODES = ("auto", "must", "never")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A stage that is parsed: its config, how it is driven, its resolved keys and its fingerprint."""

    stage: Stage
    spec: Spec
    how: Drive
    config: Mapping[str, Any]
    print_: str


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
    ranks = start()
    console = Console(soft_wrap=True, highlight=False, markup=False, quiet=not ranks.is_main)
    prints = ranks.on_main(lambda: fingerprints(recipe, parsed))
    ready = [
        Ready(stage=stage, spec=spec, how=how, config=resolved(str(stage.raw["kind"]), spec), print_=prints[stage.name])
        for stage, (spec, how) in zip(recipe.stages, parsed, strict=True)
    ]
    if not recipe.is_chain:
        run_stage(ready[0], ranks, resume=cast(Resume, resume), console=console)
        return recipe.folder
    lock = FolderLock(recipe.folder / ".lock")
    ranks.on_main(lambda: _open_chain(recipe, ready, lock, resume, console))
    try:
        for number, item in enumerate(ready, start=1):
            console.rule(f"{recipe.name}: {item.stage.name} ({number} of {len(ready)})", align="left")
            ranks.on_main(partial(_clear_changed, item, console))
            # "must" was about the chain: a stage that it has not reached yet has nothing to resume.
            run_stage(item, ranks, resume="never" if resume == "never" else "auto", console=console)
    finally:
        if ranks.is_main:
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
        prints[stage.name] = fingerprint(str(stage.raw["kind"]), spec, upstream)
    return prints


def run_stage(ready: Ready, ranks: Ranks, *, resume: Resume, console: Console) -> None:
    """One stage: a job that is driven step by step, or a function that writes its folder in one go."""
    folder = RunFolder(ready.stage.folder)
    if not hasattr(ready.spec, "build"):
        ranks.on_main(lambda: _run_once(ready, folder, ranks, resume, console))
        return
    if resume != "never" and ranks.on_main(lambda: _finished(folder, ready.print_)):
        console.print(f"{ready.stage.name}: finished and unchanged, skipped")
        return
    if resume != "never":
        ranks.on_main(lambda: _refuse_changed_inputs(folder, ready))
    job = ready.spec.build(ranks)
    drive(job, folder, ranks, resume=resume, cfg=ready.how, recipe=ready.config, fingerprint=ready.print_)


def _run_once(ready: Ready, folder: RunFolder, ranks: Ranks, resume: Resume, console: Console) -> None:
    for line in folder.open():
        console.print(line)
    try:
        done = folder.read_done()
        if resume == "never":
            for line in folder.set_aside(done["exported"] if done else []):
                console.print(line)
            done = None
        if done is not None:
            _refuse_changed_inputs(folder, ready)
            now = (ready.print_, ready.config)
            check_same_run(folder.path, (done["fingerprint"], done["recipe"]), now, label="finished run")
            if all((folder.path / name).exists() for name in done["exported"]):
                console.print(f"{ready.stage.name}: finished and unchanged, skipped")
                return
        if resume == "must":
            raise ResumeError(f"{folder.path} holds no finished run, and resume is 'must'; use --resume auto to start")
        folder.write_recipe(ready.config)
        folder.write_env(ranks)
        staging = folder.path / ".tmp-export"
        if staging.exists():
            remove(staging)
        staging.mkdir()
        facts = cast(Any, ready.spec).run(staging)
        (staging / "facts.json").write_text(json.dumps(facts, indent=2), encoding="utf-8")
        names = folder.take(staging)
        folder.write_done({"step": 1, "fingerprint": ready.print_, "recipe": ready.config, "exported": names})
        console.print(f"{ready.stage.name}: done; results in {folder.path}")
    finally:
        folder.close()


def _open_chain(recipe: Recipe, ready: Sequence[Ready], lock: FolderLock, resume: str, console: Console) -> None:
    """Lock the chain's folder: a second run with other overrides would move stages aside under the first one."""
    with writing(recipe.folder):
        recipe.folder.mkdir(parents=True, exist_ok=True)
    notice = lock.acquire()
    if notice:
        console.print(notice)
    if resume == "must" and not any(_saved(RunFolder(r.stage.folder)).get("fingerprint") == r.print_ for r in ready):
        lock.release()
        raise ResumeError(
            f"{recipe.folder} holds no stage of this recipe that is finished or has a checkpoint, and resume is 'must'; "
            "check output_dir and name, or use --resume auto to start"
        )


def _finished(folder: RunFolder, print_: str) -> bool:
    """Nothing to do: saves loading models and data to find that out."""
    done = folder.read_done()
    if done is None or done["fingerprint"] != print_:
        return False
    return all((folder.path / name).exists() for name in done["exported"])


def _clear_changed(ready: Ready, console: Console) -> None:
    """Move a stage of another fingerprint aside; a chain then makes it anew."""
    folder = RunFolder(ready.stage.folder)
    saved = _saved(folder)
    if saved and saved["fingerprint"] != ready.print_:
        folder.open()  # refuses when the stage is being run on its own
        folder.close()
        aside = move_aside(folder.path)
        console.print(f"{ready.stage.name}: its config or inputs changed; the old results are kept in {aside}")


def _refuse_changed_inputs(folder: RunFolder, ready: Ready) -> None:
    """The same config on other inputs: say that it is the inputs, which the config does not show."""
    saved = _saved(folder)
    if not saved or saved["fingerprint"] == ready.print_ or differences(saved["recipe"], ready.config):
        return
    names = sorted(inputs(ready.config, {})) or ["an earlier stage"]
    raise ResumeError(
        f"{folder.path} holds a run of the same recipe on other inputs; one of these has changed: {', '.join(names)}. "
        "Put it back, choose another name, or start over with --resume never (what is there is moved aside)"
    )


def _saved(folder: RunFolder) -> dict[str, Any]:
    """Fingerprint and recipe of the finished run or the newest checkpoint; {} when there is neither."""
    done = folder.read_done()
    if done is not None:
        return done
    path = latest(folder.checkpoints)
    if path is None:
        return {}
    try:
        found = read_checkpoint(path)
    except ResumeError:  # damaged: `drive` opens it again and says what is wrong
        return {}
    return {"fingerprint": found.fingerprint, "recipe": found.recipe}


def show_comparison(folder: Path) -> None:
    """Print the table and the dialogues that a `compare` stage wrote; under a launcher on the first rank only."""
    if os.environ.get("RANK", "0") != "0":
        return
    console = Console()
    for name in ("examples.md", "comparison.md"):
        console.print(Markdown((folder / name).read_text(encoding="utf-8")))
    console.print(f"files: {folder}", highlight=False)
