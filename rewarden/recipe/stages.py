"""Whether a stage is what it was: its config, its inputs and the stages it reads."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HASH_LIMIT = 64 * 2**20
"""Files up to this many bytes are compared by content, larger ones by size and time."""


def fingerprint(config: Mapping[str, Any], upstream: Mapping[Path, str]) -> str:
    """Hash of a stage: its resolved config, the fingerprints of the stages it reads, and the files and folders it names.

    upstream: fingerprint by folder of earlier stages. A path below such a folder counts through that fingerprint.
    """
    inputs = {}
    for value in sorted(set(_strings(config))):
        path = Path(value)
        if 0 < len(value) < 1024 and path.exists() and not any(_below(path, folder) for folder in upstream):
            inputs[value] = _content(path)
    text = json.dumps({"config": config, "upstream": sorted(upstream.values()), "inputs": inputs}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def move_aside(folder: Path) -> Path:
    """Give a folder up without losing it: NAME becomes NAME.1, NAME.2, ..."""
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(aside)
    return aside


def _below(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())


def _strings(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [text for inner in value.values() for text in _strings(inner)]
    if isinstance(value, list | tuple):
        return [text for inner in value for text in _strings(inner)]
    return [value] if isinstance(value, str) else []


def _content(path: Path) -> str:
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file())
        return hashlib.sha256("".join(f"{p.relative_to(path)}:{_content(p)};" for p in files).encode()).hexdigest()
    stat = path.stat()
    if stat.st_size > HASH_LIMIT:
        return f"{stat.st_size}:{stat.st_mtime_ns}"
    return hashlib.sha256(path.read_bytes()).hexdigest()
