"""The one base class of every config: frozen, closed, and able to name a class outside the package."""

import difflib
import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from rewarden.errors import ConfigError, in_words, shortened


class Spec(BaseModel):
    """A frozen config that refuses unknown keys; the docstring under a field is its help text."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True, protected_namespaces=()
    )

    @field_validator("*", mode="before")
    @classmethod
    def _numbers_are_numbers(cls, value: Any, info: Any) -> Any:
        parts = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(part, int) and abs(part) >= 2**63 for part in parts):
            raise ValueError("no number here is that large; use one below 2**63")
        # pydantic takes true for 1, so `max_grad_norm: true` would clip at 1 without a word.
        if any(isinstance(part, bool) for part in parts):
            kinds = _kinds(cls.model_fields[info.field_name or ""].annotation)
            if {int, float} & kinds and not {bool, Any} & kinds:
                raise ValueError("write a number, not true or false")
        return value


def _kinds(annotation: Any) -> set[Any]:
    """Every type a value may have, also inside lists and unions."""
    if get_origin(annotation) is Literal:
        return set()
    return {annotation}.union(*(_kinds(inner) for inner in get_args(annotation)))


SHOWN = 50
"""Names listed in a hint; a folder may hold thousands."""


ALIASES = {
    "lr": ("learning_rate",),
    "batch_size": ("train_batch_size", "rollout_batch_size"),
    "micro_batch_size": ("per_device_train_batch_size",),
    "epochs": ("num_train_epochs", "num_ppo_epochs"),
    "num_epochs": ("num_train_epochs", "num_ppo_epochs"),
    "steps": ("max_steps",),
    "num_steps": ("max_steps",),
    "warmup": ("warmup_steps",),
    "scheduler": ("lr_scheduler_type",),
    "grad_clip": ("max_grad_norm",),
    "clip": ("cliprange",),
    "kl_coef": ("beta",),
    "init_kl_coef": ("beta",),
    "max_new_tokens": ("max_completion_length",),
    "max_tokens": ("max_completion_length",),
    "model": ("policy",),
}
"""What other programs call a key, and our names for it."""


def nearest(name: str, allowed: Iterable[str]) -> str:
    """A hint for a misspelt name: "; did you mean 'beta'?", or the allowed names when none is near."""
    names = sorted(allowed)
    for alias in ALIASES.get(name, ()):
        if alias in names:
            return f"did you mean {alias!r}?"
    near = difflib.get_close_matches(name, names, n=1)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"did you mean {near[0]!r}?" if near else f"allowed: {', '.join(names[:SHOWN])}{more}"


def check(spec: type[Spec], fields: Mapping[str, Any], where: str = "") -> Spec:
    """`spec(**fields)`, with pydantic's complaints rewritten as one ConfigError.

    where: what to put before each key, such as "recipe.yaml: data".
    """
    try:
        return spec(**fields)
    except ValidationError as error:
        lines: dict[str, None] = dict.fromkeys(_explain(spec, entry, where) for entry in _merged(error.errors()))
        raise ConfigError("\n".join(lines)) from None


def parse(table: Mapping[str, type[Spec]], raw: Mapping[str, Any] | Spec, where: str = "") -> Spec:
    """Turn {kind: ..., **fields} into its config.

    `kind` is a key of `table` or "module:Class" (also "folder/file.py:Class"), a Spec that lives outside the package.
    """
    if isinstance(raw, Spec):
        return raw
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{_at(where)}got {_shown(raw)}; write a mapping with a `kind:` ({', '.join(sorted(table))})")
    kind = raw.get("kind")
    fields = {key: value for key, value in raw.items() if key != "kind"}
    if isinstance(kind, str) and kind in table:
        return check(table[kind], fields, where)
    if isinstance(kind, str) and ":" in kind:
        return check(outside(kind, where), fields, where)
    raise ConfigError(f"{_at(where)}kind is {_shown(kind)}; {nearest(str(kind), table)}, or 'my_file:MyClass' for your own")


def outside(name: str, where: str = "") -> Any:
    """The object "module:attribute" names; a path to a .py file works in place of the module.

    A file is run once per process, whatever it is called: `random.py` does not meet the library's module of that name. Its
    folder is put on the import path, so that it finds its neighbours.
    """
    module_name, attribute = name.rsplit(":", 1)
    path = Path(module_name if module_name.endswith(".py") else f"{module_name}.py")
    if path.is_file():
        module = _run_file(path, where)
    elif module_name.endswith(".py"):
        raise ConfigError(f"{_at(where)}no file {module_name!r} for {name!r}; paths start at the folder you run from")
    else:
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise _cannot_run(module_name, error, where) from error  # found, but what it imports is missing
            raise ConfigError(
                f"{_at(where)}no module {module_name!r} for {name!r}; give a file or an importable module"
            ) from error
        except (Exception, SystemExit) as error:  # anybody's code
            raise _cannot_run(module_name, error, where) from error
    if not hasattr(module, attribute):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        raise ConfigError(
            f"{_at(where)}{module_name!r} has no {attribute!r}; {nearest(attribute, own) if own else 'it is empty'}"
        )
    return getattr(module, attribute)


def _cannot_run(what: str | Path, error: BaseException, where: str) -> ConfigError:
    words = in_words(error, str(Path(what).resolve()))
    return ConfigError(f"{_at(where)}{what} cannot be imported: {words}; mend it, then run again")


def _run_file(path: Path, where: str) -> ModuleType:
    """The module of a file, from the first call that named it."""
    given, path = path, path.resolve()
    name = f"rewarden_outside_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    ran = False
    try:
        spec.loader.exec_module(module)
        ran = True
    except (Exception, SystemExit) as error:  # anybody's code
        raise _cannot_run(given, error, where) from error
    finally:
        if not ran:
            del sys.modules[name]
    return module


def _at(where: str) -> str:
    return f"{where}: " if where else ""


def _merged(entries: Iterable[Any]) -> list[dict[str, Any]]:
    """Complaints about one key as one: pydantic has one for each alternative of its type, and names that in the path."""
    by_path: dict[tuple[Any, ...], dict[str, Any]] = {}
    for entry in entries:
        path = tuple(part for part in entry["loc"] if isinstance(part, int) or not ALTERNATIVE.fullmatch(part))
        if path in by_path and entry["msg"] not in by_path[path]["msg"]:
            by_path[path]["msg"] += f"; or: {entry['msg']}"
        else:
            by_path.setdefault(path, {**entry, "loc": path})
    # A list that is "too short" only because its one part is wrong is no complaint of its own.
    return [
        entry for path, entry in by_path.items() if not any(path == longer[: len(path)] for longer in by_path if path != longer)
    ]


ALTERNATIVE = re.compile(r"\w+\[.*\]|str|int|float|bool")
"""How pydantic names one alternative of a type in the path of a complaint."""


MAPPING = "write a mapping, such as {key: value}"
"""What to do where pydantic asks for a dictionary or an instance of a class."""


def _explain(spec: type[Spec], entry: Any, where: str) -> str:
    path = ".".join(str(part) for part in entry["loc"])
    if entry["type"] == "extra_forbidden":
        owner = _owner(spec, entry["loc"][:-1])
        hint = nearest(str(entry["loc"][-1]), owner.model_fields) if owner else "remove it"
        return f"{_at(where)}unknown key {path!r}; {hint}"
    if entry["type"] == "missing":
        return f"{_at(where)}{path} is missing; it has no default"
    cause = entry.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):  # raised by a validator, which names the key itself
        return "\n".join(f"{_at(where)}{line}" for line in str(cause).splitlines())
    problem = MAPPING if entry["type"] in ("model_type", "dict_type") else str(entry["msg"]).removeprefix("Value error, ")
    return f"{_at(where)}{path} is {_shown(entry.get('input'))}: {problem}" if path else f"{_at(where)}{problem}"


def _shown(value: Any) -> str:
    """A value for an error message, cut to a readable length."""
    return shortened(repr(value), 120)


def _owner(spec: type[Spec], path: Iterable[Any]) -> type[Spec] | None:
    """The Spec class that `path` leads to, if the types on the way say so."""
    current: type[Spec] | None = spec
    for part in path:
        if isinstance(part, int):  # a place in a list
            continue
        field = current.model_fields.get(str(part)) if current else None
        annotation = field.annotation if field else None
        options = [annotation, *getattr(annotation, "__args__", ())]
        current = next((o for o in options if isinstance(o, type) and issubclass(o, Spec)), None)
    return current
