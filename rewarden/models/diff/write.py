"""Safetensors files written as their tensors are computed, and a folder that appears only when it is complete."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rewarden.errors import ConfigError, RewardenError
from rewarden.models.diff.combine import raw_bytes
from rewarden.models.diff.read import DTYPE_NAMES
from rewarden.models.save import publish

PROGRESS = "progress.json"
LOCK = "lock"
"""The file by which a command that runs keeps a second one out of its draft."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A tensor to write: its rows are computed when it is its turn."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: Callable[[], Iterator[Tensor]]

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_tensors(file: Path, tensors: Sequence[Planned]) -> dict[str, Any]:
    """Write one safetensors file (8 bytes header length, JSON header, data); returns its size and SHA-256.

    Written beside `file`, synced, renamed. Wider types come first, so that every tensor is aligned.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    ordered = sorted(tensors, key=lambda planned: -planned.dtype.itemsize)
    offset = 0
    for planned in ordered:
        span = [offset, offset + planned.size]
        header[planned.key] = {"dtype": DTYPE_NAMES[planned.dtype], "shape": list(planned.shape), "data_offsets": span}
        offset = span[1]
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    temporary = file.with_name(f".tmp-{file.name}")
    with temporary.open("wb") as opened:
        for part in (len(text).to_bytes(8, "little"), text):
            opened.write(part)
            digest.update(part)
        for planned in ordered:
            before = opened.tell()
            for rows in planned.rows():
                data = raw_bytes(rows.to(planned.dtype))
                opened.write(data)
                digest.update(data)
            if opened.tell() - before != planned.size:
                raise ConfigError(
                    f"{planned.key}: {opened.tell() - before} bytes instead of {planned.size}; a file changed underway"
                )
        opened.flush()
        os.fsync(opened.fileno())
        size = opened.tell()
    temporary.rename(file)
    return {"sha256": digest.hexdigest(), "size": size}


def file_sha256(file: Path) -> str:
    """SHA-256 of a file."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def shard_name(stem: str, index: int, count: int) -> str:
    """`model.safetensors`, or `model-00001-of-00004.safetensors` where there are several."""
    base = stem.removesuffix(".safetensors")
    return stem if count == 1 else f"{base}-{index + 1:05d}-of-{count:05d}.safetensors"


def draft_of(folder: Path) -> Path:
    """Where a folder is put together before it is renamed; the same for every try, so that a killed one can go on."""
    return folder.parent / f".{folder.name}.writing"


def refuse_existing(folder: Path) -> None:
    """Errors: ConfigError when `folder` holds anything: nothing is ever overwritten."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists already; remove it, or choose another output folder")


class Draft:
    """The output folder in the making: finished shards are kept when the process dies, and a second try goes on after them.

    A draft of other inputs or options (another `fingerprint`) is thrown away, and so is the draft when an error of ours says
    that the inputs are wrong.

    Errors: ConfigError when the folder exists.
    """

    def __init__(self, folder: Path, fingerprint: Any) -> None:
        refuse_existing(folder)
        self.folder, self.path = folder, draft_of(folder)
        self.path.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256(json.dumps(fingerprint, sort_keys=True, default=str).encode()).hexdigest()
        found = _progress(self.path / PROGRESS)
        if found.get("fingerprint") != digest:
            self.clear()
            found = {"fingerprint": digest, "files": {}}
        self._progress = found

    def __enter__(self) -> "Draft":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, RewardenError):
            self.clear()

    def clear(self) -> None:
        """Remove everything but the lock."""
        for path in self.path.iterdir():
            if path.name != LOCK:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def shard(
        self, name: str, tensors: Sequence[Planned], facts: Callable[[], Mapping[str, Any]], report: Callable[[str], None]
    ) -> dict[str, Any]:
        """Write a shard, or keep it when an earlier try finished it and its bytes are still the same.

        Returns size, SHA-256 and the `facts` that were gathered while it was written.
        """
        file, record = self.path / name, self._progress["files"].get(name)
        if record is not None and file.exists() and file_sha256(file) == record["sha256"]:
            report(f"{name}: {record['size'] / 1e6:.1f} MB, kept from an earlier try")
            return record
        record = {**write_tensors(file, tensors), "facts": dict(facts())}
        self._progress["files"][name] = record
        write_text(self.path / PROGRESS, json.dumps(self._progress))
        report(f"{name}: {record['size'] / 1e6:.1f} MB")
        return record

    def index(self, stem: str, names: Mapping[str, str]) -> None:
        """The index (tensor -> file), where there are several files."""
        if len(set(names.values())) > 1:
            total = sum((self.path / name).stat().st_size for name in set(names.values()))
            content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
            write_text(self.path / f"{stem}.index.json", json.dumps(content, indent=2) + "\n")

    def publish(self) -> None:
        """Sync everything and rename the draft to its folder."""
        for name in (PROGRESS, LOCK):
            (self.path / name).unlink(missing_ok=True)
        publish(self.path, self.folder)


def write_text(file: Path, text: str) -> None:
    """Replace a small file in one step."""
    temporary = file.with_name(f".tmp-{file.name}")
    temporary.write_text(text, encoding="utf-8")
    temporary.rename(file)


def _progress(file: Path) -> dict[str, Any]:
    """What an earlier try noted; nothing where it noted nothing readable, which costs only time."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and isinstance(found.get("files"), dict) else {}
