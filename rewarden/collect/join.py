"""Pairs of several sources together, with one set of held-out prompts for all of them."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from pydantic import Field, field_validator
from rich.console import Console

from rewarden.data.sources import Data, load_comparisons
from rewarden.data.split import split_by_prompt
from rewarden.data.write import comparison_row, write_jsonl
from rewarden.errors import ConfigError, DataError
from rewarden.spec import Spec
from rewarden.types import Comparison

SOURCE = "source"
"""The column that says where a pair comes from."""

TOGETHER = ("all", "heldout")
"""The files that hold pairs of every source."""


class JoinPairs(Spec):
    """Pairs of several sources: joined, and each by itself, without the prompts that are held out from all."""

    data: dict[str, Data] = Field(min_length=1)
    """Sources by name; the name is written into the column `source` of each pair."""
    holdout_prompts: int = Field(0, ge=0)
    """First prompts to hold out, with their pairs in every source: the sources may share prompts."""
    split_seed: int = 0
    """Chooses them; no seed of a training reaches it."""

    @field_validator("data")
    @classmethod
    def _names_are_names(cls, data: dict[str, Data]) -> dict[str, Data]:
        for name in data:
            if not name or name.startswith(".") or any(mark in name for mark in "/\\:\n") or name in TOGETHER:
                taken = " or ".join(TOGETHER)
                raise ConfigError(f"data: {name!r} cannot be the name of a source; use letters, digits, _ and -, not {taken}")
        return data

    def run(self, folder: Path) -> dict[str, float]:
        """Write NAME.jsonl for each source, all.jsonl with every source in order, and heldout.jsonl; return their rows.

        Errors: DataError naming file and line; for a column `source` in the data, which the name would replace.
        """
        pairs, lines = [], []
        for name, data in self.data.items():
            loaded = load_comparisons(data)
            pairs += [_named(pair, name) for pair in loaded.rows]
            lines.append(f"{name}: {loaded.summary()}")
        train, heldout = split_by_prompt(pairs, num_heldout=self.holdout_prompts, seed=self.split_seed)
        files = {name: tuple(_of(train, name)) for name in self.data} | {"all": train, "heldout": heldout}
        for name, rows in files.items():
            if rows or name != "heldout":
                write_jsonl(folder / f"{name}.jsonl", (comparison_row(pair) for pair in rows))
        console = Console(highlight=False, markup=False)
        for line in (*lines, ", ".join(f"{len(rows)} in {name}.jsonl" for name, rows in files.items())):
            console.print(line)
        return {f"pairs/{name}": float(len(rows)) for name, rows in files.items()}


def _named(pair: Comparison, name: str) -> Comparison:
    if SOURCE in pair.meta:
        raise DataError(
            f"{pair.meta.get('where', pair.id)}: a column is named {SOURCE!r}, which would be replaced by {name!r}; rename it "
            f"with data.{name}.columns: {{origin: {SOURCE}}}"
        )
    return replace(pair, id=f"{name}:{pair.id}", meta={**pair.meta, SOURCE: name})


def _of(pairs: tuple[Comparison, ...], name: str) -> Iterator[Comparison]:
    return (pair for pair in pairs if pair.meta[SOURCE] == name)
