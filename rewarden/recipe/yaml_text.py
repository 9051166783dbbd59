"""YAML as recipes write it: 1e-5 is a number, None is null, on and off are words, and a key given twice is an error."""

import re
from pathlib import Path
from typing import Any

import yaml

from rewarden.errors import ConfigError
from rewarden.spec import nearest

FLOAT = re.compile(
    r"^[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][-+]?\d+)$|^[-+]?(?:\d[\d_]*\.[\d_]*|\.\d[\d_]*)$"
    r"|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
)
BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
NULL = re.compile(r"^(?:~|null|Null|NULL|None|)$")
INT = re.compile(r"^[-+]?\d[\d_]*$")


class _Loader(yaml.SafeLoader):
    """Plain words mean what they mean in YAML 1.2, and None is null. YAML 1.1 takes 1e-5 for text and off for false."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own way

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A mapping whose keys are words, each given once."""
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=deep)  # type: ignore[no-untyped-call]
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is no word", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


for _tag, _pattern, _first in (
    ("bool", BOOL, "tTfF"),
    ("int", INT, "-+0123456789"),
    ("float", FLOAT, "-+.0123456789"),
    ("null", NULL, ["~", "n", "N", ""]),
    ("merge", re.compile(r"^<<$"), "<"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _pattern, list(_first))  # type: ignore[no-untyped-call]


def _integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(str(loader.construct_scalar(node)).replace("_", ""))


_Loader.add_constructor("tag:yaml.org,2002:int", _integer)


def read_value(text: str, whole: str) -> Any:
    """The value of an override; `whole` is the override, for the message."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"override {whole!r}: the value is not YAML ({_one_line(error)}); quote it if it is text") from None


def read_mapping(path: Path) -> dict[str, Any]:
    """The mapping a recipe file holds.

    Errors: ConfigError when the file is not there (with the nearest name in its folder), not readable, not YAML, no mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = [p.name for p in path.parent.glob("*.yaml")] if path.parent.is_dir() else []
        hint = nearest(path.name, near) if near else "give the path of a YAML file"
        raise ConfigError(f"{path}: no such recipe; {hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); give the path of a YAML file") from None
    try:
        raw = yaml.load(text, Loader=_Loader)
        _expanded(raw, {})
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not a valid recipe: {_one_line(error)}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: holds {type(raw).__name__}; a recipe is a mapping with `kind:` or `stages:`")
    return raw


LARGEST = 100_000
"""Values in a recipe, those behind aliases counted each time they are used."""


def _expanded(value: Any, sizes: dict[int, int]) -> int:
    """How many values a nested one holds; an alias that holds itself, or aliases of aliases without end, are refused."""
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in sizes:
        sizes[id(value)] = -1  # on the way
        inner = value.values() if isinstance(value, dict) else value
        sizes[id(value)] = 1 + sum(_expanded(part, sizes) for part in inner)
    if sizes[id(value)] < 0:
        raise ValueError("an alias (*name) stands inside what it names")
    if sizes[id(value)] > LARGEST:
        raise ValueError(f"its aliases (*name) stand for more than {LARGEST} values")
    return sizes[id(value)]


def _one_line(error: Exception) -> str:
    problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
    if problem is None or mark is None:
        return " ".join(str(error).split())
    return f"{problem}, line {mark.line + 1}, column {mark.column + 1}"
