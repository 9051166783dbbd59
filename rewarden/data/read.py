"""One reader for JSON Lines, JSON, their .gz forms, Parquet, folders of these, and hub data sets.

Every row knows where it stands, so that an error in any later stage can name file and line.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewarden.data.hub import NotLoaded, hub_file, hub_file_names, hub_rows, saved_rows
from rewarden.data.json_rows import Broken, Unreadable, json_array, json_lines, refuse
from rewarden.errors import DataError
from rewarden.hub import means_folder, neighbors
from rewarden.spec import nearest

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")
SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing"), "test"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "eval", "evaluation"), "validation"),
}
VALUE = "value"
"""The column a row goes into when it is not an object: a bare string, or a list of turns."""


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

    def __init__(self, path: str | Path, *, split: str = "train", subset: str | None = None, broken: Broken = refuse) -> None:
        self.noticed: Counter[str] = Counter()
        self._rows = _rows(str(path), split, subset, self.noticed, broken)

    def __next__(self) -> Row:
        return next(self._rows)


def read_rows(path: str | Path, *, split: str = "train", subset: str | None = None, broken: Broken = refuse) -> Rows:
    """The rows of a file, a folder of files, a `save_to_disk` folder, or a data set on the hub (or in its local cache).

    path: what exists on disk is read from disk; otherwise "owner/name" is a hub id.
    split: of a folder, the files whose name or subfolder says so (train, test, validation/valid/val/dev/eval, or the word
    itself); a folder whose files name no split is all "train". A single file is one split.
    subset: the subfolder of a folder, the configuration of a hub data set. Where a hub data set has a loader script, which is
    not run, the configuration is read from the repository's file SUBSET.json or SUBSET/SPLIT.json (or .jsonl, .parquet, .gz).
    broken: called with each line, element or file that cannot be read; when it returns, the rows behind follow. The default
    raises what it is given.

    Errors: DataError with file, line and column for broken JSON, text that is not UTF-8, damaged gzip, a file without rows;
    for a path, split or subset that does not exist, with the nearest name.
    """
    return Rows(path, split=split, subset=subset, broken=broken)


def _rows(path: str, split: str, subset: str | None, noticed: Counter[str], broken: Broken) -> Iterator[Row]:
    place = Path(path).expanduser()
    if place.is_dir():
        if subset is not None:
            place = _subfolder(place, subset)
        if any((place / mark).is_file() for mark in ("dataset_dict.json", "state.json")):
            for where, name, fields in saved_rows(place, split):
                yield Row(where=where, name=name, fields=fields)
            return
        for file in _files(place, split, noticed):
            yield from _file_rows(file, str(file), file.relative_to(place).as_posix(), noticed, broken)
    elif place.is_file():
        if subset is not None:
            raise DataError(f"{path}: subset={subset!r}, but this is one file; a subset is a subfolder, so leave it out")
        if split != "train" and _canonical(split) not in _words(place.name) | {_canonical(place.parent.name)}:
            raise DataError(f"{path}: split={split!r}, but this is one file; give the file of that split, or leave split out")
        yield from _file_rows(place, path, place.name, noticed, broken)
    elif _is_hub_id(path) and not (place.exists() or place.is_symlink() or means_folder(path)):
        try:
            for where, name, fields in hub_rows(path, split, subset):
                yield Row(where=where, name=name, fields=fields)
        except NotLoaded as error:
            files = [name for name in hub_file_names(path) if name.endswith(SUFFIXES)]
            if not files:
                raise
            name = _hub_choice(path, files, split, subset, error)
            yield from _file_rows(hub_file(path, name), f"{path}/{name}", f"{path}/{name}", noticed, broken)
    else:
        raise DataError(f"{path}: {_absence(place)}")


def _hub_choice(path: str, files: Sequence[str], split: str, subset: str | None, error: NotLoaded) -> str:
    """The file of a hub repository that holds a configuration, or one of its splits, by their names."""
    stems = {name: next(name.removesuffix(end) for end in reversed(SUFFIXES) if name.endswith(end)) for name in files}
    for name, stem in stems.items():
        if subset is not None and stem == f"{subset}/{split}":
            return name
    alone = [name for name, stem in stems.items() if stem == subset]
    if alone and (split == "train" or _canonical(split) in _words(alone[0])):
        return alone[0]
    splits = [stem.removeprefix(f"{subset}/") for stem in stems.values() if stem.startswith(f"{subset}/")]
    if alone:
        hint = f"{alone[0]} is one split; leave split out"
    elif splits:
        hint = f"subset {subset!r} has no file of split {split!r}; {nearest(split, splits)}"
    else:
        there = sorted({stem.split("/")[0] for stem in stems.values()})
        hint = f"no file is named after subset {subset!r}; {nearest(str(subset), there)} (subset: NAME)"
    raise DataError(f"{path}: read file by file, since the datasets library does not load it: {hint}") from error


def _absence(place: Path) -> str:
    """Why nothing can be read there."""
    if place.is_symlink() and not place.exists():
        return f"a link to {place.readlink()}, which does not exist; mend the link, or give another file"
    if place.exists():
        return "neither a file nor a folder (a pipe or a device); write the rows into a file"
    return f"no such file or folder; {neighbors(place)}"


def _is_hub_id(path: str) -> bool:
    return not path.endswith(SUFFIXES) and re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", path) is not None


def _subfolder(folder: Path, subset: str) -> Path:
    if (folder / subset).is_dir():
        return folder / subset
    there = [entry.name for entry in folder.iterdir() if entry.is_dir()]
    hint = nearest(subset, there) if there else "there are none: write data.subset=null"
    raise DataError(f"{folder}: subset={subset!r} is no subfolder; {hint}")


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


def _file_rows(file: Path, where: str, name: str, noticed: Counter[str], broken: Broken) -> Iterator[Row]:
    met = False

    def met_broken(error: Unreadable) -> None:
        nonlocal met
        met = True
        broken(error)

    try:
        for line, value in _values(file, where, noticed, met_broken):
            met = True
            fields = value if isinstance(value, dict) else {VALUE: value}
            yield Row(where=f"{where}:{line}", name=f"{name}:{line}", fields=fields)
    except Unreadable as error:
        met_broken(error)
    if not met:
        broken(Unreadable("no_rows", where, "no rows in the file; remove it or give another"))


def _values(file: Path, where: str, noticed: Counter[str], broken: Broken) -> Iterator[tuple[str, Any]]:
    if file.name.endswith(".parquet"):
        return _parquet(file, where)
    if file.name.endswith((".jsonl", ".jsonl.gz")):
        return json_lines(file, where, noticed, broken)
    if file.name.endswith((".json", ".json.gz")):
        return json_array(file, where, noticed, broken)
    raise DataError(f"{where}: cannot tell the kind of file from its name; it must end in {', '.join(SUFFIXES)}")


def _parquet(file: Path, where: str) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=1024):
                for fields in batch.to_pylist():
                    number += 1
                    yield str(number), fields
    except pyarrow.ArrowException as error:
        raise Unreadable(
            "damaged_file", f"{where}:{number + 1}", f"not readable as Parquet ({error}); write the file again"
        ) from error
