"""AlpacaEval's files: model outputs and annotations, read with a check of every row and written whole or not at all."""

import gzip
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rewarden.data.read import VALUE, Row, read_rows
from rewarden.errors import DataError, shortened
from rewarden.runtime.disk import write_atomic, writing

TIES = (0, 1.5)
"""Codes of a tie; 0 is that of old files."""

OUTPUT_COLUMNS = ("dataset", "instruction", "output", "generator")
ANNOTATION_COLUMNS = (
    "instruction",
    "output_1",
    "generator_1",
    "dataset",
    "output_2",
    "generator_2",
    "annotator",
    "preference",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOutput:
    """One answer of a model to an instruction; `extra` holds the columns that are not AlpacaEval's."""

    instruction: str
    output: str
    generator: str | None = None
    dataset: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotation:
    """One judged comparison: output_1 is the reference's answer, output_2 the model's.

    `preference` is AlpacaEval's code: 1 the reference is better, 2 the model, 1.5 (0 in old files) a tie, in between a judge
    that gives probabilities, None no verdict.
    """

    instruction: str
    output_1: str
    output_2: str
    preference: float | int | None
    generator_1: str | None = None
    generator_2: str | None = None
    dataset: str | None = None
    annotator: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""

    @property
    def model_wins(self) -> float | None:
        """Probability that the model's answer is better, 0 to 1; None without a verdict."""
        if self.preference is None:
            return None
        return 0.5 if self.preference in TIES else self.preference - 1

    @property
    def length_difference(self) -> int:
        """Characters by which the reference's answer is longer."""
        return len(self.output_1) - len(self.output_2)


def read_outputs(path: str | Path) -> tuple[ModelOutput, ...]:
    """The rows of model_outputs.json (also .jsonl, .gz, .parquet).

    Errors: DataError naming file and row for a row without instruction or output, or of another type than text.
    """
    return tuple(_output(row) for row in read_rows(path))


def read_annotations(path: str | Path) -> tuple[Annotation, ...]:
    """The rows of annotations.json (also .jsonl, .gz, .parquet); NaN as a preference is no verdict, as null is.

    Errors: DataError naming file and row for a missing or mistyped column, or a preference that is no code.
    """
    return tuple(_annotation(row) for row in read_rows(path))


def write_outputs(path: str | Path, rows: Sequence[ModelOutput]) -> None:
    """Write model_outputs.json as AlpacaEval reads it; compressed when the name ends in .gz."""
    _write(Path(path), (_columns(row, OUTPUT_COLUMNS) for row in rows))


def write_annotations(path: str | Path, rows: Sequence[Annotation]) -> None:
    """Write annotations.json as AlpacaEval reads it; compressed when the name ends in .gz."""
    _write(Path(path), (_columns(row, ANNOTATION_COLUMNS) for row in rows))


def _output(row: Row) -> ModelOutput:
    fields = _known(row, ("instruction", "output"), "a row of model outputs")
    return ModelOutput(
        instruction=_text(row, "instruction"),
        output=_text(row, "output"),
        generator=_name(row, "generator"),
        dataset=_name(row, "dataset"),
        extra={k: v for k, v in fields.items() if k not in OUTPUT_COLUMNS},
        where=row.where,
    )


def _annotation(row: Row) -> Annotation:
    fields = _known(row, ("instruction", "output_1", "output_2", "preference"), "an annotation")
    return Annotation(
        instruction=_text(row, "instruction"),
        output_1=_text(row, "output_1"),
        output_2=_text(row, "output_2"),
        preference=_preference(row),
        generator_1=_name(row, "generator_1"),
        generator_2=_name(row, "generator_2"),
        dataset=_name(row, "dataset"),
        annotator=_name(row, "annotator"),
        extra={key: value for key, value in fields.items() if key not in ANNOTATION_COLUMNS},
        where=row.where,
    )


def _known(row: Row, needed: tuple[str, ...], what: str) -> Mapping[str, Any]:
    if set(row.fields) == {VALUE}:
        raise DataError(f"{row.where}: the row is {_shown(row.fields[VALUE])}, no object; {what} has {', '.join(needed)}")
    missing = [name for name in needed if name not in row.fields]
    if missing:
        hint = "; these are model outputs, give annotations" if "output" in row.fields and "output_1" in missing else ""
        raise DataError(
            f"{row.where}: no column {', '.join(map(repr, missing))}; the row has {', '.join(row.fields) or 'none'}, "
            f"{what} has {', '.join(needed)}{hint}"
        )
    return row.fields


def _text(row: Row, name: str) -> str:
    value = row.fields[name]
    if not isinstance(value, str):
        raise DataError(f"{row.where}: {name} is {_shown(value)}; it must be text (an empty answer is an empty text)")
    return value


def _name(row: Row, name: str) -> str | None:
    value = row.fields.get(name)
    if value is not None and not isinstance(value, str):
        raise DataError(f"{row.where}: {name} is {_shown(value)}; it must be text, or null")
    return value or None


def _preference(row: Row) -> float | None:
    value = row.fields["preference"]
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not (value == 0 or 1 <= value <= 2):
        raise DataError(
            f"{row.where}: preference is {_shown(value)}; it must be a number from 1 (the reference is better) to 2 (the model "
            "is), 0 or 1.5 for a tie, or null where the judge gave no verdict"
        )
    return float(value)


def _shown(value: Any) -> str:
    return shortened(repr(value), 60)


def _columns(row: ModelOutput | Annotation, names: tuple[str, ...]) -> dict[str, Any]:
    """The columns in the order of the original files, then the others; a name that is not known is left out."""
    own = {name: getattr(row, name) for name in names}
    kept = {name: value for name, value in own.items() if value is not None or name == "preference"}
    clash = sorted(set(own) & set(row.extra))
    if clash:
        raise DataError(f"{row.where or 'row'}: the extra column {clash[0]!r} has the name of one of AlpacaEval's; rename it")
    return {**kept, **row.extra}


def _write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    try:
        data = json.dumps(list(rows), ensure_ascii=False, allow_nan=False, indent=2).encode("utf-8")
    except (TypeError, ValueError) as error:
        raise DataError(f"{path}: a row cannot be written: {error}; give text, finite numbers, lists and dicts") from error
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    # No name and no time in the gzip header: equal rows give equal bytes.
    write_atomic(path, gzip.compress(data, mtime=0) if path.name.endswith(".gz") else data)
