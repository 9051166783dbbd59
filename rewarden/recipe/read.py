"""Recipes: one YAML file, dotted overrides, references between stages, a grid. Nothing here imports torch."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rewarden.errors import ConfigError
from rewarden.recipe.architectures import check_architectures
from rewarden.recipe.cells import absent, belongs, cells_of, without_only
from rewarden.recipe.chain import TOP, Recipe, Stage, chain_of, folder_of
from rewarden.recipe.changes import Change, changed, read_change, size_changes
from rewarden.recipe.grid import blocks_of, change_grid
from rewarden.recipe.references import References, names, resolve
from rewarden.recipe.yaml_text import read_mapping
from rewarden.spec import nearest

__all__ = ["Recipe", "Stage", "merge", "read_recipe"]

RESERVED = (*TOP, "stages", "description", "grid", "gather", "jobs", "size", "sizes", "architectures")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


def read_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read PATH, apply `a.b=value` overrides (values are YAML), resolve ${...}.

    A chain has `stages:`, a list of {stage: NAME, kind: ..., ...}; `recipe: other.yaml` in a stage takes that file's fields
    and lays the stage's own over them. ${NAME} is the folder of an earlier stage, or another top-level key; $${ is a plain ${.
    `architectures:` describes models that are not on this machine, see `rewarden.recipe.architectures`.
    With `grid:` the stages are made for every cell, see `rewarden.recipe.grid`.

    Errors: ConfigError for anything that is no recipe: YAML that does not parse, a key given twice, a value that no stage
    uses, a reference to what is not there, an override or a grid path of what is not there.
    """
    raw = read_mapping(path)
    architectures = check_architectures(raw.pop("architectures", None), str(path))
    given = [read_change(text) for text in overrides]
    changes = [*size_changes(raw, given, str(path)), *given]
    is_grid = bool({"grid", "gather", "jobs"} & {*raw, *(change.parts[0] for change in changes)})
    top = {"name": path.stem, "output_dir": "runs"}
    if "stages" not in raw and is_grid:
        raw, changes = _as_chain(raw, changes)
    if "stages" not in raw:
        sized = ("size", "sizes") if "sizes" in raw else ()
        fields = {key: value for key, value in raw.items() if key not in ("description", *sized)}
        fields = changed({**top, **fields}, [change for change in changes if change.parts[0] not in sized])
        name, folder = folder_of(fields, path)
        stage_fields = {key: value for key, value in fields.items() if key not in top}
        resolved = resolve(stage_fields, References({key: fields[key] for key in top}), str(path))
        stage = Stage(name=name, folder=folder, raw=resolved, base=name)
        return Recipe(path=path, name=name, folder=folder, stages=(stage,), architectures=architectures)
    stages = _stage_table(raw["stages"], path, "stages")
    gather = _stage_table(raw["gather"], path, "gather") if raw.get("gather") is not None else {}
    values = {key: value for key, value in raw.items() if key in (*TOP, "size") or key not in RESERVED}
    values = {**{key: value for key, value in top.items() if key not in values}, **values}
    clash = sorted((set(values) & {*stages, *gather}) | (set(stages) & set(gather)))
    if clash:
        raise ConfigError(f"{path}: {clash[0]!r} is both a value and a stage, or two stages; rename one")
    written = (values, stages, gather)
    grid, jobs = raw.get("grid"), raw.get("jobs", 1)
    for change in changes:
        taken, grid = change_grid(grid, change, str(path)) if is_grid else (False, grid)
        if taken:
            continue
        if change.parts == ("jobs",):
            jobs = change.value
            continue
        tables = changed({**values, **stages, **gather}, [change], known={*values, *stages, *gather})
        values, stages, gather = ({key: tables[key] for key in table} for table in (values, stages, gather))
    if is_grid:
        recipe = cells_of(path, values, stages, gather, blocks_of(grid, str(path)), _jobs(jobs, path))
    else:
        kept = {name: fields for name, fields in stages.items() if belongs(fields, {}, values, f"{path}: stage {name}")}
        recipe = chain_of(path, values, without_only(kept), absent=absent(stages, kept, {}))
    _refuse_unused(path, *written, has_sizes="sizes" in raw)
    return replace(recipe, architectures=architectures)


def _as_chain(raw: Mapping[str, Any], changes: Sequence[Change]) -> tuple[dict[str, Any], list[Change]]:
    """The recipe of a single job as a chain of one stage, named after its kind; paths of the grid lead into that stage."""
    kind = str(raw.get("kind"))
    stage = kind if NAME.fullmatch(kind) else "job"
    own = {key: value for key, value in raw.items() if key in RESERVED}
    fields = {key: value for key, value in raw.items() if key not in RESERVED}
    outer = [
        change
        if change.parts[0] in (*RESERVED, stage)
        else Change(parts=(stage, *change.parts), value=change.value, text=change.text)
        for change in changes
    ]
    outer = [
        replace(change, parts=("grid", stage, *change.parts[1:])) if change.parts[0] == "grid" and change.parts[1:] else change
        for change in outer
    ]
    grid = own.get("grid")
    blocks = grid if isinstance(grid, list) else [grid]
    if all(isinstance(block, dict) for block in blocks):
        own["grid"] = [{f"{stage}.{key}": values for key, values in dict(block or {}).items()} for block in blocks]
    return {**own, "stages": [{"stage": stage, **fields}]}, outer


def _jobs(jobs: Any, path: Path) -> int:
    if isinstance(jobs, bool) or not isinstance(jobs, int) or jobs < 1:
        raise ConfigError(f"{path}: jobs is {jobs!r}; write how many stages run at a time, 1 or more")
    return jobs


def _refuse_unused(
    path: Path, values: Mapping[str, Any], stages: Mapping[str, Any], gather: Mapping[str, Any], *, has_sizes: bool
) -> None:
    """A top-level key of a chain that nothing refers to is a misspelt one."""
    conditions = [fields["only"] for fields in stages.values() if isinstance(fields, Mapping) and "only" in fields]
    used = names([values, stages, gather]).union(*(only for only in conditions if isinstance(only, Mapping)))
    used |= {*TOP, *(["size"] if has_sizes else [])}
    for key in values:
        if key not in used:
            hint = nearest(key, [*RESERVED, *stages])
            raise ConfigError(f"{path}: no stage uses the value {key!r}; write ${{{key}}} where it belongs, or {hint}")


def _stage_table(raw: Any, path: Path, key: str) -> dict[str, dict[str, Any]]:
    if not isinstance(raw, list) or not raw:
        raise ConfigError(f"{path}: {key} is {raw!r}; write a list of {{stage: NAME, kind: ...}}")
    table: dict[str, dict[str, Any]] = {}
    for place, entry in enumerate(raw):
        if not isinstance(entry, dict) or "stage" not in entry:
            raise ConfigError(f"{path}: {key}[{place}] has no `stage:` name")
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
