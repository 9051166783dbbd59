"""A result file that survives an interruption: finished windows of rows are kept beside it until all are there."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from rewarden.data.write import write_jsonl
from rewarden.recipe.stages import move_aside
from rewarden.runtime.disk import append, writing


class Part:
    """OUTPUT.part: a first line that says what is scored, then a line per finished window."""

    def __init__(self, output: Path, identity: str) -> None:
        self.output, self.identity = output, identity
        self.path = output.with_name(f"{output.name}.part")

    def open(self, notes: Console) -> list[dict[str, Any]]:
        """The rows that an interrupted run left. A part of other work is renamed, not deleted; a torn last line is cut off."""
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            windows, size = self._read()
            if windows is None and self.path.exists():
                notes.print(f"{self.path} holds scores of other rows or another reward; it is now {move_aside(self.path)}")
            if windows is None:
                append(self.path, (json.dumps({"scores": self.identity}) + "\n").encode())
                return []
            os.truncate(self.path, size)
        return [row for window in windows for row in window]

    def add(self, window: Sequence[Mapping[str, Any]]) -> None:
        """Write one window; a full disk takes nothing of it."""
        append(self.path, (json.dumps(list(window), ensure_ascii=False) + "\n").encode())

    def finish(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """All rows as JSON lines in OUTPUT; the part is removed once they are there."""
        with writing(self.output):
            write_jsonl(self.output, rows)
            self.path.unlink()

    def _read(self) -> tuple[list[list[dict[str, Any]]] | None, int]:
        """The whole windows and the bytes they take; None for a file that is absent or of other work."""
        if not self.path.exists():
            return None, 0
        windows: list[list[dict[str, Any]]] = []
        size = 0
        for number, line in enumerate(self.path.read_bytes().splitlines(keepends=True)):
            try:
                value = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                value = None
            if number == 0 and value != {"scores": self.identity}:
                return None, 0
            if value is None:
                break
            windows += [] if number == 0 else [value]
            size += len(line)
        return windows, size
