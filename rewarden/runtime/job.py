"""Drives a job: resume, progress, metrics, samples, checkpoints, export. The job itself knows of none of these.

A job's `train` is a generator of ticks. Between two ticks it stands still, so what a checkpoint takes then (parts, loop state,
random generators) is one moment of the run: N steps equal N/2, a kill, a resume and the rest, bit for bit on a CPU. Two rules
make that true: `train(state)` carries nothing from step to step but `state` and `parts`, and draws nothing from the global
generators before its first tick's work.
"""

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field

from rewarden.errors import ResumeError, RewardenError
from rewarden.protocols import Part
from rewarden.runtime.checkpoint import (
    Resume,
    check_same_run,
    decide_resume,
    fingerprint_of,
    latest,
    load_checkpoint,
    read_checkpoint,
    save_checkpoint,
)
from rewarden.runtime.clock import Clock, phase, timed_by
from rewarden.runtime.disk import remove, sync_tree, writing
from rewarden.runtime.metrics import read_metrics
from rewarden.runtime.ranks import Ranks
from rewarden.runtime.report import RunFolder
from rewarden.runtime.seed import capture_rng, restore_rng, seed_global
from rewarden.runtime.trackers import Tracker, Trackers
from rewarden.runtime.view import Mode, View, columns_for
from rewarden.spec import Spec


class Drive(Spec):
    """How a run is saved, logged and shown; nothing here changes a number of the training."""

    save_steps: int = Field(default=50, ge=0)
    """Steps between checkpoints; 0 saves only at the end."""
    save_total_limit: int | None = Field(default=1, ge=1)
    """Checkpoints kept, the newest; None keeps all."""
    max_skipped_steps: int = Field(default=5, ge=1)
    """Stop after this many optimizer steps in a row whose loss or gradient was not finite."""
    report_to: tuple[Tracker, ...] = ()
    """Trackers beside metrics.jsonl: tensorboard, wandb, trackio."""
    project: str = "rewarden"
    """Project name for trackers that have projects."""
    run_name: str | None = None
    """Run name for trackers; None takes the name of the run folder."""
    view: Mode = "auto"
    """What is shown: live (a table), plain (lines), off, or auto (live on a terminal)."""
    seed: int = 0
    """Seed of the global generators (dropout) of a new run; a resumed run goes on with the saved ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """One step done: the state after it, its numbers, and transcripts worth keeping.

    The report may hold `num_tokens` (tokens handled in the step), from which tokens per second are shown.
    """

    state: Any
    report: Mapping[str, float]
    samples: Sequence[Mapping[str, Any]] = ()


def _same(value: Any) -> Any:
    return value


def _silent(state: Any, report: Mapping[str, float]) -> Sequence[str]:
    """Nothing to say."""
    return ()


def _ignore(folder: Path) -> None:
    """Nothing to do with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Something that runs in steps and can be resumed.

    train(state) yields one Tick per step from `state` on, up to `steps` in all. parts: what a checkpoint holds, by name.
    export(folder) writes the results under names of its own choice (such as folder/"model"); every rank calls it with a
    folder, and only rank 0's is kept. enter(folder) is told, on every rank and before the first step, of a folder in which the
    job may keep what it has finished and no longer holds; it goes when the run is done. publish(folder) is called on rank 0
    with the run folder, once the results lie in it and before the run counts as finished; it must bear being called again.
    notes are lines for people before the first step; closing(state, report), called on rank 0 with the last state and the last
    report, gives lines for the end, such as what was measured on held-out rows.
    columns: report keys to show instead of the default ones. dump_state and restore_state turn the state into plain values
    and back; the default handles frozen dataclasses of numbers, tuples and tensors.
    """

    title: str
    steps: int
    start: Any
    train: Callable[[Any], Iterator[Tick]]
    parts: Mapping[str, Part]
    export: Callable[[Path], None]
    enter: Callable[[Path], None] = _ignore
    publish: Callable[[Path], None] = _ignore
    notes: Sequence[str] = ()
    closing: Callable[[Any, Mapping[str, float]], Sequence[str]] = _silent
    columns: Sequence[str] = ()
    dump_state: Callable[[Any], Any] = _same
    restore_state: Callable[[Any], Any] = _same


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How `drive` ended: steps done in all, the step it resumed from (None: from the beginning), the last report."""

    step: int
    resumed_from: int | None = None
    already_done: bool = False
    report: Mapping[str, float] = field(default_factory=dict)


def drive(
    job: Job,
    folder: RunFolder,
    ranks: Ranks,
    *,
    resume: Resume = "auto",
    cfg: Drive | None = None,
    recipe: Mapping[str, Any] | None = None,
    fingerprint: str = "",
) -> Outcome:
    """Run `job` in `folder` to its end, from its newest checkpoint or from the beginning.

    recipe: what is being run, resolved; it is written to recipe.yaml and kept in checkpoints. fingerprint: its hash (computed
    when empty). A checkpoint of another fingerprint is refused with the differing keys listed. A finished run is not run again.

    ResumeError: folder in use, checkpoint damaged, of another recipe, or missing under resume "must". RewardenError: the disk
    refuses, or too many steps in a row were skipped. Only rank 0 writes; all ranks raise together when it cannot.
    """
    run = _Run(job, folder, ranks, cfg or Drive(), dict(recipe or {}), fingerprint or fingerprint_of(recipe or {}))
    found = ranks.on_main(lambda: run.open(resume))
    try:
        return run.finished(found) if found.done else run.go(found)
    finally:
        if ranks.is_main:
            folder.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What the run folder holds at the start: lines for people, and where to go on."""

    lines: list[str]
    checkpoint: Path | None = None
    step: int = 0
    done: dict[str, Any] | None = None


class _Run:
    """One call of `drive`."""

    def __init__(self, job: Job, folder: RunFolder, ranks: Ranks, cfg: Drive, recipe: dict[str, Any], fingerprint: str) -> None:
        self.job, self.folder, self.ranks, self.cfg = job, folder, ranks, cfg
        self.recipe, self.fingerprint = recipe, fingerprint
        self.trackers: list[Trackers] = []
        self.mode: Mode = cfg.view if ranks.is_main else "off"

    def open(self, resume: Resume) -> _Found:
        """Lock the folder, clean it, and find where to go on. On rank 0."""
        lines = self.folder.open()
        try:
            done = self.folder.read_done()
            if resume == "never":
                lines += self.folder.set_aside(done["exported"] if done else [])
                done = None
            now = (self.fingerprint, self.recipe)
            if done and all((self.folder.path / name).exists() for name in done["exported"]):
                check_same_run(self.folder.path, (done["fingerprint"], done["recipe"]), now, label="finished run")
                self.folder.drop_work()
                return _Found(lines=lines, done=done)
            step, path = 0, decide_resume(self.folder.checkpoints, resume)
            if path is not None:
                saved = read_checkpoint(path)
                check_same_run(path, (saved.fingerprint, saved.recipe), now)
                step = saved.step
            elif self.folder.metrics.path.exists() or self.folder.checkpoints.exists():
                lines.append(f"no checkpoint in {self.folder.checkpoints}: starting from the beginning")
            if step == 0:
                self.folder.drop_work()
            lines += self.folder.truncate(step)
            self.folder.write_recipe(self.recipe)
            self.folder.write_env(self.ranks)
        except BaseException:
            self.folder.close()
            raise
        return _Found(lines=lines, checkpoint=path, step=step)

    def finished(self, found: _Found) -> Outcome:
        """Say that there is nothing to do."""
        assert found.done is not None
        with self.view(found.done["step"]) as view:
            for line in found.lines:
                view.note(line)
            view.note(f"{self.job.title}: already finished at step {found.done['step']} in {self.folder.path}")
        return Outcome(step=found.done["step"], already_done=True)

    def view(self, step: int) -> View:
        """The view of this run, silent on other ranks than 0."""
        return View(self.job.title, self.job.steps, start=step, columns=columns_for(self.job.columns), mode=self.mode)

    def go(self, found: _Found) -> Outcome:
        """Restore, run to the end, export."""
        began = time.monotonic()
        self.ranks.on_main(lambda: self.open_trackers(found.step))
        try:
            with self.view(found.step) as view:
                said = (note for part in self.job.parts.values() for note in getattr(part, "notes", ()))
                for line in (*found.lines, *self.job.notes, *said):
                    view.note(line)
                self.job.enter(self.folder.work)
                step, state = self.restore(found.checkpoint, view)
                end, state, report = self.loop(step, state, view)
                with writing(self.folder.path):
                    self.export(end)
                view.note(
                    f"{self.job.title}: done, {end} steps, {time.monotonic() - began:.1f} s; results in {self.folder.path}"
                )
                if self.ranks.is_main:
                    for line in self.job.closing(state, report or self.last_report()):
                        view.note(f"{self.job.title}: {line}")
        finally:
            for tracker in self.trackers:
                tracker.finish()
        return Outcome(step=end, resumed_from=found.step if found.checkpoint else None, report=report)

    def restore(self, path: Path | None, view: View) -> tuple[int, Any]:
        """Load parts and state, and set the global generators last: whatever came before may have drawn from them."""
        if path is None:
            seed_global(self.cfg.seed, "run", self.ranks.rank)
            return 0, self.job.start
        saved = load_checkpoint(path, self.job.parts)
        try:
            state = self.job.restore_state(saved.state)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise ResumeError(
                f"{path}: its loop state is not that of this job ({error}); resume with the code that wrote it, or start "
                "over with --resume never"
            ) from error
        view.note(f"resuming after step {saved.step} from {path}")
        generators = saved.rng()
        if len(generators) == self.ranks.world:
            restore_rng(generators[self.ranks.rank])
        else:
            seed_global(self.cfg.seed, "run", self.ranks.rank, saved.step)
            view.note(
                f"written by {len(generators)} ranks, resumed by {self.ranks.world}: the steps are the same up to rounding, "
                "except that dropout, where it is on, is drawn from new seeds"
            )
        return saved.step, state

    def open_trackers(self, step: int) -> None:
        """Open the trackers asked for. On rank 0."""
        if self.cfg.report_to:
            name = self.cfg.run_name or self.folder.path.resolve().name
            self.trackers.append(
                Trackers(
                    self.cfg.report_to,
                    self.folder.path,
                    project=self.cfg.project,
                    run_name=name,
                    config=self.recipe,
                    first_step=step + 1,
                )
            )

    def last_report(self) -> Mapping[str, float]:
        """The last line of metrics.jsonl: a run resumed after its last step has no report of its own."""
        rows = read_metrics(self.folder.metrics.path)[-1:] if self.folder.metrics.path.exists() else []
        return {name: value for row in rows for name, value in row.items() if name != "step"}

    def loop(self, step: int, state: Any, view: View) -> tuple[int, Any, Mapping[str, float]]:
        """Tick until the last step, or until the job ends by itself; returns the step, its state and the last report."""
        report: Mapping[str, float] = {}
        saved_at = first = step
        iterator = self.job.train(state) if step < self.job.steps else iter(())
        try:
            with timed_by(Clock()) as clock:
                began = time.perf_counter()
                while step < self.job.steps and (tick := next(iterator, None)) is not None:
                    step, state = step + 1, tick.state
                    now = time.perf_counter()
                    report, began = self.timed(tick.report, clock, now - began), now
                    self.record(step, report, tick.samples, view)
                    self.check_skips(step, report)
                    if self.cfg.save_steps and step % self.cfg.save_steps == 0:
                        with phase("checkpoint"):
                            self.save(step, state)
                        saved_at = step
            self.check_all_skipped(step - first, report)
            if step < self.job.steps:
                view.note(f"{self.job.title}: ended by itself after step {step} of {self.job.steps}")
            if saved_at < step or step == 0:
                self.save(step, state)
        except BaseException as error:
            newest = latest(self.folder.checkpoints)
            where = f"the last checkpoint is {newest.name}" if newest else "there is no checkpoint yet"
            view.note(
                f"{self.job.title}: stopped after step {step} by {type(error).__name__}; {where}; run again to resume from it"
            )
            raise
        finally:
            close = getattr(iterator, "close", None)
            if close is not None:
                close()
        return step, state, report

    def timed(self, report: Mapping[str, float], clock: Clock, seconds: float) -> dict[str, float]:
        """The report with seconds per phase, of the whole step, and tokens per second."""
        times = {**clock.report(), "time/step": seconds}
        if "num_tokens" in report and seconds > 0:
            times["time/tokens_per_s"] = report["num_tokens"] / seconds
        return {**report, **times}

    def record(self, step: int, report: Mapping[str, float], samples: Sequence[Mapping[str, Any]], view: View) -> None:
        """Write and show one step."""
        rows = [row for part in self.ranks.gather_objects(list(samples)) for row in part]

        def write() -> None:
            self.folder.metrics.append(step, report)
            if rows:
                self.folder.samples.append(step, rows)
            for tracker in self.trackers:
                tracker.log(step, report)
            view.update(step, report)

        self.ranks.on_main(write)

    def check_skips(self, step: int, report: Mapping[str, float]) -> None:
        """Stop when too many optimizer steps in a row were skipped."""
        skipped = report.get("skipped_in_a_row", 0.0)
        if skipped >= self.cfg.max_skipped_steps:
            bad = sorted(name for name, value in report.items() if not math.isfinite(value))
            raise RewardenError(
                f"{skipped:.0f} optimizer steps in a row were skipped up to step {step}, because the loss or a gradient was "
                f"not finite ({', '.join(bad) or 'see metrics.jsonl'}); max_skipped_steps is {self.cfg.max_skipped_steps}. "
                "They changed no weight. Lower learning_rate, set max_grad_norm, or look at the data of these steps"
            )

    def check_all_skipped(self, taken: int, report: Mapping[str, float]) -> None:
        """A short run in which no step changed a weight has not trained anything."""
        if 0 < taken <= report.get("skipped_in_a_row", 0.0):
            raise RewardenError(
                f"nothing was learnt in {taken} steps: all were skipped, because the loss or a gradient was not finite. "
                "Lower learning_rate, set max_grad_norm, or look at the data"
            )

    def save(self, step: int, state: Any) -> None:
        """Write a checkpoint of this moment."""
        generators = self.ranks.gather_objects(capture_rng())

        def write() -> None:
            self.folder.metrics.sync()
            self.folder.samples.flush()
            save_checkpoint(
                self.folder.checkpoints,
                step,
                self.job.parts,
                self.job.dump_state(state),
                keep=self.cfg.save_total_limit,
                fingerprint=self.fingerprint,
                recipe=self.recipe,
                rng=generators,
            )

        self.ranks.on_main(write)

    def export(self, step: int) -> None:
        """Let every rank export, keep what rank 0 wrote, and mark the run as finished."""
        if not self.ranks.is_main:
            with tempfile.TemporaryDirectory() as scratch:
                self.job.export(Path(scratch))
        else:
            staging = self.folder.path / ".tmp-export"
            if staging.exists():
                remove(staging)
            staging.mkdir()
            try:
                self.job.export(staging)
            except BaseException:
                remove(staging)
                raise
        self.ranks.on_main(lambda: self.close(step))

    def close(self, step: int) -> None:
        """Put the exported files in place and write done.json. On rank 0."""
        staging = self.folder.path / ".tmp-export"
        sync_tree(staging)
        self.folder.samples.flush(final=True)
        names = self.folder.take(staging)
        self.job.publish(self.folder.path)
        self.folder.write_done({"step": step, "fingerprint": self.fingerprint, "recipe": self.recipe, "exported": names})
        self.folder.drop_work()
