"""What a recipe resolves to, before it runs: every key, its meaning, the batch plan, and the memory it needs."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape

from rewarden.algos.ppo import PPO
from rewarden.algos.reward import Reward
from rewarden.algos.sft import SFT
from rewarden.recipe.jobs import mappings, parse_part, parse_recipe
from rewarden.recipe.memory import known_models, memory_lines
from rewarden.recipe.read import read_recipe
from rewarden.spec import Spec


def show_recipe(path: Path, overrides: Sequence[str]) -> None:
    """Print every stage of the recipe: key, value, whether it was set, help; then how batches are cut and the memory needed."""
    recipe = read_recipe(path, overrides)
    parsed = parse_recipe(recipe)
    known = known_models({stage.folder: spec for stage, (spec, _) in zip(recipe.stages, parsed, strict=True)})
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"[bold]{escape(str(recipe.folder))}[/bold]  ({len(recipe.stages)} stage{'s' * (len(recipe.stages) > 1)})")
    for stage, (spec, drive) in zip(recipe.stages, parsed, strict=True):
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
        return [
            f"{spec.train_batch_size} {what} per optimizer step over {world} rank(s): at most {per_rank} a rank in {micro} "
            f"microbatch(es) of {min(per_rank, spec.per_device_train_batch_size)} or fewer; an epoch's last step may be smaller"
        ]
    if isinstance(spec, PPO):
        minis = math.ceil(spec.rollout_batch_size / spec.mini_batch_size)
        per_rank = math.ceil(spec.rollout_batch_size / world / minis)
        micro = math.ceil(per_rank / spec.per_device_train_batch_size)
        return [
            f"{spec.max_steps} rounds x {spec.rollout_batch_size} rollouts, {spec.max_steps * spec.rollout_batch_size} in all",
            f"each round: {spec.num_ppo_epochs} epochs x {minis} minibatches = {spec.num_ppo_epochs * minis} optimizer steps, "
            f"{spec.max_steps * spec.num_ppo_epochs * minis} in all",
            f"each optimizer step: at most {per_rank} rollouts a rank in {micro} microbatch(es)",
        ]
    return []
