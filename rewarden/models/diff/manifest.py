"""`diff.json`: what a diff consists of, how it is undone, and the hashes of every tensor on all three sides."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError

from rewarden.errors import ConfigError
from rewarden.models.diff.read import DTYPE_NAMES, DTYPES, Checkpoint, Entry, some
from rewarden.models.diff.rules import Mode, Rule, Step
from rewarden.models.diff.write import file_sha256
from rewarden.models.folder import FULL, find
from rewarden.spec import Spec

MANIFEST = "diff.json"
DIFF = "diff.safetensors"
"""The name of our own rule's weights: not `model`, so that no loader takes a diff for a model."""


class Tensor(Spec):
    """One tensor on all three sides."""

    mode: Mode
    """full: as it is in the tuned model; delta: tuned - base; xor: bits of tuned xor bits of base."""
    shape: tuple[int, ...]
    dtype: str
    """Of the tuned tensor."""
    sha256: str
    """Of the values that `recover` gives, row-major."""
    diff_dtype: str
    diff_sha256: str
    base_key: str | None = None
    base_shape: tuple[int, ...] | None = None
    base_dtype: str | None = None
    base_sha256: str | None = None
    added_rows: int = 0
    """Rows, each the mean of the base's rows, by which the base is extended first."""
    total: float
    """Sum of the finite tuned values, in float64."""
    inexact: int = 0
    """Entries that the rule does not give back bit for bit."""
    not_finite: int = 0
    """Entries that are NaN or inf."""

    @property
    def step(self) -> tuple[Mode, str | None, int]:
        """What a `Step` says besides the name."""
        return self.mode, self.base_key, self.added_rows


class File(Spec):
    """One weight file."""

    sha256: str
    size: int


class Base(Spec):
    """The model that the diff was made from."""

    name: str
    sha256: str
    """Of the sorted lines "name type shape hash" of the tensors that the rule reads."""


class Manifest(Spec):
    """The content of `diff.json`."""

    format: Literal["rewarden weight diff"] = "rewarden weight diff"
    version: Literal[1] = 1
    rule: Rule
    rule_text: str
    base: Base
    tuned_sha256: str
    """As `base.sha256`, of all tensors of the tuned model."""
    total: float
    """Sum of all entries of the tuned model without inv_freq: the published integrity sum."""
    tensors: dict[str, Tensor]
    files: dict[str, File]
    carried: dict[str, str]
    """Config, tokenizer and other small files -> SHA-256."""
    skipped: tuple[str, ...] = ()
    """inv_freq tables of the tuned model, which are no weights."""

    def steps(self) -> list[Step]:
        """The steps that made the diff."""
        parts = {key: record.step for key, record in self.tensors.items()}
        return [Step(key=key, mode=mode, base_key=base, added_rows=rows) for key, (mode, base, rows) in parts.items()]

    def modes(self) -> str:
        """How many tensors of each mode, in words."""
        counts = Counter(record.mode for record in self.tensors.values())
        return ", ".join(f"{number} {mode}" for mode, number in sorted(counts.items()))


def digest(rows: Iterable[tuple[str, str, Iterable[int], str]]) -> str:
    """One hash for a set of tensors (name, type, shape, hash), whatever their order and files."""
    lines = sorted(f"{key} {dtype} {list(shape)} {sha}\n" for key, dtype, shape, sha in rows)
    return hashlib.sha256("".join(lines).encode("utf-8")).hexdigest()


def read_manifest(diff: str | Path) -> Manifest | None:
    """The manifest of a diff, or None for a published diff, which has none.

    Errors: ConfigError when it is damaged, or of a later version.
    """
    file = find(str(diff), MANIFEST)
    if file is None:
        return None
    try:
        return Manifest.model_validate(json.loads(file.read_text(encoding="utf-8")))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"{file}: {place}: {first['msg']}; it is damaged or of another version: get the diff again"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{file} is damaged ({error}); get the diff again") from error


def open_diff(diff: str | Path, manifest: Manifest | None) -> Checkpoint:
    """The tensors of a diff, after its headers were compared with the manifest.

    Errors: ConfigError for a missing or truncated file, and for tensors that are missing, left over, or of another shape or
    type than the manifest says.
    """
    path = str(diff)
    if manifest is None:
        if any(find(path, name) is not None for name in (DIFF, f"{DIFF}.index.json")):
            raise ConfigError(f"{path} holds a diff by the rule exact but no {MANIFEST}; copy that file too")
        return Checkpoint(path)
    for name in manifest.files:
        if find(path, name) is None:
            raise ConfigError(f"{path}: {name} is missing; the manifest names it: copy it again")
    checkpoint = Checkpoint(path, stem=DIFF if manifest.rule == "exact" else FULL)
    try:
        _check_headers(checkpoint, manifest)
    except ConfigError:
        checkpoint.__exit__()
        raise
    return checkpoint


def _check_headers(diff: Checkpoint, manifest: Manifest) -> None:
    if missing := sorted(set(manifest.tensors) - set(diff.entries)):
        raise ConfigError(f"{diff.path} lacks {len(missing)} tensors of its manifest: {some(missing)}; get the diff again")
    if extra := sorted(set(diff.entries) - set(manifest.tensors)):
        raise ConfigError(
            f"{diff.path} holds {len(extra)} tensors that its manifest does not name: {some(extra)}; get it again"
        )
    for key, record in manifest.tensors.items():
        _same(diff.entries[key], record.shape, record.diff_dtype, f"{diff.path}: {key}", "the diff is damaged: get it again")


def check_base(base: Checkpoint, manifest: Manifest) -> None:
    """Whether a base has the tensors, shapes and types of the base that the diff was made from.

    Errors: ConfigError naming the first difference.
    """
    wrong = f"{base.path} is not the base of this diff ({manifest.base.name})"
    for record in manifest.tensors.values():
        if record.base_key is None or record.base_shape is None or record.base_dtype is None:
            continue
        if record.base_key not in base.entries:
            raise ConfigError(f"{wrong}: it lacks {record.base_key}; give the model that the diff was made from")
        _same(
            base.entries[record.base_key], record.base_shape, record.base_dtype, f"{wrong}: {record.base_key}", "give that base"
        )


def _same(entry: Entry, shape: tuple[int, ...], dtype: str, what: str, todo: str) -> None:
    if entry.shape != shape:
        raise ConfigError(f"{what} has shape {list(entry.shape)}, the manifest says {list(shape)}; {todo}")
    if DTYPE_NAMES[entry.dtype] != dtype:
        raise ConfigError(f"{what} is of type {DTYPE_NAMES[entry.dtype]}, the manifest says {dtype}; {todo}")


def torch_dtype(name: str) -> torch.dtype:
    """The torch type of a name in a manifest. Errors: ConfigError for an unknown one."""
    if name not in DTYPES:
        raise ConfigError(f"{MANIFEST}: {name} is no tensor type; one of {', '.join(DTYPES)}: the manifest is damaged")
    return DTYPES[name]


def check_carried(path: str, carried: Mapping[str, str]) -> None:
    """Whether the small files of a diff are those of its manifest.

    Errors: ConfigError naming the one that is missing or changed.
    """
    for name, sha in carried.items():
        file = find(path, name)
        if file is None:
            raise ConfigError(f"{path}: {name} is missing; the manifest names it: copy it again")
        if (found := file_sha256(file)) != sha:
            raise ConfigError(f"{file} was changed: its sha256 is {found[:16]}, the manifest says {sha[:16]}; copy it again")


def hash_problem(key: str, record: Tensor, seen: Mapping[str, str], diff: str, base: str, name: str) -> str | None:
    """What a tensor's hashes say: a changed diff, a wrong base, or (None) nothing; `seen` holds diff, base and tuned."""
    if seen["diff"] != record.diff_sha256:
        return f"{diff}: {key} was changed: its sha256 is {seen['diff'][:16]}, the manifest says {record.diff_sha256[:16]}"
    if record.base_sha256 is not None and seen["base"] != record.base_sha256:
        return (
            f"{base} is not the base of this diff ({name}): the sha256 of {record.base_key} is {seen['base'][:16]}, the "
            f"manifest says {record.base_sha256[:16]}"
        )
    if seen["tuned"] != record.sha256:
        return f"{key}: what is recovered has sha256 {seen['tuned'][:16]}, the manifest says {record.sha256[:16]}"
    return None


def to_json(manifest: Manifest) -> str:
    """The text of `diff.json`."""
    content: dict[str, Any] = manifest.model_dump(mode="json", exclude_defaults=False)
    content["tensors"] = {
        key: {name: value for name, value in record.items() if value is not None} for key, record in content["tensors"].items()
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"
