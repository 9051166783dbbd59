"""One stage of a recipe: whether it is done, and running it where it is not."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from rich.console import Console

from rewarden.errors import ResumeError
from rewarden.recipe.read import Stage
from rewarden.recipe.stages import inputs, move_aside
from rewarden.runtime.checkpoint import Resume, check_same_run, differences, latest, read_checkpoint
from rewarden.runtime.disk import remove
from rewarden.runtime.job import Drive, drive
from rewarden.runtime.ranks import Ranks
from rewarden.runtime.report import RunFolder
from rewarden.spec import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A stage that is parsed: its config, how it is driven, its resolved keys and its fingerprint."""

    stage: Stage
    spec: Spec
    how: Drive
    config: Mapping[str, Any]
    print_: str


def run_stage(ready: Ready, ranks: Ranks, *, resume: Resume, console: Console) -> None:
    """One stage: a job that is driven step by step, or a function that writes its folder in one go."""
    folder = RunFolder(ready.stage.folder)
    if not hasattr(ready.spec, "build"):
        ranks.on_main(lambda: _run_once(ready, folder, ranks, resume, console))
        return
    if resume != "never" and ranks.on_main(lambda: finished(folder, ready.print_)):
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
        try:
            facts = cast(Any, ready.spec).run(staging)
        except BaseException:
            remove(staging)
            raise
        (staging / "facts.json").write_text(json.dumps(facts, indent=2), encoding="utf-8")
        names = folder.take(staging)
        folder.write_done({"step": 1, "fingerprint": ready.print_, "recipe": ready.config, "exported": names})
        console.print(f"{ready.stage.name}: done; results in {folder.path}")
    finally:
        folder.close()


def finished(folder: RunFolder, print_: str) -> bool:
    """Nothing to do: saves loading models and data to find that out."""
    done = folder.read_done()
    if done is None or done["fingerprint"] != print_:
        return False
    return all((folder.path / name).exists() for name in done["exported"])


def clear_changed(ready: Ready, console: Console) -> None:
    """Move a stage of another fingerprint aside; a chain then makes it anew."""
    folder = RunFolder(ready.stage.folder)
    saved = saved_run(folder)
    if saved and saved["fingerprint"] != ready.print_:
        folder.open()  # refuses when the stage is being run on its own
        folder.close()
        aside = move_aside(folder.path)
        console.print(f"{ready.stage.name}: its config or inputs changed; the old results are kept in {aside}")


def _refuse_changed_inputs(folder: RunFolder, ready: Ready) -> None:
    """The same config on other inputs: say that it is the inputs, which the config does not show."""
    saved = saved_run(folder)
    if not saved or saved["fingerprint"] == ready.print_ or differences(saved["recipe"], ready.config):
        return
    names = sorted(inputs(ready.config, {})) or ["an earlier stage"]
    raise ResumeError(
        f"{folder.path} holds a run of the same recipe on other inputs; one of these has changed: {', '.join(names)}. "
        "Put it back, choose another name, or start over with --resume never (what is there is moved aside)"
    )


def saved_run(folder: RunFolder) -> dict[str, Any]:
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
