"""Rows of data sets that the `datasets` library reads: on the hub, in its local cache, or saved to disk by it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rewarden.errors import DataError

Place = tuple[str, str, dict[str, Any]]
"""where, name and fields of a row."""


def hub_rows(path: str, split: str, subset: str | None) -> Iterator[Place]:
    """Rows of a hub data set; without a network, of its copy in the local cache."""
    datasets = _datasets(path)
    name = f"{path}[{subset}]" if subset else path
    try:
        table = _load(datasets, path, subset, split)
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{name}, split {split!r}: {str(error).strip()}. Nothing of that name is on disk, so this is a hub data set; "
            "check name, subset and split, or load it once with a network (a copy stays in the local cache)"
        ) from error
    yield from _numbered(table, f"{name}/{split}")


def _load(datasets: Any, path: str, subset: str | None, split: str) -> Any:
    """A configuration of that name, or else a folder: HH-RLHF keeps its subsets in folders of one configuration."""
    try:
        return datasets.load_dataset(path, subset, split=split)
    except ValueError as error:
        if subset is None or "BuilderConfig" not in str(error):
            raise
        return datasets.load_dataset(path, data_dir=subset, split=split)


def saved_rows(folder: Path, split: str) -> Iterator[Place]:
    """Rows of a folder written by `save_to_disk`."""
    datasets = _datasets(str(folder))
    try:
        table = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{folder}: a saved data set that cannot be read ({type(error).__name__}: {error}); save it again with save_to_disk"
        ) from error
    if isinstance(table, datasets.DatasetDict):
        if split not in table:
            raise DataError(f"{folder}: no split {split!r}; there are {', '.join(table)}")
        table = table[split]
    elif split != "train":
        raise DataError(f"{folder}: split={split!r}, but this folder holds one split; leave split out")
    for where, name, fields in _numbered(table, str(folder)):
        yield where, f"{folder.name}:{name.rsplit(':', 1)[1]}", fields


def _datasets(path: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{path}: reading it needs the package `datasets`; run: pip install datasets") from error
    return datasets


def _numbered(table: Any, name: str) -> Iterator[Place]:
    number = 0
    for number, fields in enumerate(table, 1):
        yield f"{name}:{number}", f"{name}:{number}", dict(fields)
    if number == 0:
        raise DataError(f"{name}: no rows; choose another split")
