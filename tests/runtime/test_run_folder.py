"""The files of a run: metrics, samples, environment, lock."""

import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from rewarden.errors import DataError, ResumeError, RewardenError
from rewarden.runtime import lock as lock_module
from rewarden.runtime import samples as samples_module
from rewarden.runtime.lock import FolderLock
from rewarden.runtime.metrics import Metrics, read_metrics
from rewarden.runtime.ranks import Ranks
from rewarden.runtime.report import RunFolder, commit
from rewarden.runtime.samples import Samples


def test_metrics_are_one_line_per_step_and_exact(tmp_path):
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.append(1, {"b/x": 1 / 3, "a": 2.0})
    metrics.append(2, {"a": math.nan, "b/x": math.inf})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text == '{"step": 1, "a": 2.0, "b/x": 0.3333333333333333}\n{"step": 2, "a": null, "b/x": null}\n'
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert rows[0] == {"step": 1, "a": 2.0, "b/x": 1 / 3}
    assert math.isnan(rows[1]["a"])


def test_later_steps_and_a_torn_line_are_dropped_and_counted(tmp_path):
    metrics = Metrics(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3, 4):
        metrics.append(step, {"a": float(step)})
    with metrics.path.open("a") as file:
        file.write('{"step": 5, "a"')
    assert [row["step"] for row in read_metrics(metrics.path)] == [1, 2, 3, 4]
    assert metrics.truncate(2) == [3, 4, -1]
    metrics.append(3, {"a": 9.0})
    assert [row["a"] for row in read_metrics(metrics.path)] == [1.0, 2.0, 9.0]
    assert metrics.truncate(3) == []
    assert Metrics(tmp_path / "absent.jsonl").truncate(0) == []


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(ResumeError, match=r"metrics.jsonl:2: not JSON"):
        Metrics(path).truncate(5)
    path.write_text('{"a": 1}\n')
    with pytest.raises(ResumeError, match="with a whole 'step'"):
        read_metrics(path)


def test_samples_end_as_one_parquet_file_that_anybody_can_read(tmp_path):
    samples = Samples(tmp_path / "samples.parquet")
    samples.append(1, [{"text": "a", "score": 1, "parts": {"x": 0.5}, "none": None}])
    samples.append(2, [{"text": "b\né", "score": 2.5, "none": None, "late": True}])
    samples.flush(final=True)
    assert [path.name for path in tmp_path.iterdir()] == ["samples.parquet"]
    rows = pq.read_table(tmp_path / "samples.parquet").to_pylist()
    assert rows == [
        {"step": 1, "text": "a", "score": 1.0, "parts": '{"x": 0.5}', "none": None, "late": None},
        {"step": 2, "text": "b\né", "score": 2.5, "parts": None, "none": None, "late": True},
    ]


def test_samples_are_merged_at_bounded_cost(tmp_path, monkeypatch):
    monkeypatch.setattr(samples_module, "TAIL_ROWS", 4)
    written = []
    real = samples_module.pq.write_table
    monkeypatch.setattr(
        samples_module.pq, "write_table", lambda table, *a, **k: (written.append(table.num_rows), real(table, *a, **k))
    )
    samples = Samples(tmp_path / "samples.parquet")
    for step in range(1, 201):
        samples.append(step, [{"text": str(step)}])
        samples.flush()
        if step % 50 == 0:
            assert [row["text"] for row in Samples(tmp_path / "samples.parquet").read()] == [str(i + 1) for i in range(step)]
    # each merge writes at most five times what it adds, so all of them write at most five times the rows
    assert sum(written) <= 5 * 200
    assert len(written) < 40


@pytest.mark.parametrize("seed", range(5))
def test_samples_survive_a_kill_at_any_point(tmp_path, monkeypatch, seed):
    """A kill is played at every write to disk: what is on disk then must hold exactly the rows appended before."""
    monkeypatch.setattr(samples_module, "TAIL_ROWS", 3)
    rng = random.Random(seed)
    path = tmp_path / "samples.parquet"
    expected: list[tuple[int, str]] = []

    class Killed(BaseException):
        pass

    def dying(point: str) -> None:
        if rng.random() < 0.3:
            raise Killed(point)

    real_sync, real_unlink = samples_module.sync_folder, Path.unlink
    monkeypatch.setattr(samples_module, "sync_folder", lambda folder: (real_sync(folder), dying("after the rename"))[0])
    monkeypatch.setattr(Path, "unlink", lambda self, **k: (real_unlink(self, **k), dying("after the tail is gone"))[0])
    samples, step = Samples(path), 0
    for _ in range(60):
        step += 1
        samples.append(step, [{"text": f"{step}.{i}"} for i in range(rng.randint(0, 3))])
        expected += [(row["step"], row["text"]) for row in samples.read()[len(expected) :]]
        try:
            samples.flush(final=rng.random() < 0.2)
            if rng.random() < 0.1:
                step = rng.randint(0, step)
                expected = [row for row in expected if row[0] <= step]
                samples.truncate(step)
        except Killed:
            samples = Samples(path)
            with monkeypatch.context() as calm:
                calm.setattr(Path, "unlink", real_unlink)
                calm.setattr(samples_module, "sync_folder", real_sync)
                samples.truncate(step)
        assert [(row["step"], row["text"]) for row in samples.read()] == expected
        assert [(row["step"], row["text"]) for row in Samples(path).read()] == expected


def test_a_torn_tail_of_samples_is_mended(tmp_path):
    samples = Samples(tmp_path / "samples.parquet")
    samples.append(1, [{"text": "a"}])
    with samples.tail.open("a") as file:
        file.write('{"n": 1, "row": {"st')
    again = Samples(tmp_path / "samples.parquet")
    assert again.truncate(1) == 0
    again.append(2, [{"text": "b"}])
    again.flush(final=True)
    assert [row["text"] for row in Samples(tmp_path / "samples.parquet").read()] == ["a", "b"]


def test_a_column_of_samples_keeps_its_kind(tmp_path):
    samples = Samples(tmp_path / "samples.parquet")
    samples.append(1, [{"score": 1.0, "later": None}])
    samples.flush(final=True)
    for value, words in [("high", "held number and now gets 'high' \\(step 2\\)"), (True, "held number and now gets True")]:
        with pytest.raises(DataError, match=words):
            Samples(tmp_path / "samples.parquet").append(2, [{"score": value}])
    samples.append(2, [{"score": 2, "later": "text"}])


def test_a_folder_in_use_is_refused_and_free_again_after(tmp_path):
    first, second = RunFolder(tmp_path), RunFolder(tmp_path)
    assert first.open() == []
    with pytest.raises(ResumeError, match=f"is in use by pid {os.getpid()} on .*choose another folder"):
        second.open()
    first.close()
    assert second.open() == []
    second.close()
    assert not (tmp_path / "lock").exists()


HOLD = """
import sys, time
from pathlib import Path
from rewarden.runtime.lock import FolderLock
FolderLock(Path(sys.argv[1])).acquire()
print("held", flush=True)
time.sleep(60)
"""


def test_a_lock_of_a_living_process_is_refused_and_of_a_dead_one_taken_over(tmp_path):
    path = tmp_path / "lock"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            with pytest.raises(ResumeError, match=f"in use by pid {process.pid} on"):
                FolderLock(path).acquire()
        finally:
            process.kill()
    taken = FolderLock(path)
    assert taken.acquire().startswith(f"took over the lock of pid {process.pid} on ")
    taken.release()
    path.write_text(f"pid {os.getpid()} on here\n")  # a pid that lives again as somebody else does not block
    assert taken.acquire() is not None
    taken.release()


def test_without_a_kernel_lock_the_pid_decides(tmp_path, monkeypatch):
    monkeypatch.setattr(lock_module, "fcntl", None)
    path = tmp_path / "lock"
    path.write_text(f"pid {os.getpid()} on here\n")
    with pytest.raises(ResumeError, match="in use by pid"):
        FolderLock(path).acquire()
    with subprocess.Popen(["true"]) as process:
        pass
    path.write_text(f"pid {process.pid} on here\n")
    lock = FolderLock(path)
    assert "no longer running" in lock.acquire()
    lock.release()


def test_env_names_versions_device_commit_and_command_and_keeps_earlier_starts(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["rewarden", "run", "x.yaml"])
    folder.write_env(Ranks.single("cpu"))
    folder.write_env(Ranks.single("cpu"))
    env = json.loads((tmp_path / "env.json").read_text())
    assert env["argv"] == ["rewarden", "run", "x.yaml"]
    assert env["device"] == "cpu"
    assert (env["num_ranks"], env["commit"]) == (1, None)
    assert env["versions"]["torch"].split(".")[0].isdigit()
    assert env["python"] == ".".join(map(str, sys.version_info[:3]))
    assert len(env["earlier_starts"]) == 1
    assert env["earlier_starts"][0]["argv"] == env["argv"]


def test_commit_is_that_of_the_folder_and_marks_changes(tmp_path):
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    (tmp_path / "a.txt").write_text("1")
    for command in (["init", "-q"], ["add", "a.txt"], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *command], cwd=tmp_path, check=True)
    head = subprocess.run(
        [*git, "log", "-1", "--format=%H"], cwd=tmp_path, check=True, capture_output=True, text=True
    ).stdout.strip()
    assert commit(tmp_path) == head
    (tmp_path / "a.txt").write_text("2")
    assert commit(tmp_path) == f"{head}+changes"


def test_recipe_is_readable_yaml_in_the_order_given(tmp_path):
    folder = RunFolder(tmp_path)
    recipe = {"z": 1, "a": {"text": "é", "path": Path("x"), "pair": (1, 2)}}
    folder.write_recipe(recipe)
    assert yaml.safe_load(folder.recipe.read_text(encoding="utf-8")) == {
        "z": 1,
        "a": {"text": "é", "path": "x", "pair": [1, 2]},
    }
    assert folder.recipe.read_text(encoding="utf-8").startswith("z: 1\na:\n  text: é\n")


def test_a_job_may_not_export_over_the_files_of_the_run(tmp_path):
    staging = tmp_path / "staging"
    staging.mkdir()
    (staging / "metrics.jsonl").touch()
    with pytest.raises(RewardenError, match=r"exports \['metrics.jsonl'\], which the run folder uses itself"):
        RunFolder(tmp_path).take(staging)


@pytest.mark.parametrize("text", ["{", "[]", '{"step": 3}'])
def test_a_damaged_done_file_is_refused_in_words(text, tmp_path):
    (tmp_path / "done.json").write_text(text)
    with pytest.raises(ResumeError, match=r"done.json is damaged .*; remove it to go on from the last checkpoint"):
        RunFolder(tmp_path).read_done()
