"""Replies on disk: one file that only grows, so that a killed run loses at most the reply it was writing."""

import json
import logging
import os
from pathlib import Path
from typing import Any

from rewarden.errors import ConfigError
from rewarden.runtime.disk import append, sync_file, writing
from rewarden.runtime.endpoint.reply import Reply, as_record, from_record

log = logging.getLogger(__name__)

BEGINS = b'{"key": "'
"""How every line begins, also one that was cut."""


class ReplyCache:
    """Replies by the key of their request; `path` None keeps them in memory only.

    One JSON line per reply: {"key", "from" (base URL), "reply"}. Several processes may append to one file: each sees what was
    there when it opened it. `ignored` counts lines that are no reply, which is what a killed writer leaves at the end; the next
    reply starts a new line.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.ignored = 0
        self._memory: dict[str, bytes] = {}
        self._places: dict[str, tuple[int, int]] = {}
        if path is not None and path.exists():
            self._index(path)

    def __len__(self) -> int:
        return len(self._memory) + len(self._places)

    def find(self, key: str) -> tuple[Reply, str] | None:
        """The reply to the request with this key and the base URL of the server that gave it, or None."""
        line = self._memory.get(key) or self._line(key)
        if line is None:
            return None
        record = json.loads(line)
        return from_record(record["reply"]), record["from"]

    def _line(self, key: str) -> bytes | None:
        if key not in self._places or self.path is None:
            return None
        start, length = self._places[key]
        with self.path.open("rb") as file:
            file.seek(start)
            return file.read(length)

    def keep(self, key: str, reply: Reply, source: str) -> None:
        """Remember a reply; it is in the file when this returns."""
        line = json.dumps({"key": key, "from": source, "reply": as_record(reply)}).encode("ascii") + b"\n"
        if self.path is not None:
            with writing(self.path):
                self.path.parent.mkdir(parents=True, exist_ok=True)
            append(self.path, line)
        self._memory[key] = line

    def sync(self) -> None:
        """Make the file safe from a power cut; a killed process alone loses nothing that was kept."""
        if self.path is not None:
            sync_file(self.path)

    def _index(self, path: Path) -> None:
        """Where each reply stands in the file; of two with one key the first counts."""
        place, foreign = 0, 0
        with path.open("rb") as file:
            for line in file:
                record = _parsed(line)
                if record is None:
                    self.ignored += bool(line.strip())
                    foreign += not line.strip().startswith(BEGINS[: len(line.strip())])
                elif record["key"] not in self._places:
                    self._places[record["key"]] = (place, len(line))
                place += len(line)
        if foreign and not self._places:
            raise ConfigError(f"{path} holds {foreign} lines and none is a kept reply; choose another file for the cache")
        if self.ignored:
            log.warning("%s: %d lines are no reply (a run was killed while writing) and are ignored", path, self.ignored)
        if place and not _ended(path):
            append(path, b"\n")


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
        from_record(record["reply"])
        return record if isinstance(record["key"], str) and isinstance(record["from"], str) and line.endswith(b"\n") else None
    except (ValueError, RecursionError, KeyError, TypeError):
        return None


def _ended(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
