"""The report of `make slow` keeps what a test recorded."""

import json
import os
import subprocess
import sys
from pathlib import Path

TOOLS = Path(__file__).parents[1] / "tools"

TESTS = """
import pytest

@pytest.mark.slow
def test_promise(record_property):
    record_property("point", "the promise holds")
    record_property("gain", 0.25)

@pytest.mark.slow
def test_broken_promise(record_property):
    record_property("seeds", [0, 1])
    assert False

@pytest.mark.slow
def test_left_out():
    pytest.skip("no data here")

def test_quick():
    pass
"""


def test_each_slow_test_gives_one_line_and_one_entry(tmp_path):
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow: long\n")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "slow", "-p", "slow_report", "-p", "no:cacheprovider"]
    run = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(TOOLS)}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 1, run.stdout + run.stderr
    points = json.loads((tmp_path / "slow" / "results.json").read_text())["points"]
    assert [(p["point"], p["outcome"], p["measured"]) for p in points] == [
        ("the promise holds", "passed", {"gain": 0.25}),
        ("test broken promise", "failed", {"seeds": [0, 1]}),
        ("test left out", "skipped", {}),
    ]
    assert "no data here" in points[2]["reason"]
    lines = [line for line in run.stdout.splitlines() if line.startswith(("passed", "failed ", "skipped"))]
    assert len(lines) == 3
    assert "gain=0.25" in lines[0]
