"""A pytest plugin for `make slow`: one line per test, and what it measured in slow/results.json.

A test says which promised point it stands for and what it measured with pytest's own `record_property`:

    def test_ppo_beats_sft(record_property):
        record_property("point", "PPO gains gold over SFT, 5 seeds")
        record_property("gain", 0.21)

The file is rewritten after every test, so a run that is stopped keeps what it has measured.
"""

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import pytest

FOLDER = "slow"


class SlowReport:
    """Collects the outcome and the recorded properties of every test that ran."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.path = root / FOLDER / "results.json"
        self.points: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the call phase; set-up and tear-down count only when they fail or skip."""
        if report.when != "call" and report.outcome == "passed":
            return
        properties = dict(report.user_properties)
        point = {
            "point": str(properties.pop("point", report.nodeid.split("::")[-1].replace("_", " "))),
            "test": report.nodeid,
            "outcome": report.outcome,
            "seconds": round(report.duration, 1),
            "measured": properties,
        }
        if report.outcome == "skipped":
            point["reason"] = report.longrepr[-1] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        self.points.append(point)
        self.write()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """One line per promised point."""
        if not self.points:
            return
        terminalreporter.section("promised points")
        for point in self.points:
            terminalreporter.write_line(line(point))
        terminalreporter.write_line(f"numbers: {self.path}")

    def write(self) -> None:
        """Replace results.json in one move."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        result = {
            "commit": commit(self.root),
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "points": self.points,
        }
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(result, indent=1, default=str) + "\n", encoding="utf-8")
        temporary.replace(self.path)


def line(point: dict[str, Any]) -> str:
    """`passed  PPO gains gold over SFT  gain=0.21  (12.3 s)`."""
    measured = "  ".join(f"{name}={_short(value)}" for name, value in point["measured"].items())
    reason = f"  {point['reason']}" if "reason" in point else ""
    return f"{point['outcome']:<8}{point['point']}  {measured}{reason}  ({point['seconds']} s)"


def commit(root: Path) -> str | None:
    """The commit the numbers belong to, with "+" when tracked files differ from it; None outside a repository."""
    try:
        head = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, encoding="utf-8", check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "status", "--porcelain", "-uno"], cwd=root, capture_output=True, encoding="utf-8", check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changed.strip() else "")


def pytest_configure(config: pytest.Config) -> None:
    """Register the report for this run."""
    config.pluginmanager.register(SlowReport(config.rootpath), "slow-report")


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
