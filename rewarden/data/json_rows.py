"""The values of a JSON or JSON Lines file, plain or .gz, each with its place; one that cannot be read names line and column."""

import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rewarden.errors import DataError

_HALF = re.compile(r"\\u[dD][89a-fA-F]")
_BLANK = re.compile(r"[ \t\r\n]*")


class Unreadable(DataError):
    """A line, an element or a file that holds no row; `where` is its file:line, `reason` the word it is counted under."""

    def __init__(self, reason: str, where: str, message: str) -> None:
        super().__init__(f"{where}: {message}")
        self.reason = reason
        self.where = where


Broken = Callable[[Unreadable], None]
"""Told of what cannot be read; when it returns, reading goes on behind that."""


def refuse(error: Unreadable) -> None:
    """The usual `Broken`: nothing is read behind what cannot be read."""
    raise error


class _Twice(ValueError):
    """An object gives one key twice."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys are each given once: Python would keep the last and drop the others without a word."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise _Twice(f"an object has the key {twice!r} twice")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_once)


def _byte_lines(file: Path, where: str) -> Iterator[tuple[int, bytes]]:
    number = 0
    try:
        with gzip.open(file, "rb") if file.name.endswith(".gz") else file.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                yield number, line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise Unreadable(
            "damaged_file", f"{where}:{number + 1}", f"the gzip data are damaged or cut off ({error}); copy the file again"
        ) from error


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
        raise Unreadable(
            "not_utf8",
            f"{where}:{line}",
            f"byte 0x{raw[error.start]:02x} at column {column} is not UTF-8; save the file as UTF-8",
        ) from error


def json_lines(file: Path, where: str, noticed: Counter[str], broken: Broken) -> Iterator[tuple[str, Any]]:
    """(line, value) of each line that is not blank."""
    for number, raw in _byte_lines(file, where):
        try:
            text = _text(raw, where, number, noticed)
            if not text.strip(" \t\r\n"):
                noticed["blank_line"] += 1
                continue
            value = _line(text, f"{where}:{number}")
        except Unreadable as error:
            broken(error)
            continue
        yield str(number), value


def _line(text: str, place: str) -> Any:
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise Unreadable(
            "broken_json", place, f"broken JSON at column {error.pos + 1}: {error.msg}; mend or remove the line"
        ) from error
    except (ValueError, RecursionError) as error:  # a key twice, a number of thousands of digits, brackets without end
        reason = "repeated_key" if isinstance(error, _Twice) else "broken_json"
        raise Unreadable(reason, place, f"JSON that cannot be read ({error}); mend or remove the line") from error
    if _HALF.search(text):
        _whole(value, place)
    return value


def json_array(file: Path, where: str, noticed: Counter[str], broken: Broken) -> Iterator[tuple[str, Any]]:
    """("line[position]", value) of each element of the array of rows; JSON Lines under this name are read as such."""
    text = _text(b"".join(line for _, line in _byte_lines(file, where)), where, 1, noticed)
    try:
        start = _skip(text, 0)
        if text[start : start + 1] == "{" and _is_json_lines(text, start):
            yield from json_lines(file, where, noticed, broken)
            return
        start = _array_start(text, start, where)
        line, counted, escapes = 1, 0, _HALF.search(text)
        for index, offset, value in _elements(text, start, lambda error: broken(_unreadable(error, where))):
            line, counted = line + text.count("\n", counted, offset), offset
            try:
                if escapes:
                    _whole(value, f"{where}:{line}")
            except Unreadable as error:
                broken(error)
                continue
            yield f"{line}[{index}]", value
    except json.JSONDecodeError as error:
        raise _unreadable(error, where) from error


def _unreadable(error: json.JSONDecodeError, where: str) -> Unreadable:
    return Unreadable(
        "broken_json", f"{where}:{error.lineno}", f"broken JSON at column {error.colno}: {error.msg}; mend the file"
    )


def _whole(value: Any, where: str) -> None:
    """Refuse text with half a surrogate pair, which no tokenizer takes."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        message = f"{half} is half of a character (a lone surrogate); write the text anew"
        raise Unreadable("half_character", where, message) from error


def _skip(text: str, offset: int) -> int:
    found = _BLANK.match(text, offset)
    return found.end() if found else offset


def _decode(text: str, offset: int) -> tuple[Any, int]:
    try:
        value, end = _DECODER.raw_decode(text, offset)
    except json.JSONDecodeError:
        raise
    except (ValueError, RecursionError) as error:  # a key twice, a number of thousands of digits, brackets without end
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
        found = f"starts with {text[start : start + 20]!r}"
        raise Unreadable("no_array", f"{where}:1", f"{found}; rows are a JSON array, or {{'data': [...]}}")
    whole, end = _decode(text, start)
    if end != len(text):
        raise json.JSONDecodeError("Extra data", text, end)
    if not isinstance(whole.get("data"), list):
        keys = ", ".join(whole) or "none"
        raise Unreadable("no_array", f"{where}:1", f"an object with keys {keys}; rows are a JSON array, or {{'data': [...]}}")
    offset = _skip(text, start + 1)
    while True:
        key, offset = _decode(text, offset)
        offset = _skip(text, offset + 1)
        if key == "data":
            return offset
        _, offset = _decode(text, offset)
        offset = _skip(text, offset + 1)


def _elements(text: str, start: int, broken: Callable[[json.JSONDecodeError], None]) -> Iterator[tuple[int, int, Any]]:
    """(position, offset, value) of each element of the array that begins at `start`.

    Behind a broken element reading goes on at the next line that is indented as it and opens as it does: the next element
    of a file with one element on each line, or of one that is printed with indents.
    """
    if start == len(text):
        return
    first = _skip(text, start + 1)
    if text[first : first + 1] == "]":
        return
    offset: int | None = first
    position, end = 0, len(text)
    while offset is not None:
        try:
            value, end = _decode(text, offset)
        except json.JSONDecodeError as error:
            broken(error)
            offset, end = _next_alike(text, offset, error.pos), len(text)
            position += 1
            continue
        yield position, offset, value
        position += 1
        mark = text[end : end + 1]
        if mark not in ("]", ","):
            broken(json.JSONDecodeError("Expecting ',' or ']' after an element", text, end))
            offset, end = (end if mark == text[offset] else _next_alike(text, offset, end)), len(text)
        else:
            offset = _skip(text, end + 1) if mark == "," else None
    end = _skip(text, end + 1)
    if start == _skip(text, 0) and end < len(text):
        raise json.JSONDecodeError("Extra data", text, end)


def _next_alike(text: str, offset: int, after: int) -> int | None:
    """The start of the first line beyond `after` that is indented as the element at `offset` and opens like it."""
    indent = text[text.rfind("\n", 0, offset) + 1 : offset]
    if indent.strip():
        return None
    found = re.compile(rf"\n{re.escape(indent)}(?={re.escape(text[offset])})").search(text, max(offset, after - 1))
    return found.end() if found else None
