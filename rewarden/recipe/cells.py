"""The stages of every cell of a grid, shared ones once, and those that gather the cells."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rewarden.errors import ConfigError
from rewarden.recipe.chain import TOP, Recipe, Stage, chain_of, folder_of
from rewarden.recipe.changes import Change, changed
from rewarden.recipe.grid import Cell, combinations, dependences, holds, labelled, shown, targets
from rewarden.recipe.references import References, resolve

CELLS = "cells"
"""What ${cells} in a gathering stage stands for: the file CELLS_FILE in the recipe's folder."""
CELLS_FILE = "cells.json"
LOGS = "logs"
"""Where a grid's stages write what they print."""


def belongs(fields: Any, cell: Mapping[str, Any], values: Mapping[str, Any], where: str) -> bool:
    """Whether a cell has a stage: its `only:`, if any, holds there."""
    return not isinstance(fields, Mapping) or holds(fields.get("only"), cell, values, where)


def without_only(stages: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of each stage as its job reads them."""
    return {
        name: {key: value for key, value in fields.items() if key != "only"} if isinstance(fields, Mapping) else fields
        for name, fields in stages.items()
    }


def absent(stages: Mapping[str, Any], kept: Mapping[str, Any], cell: Mapping[str, Any]) -> dict[str, str]:
    """What to say of a reference to a stage that a cell does not have."""
    where = f"the cell {shown(cell)}" if cell else "this recipe as it is"
    return {
        name: f"is not in {where}: its `only:` is {fields['only']}; give this stage the same `only:`"
        for name, fields in stages.items()
        if name not in kept
    }


def cells_of(
    path: Path,
    values: Mapping[str, Any],
    stages: Mapping[str, Any],
    gather: Mapping[str, Any],
    blocks: Sequence[Mapping[str, Sequence[Any]]],
    jobs: int,
) -> Recipe:
    """The stages of every cell, shared ones once, and those that gather them."""
    where = str(path)
    for name in (LOGS, CELLS):
        if name in {*stages, *gather, *values}:
            raise ConfigError(f"{where}: {name!r} is a name that a grid uses itself; choose another")
    target = targets(blocks[0] if blocks else (), values, stages, where)
    depends = dependences(target, values, stages)
    for key in (*TOP, "size"):
        if depends.get(key):
            raise ConfigError(f"{where}: {key} is the same in every cell, and here depends on grid.{depends[key][0]}")
    found: dict[str, Stage] = {}
    cells: list[Cell] = []
    for keys in combinations(blocks):
        settings = [Change(parts=target[key], value=value, text=f"{where}: grid.{key}") for key, value in keys.items()]
        tables = changed({**values, **stages}, settings)
        in_cell = {key: tables[key] for key in values}
        kept = {name: tables[name] for name in stages if belongs(tables[name], keys, in_cell, f"{where}: stage {name}")}
        labels = {name: labelled(name, {key: keys[key] for key in depends[name]}) for name in kept}
        chain = chain_of(path, in_cell, without_only(kept), labels=labels, absent=absent(stages, kept, keys))
        for stage in chain.stages:
            if found.setdefault(stage.name, stage).raw != stage.raw:
                raise ConfigError(
                    f"{where}: stage {stage.base} differs between cells in which {stage.name} should be one; refer to what it "
                    "reads by ${NAME}, not by a path written out"
                )
        cells.append(Cell(keys=keys, stages=labels))
    shared = {name for name, keys in depends.items() if not keys}
    name, folder = folder_of(chain.variables, path)
    common = {key: value for key, value in chain.variables.items() if key in shared}
    gathered = _gathered(path, folder, gather, [*found.values()], common, depends)
    return Recipe(
        path=path,
        name=name,
        folder=folder,
        stages=(*found.values(), *gathered),
        variables=chain.variables,
        cells=tuple(cells),
        jobs=jobs,
        written=(*stages, *gather),
    )


def _gathered(
    path: Path,
    folder: Path,
    gather: Mapping[str, Any],
    stages: Sequence[Stage],
    values: Mapping[str, Any],
    depends: Mapping[str, Sequence[str]],
) -> list[Stage]:
    """The stages of `gather:`, in order; ${cells} is the file that lists the cells, and reads all of them."""
    alone = {stage.base: stage for stage in stages if stage.name == stage.base}
    many = {
        name: f"depends on {', '.join(keys)}, so there are many; read ${{{CELLS}}}, which lists every cell and its folders"
        for name, keys in depends.items()
        if keys
    }
    references = References(
        known={**values, **{name: str(stage.folder) for name, stage in alone.items()}, CELLS: str(folder / CELLS_FILE)},
        stages={*alone, CELLS},
        later=set(gather),
        absent=many,
    )
    done: list[Stage] = []
    for name, fields in gather.items():
        where = f"{path}: gather {name}"
        if not isinstance(fields, Mapping) or "only" in fields:
            raise ConfigError(f"{where} is {fields!r}; a stage here is a mapping with a `kind:` and without `only:`")
        references.stages_read = set()
        raw = resolve(fields, references, where)
        cells = tuple(stage.name for stage in stages) if CELLS in references.stages_read else ()
        others = [stage for stage in (*alone.values(), *done) if stage.name not in cells]
        reads = (*cells, *(stage.name for stage in others if stage.name in references.stages_read))
        done.append(Stage(name=name, folder=folder / name, raw=raw, reads=reads, base=name))
        references.known[name] = str(folder / name)
        references.stages.add(name)
    return done
