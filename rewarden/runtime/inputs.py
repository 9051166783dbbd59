"""What a config reads from disk: the files and folders it names, by content."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rewarden.errors import ConfigError

HASH_LIMIT = 64 * 2**20
"""Files up to this many bytes are compared by content, larger ones by size and time."""

PATH_KEYS = ("path", "model_name_or_path", "tokenizer")
"""Under these keys any text that names something on disk is an input; elsewhere it must look like a path."""

CACHE_KEYS = ("feature_cache_dir", "score_cache_dir")
"""Folders that a stage fills itself; what is in them changes no result."""


def named_files(config: Any) -> Iterator[Path]:
    """Every file and folder that a config names, also the code in "my_file.py:MyReward"."""
    for key, text in _named(config):
        yield from _files(key, text)


def content(path: Path) -> str:
    """Hash of a file, or of everything in a folder, by name. Errors: ConfigError when it cannot be read."""
    try:
        return _content(path)
    except OSError as error:
        where = error.filename or path
        raise ConfigError(f"{path} cannot be read ({where}: {error.strerror}); check its permissions") from error


def identity(config: Mapping[str, Any]) -> str:
    """Hash of a config in which what lies on disk counts by its content: a moved folder is the same, a changed one is not."""
    return hashlib.sha256(json.dumps(_by_content(config, ""), sort_keys=True, default=str).encode()).hexdigest()


def _by_content(value: Any, key: str) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _by_content(inner, str(name)) for name, inner in value.items() if name not in CACHE_KEYS}
    if isinstance(value, list | tuple):
        return [_by_content(inner, key) for inner in value]
    if not isinstance(value, str) or not (files := _files(key, value)):
        return value
    attribute = value.rpartition(":")[2] if ":" in value else ""
    return [*(content(path) for path in files), attribute]


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
