"""The command line. Every command imports what it needs when it runs, so that help is instant."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from rewarden.errors import RewardenError

app = typer.Typer(
    name="rewarden",
    help="Reinforcement learning from human feedback with rewards you can trust.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

INTERRUPTED = 130
"""128 + SIGINT, as shells have it."""

RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE.yaml", help="A recipe; see the folder recipes/.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[path=value]...", help="Changes, such as optim.learning_rate=1e-4.")
]
Resume = Annotated[
    str, typer.Option(help="auto: go on where a run stopped; must: fail if there is nothing; never: start anew.")
]


@app.command()
def demo(
    overrides: Overrides = None,
    resume: Resume = "auto",
) -> None:
    """SFT, reward model and PPO in the built-in world, then a table and dialogues before and after. A few minutes."""
    from rewarden.recipe.demo import demo_recipe
    from rewarden.recipe.run import run_recipe, show_comparison

    path = demo_recipe()
    folder = run_recipe(path, overrides or [], resume=resume)
    show_comparison(folder / "compare")


@app.command()
def run(recipe: RecipeFile, overrides: Overrides = None, resume: Resume = "auto") -> None:
    """Run a recipe: one job, or a chain of stages in which finished ones are skipped."""
    from rewarden.recipe.run import run_recipe

    run_recipe(recipe, overrides or [], resume=resume)


@app.command()
def show(recipe: RecipeFile, overrides: Overrides = None) -> None:
    """Print what a recipe resolves to: every key with its value and meaning, and the batch plan."""
    from rewarden.recipe.show import show_recipe

    show_recipe(recipe, overrides or [])


@app.command()
def sample(
    model: Annotated[str, typer.Argument(help="Model folder or hub id.")],
    prompt: Annotated[str, typer.Argument(help="What the user says, or a file of prompts (jsonl).")],
    n: Annotated[int, typer.Option(help="Answers per prompt.")] = 1,
    max_completion_length: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the most probable token.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Nucleus; 1 is off.")] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same answers.")] = 0,
    template: Annotated[
        str | None, typer.Option(help="chat, moss_en, moss_zh, alpaca or hh; not given: what the model was trained with.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write jsonl here instead of printing.")] = None,
) -> None:
    """Let a model answer."""
    from rewarden.recipe.once import sample_once

    sample_once(
        model,
        prompt,
        n=n,
        max_completion_length=max_completion_length,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        template=template,
        output=output,
    )


@app.command()
def score(
    model: Annotated[str, typer.Argument(help="Reward model folder or hub id.")],
    file: Annotated[Path, typer.Argument(help="Conversations or preference pairs (jsonl, json, parquet, .gz).")],
    data_format: Annotated[
        str, typer.Option("--format", help="auto, trl, hh, ultrainteract, alpaca_farm, moss_rm, moss_sft or oasst.")
    ] = "auto",
    output: Annotated[Path | None, typer.Option(help="Write jsonl here instead of printing.")] = None,
) -> None:
    """Score conversations with a reward model; pairs get both scores and who wins."""
    from rewarden.recipe.once import score_once

    score_once(model, file, data_format=data_format, output=output)


@app.command()
def worlds(seed: Annotated[int, typer.Option(help="Which user.")] = 0) -> None:
    """The built-in worlds, with a scripted dialogue of each and its gold reward turn by turn."""
    from rewarden.recipe.once import show_worlds

    show_worlds(seed)


def main() -> None:
    """Entry point: an error we raise on purpose is one message and exit code 2, Ctrl-C one line and 130."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        app()
    except RewardenError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    except SystemExit as stop:
        if stop.code == INTERRUPTED:  # typer turns KeyboardInterrupt into this, without a word
            sys.stderr.write("interrupted\n")
        raise


if __name__ == "__main__":
    main()
