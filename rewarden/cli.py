"""The command line. Every command imports what it needs when it runs, so that help is instant."""

import errno
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from rewarden.errors import RewardenError
from rewarden.recipe.diff import diff_app, import_model
from rewarden.recipe.doctor import doctor
from rewarden.recipe.evaluate import eval_app

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
    file: Annotated[str, typer.Argument(help="Conversations, preference pairs or labeled answers: a file, folder or hub id.")],
    reward: Annotated[
        str,
        typer.Option(
            help="Reward model: a folder of Rewarden, transformers or peft, or a hub id; models.yaml:NAME for an entry of a "
            "registry, models.yaml for all of them."
        ),
    ],
    template: Annotated[
        str | None, typer.Option(help="chat, moss_en, moss_zh, alpaca or hh; not given: what the model was trained with.")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Longer texts get no score and are counted; not given: the model's positions.")
    ] = None,
    data_format: Annotated[
        str, typer.Option("--format", help="auto, trl, hh, ultrainteract, alpaca_farm, moss_rm, moss_sft or oasst.")
    ] = "auto",
    split: Annotated[str, typer.Option(help="Split of a hub data set, or files of a folder.")] = "train",
    on_bad_row: Annotated[str, typer.Option(help="error, or drop: leave malformed rows out and count them.")] = "error",
    rows: Annotated[str | None, typer.Option(help="Only these rows: numbers from 0 and ranges, such as 0,4-6.")] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show the text, the tokens and the scored position of --rows (default: row 0).")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines instead of a table.")] = False,
    output: Annotated[
        Path | None, typer.Option(help="Write JSON lines here instead of printing; a run that was stopped goes on.")
    ] = None,
) -> None:
    """Score conversations with a reward model; pairs get both scores and the accuracy."""
    options = {"path": reward, "template": template, "max_length": max_length}
    raw = {
        "reward": {key: value for key, value in options.items() if value is not None},
        "data": {"path": file, "format": data_format, "split": split, "on_bad_row": on_bad_row},
        **({} if rows is None else {"rows": rows}),
    }
    if explain:
        from rewarden.recipe.explain import explain_once

        explain_once(raw, output=output, as_json=as_json)
    else:
        from rewarden.recipe.score import score_once

        score_once(raw, output=output, as_json=as_json)


@app.command()
def worlds(seed: Annotated[int, typer.Option(help="Which user.")] = 0) -> None:
    """The built-in worlds, with a scripted dialogue of each and its gold reward turn by turn."""
    from rewarden.recipe.once import show_worlds

    show_worlds(seed)


@app.command()
def env() -> None:
    """Versions, device, threads and optional packages as JSON; what to put into a bug report."""
    from rewarden.recipe.env import show_env

    show_env()


app.add_typer(eval_app, name="eval")
app.add_typer(diff_app, name="diff")
app.command("import")(import_model)
app.command("doctor")(doctor)


def _fail_on_disk(error: OSError) -> None:
    """One message for what the system refuses; an error that names no file and is not of standard output is a bug."""
    if error.filename is not None:
        sys.stderr.write(f"error: {error.filename}: {error.strerror}; check the path and its permissions\n")
    elif error.errno in (errno.EPIPE, errno.ENOSPC, errno.EIO):
        why = "was closed before all was written" if error.errno == errno.EPIPE else f"takes no more ({error.strerror})"
        sys.stderr.write(f"error: standard output {why}; use --output FILE, or write to a disk with room\n")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still buffered has nowhere to go
    else:
        raise error
    sys.exit(2)


def main() -> None:
    """Entry point: an error we raise on purpose is one message and exit code 2, Ctrl-C one line and 130."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # here, where a full disk or a closed pipe still has a message
    except RewardenError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    except OSError as error:
        _fail_on_disk(error)
    except SystemExit as stop:
        if isinstance(stop.__context__, OSError) and stop.__context__.errno == errno.EPIPE:  # typer exits without a word
            _fail_on_disk(stop.__context__)
        if stop.code == INTERRUPTED:  # typer turns KeyboardInterrupt into this, without a word
            sys.stderr.write("interrupted\n")
        raise


if __name__ == "__main__":
    main()
