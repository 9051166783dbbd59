"""Rows of data sets that the `datasets` library reads: on the hub, in its local cache, or saved to disk by it.

Data sets of the hub with a loader script, which that library runs no longer, have files that can be read without it: their
names and their copies in the local cache come from here.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rewarden.errors import DataError
from rewarden.hub import cannot_reach, unreachable


class NotLoaded(DataError):
    """The `datasets` library does not load a data set; its files may still be read one by one."""


Place = tuple[str, str, dict[str, Any]]
"""where, name and fields of a row."""


def hub_rows(path: str, split: str, subset: str | None) -> Iterator[Place]:
    """Rows of a hub data set; without a network, of its copy in the local cache."""
    datasets = _datasets(path)
    name = f"{path}[{subset}]" if subset else path
    if (why := unreachable()) and not _prepared(datasets, path):
        raise NotLoaded(cannot_reach(name, why))
    try:
        table = _load(datasets, path, subset, split)
    except (OSError, ValueError, RuntimeError) as error:
        raise NotLoaded(
            f"{name}, split {split!r}: {str(error).strip()}. Nothing of that name is on disk, so this is a hub data set; "
            "check name, subset and split, or load it once with a network (a copy stays in the local cache)"
        ) from error
    yield from _numbered(table, f"{name}/{split}")


def _prepared(datasets: Any, path: str) -> bool:
    """Whether the library has made a data set of that name before, and so has a copy."""
    return (Path(datasets.config.HF_DATASETS_CACHE) / path.replace("/", "___")).is_dir()


def _load(datasets: Any, path: str, subset: str | None, split: str) -> Any:
    """A configuration of that name, or else a folder: HH-RLHF keeps its subsets in folders of one configuration."""
    try:
        return datasets.load_dataset(path, subset, split=split)
    except ValueError as error:
        if subset is None or "BuilderConfig" not in str(error):
            raise
        return datasets.load_dataset(path, data_dir=subset, split=split)


def hub_file_names(path: str) -> list[str]:
    """The files of a hub data set; without a network, of its copy in the local cache; [] where neither is there."""
    import huggingface_hub

    if not unreachable():
        try:
            return sorted(huggingface_hub.HfApi().list_repo_files(path, repo_type="dataset"))
        except (OSError, ValueError):  # offline by choice, no such data set, or a name that is none
            pass
    try:
        folder = Path(huggingface_hub.snapshot_download(path, repo_type="dataset", local_files_only=True))
    except (OSError, ValueError):
        return []
    return sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())


def hub_file(path: str, name: str) -> Path:
    """The local copy of a file of a hub data set, downloaded where it is not there yet.

    Errors: DataError when it is neither here nor to be had.
    """
    import huggingface_hub

    alone = unreachable() is not None
    try:
        return Path(huggingface_hub.hf_hub_download(path, name, repo_type="dataset", local_files_only=alone))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path}/{name}: not in the local cache, and it cannot be downloaded ({str(error).strip()}); read it once with a "
            "network"
        ) from error


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
