"""Recipes: one YAML file, dotted overrides, references between stages. Nothing here imports torch."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rewarden.errors import ConfigError
from rewarden.recipe.yaml_text import read_mapping, read_value
from rewarden.spec import nearest

RESERVED = ("name", "output_dir", "stages", "description")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
REFERENCE = re.compile(r"(\$?)\$\{([^{}]*)\}")


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
    and lays the stage's own over them. ${NAME} is the folder of an earlier stage, or another top-level key; $${ is a plain ${.

    Errors: ConfigError for anything that is no recipe: YAML that does not parse, a key given twice, a value that no stage
    uses, a reference to what is not there, an override of what is not there.
    """
    raw = read_mapping(path)
    top = {"name": path.stem, "output_dir": "runs"}
    if "stages" not in raw:
        fields = {key: value for key, value in raw.items() if key != "description"}
        changed = override({**top, **fields}, overrides)
        name, folder = _folder(changed, path)
        fields = {key: value for key, value in changed.items() if key not in top}
        resolved = _resolve(fields, _References({key: changed[key] for key in top}), str(path))
        return Recipe(path=path, name=name, folder=folder, stages=(Stage(name=name, folder=folder, raw=resolved),))
    stages = _stage_table(raw["stages"], path)
    values = {key: value for key, value in raw.items() if key not in ("stages", "description")}
    values = {**{key: value for key, value in top.items() if key not in values}, **values}
    clash = sorted(set(values) & set(stages))
    if clash:
        raise ConfigError(f"{path}: {clash[0]!r} is both a value and a stage; rename one")
    changed = override({**values, **stages}, overrides, known={*values, *stages})
    recipe = _chain(path, {key: changed[key] for key in values}, {key: changed[key] for key in stages})
    _refuse_unused(path, values, stages)
    return recipe


def _chain(path: Path, values: Mapping[str, Any], stages: Mapping[str, Any]) -> Recipe:
    """The recipe of a chain: values in order, each of which may refer to those above it, then stages in order."""
    references = _References(later={*values, *stages})
    resolved_values: dict[str, Any] = {}
    for key, value in values.items():
        resolved_values[key] = references.known[key] = _resolve(value, references, f"{path}: {key}")
    name, folder = _folder(resolved_values, path)
    done: list[Stage] = []
    for stage, fields in stages.items():
        where = f"{path}: stage {stage}"
        if not isinstance(fields, Mapping):
            raise ConfigError(f"{where} is {fields!r}; a stage is a mapping with a `kind:`")
        references.stages_read = set()
        resolved = _resolve(fields, references, where)
        # A path written out in full leads into a stage's folder just as its ${NAME} does.
        named = {s.name for s in done if any(below(text, s.folder) for text in strings(resolved))}
        reads = tuple(s.name for s in done if s.name in named | references.stages_read)
        done.append(Stage(name=stage, folder=folder / stage, raw=resolved, reads=reads))
        references.known[stage] = str(folder / stage)
        references.stages.add(stage)
    return Recipe(path=path, name=name, folder=folder, stages=tuple(done), variables=resolved_values)


def _refuse_unused(path: Path, values: Mapping[str, Any], stages: Mapping[str, Any]) -> None:
    """A top-level key of a chain that nothing refers to is a misspelt one."""
    used = {match[2] for text in strings([values, stages]) for match in REFERENCE.finditer(text)}
    for key in values:
        if key not in RESERVED and key not in used:
            hint = nearest(key, [*RESERVED, *stages])
            raise ConfigError(f"{path}: no stage uses the value {key!r}; write ${{{key}}} where it belongs, or {hint}")


def _folder(top: Mapping[str, Any], path: Path) -> tuple[str, Path]:
    """(name, output_dir/name), both plain values."""
    for key in ("name", "output_dir"):
        if not isinstance(top[key], str | int) or not str(top[key]):
            raise ConfigError(f"{path}: {key} is {top[key]!r}; write a word or a path")
    if ".." in Path(str(top["name"])).parts or Path(str(top["name"])) == Path():
        raise ConfigError(f"{path}: name is {top['name']!r}, which is no folder below output_dir; write a word")
    return str(top["name"]), Path(str(top["output_dir"])) / str(top["name"])


def override(raw: Mapping[str, Any], overrides: Sequence[str], *, known: Collection[str] | None = None) -> dict[str, Any]:
    """`raw` with each `a.b=value` set.

    known: what the first key may be (None: anything); deeper keys are checked when the recipe is parsed.
    """
    out = dict(raw)
    for text in overrides:
        key, equals, value = text.partition("=")
        parts = [part.strip() for part in key.split(".")]
        if not equals or not all(parts):
            raise ConfigError(f"override {text!r}: write path=value, such as optim.learning_rate=1e-4")
        if known is not None and parts[0] not in known:
            raise ConfigError(f"override {text!r}: the recipe has no {parts[0]!r}; {nearest(parts[0], known)}")
        out = _with(out, parts, read_value(value, text), text, depth=0)
    return out


def _with(place: Mapping[str, Any], parts: Sequence[str], value: Any, text: str, depth: int) -> dict[str, Any]:
    """A copy of `place` in which the key that `parts[depth:]` leads to is `value`."""
    part = parts[depth]
    if depth + 1 == len(parts):
        return {**place, part: value}
    inner = place.get(part)
    if inner is not None and not isinstance(inner, Mapping):
        raise ConfigError(f"override {text!r}: {'.'.join(parts[: depth + 1])} is {inner!r}, which has no keys; set it whole")
    return {**place, part: _with(inner or {}, parts, value, text, depth + 1)}


def _stage_table(raw: Any, path: Path) -> dict[str, dict[str, Any]]:
    if not isinstance(raw, list) or not raw:
        raise ConfigError(f"{path}: stages is {raw!r}; write a list of {{stage: NAME, kind: ...}}")
    table: dict[str, dict[str, Any]] = {}
    for place, entry in enumerate(raw):
        if not isinstance(entry, dict) or "stage" not in entry:
            raise ConfigError(f"{path}: stages[{place}] has no `stage:` name")
        name = entry["stage"]
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ConfigError(f"{path}: stage name {name!r} is no plain word; names are letters, digits, _ and -")
        if name in table:
            raise ConfigError(f"{path}: two stages are named {name!r}; give each its own name")
        fields = {key: value for key, value in entry.items() if key not in ("stage", "recipe")}
        if "recipe" in entry:
            inner = read_mapping(path.parent / str(entry["recipe"]))
            if "stages" in inner:
                raise ConfigError(f"{path}: stage {name}: {entry['recipe']} is a chain itself; name the recipe of one job")
            fields = merge({key: value for key, value in inner.items() if key not in RESERVED}, fields)
        table[name] = fields
    return table


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid on `under`, mappings merged key by key; a mapping of another `kind` replaces the one below it."""
    if "kind" in over and "kind" in under and over["kind"] != under["kind"]:
        return dict(over)
    out = dict(under)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
        out[key] = merge(out[key], value) if both else value
    return out


def strings(value: Any) -> list[str]:
    """Every text in a nested value, in order."""
    if isinstance(value, Mapping):
        return [text for inner in value.values() for text in strings(inner)]
    if isinstance(value, list | tuple):
        return [text for inner in value for text in strings(inner)]
    return [value] if isinstance(value, str) else []


def below(text: str, folder: Path) -> bool:
    """Whether a text, read as a path, is the folder or lies in it."""
    try:
        return Path(text).resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError):  # too long for a path, or with a null byte
        return False


@dataclass(slots=True)
class _References:
    """What ${...} may name so far, and what was named."""

    known: dict[str, Any] = field(default_factory=dict)
    later: Collection[str] = ()
    stages: set[str] = field(default_factory=set)
    stages_read: set[str] = field(default_factory=set)

    def look(self, name: str, where: str) -> Any:
        """The value of a name."""
        if name not in self.known:
            if name in self.later:
                raise ConfigError(f"{where}: ${{{name}}} comes later in the recipe; move it up")
            hint = nearest(name, self.known) if self.known else "there is nothing to refer to yet"
            raise ConfigError(f"{where}: ${{{name}}} is neither an earlier stage nor a value; {hint}")
        if name in self.stages:
            self.stages_read.add(name)
        return self.known[name]


def _resolve(value: Any, references: _References, where: str) -> Any:
    """`value` with every ${NAME} replaced; a text that is nothing but one keeps the value's type."""
    if isinstance(value, Mapping):
        return {key: _resolve(inner, references, f"{where}.{key}") for key, inner in value.items()}
    if isinstance(value, list):
        return [_resolve(inner, references, f"{where}[{place}]") for place, inner in enumerate(value)]
    if not isinstance(value, str):
        return value
    whole = REFERENCE.fullmatch(value)
    if whole and not whole[1]:
        return references.look(whole[2], where)
    return REFERENCE.sub(lambda m: f"${{{m[2]}}}" if m[1] else str(references.look(m[2], where)), value)
