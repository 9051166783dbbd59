"""`drive` runs a job to its end, from wherever the folder stands, and says what it does."""

import dataclasses
import io
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

sys.path.insert(0, str(Path(__file__).parent))
from toy_job import State, make_job

from rewarden.errors import ResumeError, RewardenError
from rewarden.runtime.checkpoint import latest, read_checkpoint
from rewarden.runtime.job import Drive, Job, Tick, drive
from rewarden.runtime.metrics import read_metrics
from rewarden.runtime.ranks import Ranks
from rewarden.runtime.report import RunFolder
from rewarden.runtime.samples import Samples

ALONE = Ranks.single("cpu")
RECIPE = {"toy": {"steps": 20, "beta": 0.5}}


def run(folder: Path, steps: int = 20, *, resume="auto", recipe=RECIPE, stop_at=-1, **options):
    job, policy, _ = make_job(steps, ALONE, stop_at=stop_at)
    cfg = Drive(**{"save_steps": 4, "view": "plain", **options})
    return drive(job, RunFolder(folder), ALONE, resume=resume, cfg=cfg, recipe=recipe), policy


def rows(folder: Path) -> list[dict]:
    return [{k: repr(v) for k, v in row.items() if not k.startswith("time/")} for row in read_metrics(folder / "metrics.jsonl")]


def test_a_run_leaves_everything_a_reader_needs(tmp_path, capsys):
    outcome, _ = run(tmp_path)
    assert (outcome.step, outcome.resumed_from, outcome.already_done) == (20, None, False)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "checkpoints", "done.json", "env.json", "metrics.jsonl", "model", "recipe.yaml", "samples.parquet",
    ]  # fmt: skip
    assert yaml.safe_load((tmp_path / "recipe.yaml").read_text()) == RECIPE
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000020"]
    metrics = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(1, 21))
    assert {"time/rollout", "time/update", "time/step", "time/tokens_per_s"} <= metrics[0].keys()
    assert "time/checkpoint" in metrics[4]  # what the checkpoint after step 4 took
    assert [row["skipped_steps"] for row in metrics].count(1.0) == 1
    assert math.isnan(metrics[6]["loss/policy"])
    assert len(Samples(tmp_path / "samples.parquet").read()) == 20
    saved = read_checkpoint(latest(tmp_path / "checkpoints"))
    assert (saved.state.step, saved.recipe) == (20, RECIPE)
    assert isinstance(saved.state, State)
    out = capsys.readouterr().out
    assert "toy data: 10 rows" in out
    assert "toy: done, 20 steps" in out


def test_stopped_and_resumed_equals_never_stopped(tmp_path, capsys):
    with pytest.raises(RewardenError, match="on purpose"):
        run(tmp_path / "a", stop_at=11)
    assert "stopped after step 11 by RewardenError; the last checkpoint is step-00000008; run again" in capsys.readouterr().out
    torch.rand(7)  # whatever happens to the global generator in between
    outcome, policy = run(tmp_path / "a", resume="must")
    out = capsys.readouterr().out
    assert outcome.resumed_from == 8
    assert "resuming after step 8" in out
    assert "dropped 3 lines of metrics.jsonl after step 8" in out
    assert "dropped 3 rows of samples.parquet after step 8" in out
    _, straight = run(tmp_path / "b")
    assert rows(tmp_path / "a") == rows(tmp_path / "b")
    assert all(torch.equal(p, q) for p, q in zip(policy.parameters(), straight.parameters(), strict=True))
    assert Samples(tmp_path / "a/samples.parquet").read() == Samples(tmp_path / "b/samples.parquet").read()


def test_how_often_it_saves_changes_no_number(tmp_path):
    run(tmp_path / "a", 9, save_steps=1, save_total_limit=None, seed=3)
    run(tmp_path / "b", 9, save_steps=0, seed=3)
    run(tmp_path / "c", 9, save_steps=0, seed=4)
    assert rows(tmp_path / "a") == rows(tmp_path / "b")
    assert rows(tmp_path / "a") != rows(tmp_path / "c")  # another seed for dropout
    assert len(list((tmp_path / "a/checkpoints").iterdir())) == 9
    assert len(list((tmp_path / "b/checkpoints").iterdir())) == 1


def test_a_finished_run_is_not_run_again(tmp_path, capsys):
    run(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    for resume in ("auto", "must"):
        outcome, _ = run(tmp_path, resume=resume)
        assert (outcome.already_done, outcome.step) == (True, 20)
    assert "already finished at step 20" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_finished_run_whose_model_is_gone_is_exported_again_from_its_last_checkpoint(tmp_path):
    run(tmp_path)
    weights = (tmp_path / "model/weights.safetensors").read_bytes()
    (tmp_path / "model/weights.safetensors").unlink()
    (tmp_path / "model").rmdir()
    outcome, _ = run(tmp_path)
    assert (outcome.resumed_from, outcome.already_done) == (20, False)
    assert (tmp_path / "model/weights.safetensors").read_bytes() == weights
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 20


def test_never_moves_the_earlier_run_aside(tmp_path, capsys):
    run(tmp_path)
    old = (tmp_path / "metrics.jsonl").read_text()
    outcome, _ = run(tmp_path, resume="never", recipe={"toy": {"other": 1}})
    assert outcome.resumed_from is None
    assert (
        "moved checkpoints, metrics.jsonl, samples.parquet, done.json, recipe.yaml, model of an earlier run"
        in capsys.readouterr().out
    )
    assert (tmp_path / "earlier-1" / "metrics.jsonl").read_text() == old
    assert rows(tmp_path) == rows(tmp_path / "earlier-1")
    run(tmp_path, resume="never")
    assert (tmp_path / "earlier-2").is_dir()


def test_another_recipe_is_refused_before_anything_is_touched(tmp_path):
    with pytest.raises(RewardenError, match="on purpose"):
        run(tmp_path, stop_at=6)
    before = (tmp_path / "metrics.jsonl").read_text()
    with pytest.raises(ResumeError, match=r"toy\.beta: 0.5 -> 0.7"):
        run(tmp_path, recipe={"toy": {"steps": 20, "beta": 0.7}})
    assert (tmp_path / "metrics.jsonl").read_text() == before
    assert yaml.safe_load((tmp_path / "recipe.yaml").read_text()) == RECIPE
    run(tmp_path)
    with pytest.raises(ResumeError, match=r"the finished run in .* was made by another recipe"):
        run(tmp_path, recipe={})


def test_without_a_checkpoint_auto_begins_with_a_notice_and_must_refuses(tmp_path, capsys):
    with pytest.raises(ResumeError, match="resume is 'must'"):
        run(tmp_path, resume="must")
    with pytest.raises(RewardenError, match="on purpose"):
        run(tmp_path, stop_at=3)
    assert "there is no checkpoint yet" in capsys.readouterr().out
    run(tmp_path)
    out = capsys.readouterr().out
    assert "no checkpoint in " in out
    assert "starting from the beginning" in out
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == list(range(1, 21))


def test_too_many_skipped_steps_in_a_row_stop_the_run(tmp_path):
    def train(state: dict) -> Iterator[Tick]:
        for step in range(state["step"], 20):
            report = {"loss/total": math.nan, "grad_norm/policy": 1.0, "skipped_steps": 1.0, "skipped_in_a_row": float(step)}
            yield Tick(state={"step": step + 1}, report=report)

    job = Job(title="bad", steps=20, start={"step": 0}, train=train, parts={}, export=lambda folder: None)
    with pytest.raises(
        RewardenError, match=r"3 optimizer steps in a row were skipped up to step 4, .*not finite \(loss/total\)"
    ):
        drive(job, RunFolder(tmp_path), ALONE, cfg=Drive(max_skipped_steps=3, view="off"))
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 4


def test_a_short_run_in_which_every_step_was_skipped_is_no_success(tmp_path):
    def train(state: int) -> Iterator[Tick]:
        for step in range(state, 2):
            yield Tick(state=step + 1, report={"skipped_steps": 1.0, "skipped_in_a_row": float(step + 1)})

    job = Job(title="short", steps=2, start=0, train=train, parts={}, export=lambda folder: (folder / "x.txt").touch())
    with pytest.raises(RewardenError, match=r"nothing was learnt in 2 steps"):
        drive(job, RunFolder(tmp_path), ALONE, cfg=Drive(view="off"))
    assert not (tmp_path / "x.txt").exists()


def test_a_job_may_end_early_and_may_have_no_steps(tmp_path, capsys):
    def train(state: int) -> Iterator[Tick]:
        for step in range(state, 3):
            yield Tick(state=step + 1, report={})

    job = Job(title="early", steps=9, start=0, train=train, parts={}, export=lambda folder: (folder / "x.txt").touch())
    assert drive(job, RunFolder(tmp_path / "a"), ALONE, cfg=Drive(view="plain")).step == 3
    assert "early: ended by itself after step 3 of 9" in capsys.readouterr().out
    none = Job(title="none", steps=0, start=0, train=train, parts={}, export=lambda folder: (folder / "x.txt").touch())
    assert drive(none, RunFolder(tmp_path / "b"), ALONE, cfg=Drive(view="off")).step == 0
    for name in "ab":
        assert json.loads((tmp_path / name / "done.json").read_text())["exported"] == ["x.txt"]


def test_a_state_may_bring_its_own_form(tmp_path):
    def train(state: complex) -> Iterator[Tick]:
        while state.real < 4:
            if state.real == 3 and not (tmp_path / "again").exists():
                raise RewardenError("half way")
            state = state + 1
            yield Tick(state=state, report={"x": state.real, "y": state.imag})

    def job() -> Job:
        return Job(
            title="own", steps=4, start=complex(0, 5), train=train, parts={}, export=lambda folder: None,
            dump_state=lambda z: [z.real, z.imag], restore_state=lambda raw: complex(*raw),
        )  # fmt: skip

    cfg = Drive(save_steps=1, view="off")
    with pytest.raises(RewardenError, match="half way"):
        drive(job(), RunFolder(tmp_path), ALONE, cfg=cfg)
    (tmp_path / "again").touch()
    assert drive(job(), RunFolder(tmp_path), ALONE, cfg=cfg).report["y"] == 5.0


def test_the_folder_is_free_again_after_any_end(tmp_path):
    with pytest.raises(RewardenError, match="on purpose"):
        run(tmp_path, stop_at=5)
    folder = RunFolder(tmp_path)
    folder.open()
    with pytest.raises(ResumeError, match="in use by pid"):
        run(tmp_path)
    folder.close()
    run(tmp_path)
    assert not (tmp_path / "lock").exists()


def test_a_crash_in_export_keeps_the_training(tmp_path):
    job, _, _ = make_job(8, ALONE)

    def broken(folder: Path) -> None:
        (folder / "model").mkdir()
        raise RewardenError("no export today")

    half = Job(title="toy", steps=8, start=job.start, train=job.train, parts=job.parts, export=broken)
    with pytest.raises(RewardenError, match="no export today"):
        drive(half, RunFolder(tmp_path), ALONE, cfg=Drive(view="off"))
    assert [path.name for path in tmp_path.iterdir() if path.name in ("model", ".tmp-export")] == []
    job, _, _ = make_job(8, ALONE)
    outcome = drive(job, RunFolder(tmp_path), ALONE, cfg=Drive(view="off"))
    assert outcome.resumed_from == 8
    assert (tmp_path / "model" / "weights.safetensors").exists()
    assert not (tmp_path / ".tmp-export").exists()


def test_the_last_lines_are_what_the_job_has_to_say_of_its_state_and_last_report(tmp_path, capsys):
    job, _, _ = make_job(6, ALONE)

    def closing(state: State, report: dict[str, float]) -> list[str]:
        return [f"{state.step} steps, score {report['score/mean']!r}"]

    told = dataclasses.replace(job, closing=closing)
    drive(told, RunFolder(tmp_path), ALONE, cfg=Drive(view="plain"))
    score = read_metrics(tmp_path / "metrics.jsonl")[-1]["score/mean"]
    assert capsys.readouterr().out.splitlines()[-1] == f"toy: 6 steps, score {score!r}"
    (tmp_path / "done.json").unlink()  # killed between the last checkpoint and the end: nothing is left to train
    job, _, _ = make_job(6, ALONE)
    drive(dataclasses.replace(job, closing=closing), RunFolder(tmp_path), ALONE, cfg=Drive(view="plain"))
    assert capsys.readouterr().out.splitlines()[-1] == f"toy: 6 steps, score {score!r}"


def test_output_is_plain_lines_when_it_is_not_a_terminal(tmp_path, monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    run(tmp_path, view="auto")
    text = out.getvalue()
    assert "\x1b" not in text
    score = rows(tmp_path)[-1]["score/mean"][:4]
    assert f"toy 20/20  score {score}" in text
    assert "eta 0:00:00" in text
