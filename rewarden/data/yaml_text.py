"""YAML of recipes and registries: 1e-5 is a number, None is null, on and off are words, a key given twice is an error."""

import re
from typing import Any

import yaml

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


def load_yaml(text: str) -> Any:
    """The value of a YAML text.

    Errors: ValueError that says in one line, with line and column, what is wrong; also for a key given twice, for an alias
    that holds itself, and for aliases of aliases without end.
    """
    try:
        raw = yaml.load(text, Loader=_Loader)
        _expanded(raw, {})
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(_one_line(error)) from None
    return raw


def key_lines(text: str) -> dict[str, int]:
    """The line (from 1) of each key of the mapping that a YAML text holds; {} for a text that is none."""
    try:
        node = yaml.compose(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    return {str(key.value): key.start_mark.line + 1 for key, _ in pairs}


LARGEST = 100_000
"""Values in a file, those behind aliases counted each time they are used."""


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
