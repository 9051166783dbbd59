"""AlpacaEval's two side tables for length control: instruction difficulties, and comparisons of length-gamed models."""

import csv
import io
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from rewarden.errors import DataError
from rewarden.evals.alpaca_eval_set import instruction_number
from rewarden.hub import neighbors
from rewarden.maths.length_control import Regularizer

DIFFICULTIES = "instruction_difficulty*.csv"
REGULARIZER = "df_gamed*.csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthReference:
    """The side tables that were found."""

    difficulty: Mapping[int, float] | None
    """By number of the instruction in the set."""
    numbers: Mapping[str, int] | None
    """Number of an instruction by its text, where the table has a column `instruction`."""
    regularizer: Regularizer | None
    missing: tuple[str, ...]
    """Name patterns of tables that are not there."""

    def number(self, instruction: str) -> int | None:
        """The number of an instruction: by the table's own texts, else by its place in the AlpacaEval set."""
        found = instruction_number(instruction) if self.numbers is None else self.numbers.get(instruction.strip())
        return found if self.difficulty is not None and found in self.difficulty else None


def read_reference(folder: str | Path) -> LengthReference:
    """Read instruction_difficulty*.csv (columns index, instruction_difficulty, perhaps instruction) and df_gamed*.csv.

    df_gamed has the columns model, index, preference (0 to 1), std_delta_len and instruction_difficulty. One of the two may
    be absent; both absent is an error.

    Errors: DataError with file and line for a missing column, a value that is no finite number, an index given twice; for a
    folder that is not there, holds neither table, or holds two of a kind.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder of length-control tables; {neighbors(folder)}")
    files = {pattern: _only(folder, pattern) for pattern in (DIFFICULTIES, REGULARIZER)}
    missing = tuple(pattern for pattern, file in files.items() if file is None)
    if len(missing) == 2:
        raise DataError(f"{folder}: neither {missing[0]} nor {missing[1]}; give the folder that holds them, or leave it out")
    difficulty, numbers = _difficulties(files[DIFFICULTIES])
    return LengthReference(
        difficulty=difficulty, numbers=numbers, regularizer=_regularizer(files[REGULARIZER]), missing=missing
    )


def _only(folder: Path, pattern: str) -> Path | None:
    files = sorted(folder.glob(pattern))
    if len(files) > 1:
        raise DataError(f"{folder}: {', '.join(f.name for f in files)} all match {pattern}; keep the one to use")
    return files[0] if files else None


def _difficulties(file: Path | None) -> tuple[dict[int, float] | None, dict[str, int] | None]:
    if file is None:
        return None, None
    difficulty: dict[int, float] = {}
    numbers: dict[str, int] = {}
    for where, row in _table(file, ("index", "instruction_difficulty")):
        index = _integer(row, "index", where)
        if index in difficulty:
            raise DataError(f"{where}: index {index} is given twice; every instruction has one difficulty")
        difficulty[index] = _number(row, "instruction_difficulty", where)
        if "instruction" in row:
            numbers[row["instruction"].strip()] = index
    return difficulty, numbers or None


def _regularizer(file: Path | None) -> Regularizer | None:
    if file is None:
        return None
    columns: dict[str, list[float]] = {"preference": [], "std_delta_len": [], "instruction_difficulty": []}
    groups, models = [], set()
    for where, row in _table(file, ("model", "index", *columns)):
        for name, values in columns.items():
            values.append(_number(row, name, where))
        if not 0 <= columns["preference"][-1] <= 1:
            raise DataError(f"{where}: preference is {row['preference']}; it must be a probability, 0 to 1 (no code, 1 to 2)")
        groups.append(_integer(row, "index", where))
        models.add(row["model"])
    return Regularizer(
        std_difference_M=torch.tensor(columns["std_delta_len"], dtype=torch.float64),
        difficulty_M=torch.tensor(columns["instruction_difficulty"], dtype=torch.float64),
        preference_M=torch.tensor(columns["preference"], dtype=torch.float64),
        group_M=torch.tensor(groups),
        num_models=len(models),
    )


def _table(file: Path, needed: tuple[str, ...]) -> Iterator[tuple[str, dict[str, str]]]:
    """(file:line, row) of a CSV file with a header; an unnamed first column is the index."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not UTF-8 ({error}); save the table as UTF-8") from error
    with io.StringIO(text, newline="") as stream:
        reader = csv.reader(stream)
        header = [name or "index" for name in next(reader, [])]
        absent = [name for name in needed if name not in header]
        if absent:
            raise DataError(f"{file}:1: no column {', '.join(map(repr, absent))}; the header is {', '.join(header) or 'empty'}")
        empty = True
        for values in reader:
            empty = False
            where = f"{file}:{reader.line_num}"
            if len(values) != len(header):
                raise DataError(f"{where}: {len(values)} values for {len(header)} columns; mend the row")
            yield where, dict(zip(header, values, strict=True))
        if empty:
            raise DataError(f"{file}: a header without rows; give the whole table")


def _number(row: Mapping[str, str], name: str, where: str) -> float:
    try:
        value = float(row[name])
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise DataError(f"{where}: {name} is {row[name]!r}; it must be a finite number")
    return value


def _integer(row: Mapping[str, str], name: str, where: str) -> int:
    try:
        return int(row[name])
    except ValueError:
        raise DataError(f"{where}: {name} is {row[name]!r}; it must be a whole number") from None
