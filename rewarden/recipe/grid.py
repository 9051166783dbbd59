"""The grid of a recipe: its cells, which of them a stage belongs to, and the keys that a stage's folder carries.

A grid is a block or a list of blocks. A block maps paths to lists of values and stands for every combination of them; the
cells of a grid are those of its blocks, each once. A stage depends on the keys that it names, that are set inside it, or that
the stages it reads depend on; its folder is named after these alone, so that cells which agree in them share it.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rewarden.errors import ConfigError
from rewarden.recipe.changes import Change
from rewarden.recipe.references import names
from rewarden.spec import nearest

LONGEST = 160
"""Characters of a folder's name; longer ones end in a hash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One combination of the grid's values, and the stages it has: name in the recipe -> name with the keys it depends on."""

    keys: Mapping[str, Any]
    stages: Mapping[str, str]

    def __str__(self) -> str:
        return shown(self.keys) or "the only cell"


def blocks_of(raw: Any, where: str) -> list[dict[str, list[Any]]]:
    """The blocks of a `grid:`; none for null.

    Errors: ConfigError for what is no block, an empty list, a value given twice, or blocks of different keys.
    """
    blocks = [] if raw is None else raw if isinstance(raw, list) else [raw]
    found: list[dict[str, list[Any]]] = []
    for place, block in enumerate(blocks):
        here = f"{where}: grid[{place}]" if isinstance(raw, list) else f"{where}: grid"
        if not isinstance(block, Mapping) or not block:
            raise ConfigError(f"{here} is {block!r}; write {{path: [value, ...], ...}}, or a list of such blocks")
        for key, values in block.items():
            if not isinstance(values, list) or not values:
                raise ConfigError(f"{here}.{key} is {values!r}; write a list of one value or more")
            texts = [_text(value) for value in values]
            twice = next((text for text in texts if texts.count(text) > 1), None)
            if twice is not None:
                raise ConfigError(f"{here}.{key} has {twice} twice; give each value once")
        missing = [key for key in (found[0] if found else block) if key not in block]
        extra = [key for key in block if found and key not in found[0]]
        if missing or extra:
            raise ConfigError(
                f"{here} has the keys {', '.join(block)}, grid[0] {', '.join(found[0])}; name all of them in every block"
            )
        found.append(dict(block))
    return found


def change_grid(grid: Any, change: Change, where: str) -> tuple[bool, Any]:
    """Whether a change is one of the grid's lists, and the grid with it made.

    grid=... sets it whole, grid.PATH=LIST a list in every block; PATH=LIST does the same for a path that the grid has.
    """
    if change.parts == ("grid",):
        return True, change.value
    key = ".".join(change.parts[1:] if change.parts[0] == "grid" else change.parts)
    blocks = blocks_of(grid, where)
    if change.parts[0] != "grid" and not any(key in block for block in blocks):
        return False, grid
    values = change.value if isinstance(change.value, list) else [change.value]
    return True, [{**block, key: values} for block in blocks or [{}]]


def combinations(blocks: Sequence[Mapping[str, Sequence[Any]]]) -> list[dict[str, Any]]:
    """Keys and values of every cell, in order, each once; without blocks the one cell that has no keys."""
    cells: dict[str, dict[str, Any]] = {}
    for block in blocks or [{}]:
        for values in itertools.product(*block.values()):
            cell = dict(zip(block, values, strict=True))
            cells.setdefault(_text(cell), {key: cell[key] for key in (blocks[0] if blocks else ())})
    return list(cells.values())


def targets(keys: Iterable[str], values: Collection[str], stages: Collection[str], where: str) -> dict[str, tuple[str, ...]]:
    """Where each key of the grid leads: a value of the recipe, or a key of a stage.

    Errors: ConfigError with the nearest name for a path that leads nowhere.
    """
    found = {}
    for key in keys:
        parts = tuple(key.split("."))
        if parts[0] in stages and len(parts) == 1:
            raise ConfigError(f"{where}: grid.{key} is a stage; name a key of it, such as {key}.seed")
        if parts[0] not in stages and parts[0] not in values:
            raise ConfigError(f"{where}: grid.{key}: the recipe has no {parts[0]!r}; {nearest(parts[0], [*values, *stages])}")
        found[key] = parts
    return found


def dependences(
    target: Mapping[str, tuple[str, ...]], values: Mapping[str, Any], stages: Mapping[str, Any]
) -> dict[str, tuple[str, ...]]:
    """By value and by stage: the keys of the grid it depends on, in its order. Both tables refer only to what is above."""
    found: dict[str, set[str]] = {}
    for name, raw in (*values.items(), *stages.items()):
        own = {key for key, parts in target.items() if parts[0] == name}
        found[name] = own.union(*(found.get(other, set()) for other in names(raw)))
    return {name: tuple(key for key in target if key in keys) for name, keys in found.items()}


def holds(only: Any, cell: Mapping[str, Any], values: Mapping[str, Any], where: str) -> bool:
    """Whether a stage's `only:` ({key: value or list of values}) holds in a cell; a key may also be a value of the recipe.

    Errors: ConfigError for what is no such mapping, or a key that is not there.
    """
    if only is None:
        return True
    if not isinstance(only, Mapping):
        raise ConfigError(f"{where}: only is {only!r}; write {{key: value, ...}} or {{key: [value, ...], ...}}")
    for key, wanted in only.items():
        if key not in cell and key not in values:
            raise ConfigError(f"{where}: only.{key} is no key of the grid; {nearest(str(key), {*cell, *values})}")
        value = cell[key] if key in cell else values[key]
        allowed = wanted if isinstance(wanted, list) else [wanted]
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed):
            return False
    return True


def labelled(stage: str, keys: Mapping[str, Any]) -> str:
    """STAGE@key=value,...: what a stage and its folder are called; STAGE alone where it depends on no key."""
    if not keys:
        return stage
    plain = f"{stage}@{shown({key.removeprefix(f'{stage}.'): value for key, value in keys.items()})}"
    name = re.sub(r"[^\w@=,.+-]+", "-", plain)[:LONGEST]
    if name == plain:
        return name
    return f"{name}-{hashlib.sha256(_text(dict(keys)).encode()).hexdigest()[:8]}"


def shown(keys: Mapping[str, Any]) -> str:
    """key=value, ... in a few characters."""
    return ",".join(f"{key}={value if isinstance(value, str) else _text(value)}" for key, value in keys.items())


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
