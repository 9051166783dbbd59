"""One reader for JSON Lines, JSON, their .gz forms, Parquet, folders of these, and hub data sets.

Every row knows where it stands, so that an error in any later stage can name file and line.
"""

import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewarden.data.hub import hub_rows, saved_rows
from rewarden.errors import DataError
from rewarden.spec import nearest

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")
SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing"), "test"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "eval"), "validation"),
}
VALUE = "value"
"""The column a row goes into when it is not an object: a bare string, or a list of turns."""

_HALF = re.compile(r"\\u[dD][89a-fA-F]")
_BLANK = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row. `where` is file:line for people; `name` is the same without the folder it lies in, so ids travel.

    The line of a row of a JSON array is the line it starts on, followed by its 0-based position: "train.json:7[2]".
    For Parquet and hub data the line is the 1-based number of the row.
    """

    where: str
    name: str
    fields: dict[str, Any]


class Rows(Iterator[Row]):
    """Rows in order. `noticed` counts what was tolerated so far: byte order marks, blank lines, files of no split."""

    def __init__(self, path: str | Path, *, split: str = "train", subset: str | None = None) -> None:
        self.noticed: Counter[str] = Counter()
        self._rows = _rows(str(path), split, subset, self.noticed)

    def __next__(self) -> Row:
        return next(self._rows)


def read_rows(path: str | Path, *, split: str = "train", subset: str | None = None) -> Rows:
    """The rows of a file, a folder of files, a `save_to_disk` folder, or a data set on the hub (or in its local cache).

    path: what exists on disk is read from disk; otherwise "owner/name" is a hub id.
    split: of a folder, the files whose name or subfolder says so (train, test, validation/valid/val/dev/eval, or the word
    itself); a folder whose files name no split is all "train". A single file is one split.
    subset: the subfolder of a folder, the configuration of a hub data set.

    Errors: DataError with file, line and column for broken JSON, text that is not UTF-8, damaged gzip, a file without rows;
    for a path, split or subset that does not exist, with the nearest name.
    """
    return Rows(path, split=split, subset=subset)


def _rows(path: str, split: str, subset: str | None, noticed: Counter[str]) -> Iterator[Row]:
    place = Path(path).expanduser()
    if place.is_dir():
        if subset is not None:
            place = _subfolder(place, subset)
        if any((place / mark).is_file() for mark in ("dataset_dict.json", "state.json")):
            for where, name, fields in saved_rows(place, split):
                yield Row(where=where, name=name, fields=fields)
            return
        for file in _files(place, split, noticed):
            yield from _file_rows(file, str(file), file.relative_to(place).as_posix(), noticed)
    elif place.is_file():
        if subset is not None:
            raise DataError(f"{path}: subset={subset!r}, but this is one file; a subset is a subfolder, so leave it out")
        if split != "train" and _canonical(split) not in _words(place.name) | {_canonical(place.parent.name)}:
            raise DataError(f"{path}: split={split!r}, but this is one file; give the file of that split, or leave split out")
        yield from _file_rows(place, path, place.name, noticed)
    elif _is_hub_id(path):
        for where, name, fields in hub_rows(path, split, subset):
            yield Row(where=where, name=name, fields=fields)
    else:
        siblings = [entry.name for entry in place.parent.iterdir()] if place.parent.is_dir() else []
        hint = nearest(place.name, siblings) if siblings else f"folder {place.parent} does not exist either"
        raise DataError(f"{path}: no such file or folder; {hint}")


def _is_hub_id(path: str) -> bool:
    return not path.endswith(SUFFIXES) and re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", path) is not None


def _subfolder(folder: Path, subset: str) -> Path:
    if (folder / subset).is_dir():
        return folder / subset
    there = [entry.name for entry in folder.iterdir() if entry.is_dir()]
    raise DataError(f"{folder}: subset={subset!r} is no subfolder; {nearest(subset, there) if there else 'there are none'}")


def _canonical(split: str) -> str:
    return SPLITS.get(split.lower(), split.lower())


def _words(*parts: str) -> set[str]:
    """Words of file and folder names, splits under their usual name: helpful.valid.jsonl -> helpful, validation, jsonl."""
    return {_canonical(word) for part in parts for word in re.split(r"[-._ ]+", part)}


def _files(folder: Path, split: str, noticed: Counter[str]) -> list[Path]:
    everything = (file for file in folder.rglob("*") if file.name.endswith(SUFFIXES) and file.is_file())
    files = sorted(file for file in everything if not any(part[0] == "." for part in file.relative_to(folder).parts))
    if not files:
        raise DataError(f"{folder}: no file ends in {', '.join(SUFFIXES)}; give a folder with data files")
    words = {file: _words(*file.relative_to(folder).parts) for file in files}
    there = sorted(set(SPLITS.values()) & set().union(*words.values()))
    wanted = _canonical(split)
    chosen = [file for file in files if wanted in words[file]]
    if not chosen and wanted == "train" and not there:
        chosen = files
    if not chosen:
        hint = nearest(wanted, there) if there else "no file name names a split"
        raise DataError(f"{folder}: no file of split {split!r}; {hint}")
    if len(files) > len(chosen):
        noticed["file_of_another_split"] += len(files) - len(chosen)
    return chosen


def _file_rows(file: Path, where: str, name: str, noticed: Counter[str]) -> Iterator[Row]:
    if file.name.endswith(".parquet"):
        rows = _parquet(file, where)
    elif file.name.endswith((".jsonl", ".jsonl.gz")):
        rows = _json_lines(file, where, noticed)
    elif file.name.endswith((".json", ".json.gz")):
        rows = _json(file, where, noticed)
    else:
        raise DataError(f"{where}: cannot tell the kind of file from its name; it must end in {', '.join(SUFFIXES)}")
    line = None
    for line, value in rows:
        fields = value if isinstance(value, dict) else {VALUE: value}
        yield Row(where=f"{where}:{line}", name=f"{name}:{line}", fields=fields)
    if line is None:
        raise DataError(f"{where}: no rows in the file; remove it or give another")


def _parquet(file: Path, where: str) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        number = 0
        with pyarrow.parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=1024):
                for fields in batch.to_pylist():
                    number += 1
                    yield str(number), fields
    except pyarrow.ArrowException as error:
        raise DataError(f"{where}:{number + 1}: not readable as Parquet ({error}); write the file again") from error


def _byte_lines(file: Path, where: str) -> Iterator[tuple[int, bytes]]:
    number = 0
    try:
        with gzip.open(file, "rb") if file.name.endswith(".gz") else file.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                yield number, line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{where}:{number + 1}: the gzip data are damaged or cut off ({error}); copy the file again") from error


def _text(raw: bytes, where: str, first_line: int, noticed: Counter[str]) -> str:
    """Bytes that begin on `first_line` as text, without a byte order mark."""
    if first_line == 1 and raw.startswith(b"\xef\xbb\xbf"):
        noticed["byte_order_mark"] += 1
        raw = raw[3:]
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        before = raw[: error.start]
        line, column = first_line + before.count(b"\n"), error.start - before.rfind(b"\n")
        raise DataError(
            f"{where}:{line}: byte 0x{raw[error.start]:02x} at column {column} is not UTF-8; save the file as UTF-8"
        ) from error


def _json_lines(file: Path, where: str, noticed: Counter[str]) -> Iterator[tuple[str, Any]]:
    for number, raw in _byte_lines(file, where):
        text = _text(raw, where, number, noticed)
        if not text.strip(" \t\r\n"):
            noticed["blank_line"] += 1
            continue
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            raise DataError(f"{where}:{number}: broken JSON at column {error.pos + 1}: {error.msg}") from error
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets without end
            raise DataError(f"{where}:{number}: JSON that cannot be read ({error}); mend or remove the line") from error
        if _HALF.search(text):
            _whole(value, f"{where}:{number}")
        yield str(number), value


def _json(file: Path, where: str, noticed: Counter[str]) -> Iterator[tuple[str, Any]]:
    text = _text(b"".join(line for _, line in _byte_lines(file, where)), where, 1, noticed)
    try:
        start = _skip(text, 0)
        if text[start : start + 1] == "{" and _is_json_lines(text, start):
            yield from _json_lines(file, where, noticed)
            return
        start = _array_start(text, start, where)
        line, counted, escapes = 1, 0, _HALF.search(text)
        for index, (offset, value) in enumerate(_elements(text, start)):
            line, counted = line + text.count("\n", counted, offset), offset
            if escapes:
                _whole(value, f"{where}:{line}")
            yield f"{line}[{index}]", value
    except json.JSONDecodeError as error:
        raise DataError(f"{where}:{error.lineno}: broken JSON at column {error.colno}: {error.msg}") from error


def _whole(value: Any, where: str) -> None:
    """DataError for text with half a surrogate pair, which no tokenizer takes."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise DataError(f"{where}: {half} is half of a character (a lone surrogate); write the text anew") from error


def _skip(text: str, offset: int) -> int:
    found = _BLANK.match(text, offset)
    return found.end() if found else offset


def _decode(text: str, offset: int) -> tuple[Any, int]:
    try:
        value, end = json.JSONDecoder().raw_decode(text, offset)
    except json.JSONDecodeError:
        raise
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets without end
        raise json.JSONDecodeError(f"cannot be read ({error})", text, offset) from error
    return value, _skip(text, end)


def _is_json_lines(text: str, start: int) -> bool:
    """A .json file that really holds one object a line: after the first object comes another."""
    _, end = _decode(text, start)
    return text[end : end + 1] == "{"


def _array_start(text: str, start: int, where: str) -> int:
    """Where the array of rows begins: the whole file, or the value of its key "data"."""
    if start == len(text) or text[start] == "[":
        return start
    if text[start] != "{":
        raise DataError(f"{where}:1: starts with {text[start : start + 20]!r}; rows are a JSON array, or {{'data': [...]}}")
    whole, end = _decode(text, start)
    if end != len(text):
        raise json.JSONDecodeError("Extra data", text, end)
    if not isinstance(whole.get("data"), list):
        keys = ", ".join(whole) or "none"
        raise DataError(f"{where}:1: an object with keys {keys}; rows are a JSON array, or {{'data': [...]}}")
    offset = _skip(text, start + 1)
    while True:
        key, offset = _decode(text, offset)
        offset = _skip(text, offset + 1)
        if key == "data":
            return offset
        _, offset = _decode(text, offset)
        offset = _skip(text, offset + 1)


def _elements(text: str, start: int) -> Iterator[tuple[int, Any]]:
    """(offset, value) of each element of the array that begins at `start`."""
    if start == len(text):
        return
    offset = _skip(text, start + 1)
    if text[offset : offset + 1] == "]":
        return
    while True:
        value, end = _decode(text, offset)
        yield offset, value
        mark = text[end : end + 1]
        if mark == "]":
            break
        if mark != ",":
            raise json.JSONDecodeError("Expecting ',' or ']' after an element", text, end)
        offset = _skip(text, end + 1)
    end = _skip(text, end + 1)
    if start == _skip(text, 0) and end != len(text):
        raise json.JSONDecodeError("Extra data", text, end)
