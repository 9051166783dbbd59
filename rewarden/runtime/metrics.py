"""metrics.jsonl: one line of numbers per step, whole or absent, in the order of the steps."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rewarden.errors import ResumeError
from rewarden.runtime.disk import append, sync_file, write_atomic


class Metrics:
    """Appends to and trims `path`. A number that is not finite is written as null: JSON has no other word for it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, step: int, report: Mapping[str, float]) -> None:
        """Write one line, `step` first, then names in order. A line the disk takes only in part is taken back."""
        values = {name: float(report[name]) for name in sorted(report)}
        line = json.dumps({"step": step, **{name: v if math.isfinite(v) else None for name, v in values.items()}}) + "\n"
        append(self.path, line.encode("utf-8"))

    def sync(self) -> None:
        """Make all lines durable."""
        sync_file(self.path)

    def truncate(self, step: int) -> list[int]:
        """Drop lines of later steps and a torn last line; returns the steps dropped (-1 for a torn line)."""
        if not self.path.exists():
            return []
        kept, dropped = [], []
        lines = _lines(self.path)
        for number, line in enumerate(lines, start=1):
            if not line.endswith("\n"):
                dropped.append(-1)
                continue
            found = _parse(line, self.path, number)["step"]
            if found > step:
                dropped.append(found)
            else:
                kept.append(line)
        if dropped:
            write_atomic(self.path, "".join(kept))
        return dropped


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; null becomes nan. A torn last line, as a kill leaves it, is left out."""
    rows = []
    for number, line in enumerate(_lines(path), start=1):
        if line.endswith("\n"):
            row = _parse(line, path, number)
            rows.append({name: math.nan if value is None else value for name, value in row.items()})
    return rows


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise ResumeError(f"{path} cannot be read ({error}); move it away, then run again") from error


def _parse(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ResumeError(f"{path}:{number}: not JSON ({error}); remove the line, or the file, and run again") from error
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise ResumeError(
            f"{path}:{number}: a line holds an object with a whole 'step'; remove the line, or the file, and run again"
        )
    return row
