"""samples.parquet: transcripts a person can read, appended safely at bounded cost.

A parquet file cannot grow in place. New rows go to a tail of JSON lines beside it; when the tail has grown to a quarter of the
file (and at every end) both are merged into a new file that replaces the old one, so n rows cost O(n) writing in all. Each
tail row carries its position in the whole sequence, so a kill between the replacement and the removal of the tail duplicates
nothing.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rewarden.errors import DataError, ResumeError
from rewarden.runtime.disk import append, sync_file, sync_folder, writing

TAIL_ROWS = 256
"""The tail is merged when it has at least this many rows, and a quarter of the file's."""

ROW_GROUP = 4096
"""Rows of one row group of the file, so that a reader can take the texts piece by piece."""


class Samples:
    """The samples of one run; `path` is the parquet file, `tail` what has not been merged yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tail = path.with_name("samples.tail.jsonl")
        table, tail = self._stored()
        self._merged, self._pending = table.num_rows, len(tail)
        self._kinds = {name: kind for name in table.column_names if (kind := _kind_of_type(table.schema.field(name).type))}
        for row in tail:
            self._learn(row)

    def append(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows with their step. Values are text, numbers, booleans or None; lists and dicts are stored as JSON text.

        DataError when a column holds another kind of value than before.
        """
        flat = [{"step": step, **{key: _plain(value) for key, value in row.items()}} for row in rows]
        for row in flat:
            self._learn(row)
        start = self._merged + self._pending
        lines = [json.dumps({"n": start + i, "row": row}, ensure_ascii=False) + "\n" for i, row in enumerate(flat)]
        if lines:
            append(self.tail, "".join(lines).encode("utf-8"))
            self._pending += len(flat)

    def flush(self, *, final: bool = False) -> None:
        """Make rows durable; merge the tail when it has grown enough, or in any case when `final`."""
        if not self._pending:
            return
        if final or self._pending >= max(TAIL_ROWS, self._merged // 4):
            self._replace(*self._stored())
        else:
            sync_file(self.tail)

    def truncate(self, step: int) -> int:
        """Drop rows of later steps, and what a kill left of a torn line; returns the number of rows dropped."""
        if self.tail.exists():
            whole = self.tail.read_bytes().rfind(b"\n") + 1
            with writing(self.tail):
                os.truncate(self.tail, whole)
        table, tail = self._stored()
        kept_tail = [row for row in tail if row["step"] <= step]
        kept = table.filter(pc.less_equal(table["step"], step)) if table.num_rows else table
        dropped = table.num_rows - kept.num_rows + len(tail) - len(kept_tail)
        if dropped:
            self._replace(kept, kept_tail)
        return dropped

    def read(self) -> list[dict[str, Any]]:
        """All rows, merged or not, in order."""
        table, tail = self._stored()
        return [*table.to_pylist(), *tail]

    def _stored(self) -> tuple[pa.Table, list[dict[str, Any]]]:
        reading = self.path
        try:
            table = pq.read_table(self.path) if self.path.exists() else pa.table({})
            reading, rows = self.tail, []
            if self.tail.exists():
                # as bytes: a text may hold U+2028, at which str.splitlines would cut its line
                for line in self.tail.read_bytes().splitlines(keepends=True):
                    if line.endswith(b"\n"):  # a torn last line is of a step that will be done again
                        entry = json.loads(line)
                        if entry["n"] >= table.num_rows:
                            rows.append(entry["row"])
        except (pa.ArrowException, OSError, ValueError, TypeError, KeyError) as error:
            raise ResumeError(f"{reading} cannot be read ({error}); move it away, then run again") from error
        return table, rows

    def _replace(self, table: pa.Table, rows: list[dict[str, Any]]) -> None:
        if rows:
            names = dict.fromkeys(key for row in rows for key in row)
            tail = pa.table({name: pa.array([row.get(name) for row in rows]) for name in names})
            table = pa.concat_tables([table, tail], promote_options="permissive") if table.num_rows else tail
        temporary = self.path.with_name(f".tmp-{self.path.name}")
        with writing(self.path):
            try:
                with temporary.open("wb") as file:
                    pq.write_table(table, file, compression="zstd", row_group_size=ROW_GROUP)
                    file.flush()
                    os.fsync(file.fileno())
            except OSError:
                temporary.unlink(missing_ok=True)
                raise
            temporary.replace(self.path)
            sync_folder(self.path.parent)
            self.tail.unlink(missing_ok=True)
        self._merged, self._pending = table.num_rows, 0

    def _learn(self, row: Mapping[str, Any]) -> None:
        for name, value in row.items():
            kind = _kind(value)
            if kind and self._kinds.setdefault(name, kind) != kind:
                raise DataError(
                    f"{self.path}: column {name!r} held {self._kinds[name]} and now gets {value!r} (step {row['step']}); "
                    "a column has one kind of value: text, number or boolean"
                )


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int | float):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def _kind(value: Any) -> str:
    if value is None:
        return ""
    return "boolean" if isinstance(value, bool) else "number" if isinstance(value, int | float) else "text"


def _kind_of_type(type_: pa.DataType) -> str:
    if pa.types.is_boolean(type_) or pa.types.is_null(type_):
        return "boolean" if pa.types.is_boolean(type_) else ""
    return "number" if pa.types.is_integer(type_) or pa.types.is_floating(type_) else "text"
