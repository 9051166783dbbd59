"""Whether a stage is what it was: its config, its inputs and the stages it reads."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rewarden.errors import ConfigError
from rewarden.recipe.read import below
from rewarden.spec import Spec

HASH_LIMIT = 64 * 2**20
"""Files up to this many bytes are compared by content, larger ones by size and time."""

PATH_KEYS = ("path", "model_name_or_path", "tokenizer")
"""Under these keys any text that names something on disk is an input; elsewhere it must look like a path."""

CACHE_KEYS = ("feature_cache_dir",)
"""Folders that a stage fills itself; what is in them changes no result."""


def resolved(kind: str, spec: Spec) -> dict[str, Any]:
    """Every key of a stage with the value it has, as plain JSON values; what recipe.yaml of a run folder holds."""
    return {"kind": kind, **spec.model_dump(mode="json")}


def fingerprint(kind: str, spec: Spec, upstream: Mapping[Path, str]) -> str:
    """Hash of a stage: what its config asks for beyond the defaults, what it reads on disk, and the stages it reads.

    upstream: fingerprint by folder of the earlier stages it reads; a path below such a folder counts through that fingerprint.
    """
    config = {"kind": kind, **spec.model_dump(mode="json", exclude_defaults=True)}
    text = json.dumps(
        {"config": config, "upstream": sorted(upstream.values()), "inputs": inputs(config, upstream)},
        sort_keys=True,
        default=str,
    )
    return hashlib.sha256(text.encode()).hexdigest()


def inputs(config: Mapping[str, Any], upstream: Mapping[Path, str]) -> dict[str, str]:
    """Hash of the content of every file and folder that a config names, also of the code in "my_file.py:MyReward"."""
    found = {}
    for key, text in _named(config):
        for path in _files(key, text):
            if not any(below(str(path), folder) for folder in upstream):
                try:
                    found[str(path)] = _content(path)
                except OSError as error:
                    where = error.filename or path
                    raise ConfigError(f"{path} cannot be read ({where}: {error.strerror}); check its permissions") from error
    return found


def move_aside(folder: Path) -> Path:
    """Give a folder up without losing it: NAME becomes NAME.1, NAME.2, ..."""
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(aside)
    return aside


def _named(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(key, text) of every text."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if name not in CACHE_KEYS:
                yield from _named(inner, str(name))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _named(inner, key)
    elif isinstance(value, str):
        yield key, value


def _files(key: str, text: str) -> list[Path]:
    """What a text names on disk: a file, a folder, or the file of "my_file.py:MyReward"."""
    looks_like_a_path = ("/" in text or "." in text) and text.strip("./") != ""
    code = text.rpartition(":")[0]
    candidates = [text] if key in PATH_KEYS or looks_like_a_path else []
    candidates += [name for name in (code, f"{code}.py") if code and name.endswith(".py")]
    return [Path(name).expanduser() for name in candidates if _exists(name)]


def _exists(name: str) -> bool:
    try:
        path = Path(name).expanduser()
        return path.is_file() or path.is_dir()  # reading a pipe or a device would never end
    except (OSError, ValueError, RuntimeError):  # too long for a path, with a null byte, of an unknown user
        return False


def _content(path: Path) -> str:
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file())
        return hashlib.sha256("".join(f"{p.relative_to(path)}:{_content(p)};" for p in files).encode()).hexdigest()
    stat = path.stat()
    if stat.st_size > HASH_LIMIT:
        return f"{stat.st_size}:{stat.st_mtime_ns}"
    return hashlib.sha256(path.read_bytes()).hexdigest()
