"""All rows of a source, read past every broken one; what the readers say about a row becomes a finding."""

import difflib
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace

from rewarden.data.formats import FORMATS, Target
from rewarden.data.formats.row import BadRow, Drop, Item, Notice
from rewarden.data.json_rows import Unreadable
from rewarden.data.read import Row, read_rows
from rewarden.data.records import Record
from rewarden.data.sources import Data, first_time, renamed, row_items
from rewarden.errors import DataError
from rewarden.evals.doctor_findings import Findings
from rewarden.evals.doctor_types import RowType, agreed, for_target, row_type

KNOWN_COLUMNS = {"id", "prompt", "chosen", "rejected", "completion", "label", "messages", "text", "margin", "preference"}
CLOSE = 0.8
"""How alike (difflib's ratio) an unused column's name is to a known one to be taken for a misspelling; it is no longer or
shorter than by two letters: raw_completion is no misspelt completion."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One usable record: where it stands, its type, and what its reader noticed about the row."""

    record: Record
    where: str
    kind: RowType
    noticed: frozenset[str]


@dataclass(slots=True, kw_only=True)
class Source:
    """What became of all rows. `types` counts rows by type, `left_out` and `refused` records by reason."""

    name: str
    path: str
    split: str
    num_rows: int = 0
    num_unreadable: int = 0
    target: Target | None = None
    types: Counter[str] = field(default_factory=Counter)
    columns: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    entries: list[Entry] = field(default_factory=list)


def read_source(name: str, data: Data, target: Target | None, findings: Findings) -> Source:
    """Every row of `data`, each read as its own type unless `target` says what all are for.

    Errors: DataError when there is no such file, folder, split or data set; ConfigError when the format lacks the target.
    """
    source = Source(name=name, path=data.path, split=data.split)
    broken: list[Unreadable] = []
    reader = read_rows(data.path, split=data.split, subset=data.subset, broken=broken.append)
    rows = list(_named(reader, data, source, findings))
    for error in broken:
        findings.add(name, error.reason, error.where, _behind(error, error.where))
    for code, count in reader.noticed.items():
        findings.add(name, code, data.path, count=count)
    source.num_unreadable = len(broken)
    source.num_rows = len(rows) + sum(source.refused.values())
    own = [row_type(row, data.format) for row in rows]
    types = agreed(own)
    if target is not None:
        types = [for_target(row, kind, data.format, target) for row, kind in zip(rows, own, strict=True)]
    source.types.update(kind.name if kind else "unknown" for kind in types)
    known = Counter(kind for kind in types if kind is not None)
    usual = known.most_common(1)[0][0] if known else RowType("unknown", "trl", target or "conversations", frozenset())
    source.target = usual.target if rows else target
    _read_all(rows, types, usual, source, findings)
    _columns(source, findings)
    if rows and not source.entries:
        findings.add(name, "nothing_usable", data.path)
    return source


def _behind(error: Exception, where: str) -> str:
    return str(error).removeprefix(f"{where}: ")


def _named(rows: Iterator[Row], data: Data, source: Source, findings: Findings) -> Iterator[Row]:
    """The rows under the names of `columns`; one that lacks such a column is refused."""
    for row in rows:
        source.columns.update(row.fields.keys())
        if "where" in row.fields and "where" not in data.columns.values():
            findings.add(source.name, "column_named_where", row.where)
            row = replace(row, fields={column: value for column, value in row.fields.items() if column != "where"})
        try:
            yield renamed(row, data.columns)
        except DataError as error:
            source.refused["missing_column"] += 1
            findings.add(source.name, "missing_column", row.where, _behind(error, row.where))


def _read_all(rows: list[Row], types: list[RowType | None], usual: RowType, source: Source, findings: Findings) -> None:
    seen = set[Hashable]()
    ids: Counter[str] = Counter()
    for row, kind in zip(rows, types, strict=True):
        kind = _read_as(row, kind, usual, source, findings)
        try:
            items = row_items(row, kind.format, kind.target, drop_last_assistant=False)
        except BadRow as error:
            source.refused[error.reason] += 1
            findings.add(source.name, error.reason, row.where, _behind(error, row.where), severity="error")
            continue
        for item in _noticed(items, row, kind, seen, source, findings):
            ids[item.id] += 1
            if ids[item.id] > 1:
                findings.add(source.name, "repeated_id", row.where, f"id {item.id!r}")
            notices = frozenset(item.what for item in items if isinstance(item, Notice))
            source.entries.append(Entry(item, row.where, kind, notices))


def _read_as(row: Row, kind: RowType | None, usual: RowType, source: Source, findings: Findings) -> RowType:
    """The type to read a row as: its own, if it is whole; the usual one when it only fails to be of that."""
    if kind is None or kind == usual:
        return usual
    if kind.needs == usual.needs:  # the same columns: its content was not recognized
        return usual
    severity, said = None, ""
    try:
        row_items(row, usual.format, usual.target, drop_last_assistant=False)
    except BadRow as error:
        if error.reason == "missing_column" and len(usual.needs - row.fields.keys()) == 1:
            return usual
        severity, said = "error", "; read as most rows are, it is refused"
    findings.add(
        source.name, "mixed_types", row.where, f"{kind.name} among {usual.name}{said}", severity="error" if severity else None
    )
    return kind


def _noticed(
    items: list[Item], row: Row, kind: RowType, seen: set[Hashable], source: Source, findings: Findings
) -> Iterator[Record]:
    """The records among the items; notices and drops become findings.

    A drop that a notice of the row already names (by side, say) is counted as left out, but is no finding of its own.
    """
    notices = [item.what for item in items if isinstance(item, Notice)]
    for what in notices:
        findings.add(source.name, what, row.where)
    once = FORMATS[kind.format].once if kind.target in ("conversations", "prompts") else None
    for item in items:
        if once:
            item = first_time(item, once, seen)
        if isinstance(item, Notice):
            continue
        if isinstance(item, Drop):
            source.left_out[item.reason] += 1
            if not any(what == item.reason or what.endswith(f"_{item.reason}") for what in notices):
                findings.add(source.name, item.reason, row.where)
        else:
            yield item


def _columns(source: Source, findings: Findings) -> None:
    """Columns that no record used. Those of prompts go to reward functions, and so are used."""
    first: dict[str, str] = {}
    count: Counter[str] = Counter()
    for entry in source.entries:
        if entry.kind.target == "prompts":
            continue
        own = {"where", "prompt_messages", *entry.kind.needs}
        if entry.kind.format == "alpaca_farm":
            own.add("input")
        for column in entry.record.meta.keys() - own:
            if f"{column}_not_read" not in entry.noticed:
                count[column] += 1
                first.setdefault(column, entry.where)
    formats = {entry.kind.format for entry in source.entries}
    for column in sorted(count):
        near = _near(column, KNOWN_COLUMNS - source.columns.keys()) if formats == {"trl"} else []
        if near:
            said = f"{column!r}: did you mean {near[0]!r}?"
            findings.add(source.name, "misspelt_column", first[column], said, count=count[column])
        else:
            findings.add(source.name, "ignored_column", first[column], f"{column!r}, {count[column]} rows")


def _near(column: str, known: set[str]) -> list[str]:
    fits = [name for name in sorted(known) if abs(len(name) - len(column)) <= 2]
    return difflib.get_close_matches(column.lower(), fits, n=1, cutoff=CLOSE)
