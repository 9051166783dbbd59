"""What an adapter makes of one row, and how it reads the row's columns.

An adapter is a generator over one row. It yields records, a `Drop` for each record that is left out, a `Notice` for each
irregularity it saw, and raises `BadRow` when the row does not have the form of the format at all.
"""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rewarden.data.read import VALUE, Row
from rewarden.data.records import Record
from rewarden.errors import DataError


@dataclass(frozen=True, slots=True)
class Drop:
    """One record that is left out on purpose, because of an irregularity the format is known for; the reader adds `where`."""

    reason: str
    where: str = ""


@dataclass(frozen=True, slots=True)
class Notice:
    """One irregularity of a row, whether the row is kept or not."""

    what: str


class BadRow(DataError):
    """A row that does not have the form of its format; `reason` is the word it is counted under."""

    def __init__(self, where: str, reason: str, message: str) -> None:
        super().__init__(f"{where}: {message}")
        self.reason = reason


Item = Record | Drop | Notice
Adapter = Callable[[Row], Iterator[Item]]


def row_id(row: Row) -> str:
    """The row's own "id" column as text, or file:line."""
    own = row.fields.get("id")
    return str(own) if own not in (None, "") else row.name


def meta(row: Row, used: Iterable[str]) -> dict[str, Any]:
    """All columns that did not go into the record, and "where" the row stands."""
    skip = {"id", "where", *used}
    return {**{key: value for key, value in row.fields.items() if key not in skip}, "where": row.where}


def text(row: Row, column: str) -> str:
    """The text in a column. BadRow "missing_column" or "not_text"."""
    if column not in row.fields:
        raise missing(row, [(column,)])
    value = row.fields[column]
    if not isinstance(value, str):
        raise BadRow(row.where, "not_text", f"column {column!r} is {show(value)}; it must be text")
    return value


def missing(row: Row, choices: Iterable[tuple[str, ...]]) -> BadRow:
    """The error for a row that has none of the sets of columns in `choices`; it names the nearest column."""
    choices = list(choices)
    needs = ", or ".join(" + ".join(choice) for choice in choices)
    if row.fields.keys() == {VALUE} and not isinstance(row.fields[VALUE], Mapping):
        return BadRow(row.where, "not_an_object", f"the row is {show(row.fields[VALUE])}; it must be an object with {needs}")
    wanted = {column for choice in choices for column in choice}
    hints = []
    for column in row.fields:
        near = difflib.get_close_matches(column, sorted(wanted - set(row.fields)), n=1)
        if column not in wanted and near:
            hints.append(f"{column!r}: did you mean {near[0]!r}?")
    has = ", ".join(repr(column) for column in row.fields) or "none"
    hint = " ".join(hints) or "Rename the columns in the file, or with `columns: {wanted: name in the file}`."
    return BadRow(row.where, "missing_column", f"columns are {has}; needed: {needs}. {hint}")


def show(value: Any) -> str:
    """A short form of a value for an error message, with its type."""
    shown = repr(value)
    return f"{shown if len(shown) <= 60 else shown[:57] + '...'} ({type(value).__name__})"
