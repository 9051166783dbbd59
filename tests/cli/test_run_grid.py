"""Grids run in processes: several at a time, shared stages once, restarted where they stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rewarden.errors import RewardenError
from rewarden.recipe.grid_run import threads_each
from rewarden.recipe.run import run_recipe

JOBS = '''
import json
import os
import signal
import time
from pathlib import Path

from rewarden.spec import Spec


class Say(Spec):
    """Writes a text, after that of the file it reads, and a line into said.txt."""

    text: str
    path: str | None = None
    fail: bool = False
    die: bool = False
    wait_for: str | None = None

    def run(self, folder: Path) -> dict[str, float]:
        with open("said.txt", "a") as file:
            file.write(f"{self.text} {os.environ['OMP_NUM_THREADS']}\\n")
        print(f"saying {self.text}")
        if self.wait_for:
            Path(f"pid-{self.text}").write_text(str(os.getpid()))
            while not Path(self.wait_for).exists():
                time.sleep(0.05)
        if self.die:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fail:
            raise ValueError(f"no {self.text} today")
        before = Path(self.path).read_text() if self.path else ""
        (folder / "out.txt").write_text(before + self.text)
        return {}


class Gather(Spec):
    """Joins what the last stage of every cell wrote."""

    cells: str

    def run(self, folder: Path) -> dict[str, float]:
        cells = json.loads(Path(self.cells).read_text())
        texts = [f"{cell['keys']}: " + (Path(cell["stages"]["last"]) / "out.txt").read_text() for cell in cells]
        (folder / "out.txt").write_text("\\n".join(texts))
        return {"cells": float(len(cells))}
'''

GRID = """
seed: 0
loud: false
grid: {seed: [0, 1], loud: [false, true]}
jobs: 2
stages:
  - {stage: first, kind: "jobs.py:Say", text: "f${seed}"}
  - {stage: last, kind: "jobs.py:Say", text: "l${loud}", path: "${first}/out.txt"}
gather:
  - {stage: all, kind: "jobs.py:Gather", cells: "${cells}"}
"""


@pytest.fixture
def grid(write):
    Path("jobs.py").write_text(JOBS)
    return lambda text=GRID: write(text, "recipe.yaml")


def said() -> list[str]:
    """The first words of the lines that stages wrote since the last call, sorted."""
    path = Path("said.txt")
    words = sorted(line.split()[0] for line in path.read_text().splitlines()) if path.exists() else []
    path.write_text("")
    return words


def test_cells_run_and_share_and_a_restart_does_only_what_is_left(grid, capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)), raising=False)
    run_recipe(grid())
    assert {line.split()[1] for line in Path("said.txt").read_text().splitlines()} == {"2"}  # four processors for two jobs
    assert said() == ["f0", "f1", "lFalse", "lFalse", "lTrue", "lTrue"]
    assert Path("runs/recipe/all/out.txt").read_text().splitlines() == [
        "{'seed': 0, 'loud': False}: f0lFalse",
        "{'seed': 0, 'loud': True}: f0lTrue",
        "{'seed': 1, 'loud': False}: f1lFalse",
        "{'seed': 1, 'loud': True}: f1lTrue",
    ]
    text = capsys.readouterr().out
    assert "first@seed=0: started" in text
    assert "[7/7] all: done in" in text
    assert "time left 0:00:0" in text
    assert "recipe: 7 stages done" in text
    assert "saying f0" in Path("runs/recipe/logs/first@seed=0.log").read_text()
    assert json.loads(Path("runs/recipe/grid.json").read_text())["last@seed=1,loud=true"]["seconds"] > 0
    run_recipe(grid())
    assert said() == []
    assert "7 of 7 stages are finished and unchanged, skipped" in capsys.readouterr().out
    run_recipe(grid(), ["seed=[1, 2]", "last.text='m${loud}'", "jobs=1"])
    assert said() == ["f2", "mFalse", "mFalse", "mTrue", "mTrue"]
    assert "the old results are kept in runs/recipe/last@seed=1,loud=true.1" in capsys.readouterr().out
    assert Path("runs/recipe/all/out.txt").read_text().splitlines()[-1] == "{'seed': 2, 'loud': True}: f2mTrue"


def test_what_fails_is_said_at_the_end_and_the_rest_is_finished(grid, capsys):
    broken = GRID.replace('text: "f${seed}"', 'text: "f${seed}", fail: "${fail}", die: "${die}"').replace(
        "loud: false\n", "loud: false\nfail: false\ndie: false\n", 1
    )
    broken = broken.replace(
        "grid: {seed: [0, 1], loud: [false, true]}",
        "grid:\n  - {seed: [0], loud: [true], fail: [true], die: [false]}\n  - {seed: [1], loud: [true], fail: [false], die: [true]}"
        "\n  - {seed: [2], loud: [true], fail: [false], die: [false]}",
    )
    with pytest.raises(RewardenError) as caught:
        run_recipe(grid(broken), ["jobs=1"])
    text = str(caught.value)
    assert "2 of 7 stages failed; 3 that read one of them did not run, the other 2 are finished" in text
    assert "first@seed=0,fail=true,die=false: ValueError: no f0 today (jobs.py, line" in text
    assert (
        "first@seed=1,fail=false,die=true: its process ended (signal SIGKILL); the machine may have run out of memory" in text
    )
    assert "log: runs/recipe/logs/first@seed=0,fail=true,die=false.log" in text
    assert "Traceback" in Path("runs/recipe/logs/first@seed=0,fail=true,die=false.log").read_text()
    assert "FAILED after" in capsys.readouterr().out
    assert Path("runs/recipe/last@seed=2,loud=true,fail=false,die=false/out.txt").exists()
    assert not Path("runs/recipe/all").exists()


def start() -> subprocess.Popen:
    code = "import sys; from rewarden.cli import main; sys.argv = ['rewarden', 'run', 'recipe.yaml']; main()"
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_until(holds, seconds=120.0) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.05)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not yet waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_grid_that_is_stopped_or_killed_leaves_nobody_behind_and_goes_on(grid):
    waiting = GRID.replace('text: "l${loud}"', 'text: "l${loud}", wait_for: go.txt').replace("seed: [0, 1]", "seed: [0]")
    for number, (end, code) in enumerate(((signal.SIGINT, 130), (signal.SIGKILL, -9))):
        grid(waiting)
        process = start()
        try:
            wait_until(lambda: Path("pid-lTrue").exists() and Path("pid-lFalse").exists())
            pids = [int(Path(name).read_text()) for name in ("pid-lTrue", "pid-lFalse")]
            process.send_signal(end)
            out, errors = process.communicate(timeout=60)
        finally:
            process.kill()
            process.wait()
        assert process.returncode == code, errors
        wait_until(lambda pids=pids: not any(alive(pid) for pid in pids), 30)
        if end == signal.SIGINT:
            assert errors == "interrupted\n"
            assert "stopped with 3 of 4 stages left; run the same command to go on" in out
            assert not list(Path("runs/recipe").glob("last@*/lock"))
        for name in ("pid-lTrue", "pid-lFalse"):
            Path(name).unlink()
        assert said() == ([] if number else ["f0"]) + ["lFalse", "lTrue"]
    Path("go.txt").touch()
    run_recipe(Path("recipe.yaml"))
    assert said() == ["lFalse", "lTrue"]
    assert "f0lTrue" in Path("runs/recipe/all/out.txt").read_text()


@pytest.mark.parametrize(("cores", "given", "jobs", "threads"), [(2, "", 2, 1), (8, "", 2, 4), (2, "", 4, 1), (8, "1", 2, 1)])
def test_processors_are_shared_out(monkeypatch, cores, given, jobs, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert threads_each(jobs) == threads
