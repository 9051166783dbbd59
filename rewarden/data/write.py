"""Write rows as JSON Lines that `read.py` and TRL read: all of a file or nothing."""

import gzip
import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rewarden.data.records import Labeled
from rewarden.errors import DataError
from rewarden.types import Comparison, Conversation, Message


def write_jsonl(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write one JSON object a line, UTF-8, and return how many; a name ending in .gz is compressed.

    Atomic: the rows go to a temporary file beside `path`, are flushed to disk, and take its place in one step. When a row
    cannot be written, `path` keeps what it held and the temporary file is removed.

    Errors: DataError naming the row (from 1) for what JSON cannot hold, such as NaN, a tensor, or half a surrogate pair.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        number = 0
        with os.fdopen(handle, "wb") as raw:
            # No name and no time in the gzip header: equal rows give equal bytes.
            stream = gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) if path.name.endswith(".gz") else raw
            for number, row in enumerate(rows, 1):
                stream.write(_line(row, path, number))
            if stream is not raw:
                stream.close()
            raw.flush()
            os.fsync(raw.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)  # mkstemp makes the file private; the result is an ordinary one
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)
    return number


def conversation_row(conversation: Conversation) -> dict[str, Any]:
    """A TRL conversational row: id, messages, and the other columns."""
    return _row(conversation.id, {"messages": _messages(conversation.messages)}, conversation.meta)


def prompt_row(conversation: Conversation) -> dict[str, Any]:
    """A TRL prompt-only row: id, prompt, and the other columns."""
    return _row(conversation.id, {"prompt": _messages(conversation.messages)}, conversation.meta)


def comparison_row(comparison: Comparison) -> dict[str, Any]:
    """A TRL preference row with explicit prompt; `margin` and `preference` only where they say something."""
    columns: dict[str, Any] = {
        "prompt": _messages(comparison.prompt),
        "chosen": _messages(comparison.chosen),
        "rejected": _messages(comparison.rejected),
    }
    if comparison.margin is not None:
        columns["margin"] = comparison.margin
    if comparison.preference != 1.0:
        columns["preference"] = comparison.preference
    return _row(comparison.id, columns, comparison.meta)


def labeled_row(labeled: Labeled) -> dict[str, Any]:
    """A TRL unpaired preference row."""
    columns = {"prompt": _messages(labeled.prompt), "completion": _messages(labeled.completion), "label": labeled.label}
    return _row(labeled.id, columns, labeled.meta)


def _messages(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.text} for message in messages]


def _row(id: str, columns: dict[str, Any], meta: Mapping[str, Any]) -> dict[str, Any]:
    others = {key: value for key, value in meta.items() if key != "where"}
    clash = sorted({"id", *columns} & set(others))
    if clash:
        raise DataError(f"row {id!r}: the extra column {clash[0]!r} has the name of one this row needs; rename it")
    return {"id": id, **columns, **others}


def _line(row: Mapping[str, Any], path: Path, number: int) -> bytes:
    try:
        return (json.dumps(dict(row), ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8")
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{path}: row {number} cannot be written: {error}; give strings, finite numbers, lists and dicts"
        ) from error


def _sync_folder(folder: Path) -> None:
    """Make the rename itself last a power cut; systems that cannot open folders do without."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
