"""Running a recipe: stages in order, finished ones skipped, an interrupted one resumed."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.markdown import Markdown

from rewarden.errors import ConfigError, ResumeError
from rewarden.recipe.jobs import parse_stage
from rewarden.recipe.read import Recipe, Stage, read_recipe
from rewarden.recipe.stages import fingerprint, move_aside
from rewarden.runtime.checkpoint import Resume, check_same_run
from rewarden.runtime.disk import remove
from rewarden.runtime.job import Drive, drive
from rewarden.runtime.ranks import Ranks
from rewarden.runtime.report import RunFolder
from rewarden.spec import Spec

MODES = ("auto", "must", "never")


def run_recipe(path: Path, overrides: Sequence[str] = (), *, resume: str = "auto") -> Path:
    """Run every stage; returns the run folder.

    All stages are parsed before the first one starts, so a misspelt key in the last costs nothing. A stage is skipped when it
    is finished and its config, inputs and the stages it reads are unchanged; in a chain a changed one is moved aside
    (STAGE.1, ...) and run anew. resume: "auto" goes on where a stage stopped, "must" fails when nothing can be resumed,
    "never" starts anew and keeps the old results beside.
    """
    if resume not in MODES:
        raise ConfigError(f"resume is {resume!r}; use one of {', '.join(MODES)}")
    recipe = read_recipe(path, overrides)
    parsed = [parse_stage(stage, _where(recipe, stage)) for stage in recipe.stages]
    ranks = Ranks.start()
    console = Console(soft_wrap=True, highlight=False, quiet=not ranks.is_main)
    prints: dict[str, str] = {}
    for number, (stage, (spec, how)) in enumerate(zip(recipe.stages, parsed, strict=True), start=1):
        upstream = {s.folder: prints[s.name] for s in recipe.stages if s.name in stage.reads}
        prints[stage.name] = ranks.broadcast_object(fingerprint(dict(stage.raw), upstream))
        if recipe.is_chain:
            console.rule(f"{recipe.name}: {stage.name} ({number} of {len(recipe.stages)})", align="left")
            ranks.on_main(partial(_clear_changed, stage, prints[stage.name], console))
        run_stage(stage, spec, how, prints[stage.name], ranks, resume=cast(Resume, resume), console=console)
    return recipe.folder


def run_stage(
    stage: Stage, spec: Spec, how: Mapping[str, Any], print_: str, ranks: Ranks, *, resume: Resume, console: Console
) -> None:
    """One stage: a job that is driven step by step, or a function that writes its folder in one go."""
    folder = RunFolder(stage.folder)
    raw = dict(stage.raw)
    if hasattr(spec, "build"):
        done = _finished(folder, print_) if resume != "never" else False
        if done:
            console.print(f"{stage.name}: finished and unchanged, skipped")
            return
        job = spec.build(ranks)
        seed = getattr(spec, "seed", 0)
        drive(job, folder, ranks, resume=resume, cfg=Drive(**{"seed": seed, **how}), recipe=raw, fingerprint=print_)
        return
    ranks.on_main(lambda: _run_once(stage, spec, folder, raw, print_, ranks, resume, console))


def _run_once(
    stage: Stage,
    spec: Any,
    folder: RunFolder,
    raw: dict[str, Any],
    print_: str,
    ranks: Ranks,
    resume: Resume,
    console: Console,
) -> None:
    for line in folder.open():
        console.print(line)
    try:
        done = folder.read_done()
        if resume == "never":
            for line in folder.set_aside(done["exported"] if done else []):
                console.print(line)
            done = None
        if done is not None:
            check_same_run(folder.path, (done["fingerprint"], done["recipe"]), (print_, raw), label="finished run")
            if all((folder.path / name).exists() for name in done["exported"]):
                console.print(f"{stage.name}: finished and unchanged, skipped")
                return
        folder.write_recipe(raw)
        folder.write_env(ranks)
        staging = folder.path / ".tmp-export"
        if staging.exists():
            remove(staging)
        staging.mkdir()
        facts = spec.run(staging)
        (staging / "facts.json").write_text(json.dumps(facts, indent=2), encoding="utf-8")
        names = folder.take(staging)
        folder.write_done({"step": 1, "fingerprint": print_, "recipe": raw, "exported": names})
        console.print(f"{stage.name}: done; results in {folder.path}")
    finally:
        folder.close()


def _finished(folder: RunFolder, print_: str) -> bool:
    """Nothing to do: saves loading models and data to find that out."""
    done = folder.read_done()
    if done is None or done["fingerprint"] != print_:
        return False
    return all((folder.path / name).exists() for name in done["exported"])


def _clear_changed(stage: Stage, print_: str, console: Console) -> None:
    """Move a stage of another fingerprint aside; a chain then makes it anew."""
    folder = RunFolder(stage.folder)
    saved = folder.read_done() or _newest_checkpoint(folder)
    if saved is not None and saved["fingerprint"] != print_:
        console.print(f"{stage.name}: its config or inputs changed; the old results are kept in {move_aside(stage.folder)}")


def _newest_checkpoint(folder: RunFolder) -> dict[str, Any] | None:
    from rewarden.runtime.checkpoint import latest, read_checkpoint

    path = latest(folder.checkpoints)
    if path is None:
        return None
    try:
        return {"fingerprint": read_checkpoint(path).fingerprint}
    except ResumeError:
        return None


def _where(recipe: Recipe, stage: Stage) -> str:
    return f"{recipe.path}: stage {stage.name}" if recipe.is_chain else str(recipe.path)


def show_comparison(folder: Path) -> None:
    """Print the table and the dialogues that a `compare` stage wrote."""
    console = Console()
    for name in ("examples.md", "comparison.md"):
        console.print(Markdown((folder / name).read_text(encoding="utf-8")))
    console.print(f"files: {folder}", highlight=False)
