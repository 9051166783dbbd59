"""The one base class of every config: frozen, closed, and able to name a class outside the package."""

import difflib
import importlib
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from rewarden.errors import ConfigError


class Spec(BaseModel):
    """A frozen config that refuses unknown keys; the docstring under a field is its help text."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


def nearest(name: str, allowed: Iterable[str]) -> str:
    """A hint for a misspelt name: "; did you mean 'beta'?", or the allowed names when none is near."""
    names = sorted(allowed)
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]!r}?" if near else f"allowed: {', '.join(names)}"


def check(spec: type[Spec], fields: Mapping[str, Any], where: str = "") -> Spec:
    """`spec(**fields)`, with pydantic's complaints rewritten as one ConfigError.

    where: what to put before each key, such as "recipe.yaml: data".
    """
    try:
        return spec(**fields)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(spec, entry, where) for entry in error.errors())) from None


def parse(table: Mapping[str, type[Spec]], raw: Mapping[str, Any] | Spec, where: str = "") -> Spec:
    """Turn {kind: ..., **fields} into its config.

    `kind` is a key of `table` or "module:Class" (also "folder/file.py:Class"), a Spec that lives outside the package.
    """
    if isinstance(raw, Spec):
        return raw
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{_at(where)}got {raw!r}; write a mapping with a `kind:` ({', '.join(sorted(table))})")
    kind = raw.get("kind")
    fields = {key: value for key, value in raw.items() if key != "kind"}
    if isinstance(kind, str) and kind in table:
        return check(table[kind], fields, where)
    if isinstance(kind, str) and ":" in kind:
        return check(outside(kind, where), fields, where)
    raise ConfigError(f"{_at(where)}kind is {kind!r}; {nearest(str(kind), table)}, or 'my_file:MyClass' for your own")


def outside(name: str, where: str = "") -> Any:
    """The object "module:attribute" names; a path to a .py file works in place of the module."""
    module_name, attribute = name.rsplit(":", 1)
    path = Path(module_name if module_name.endswith(".py") else f"{module_name}.py")
    if path.exists():
        folder = str(path.resolve().parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)
        module_name = path.stem
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        if error.name != module_name:
            raise
        raise ConfigError(f"{_at(where)}no module {module_name!r} for {name!r}; give a file or an importable module") from error
    except AttributeError as error:
        raise ConfigError(f"{_at(where)}{module_name!r} has no {attribute!r}") from error


def _at(where: str) -> str:
    return f"{where}: " if where else ""


def _explain(spec: type[Spec], entry: Any, where: str) -> str:
    path = ".".join(str(part) for part in entry["loc"])
    if entry["type"] == "extra_forbidden":
        owner = _owner(spec, entry["loc"][:-1])
        hint = nearest(str(entry["loc"][-1]), owner.model_fields) if owner else "remove it"
        return f"{_at(where)}unknown key {path!r}; {hint}"
    if entry["type"] == "missing":
        return f"{_at(where)}{path} is missing; it has no default"
    return f"{_at(where)}{path} is {entry.get('input')!r}: {entry['msg']}"


def _owner(spec: type[Spec], path: Iterable[Any]) -> type[Spec] | None:
    """The Spec class that `path` leads to, if the types on the way say so."""
    current: type[Spec] | None = spec
    for part in path:
        field = current.model_fields.get(str(part)) if current else None
        annotation = field.annotation if field else None
        options = [annotation, *getattr(annotation, "__args__", ())]
        current = next((o for o in options if isinstance(o, type) and issubclass(o, Spec)), None)
    return current
