"""Recipes: one YAML file, dotted overrides, references between stages. Nothing here imports torch."""

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rewarden.errors import ConfigError
from rewarden.spec import nearest

RESERVED = ("name", "output_dir", "stages", "description")
REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_-]*)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One job of a recipe: its name, its folder, its resolved fields (with `kind`), and the stages it reads from."""

    name: str
    folder: Path
    raw: Mapping[str, Any]
    reads: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A recipe file with its overrides applied."""

    path: Path
    name: str
    folder: Path
    stages: tuple[Stage, ...]
    variables: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_chain(self) -> bool:
        """Whether it has stages of its own."""
        return not (len(self.stages) == 1 and self.stages[0].folder == self.folder)


def read_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read PATH, apply `a.b=value` overrides (values are YAML), resolve ${...}.

    A chain has `stages:`, a list of {stage: NAME, kind: ..., ...}; `recipe: other.yaml` in a stage takes that file's fields
    and lays the stage's own over them. ${NAME} is the folder of an earlier stage; other top-level keys are values by name.
    """
    raw = _mapping(path)
    name = str(raw.get("name", path.stem))
    if "stages" not in raw:
        fields = {key: value for key, value in raw.items() if key not in RESERVED}
        changed = override({"name": name, "output_dir": raw.get("output_dir", "runs"), **fields}, overrides, path)
        name, root = str(changed.pop("name")), Path(str(changed.pop("output_dir")))
        folder = root / name
        return Recipe(path=path, name=name, folder=folder, stages=(Stage(name=name, folder=folder, raw=changed),))
    stages = _stage_table(raw["stages"], path)
    variables = {key: value for key, value in raw.items() if key not in ("stages", "description")}
    variables = {"name": name, "output_dir": "runs", **variables}
    clash = sorted(set(variables) & set(stages))
    if clash:
        raise ConfigError(f"{path}: {clash[0]!r} is both a value and a stage; rename one")
    changed = override({**variables, **stages}, overrides, path)
    variables = {key: changed[key] for key in variables}
    folder = Path(str(variables["output_dir"])) / str(variables["name"])
    known: dict[str, Any] = dict(variables)
    done: list[Stage] = []
    for stage in stages:
        reads: list[str] = []
        resolved = _substitute(changed[stage], known, [s.name for s in done], reads, f"{path}: stage {stage}")
        done.append(Stage(name=stage, folder=folder / stage, raw=resolved, reads=tuple(dict.fromkeys(reads))))
        known[stage] = str(folder / stage)
    return Recipe(path=path, name=str(variables["name"]), folder=folder, stages=tuple(done), variables=variables)


def override(raw: Mapping[str, Any], overrides: Sequence[str], path: Path) -> dict[str, Any]:
    """`raw` with each `a.b=value` set. The first key must exist; deeper ones are checked when the recipe is parsed."""
    out = copy.deepcopy(dict(raw))
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"override {text!r}: write path=value, such as optim.learning_rate=1e-4")
        parts = key.strip().split(".")
        place: Any = out
        for depth, part in enumerate(parts[:-1]):
            inner = place.get(part)
            if inner is None:
                inner = place[part] = {}
            if not isinstance(inner, dict):
                raise ConfigError(f"override {text!r}: {'.'.join(parts[: depth + 1])} is {inner!r}, which has no keys")
            place = inner
        place[parts[-1]] = _value(value, text)
    return out


def _value(text: str, whole: str) -> Any:
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {whole!r}: the value is not YAML ({error})") from None
    return None if isinstance(value, str) and value in ("None", "none") else value


class _Loader(yaml.SafeLoader):
    """YAML whose numbers include 1e-5 (YAML 1.1 reads that as text)."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][-+]?\d+)$|^[-+]?(?:\d[\d_]*\.[\d_]*|\.\d[\d_]*)$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
    ),
    list("-+0123456789."),
)


def _mapping(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = sorted(p.name for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        raise ConfigError(
            f"{path}: no such recipe; {nearest(path.name, near) if near else 'give the path of a YAML file'}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None
    try:
        raw = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: holds {type(raw).__name__}; a recipe is a mapping with `kind:` or `stages:`")
    return raw


def _stage_table(raw: Any, path: Path) -> dict[str, dict[str, Any]]:
    if not isinstance(raw, list) or not raw:
        raise ConfigError(f"{path}: stages is {raw!r}; write a list of {{stage: NAME, kind: ...}}")
    table: dict[str, dict[str, Any]] = {}
    for place, entry in enumerate(raw):
        if not isinstance(entry, dict) or "stage" not in entry:
            raise ConfigError(f"{path}: stages[{place}] has no `stage:` name")
        name = str(entry["stage"])
        if name in table or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]*", name):
            raise ConfigError(f"{path}: stage name {name!r} is taken or not a plain word; names are letters, digits, _ and -")
        fields = {key: value for key, value in entry.items() if key not in ("stage", "recipe")}
        if "recipe" in entry:
            inner = _mapping(path.parent / str(entry["recipe"]))
            fields = merge({key: value for key, value in inner.items() if key not in RESERVED}, fields)
        table[name] = fields
    return table


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid on `under`, mappings merged key by key."""
    out = dict(under)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
        out[key] = merge(out[key], value) if both else value
    return out


def _substitute(value: Any, known: Mapping[str, Any], stages: Sequence[str], reads: list[str], where: str) -> Any:
    if isinstance(value, Mapping):
        return {key: _substitute(inner, known, stages, reads, f"{where}.{key}") for key, inner in value.items()}
    if isinstance(value, list):
        return [_substitute(inner, known, stages, reads, where) for inner in value]
    if not isinstance(value, str):
        return value

    def look(match: re.Match[str]) -> Any:
        name = match.group(1)
        if name not in known:
            raise ConfigError(f"{where}: ${{{name}}} is neither an earlier stage nor a value; {nearest(name, known)}")
        if name in stages:
            reads.append(name)
        return known[name]

    whole = REFERENCE.fullmatch(value)
    if whole:
        return look(whole)
    return REFERENCE.sub(lambda match: str(look(match)), value)
