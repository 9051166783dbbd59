"""Checkpoints read a few rows at a time: safetensors or pickled, in one file or many."""

import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from rewarden.errors import ConfigError
from rewarden.models.folder import FULL, PICKLES, find, first_line, indexed_files, tensor_shapes

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The names that safetensors files use."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

CHUNK = 2**19
"""Entries of a tensor that are in memory at a time."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What a header says of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path

    @property
    def rows(self) -> int:
        """Length of the first dimension; a scalar is one row."""
        return self.shape[0] if self.shape else 1

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Row ranges that cover the tensor, each of about CHUNK entries."""
        width = max(torch.Size(self.shape[1:]).numel(), 1)
        step = max(CHUNK // width, 1)
        for start in range(0, self.rows, step):
            yield start, min(start + step, self.rows)


class Checkpoint:
    """The tensors of a folder or hub id. Headers are read and checked at once, values when they are asked for.

    `entries` leaves out the `inv_freq` tables of rotary embeddings: old versions of transformers stored them and new ones
    compute them, so they are no weights (their names are in `skipped`).

    Errors: ConfigError for a missing or truncated shard, an index that names other tensors than the files hold, a pickle that
    holds more than tensors, or no weights at all.
    """

    def __init__(self, path: str | Path, *, stem: str = FULL) -> None:
        self.path = str(path)
        names, self.files = shard_files(self.path, stem)
        self.entries: dict[str, Entry] = {}
        self.skipped: list[str] = []
        self._open: tuple[Path, Any] | None = None
        for file in self.files:
            for key, entry in self._headers(file):
                if key.endswith("inv_freq"):
                    self.skipped.append(key)
                elif key in self.entries:
                    raise ConfigError(f"{file} and {self.entries[key].file.name} both hold {key!r}; remove the stale shard")
                else:
                    self.entries[key] = entry
        if names is not None:
            self._check_index(names)
        if not self.entries:
            raise ConfigError(f"{self.path} holds no tensors; copy it again")

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self._open = None

    def rows(self, key: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a tensor, contiguous; a scalar has one row."""
        entry = self.entries[key]
        opened = self._handle(entry.file)
        if isinstance(opened, Mapping):
            tensor = opened[key]
            return (tensor[start:stop] if entry.shape else tensor.reshape(1)).contiguous()
        if not entry.shape:
            return opened.get_tensor(key).reshape(1)
        return opened.get_slice(key)[start:stop].contiguous()

    def names(self) -> dict[Path, list[str]]:
        """File -> the tensors in it."""
        grouped: dict[Path, list[str]] = {file: [] for file in self.files}
        for key, entry in self.entries.items():
            grouped[entry.file].append(key)
        return grouped

    def _handle(self, file: Path) -> Any:
        # One file at a time: an old pickle without memory mapping lies in memory while it is open.
        if self._open is None or self._open[0] != file:
            self._open = None
            self._open = (file, safe_open(file, "pt") if file.suffix == ".safetensors" else load_pickle(file))
        return self._open[1]

    def _headers(self, file: Path) -> Iterator[tuple[str, Entry]]:
        if file.suffix == ".safetensors":
            shapes = tensor_shapes([file])
            opened = self._handle(file)
            for key, shape in shapes.items():
                name = opened.get_slice(key).get_dtype()
                if name not in DTYPES:
                    raise ConfigError(f"{file}: {key} is of type {name}; one of {', '.join(DTYPES)} is needed")
                yield key, Entry(shape=shape, dtype=DTYPES[name], file=file)
            return
        for key, tensor in self._handle(file).items():
            yield key, Entry(shape=tuple(tensor.shape), dtype=tensor.dtype, file=file)

    def _check_index(self, names: Mapping[str, str]) -> None:
        held = {key: entry.file.name for key, entry in self.entries.items()}
        listed = {key: name for key, name in names.items() if not key.endswith("inv_freq")}
        if missing := sorted(key for key, name in listed.items() if held.get(key) != name):
            raise ConfigError(
                f"{self.path}: missing {some(missing)}: named by the index, not in {listed[missing[0]]}; copy that shard again"
            )
        if extra := sorted(set(held) - set(listed)):
            raise ConfigError(
                f"{self.path}: {held[extra[0]]} holds {some(extra)}, which the index does not name; index and shards must come "
                "from one checkpoint"
            )


def some(names: list[str]) -> str:
    """Up to five names and how many more there are."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(repr(name) for name in names[:5]) + more


def shard_files(path: str, stem: str) -> tuple[dict[str, str] | None, list[Path]]:
    """The index (tensor -> file name), if there is one, and the weight files of a checkpoint.

    Errors: ConfigError for a damaged index, a missing shard, an adapter, or no weights.
    """
    pickles = PICKLES[FULL] if stem == FULL else ()
    for name in (stem, f"{stem}.index.json", *pickles):
        file = find(path, name)
        if file is None:
            continue
        if not name.endswith(".index.json"):
            return None, [file]
        return indexed_files(path, file)
    if find(path, "adapter_config.json") is not None:
        raise ConfigError(f"{path} is a PEFT adapter, which is a diff already; publish it as it is, or merge it first")
    known = ", ".join((stem, *pickles))
    raise ConfigError(f"{path} holds no weights ({known}); give a folder that save_pretrained or save_model wrote")


def load_pickle(file: Path) -> dict[str, Tensor]:
    """Name -> tensor of a .bin file, memory-mapped where its format allows; nothing but tensors is ever unpickled.

    Errors: ConfigError for a damaged file, or one that holds anything else.
    """
    try:
        try:
            loaded = torch.load(file, weights_only=True, mmap=True, map_location="cpu")
        except RuntimeError as error:
            if "mmap can only be used" not in str(error):
                raise
            loaded = torch.load(file, weights_only=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"{file} is damaged or holds Python objects besides tensors, which could run code, so it is not opened: "
            f"{first_line(error)}; get the checkpoint as safetensors, or download it again"
        ) from error
    except (RuntimeError, EOFError, ValueError) as error:
        size = file.stat().st_size
        raise ConfigError(
            f"{file} ({size} bytes) is truncated or damaged: {first_line(error)[:120]}; copy or download it again"
        ) from error
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise ConfigError(f"{file} is not a table of tensors; give a checkpoint that save_pretrained wrote")
    return {key: value.detach() for key, value in loaded.items()}
