"""The records of a recipe, and the stages of a chain with their references resolved."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rewarden.errors import ConfigError
from rewarden.recipe.grid import Cell
from rewarden.recipe.references import References, below, resolve, strings
from rewarden.recipe.registries import writers

TOP = ("name", "output_dir")
"""Keys of every recipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One job of a recipe: its name, its folder, its resolved fields (with `kind`), and the stages it reads from.

    base: the name in the recipe; in a grid `name` also has the keys that the stage depends on.
    """

    name: str
    folder: Path
    raw: Mapping[str, Any]
    reads: tuple[str, ...] = ()
    base: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A recipe file with its overrides applied.

    cells: of its grid; without a grid there are none. A stage that several cells share stands in `stages` once; those of
    `gather:` come last. jobs: stages of a grid that run at a time. written: names of
    all stages in the file, also of those that are in no cell. architectures: of models that are not on this machine, by path.
    """

    path: Path
    name: str
    folder: Path
    stages: tuple[Stage, ...]
    variables: Mapping[str, Any] = field(default_factory=dict)
    cells: tuple[Cell, ...] = ()
    jobs: int = 1
    written: tuple[str, ...] = ()
    architectures: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_chain(self) -> bool:
        """Whether it has stages of its own."""
        return not (len(self.stages) == 1 and self.stages[0].folder == self.folder)


def chain_of(
    path: Path,
    values: Mapping[str, Any],
    stages: Mapping[str, Any],
    *,
    labels: Mapping[str, str] | None = None,
    absent: Mapping[str, str] | None = None,
) -> Recipe:
    """The recipe of a chain: values in order, each of which may refer to those above it, then stages in order.

    labels: what stages and their folders are called in place of their names. absent: stages that are left out, and why.
    """
    references = References(later={*values, *stages}, absent=absent or {})
    resolved_values: dict[str, Any] = {}
    for key, value in values.items():
        resolved_values[key] = references.known[key] = resolve(value, references, f"{path}: {key}")
    name, folder = folder_of(resolved_values, path)
    done: list[Stage] = []
    for stage, fields in stages.items():
        where = f"{path}: stage {stage}"
        if not isinstance(fields, Mapping):
            raise ConfigError(f"{where} is {fields!r}; a stage is a mapping with a `kind:`")
        references.stages_read = set()
        resolved = resolve(fields, references, where)
        # A path written out in full leads into a stage's folder just as its ${NAME} does.
        named = {s.base for s in done if any(below(text, s.folder) for text in strings(resolved))}
        # An entry of the chain's own registry is written by the stage of that name.
        named |= writers(resolved, folder, {s.base: s.raw.get("kind") for s in done})
        reads = tuple(s.name for s in done if s.base in named | references.stages_read)
        label = (labels or {}).get(stage, stage)
        done.append(Stage(name=label, folder=folder / label, raw=resolved, reads=reads, base=stage))
        references.known[stage] = str(folder / label)
        references.stages.add(stage)
    return Recipe(path=path, name=name, folder=folder, stages=tuple(done), variables=resolved_values)


def folder_of(top: Mapping[str, Any], path: Path) -> tuple[str, Path]:
    """(name, output_dir/name), both plain values."""
    for key in ("name", "output_dir"):
        if not isinstance(top[key], str | int) or not str(top[key]):
            raise ConfigError(f"{path}: {key} is {top[key]!r}; write a word or a path")
    if ".." in Path(str(top["name"])).parts or Path(str(top["name"])) == Path():
        raise ConfigError(f"{path}: name is {top['name']!r}, which is no folder below output_dir; write a word")
    return str(top["name"]), Path(str(top["output_dir"])) / str(top["name"])
