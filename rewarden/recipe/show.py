"""What a recipe resolves to, before it runs: every key, its meaning, the batch plan, and the memory it needs."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape

from rewarden.algos.ppo_config import PPO
from rewarden.algos.reward import Reward
from rewarden.algos.sft import SFT
from rewarden.collect.samples import SampleN
from rewarden.collect.scores import ScoreSamples
from rewarden.recipe.architectures import absence_lines, described
from rewarden.recipe.chain import Recipe
from rewarden.recipe.jobs import mappings, parse_part, parse_recipe
from rewarden.recipe.memory import known_models, memory_lines
from rewarden.recipe.read import read_recipe
from rewarden.spec import Spec


def show_recipe(path: Path, overrides: Sequence[str]) -> None:
    """Print every stage of the recipe: key, value, whether it was set, help; then how batches are cut and the memory needed."""
    recipe = read_recipe(path, overrides)
    with described(recipe.architectures) as folders:
        _show(recipe, folders)


def _show(recipe: Recipe, folders: Mapping[str, str]) -> None:
    """folders: where the config of a model lies that is not on this machine, by its path."""
    parsed = parse_recipe(recipe)
    known = known_models({stage.folder: spec for stage, (spec, _) in zip(recipe.stages, parsed, strict=True)}, folders)
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"[bold]{escape(str(recipe.folder))}[/bold]  ({len(recipe.stages)} stage{'s' * (len(recipe.stages) > 1)})")
    for text in [*grid_lines(recipe), *absence_lines(recipe.architectures, [stage.raw for stage in recipe.stages])]:
        console.print(f"  {escape(text)}")
    shown: set[str] = set()
    for stage, (spec, drive) in zip(recipe.stages, parsed, strict=True):
        if stage.base in shown:  # the same keys with the values of another cell
            continue
        shown.add(stage.base)
        console.print(
            f"\n[bold]{escape(stage.name)}[/bold]: {escape(str(stage.raw['kind']))}"
            + (f", after {', '.join(stage.reads)}" if stage.reads else "")
        )
        driven = [line for line in lines(drive) if line.key != "seed"] if hasattr(spec, "build") else []
        for line in [*lines(spec), *driven]:
            mark = "[green]set[/green]    " if line.given else "[dim]default[/dim]"
            console.print(f"  {mark} {escape(line.key)} = {escape(repr(line.value))}  [dim]{escape(line.help)}[/dim]")
        for text in batch_plan(spec):
            console.print(f"  [cyan]plan[/cyan]    {escape(text)}")
        for text in memory_lines(spec, known):
            console.print(f"  [cyan]memory[/cyan]  {escape(text)}")


def grid_lines(recipe: Recipe) -> list[str]:
    """The cells of a grid, and for each stage how many there are and how many cells share them; nothing without a grid."""
    if not recipe.cells:
        return []
    count = len(recipe.cells)
    lines = [f"grid: {count} cell{'s' * (count > 1)}, {recipe.jobs} stage{'s' * (recipe.jobs > 1)} at a time"]
    lines += [f"  cell {number}: {cell}" for number, cell in enumerate(recipe.cells, start=1)]
    for base in recipe.written:
        made = [stage for stage in recipe.stages if stage.base == base]
        cells = sum(base in cell.stages for cell in recipe.cells)
        if not made:
            lines.append(f"  {base}: in no cell, because its `only:` holds in none")
        elif not cells:
            lines.append(f"  {base}: once, from all cells" if len(made[0].reads) > 1 else f"  {base}: once")
        else:
            lines.append(f"  {base}: {len(made)} for {cells} cell{'s' * (cells > 1)}, such as {made[0].name}")
    return lines


class Line(NamedTuple):
    """One key as it is shown."""

    key: str
    value: Any
    given: bool
    help: str


def lines(spec: Spec, prefix: str = "", given: bool = True) -> Iterator[Line]:
    """Every key of a config, nested ones in place; given: whether the config itself was set and is not a default."""
    parts = dict(mappings(spec))
    texts = {name: " ".join((field.description or "").split()) for name, field in type(spec).model_fields.items()}
    for name, text in texts.items():
        value = getattr(spec, name)
        was_set = given and name in spec.model_fields_set
        inside = {key: raw for key, raw in parts.items() if key == name or key.startswith(f"{name}.")}
        if isinstance(value, Spec):
            yield from lines(value, f"{prefix}{name}.", was_set)
        elif inside:
            for key, raw in inside.items():
                yield Line(f"{prefix}{key}.kind", raw["kind"], was_set, text)
                yield from lines(parse_part(key, raw, ""), f"{prefix}{key}.", was_set)
        else:
            yield Line(f"{prefix}{name}", value, was_set, text)


def batch_plan(spec: Spec, world: int = 1) -> list[str]:
    """How global batch sizes fall on ranks and microbatches; ragged tails are kept."""
    if isinstance(spec, SFT | Reward):
        what = "rows" if isinstance(spec, SFT) else "pairs"
        per_rank = math.ceil(spec.train_batch_size / world)
        micro = math.ceil(per_rank / spec.per_device_train_batch_size)
        members = []
        if isinstance(spec, Reward) and spec.num_members > 1:
            how = "in turn, one step each" if spec.family == "lora" else "one after another"
            members = [f"{spec.family} ensemble: {spec.num_members} members, {how}; epochs and steps are those of each"]
        return [
            *members,
            f"{spec.train_batch_size} {what} per optimizer step over {world} rank(s): at most {per_rank} a rank in {micro} "
            f"microbatch(es) of {min(per_rank, spec.per_device_train_batch_size)} or fewer; the last step of an epoch may be "
            "smaller",
        ]
    if isinstance(spec, PPO):
        minis = spec.num_minibatches
        per_rank = math.ceil(spec.rollout_batch_size / world / minis)
        micro = math.ceil(per_rank / spec.per_device_train_batch_size)
        return [
            f"{spec.max_steps} rounds x {spec.rollout_batch_size} rollouts, {spec.max_steps * spec.rollout_batch_size} in all",
            f"each round: {spec.num_ppo_epochs} epochs x {minis} minibatches = {spec.num_ppo_epochs * minis} optimizer steps, "
            f"{spec.max_steps * spec.num_ppo_epochs * minis} in all",
            f"each optimizer step: at most {per_rank} rollouts a rank in {micro} microbatch(es)",
        ]
    if isinstance(spec, SampleN):
        together = min(spec.sampling.batch_size, math.ceil(spec.rows_per_step / world))
        return [
            f"{spec.num_generations} answers to each prompt; {spec.rows_per_step} a step over {world} rank(s), {together} of "
            "them decoded together"
        ]
    if isinstance(spec, ScoreSamples):
        return [f"{spec.rows_per_step} answers a step (whole prompts), each distinct text once; one scorer in memory at a time"]
    return []
