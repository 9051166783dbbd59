"""What a recipe resolves to, before it runs: every key, its meaning, and the batch plan."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from rewarden.algos.ppo import PPO
from rewarden.algos.reward import Reward
from rewarden.algos.sft import SFT
from rewarden.recipe.jobs import parse_stage
from rewarden.recipe.read import read_recipe
from rewarden.spec import Spec


def show_recipe(path: Path, overrides: Sequence[str]) -> None:
    """Print every stage of the recipe: key, value, where the value comes from, help."""
    recipe = read_recipe(path, overrides)
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"[bold]{escape(str(recipe.folder))}[/bold]  ({len(recipe.stages)} stage{'s' * (len(recipe.stages) > 1)})")
    for stage in recipe.stages:
        spec, drive = parse_stage(stage, f"{path}: {stage.name}" if recipe.is_chain else str(path))
        console.print(
            f"\n[bold]{escape(stage.name)}[/bold]: {stage.raw['kind']}"
            + (f", after {', '.join(stage.reads)}" if stage.reads else "")
        )
        for key, value, given, text in lines(spec):
            mark = "[green]set[/green]    " if given else "[dim]default[/dim]"
            console.print(f"  {mark} {escape(key)} = {escape(repr(value))}  [dim]{escape(text)}[/dim]")
        for key, value in drive.items():
            console.print(f"  [green]set[/green]     {key} = {value!r}")
        for line in batch_plan(spec):
            console.print(f"  [cyan]plan[/cyan]    {escape(line)}")


def lines(spec: Spec, prefix: str = "") -> Iterator[tuple[str, Any, bool, str]]:
    """(dotted key, value, was it given, help) of every field, nested ones in place."""
    for name, field in type(spec).model_fields.items():
        value = getattr(spec, name)
        if isinstance(value, Spec):
            yield from lines(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value, name in spec.model_fields_set, field.description or ""


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
