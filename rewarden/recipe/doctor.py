"""`rewarden doctor`: look at training data, and at how a model would be given them, before training."""

import json
import sys
from typing import Annotated, Any

import typer

from rewarden.recipe.told import every

Format = Annotated[
    str, typer.Option("--format", help="auto, trl, hh, ultrainteract, alpaca_farm, moss_rm, moss_ppo, moss_sft or oasst.")
]


def doctor(
    file: Annotated[str, typer.Argument(metavar="DATA", help="Training data: a file, folder or hub id.")],
    model: Annotated[
        str | None, typer.Option(help="Model folder or hub id: also check tokens, template, lengths and vocabulary.")
    ] = None,
    eval_data: Annotated[str | None, typer.Option(help="Held-out data: checked too, and compared with DATA.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Most tokens of a row in training.")] = None,
    max_prompt_length: Annotated[int | None, typer.Option(help="Most tokens of a prompt.")] = None,
    template: Annotated[
        str | None, typer.Option(help="chat, moss_en, moss_zh, alpaca or hh; not given: what the model was trained with.")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="conversations, prompts, comparisons or unpaired; not given: told from each row's columns."),
    ] = None,
    data_format: Format = "auto",
    columns: Annotated[
        list[str] | None, typer.Option(metavar="name=column", help="A column's name to read by, and in the file.")
    ] = None,
    split: Annotated[str, typer.Option(help="Split of a hub data set, or files of a folder.")] = "train",
    eval_split: Annotated[str | None, typer.Option(help="Split of the held-out data; of DATA without --eval-data.")] = None,
    subset: Annotated[str | None, typer.Option(help="Configuration of a hub data set, or subfolder of a folder.")] = None,
    rows: Annotated[int, typer.Option(help="Rows whose loss mask is shown.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of text.")] = False,
) -> None:
    """Look for what is wrong with data. Exit code 0: at most notes; 1: warnings; 3: errors; 2: could not look."""
    from rewarden.evals.doctor import diagnose
    from rewarden.evals.doctor_report import as_json as plain
    from rewarden.evals.doctor_report import report

    shared = {"format": data_format, "subset": subset, "columns": _columns(columns)}
    held_out = None
    if eval_data is not None or eval_split is not None:
        held_out = {**shared, "path": eval_data or file, "split": eval_split or "train"}
    named = {} if template is None else {"template": template}
    cfg = _checked(
        {
            "data": {**shared, "path": file, "split": split},
            "eval_data": held_out,
            "model": None if model is None else {"model_name_or_path": model, **named},
            "target": target,
            "max_length": max_length,
            "max_prompt_length": max_prompt_length,
            "rows": rows,
        },
        template,
    )
    diagnosis = diagnose(cfg, _teller())
    if as_json:
        sys.stdout.write(json.dumps(plain(diagnosis), indent=2, ensure_ascii=False) + "\n")
    else:
        from rich.console import Console

        console = Console(highlight=False, markup=False, soft_wrap=True)
        for line in report(diagnosis, color=console.is_terminal and not console.no_color):
            console.print(line)
    raise typer.Exit(diagnosis.exit_code)


def _columns(given: list[str] | None) -> dict[str, str]:
    from rewarden.errors import ConfigError

    named = {}
    for pair in given or ():
        name, equals, column = pair.partition("=")
        if not (name and equals and column):
            raise ConfigError(f"columns: got {pair!r}; write name=column, such as prompt=question")
        named[name] = column
    return named


def _checked(fields: dict[str, Any], template: str | None) -> Any:
    from rewarden.errors import ConfigError
    from rewarden.evals.doctor import Doctor
    from rewarden.spec import check

    if template is not None and fields["model"] is None:
        raise ConfigError(f"doctor: template is {template!r}, but no model is given to render with; add --model")
    return check(Doctor, fields, "doctor")


def _teller() -> Any:
    """Says on standard error, every few seconds, how many rows are done."""
    due = every()

    def tell(source: str, done: int, rows: int) -> None:
        if due():
            sys.stderr.write(f"{source}: {done} of {rows} rows tokenized\n")

    return tell
