"""A registry: a YAML file that lists scorers by name, written by reward training and read by every command.

    reward_3:
      kind: reward_model
      path: reward_3/model
      aggregate: {rule: lower_bound, coef: 0.5}

Paths in it are relative to its own folder, so the folder can be moved with all that is in it.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from rewarden.data.yaml_text import key_lines, load_yaml
from rewarden.errors import ConfigError, ResumeError, RewardenError
from rewarden.protocols import Scorer
from rewarden.runtime.disk import write_atomic, writing
from rewarden.runtime.lock import FolderLock
from rewarden.scoring.aggregate import Aggregate
from rewarden.spec import Spec, nearest

REGISTRY = "models.yaml"
"""The registry that training writes, beside the run folders."""

HUB = "hub:"
"""Before the id of a model of the hub, where a registry would else look for a folder."""

YAML_ENDINGS = (".yaml", ".yml")

LOCK_WAIT_S = 60.0
"""How long `register` waits for another process that is registering."""


class RegisteredReward(Spec):
    """A scorer of a registry, by name. The file is read when the scorer is built: an earlier stage may write it."""

    registry: str = Field(min_length=1)
    """The registry, such as runs/models.yaml."""
    name: str = Field(min_length=1)
    """The entry."""
    aggregate: Aggregate | None = None
    """How its members become one score, in place of what the entry says; for reward models."""

    def build(self) -> Scorer:
        """Build what the entry describes.

        Errors: ConfigError naming file, line and entry.
        """
        # The table of rewards holds this class, so it can be imported only once this class exists.
        from rewarden.scoring import build_scorer

        raw = {"kind": "registered", **self.model_dump(exclude_none=True)}
        return build_scorer(resolve(raw), f"{self.registry}: {self.name}")


def read_registry(path: str | Path) -> dict[str, dict[str, Any]]:
    """The entries by name, in the order of the file, each {kind: ..., ...} with absolute paths; nothing is loaded.

    Errors: ConfigError naming file, line and entry for what is no registry. Whether a path leads anywhere is not asked: see
    `entry_of`.
    """
    path = Path(path)
    return {name: _placed(raw, lambda text: _absolute(text, path.parent)) for name, (raw, _) in _entries(path).items()}


def entry_of(path: str | Path, name: str) -> dict[str, Any]:
    """One entry as `read_registry` gives it, whose folders and files are there.

    Errors: ConfigError for an unknown name, with the nearest one, and for a path that leads nowhere.
    """
    path = Path(path)
    entries = _entries(path)
    if name not in entries:
        hint = nearest(name, entries) if entries else "it is empty"
        raise ConfigError(f"{path}: no entry {name!r}; {hint}")
    raw, line = entries[name]

    def there(text: str) -> str:
        found = _absolute(text, path.parent)
        if not text.startswith(HUB) and not Path(found).exists():
            raise ConfigError(
                f"{path}:{line}: entry {name!r}: {text!r} is not there (looked for {found}); paths are relative to the "
                f"registry's folder, and {HUB}ORG/NAME is a model of the hub. Mend the path, train it again, or remove "
                "the entry"
            )
        return found

    return _placed(raw, there)


def resolve(raw: Mapping[str, Any], seen: tuple[tuple[str, str], ...] = ()) -> dict[str, Any]:
    """The config of a reward with every {kind: registered, ...} in it, also inside a sum, replaced by the registry's entry.

    Errors: ConfigError as of `entry_of`, and for entries that lead back to themselves.
    """
    if raw.get("kind") == "sum" and isinstance(raw.get("scorers"), list | tuple):
        return {**raw, "scorers": [_resolved_part(part, seen) for part in raw["scorers"]]}
    if raw.get("kind") != "registered":
        return dict(raw)
    path, name = str(raw["registry"]), str(raw["name"])
    place = (str(Path(path).resolve()), name)
    if place in seen:
        raise ConfigError(f"{path}: entry {name!r} leads back to itself; an entry names other scorers only")
    found = resolve(entry_of(path, name), (*seen, place))
    if raw.get("aggregate") is None:
        return found
    if found["kind"] != "reward_model":
        raise ConfigError(f"{path}: entry {name!r} is a {found['kind']}; aggregate belongs to reward models, leave it out")
    return {**found, "aggregate": raw["aggregate"]}


def named_scorers(
    scorers: Mapping[str, Mapping[str, Any]], *, registry: str | None, entries: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """{kind: ...} by name: `scorers`, then the registry's entries (none named: all); what is registered is resolved.

    Errors: ConfigError for a name that both have, an unknown entry, an entry that leads nowhere, or when there is no scorer.
    """
    raws = {name: resolve(raw) for name, raw in scorers.items()}
    if registry is not None:
        table = read_registry(registry)
        for name in entries or table:
            if name not in table:
                raise ConfigError(f"entries: {registry} has no {name!r}; {nearest(name, table)}")
            if name in raws:
                raise ConfigError(
                    f"scorers: {name!r} is named twice, in scorers and in {registry}; rename it there, or name the wanted "
                    "`entries` of the registry"
                )
            raws[name] = resolve({"kind": "registered", "registry": registry, "name": name})
    if not raws:
        raise ConfigError(f"{registry} is empty; train a reward model, or name scorers")
    return raws


def _resolved_part(part: Any, seen: tuple[tuple[str, str], ...]) -> Any:
    scorer = part.get("scorer") if isinstance(part, Mapping) else None
    return {**part, "scorer": resolve(scorer, seen)} if isinstance(scorer, Mapping) else part


def register(registry: str | Path, name: str, entry: Mapping[str, Any]) -> None:
    """Add an entry, or replace the one of that name, which keeps its place and those of its keys that `entry` does not have.

    Paths in `entry` start at the working directory and are written relative to the registry. The file is replaced in one
    piece under a lock, so processes that register at the same time all get in.

    Errors: ConfigError for a name that a command line could not give, a path that leads nowhere, a file that is no registry;
    RewardenError when another process holds the lock for a minute.
    """
    path = Path(registry)
    if not name or any(mark in name for mark in "/:\n"):
        raise ConfigError(f"{path}: {name!r} is no name for an entry; use words without '/' and ':'")
    written = _placed(entry, lambda text: _relative(text, path, name))
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        table = {key: raw for key, (raw, _) in _entries(path).items()} if path.exists() else {}
        old = table.get(name, {})
        same_kind = old.get("kind") == written.get("kind")
        table[name] = {**written, **{key: value for key, value in old.items() if same_kind and key not in written}}
        write_atomic(path, yaml.safe_dump(table, sort_keys=False, allow_unicode=True, default_flow_style=None))


def named(text: str) -> tuple[Path, str | None] | None:
    """(registry, entry) of "models.yaml:NAME", (registry, None) of "models.yaml", None for anything else."""
    if text.endswith(YAML_ENDINGS):
        return Path(text), None
    file, colon, name = text.rpartition(":")
    return (Path(file), name) if colon and file.endswith(YAML_ENDINGS) else None


def _entries(path: Path) -> dict[str, tuple[dict[str, Any], int]]:
    """The entries as they are written, each with its line."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        hint = f"reward training writes {REGISTRY} beside its run folder"
        raise ConfigError(f"{path}: no such registry; {hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); give the path of a registry") from None
    try:
        table = load_yaml(text)
    except ValueError as error:
        raise ConfigError(f"{path}: not a valid registry: {error}") from None
    if table is None:
        return {}
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: holds {type(table).__name__}; a registry is a mapping from names to {{kind: ..., ...}}")
    lines = key_lines(text)
    for name, raw in table.items():
        if not isinstance(raw, dict) or not isinstance(raw.get("kind"), str):
            raise ConfigError(
                f"{path}:{lines.get(name)}: entry {name!r} is {raw!r}; write a scorer, such as "
                "{kind: reward_model, path: FOLDER}"
            )
    return {name: (raw, lines.get(name, 0)) for name, raw in table.items()}


def _placed(raw: Mapping[str, Any], place: Callable[[str], str]) -> dict[str, Any]:
    """A scorer's config with `place` applied to each text in it that names a folder or a file."""
    kind = str(raw.get("kind"))
    if kind == "sum" and isinstance(raw.get("scorers"), list | tuple):
        return {**raw, "scorers": [_placed_part(part, place) for part in raw["scorers"]]}
    out = {**raw, "kind": _placed_code(kind, place)} if "kind" in raw else dict(raw)
    for of_kind, key in (("reward_model", "path"), ("length", "tokenizer"), ("registered", "registry")):
        if kind == of_kind and isinstance(raw.get(key), str):
            out[key] = place(raw[key])
    if kind == "function" and isinstance(raw.get("path"), str):
        out["path"] = _placed_code(raw["path"], place)
    return out


def _placed_part(part: Any, place: Callable[[str], str]) -> Any:
    scorer = part.get("scorer") if isinstance(part, Mapping) else None
    return {**part, "scorer": _placed(scorer, place)} if isinstance(scorer, Mapping) else part


def _placed_code(name: str, place: Callable[[str], str]) -> str:
    """ "my_file.py:MyReward" with its file placed; the name of an importable module stays."""
    file, colon, attribute = name.rpartition(":")
    return f"{place(file)}:{attribute}" if colon and file.endswith(".py") else name


def _absolute(text: str, folder: Path) -> str:
    if text.startswith(HUB):
        return text.removeprefix(HUB)
    return os.path.abspath(folder / Path(text).expanduser())


def _relative(text: str, registry: Path, name: str) -> str:
    """A path of this process as the registry writes it."""
    if text.startswith(HUB):
        return text
    if not Path(text).exists():
        raise ConfigError(
            f"{registry}: entry {name!r}: {text!r} is not there; give a folder, or {HUB}ORG/NAME for a model of the hub"
        )
    try:
        return Path(os.path.relpath(text, registry.parent)).as_posix()
    except ValueError:  # another drive of Windows
        return str(Path(text).absolute())


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = FolderLock(path.with_name(f".{path.name}.lock"))
    until = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            lock.acquire()
            break
        except ResumeError as error:
            if time.monotonic() > until:
                raise RewardenError(
                    f"{path} is being written by another process for {LOCK_WAIT_S:.0f} s; stop it: {error}"
                ) from error
            time.sleep(0.02)
    try:
        yield
    finally:
        lock.release()
