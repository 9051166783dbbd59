"""`rewarden eval`: measurements of files that need no run. Every command imports what it needs when it runs."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from rewarden.errors import ConfigError

eval_app = typer.Typer(help="Measure outputs and annotations.", no_args_is_help=True, rich_markup_mode=None)


@eval_app.callback()
def evaluate() -> None:
    """Measure outputs and annotations."""


@eval_app.command("win-rate")
def win_rate(
    annotations: Annotated[
        Path, typer.Argument(metavar="ANNOTATIONS.json[.gz]", help="AlpacaEval's annotations of one model.")
    ],
    lc_reference: Annotated[
        Path | None, typer.Option(help="Folder with instruction_difficulty*.csv and df_gamed*.csv, for length control.")
    ] = None,
    match_leaderboard: Annotated[
        bool, typer.Option("--match-leaderboard", help="Join difficulties by row position, as the leaderboard does.")
    ] = False,
    lc_c: Annotated[str, typer.Option(help="C of the length-control fit: cv, none (no penalty), or a number.")] = "cv",
    generator: Annotated[str | None, typer.Option(help="Which model, where the file holds several.")] = None,
    confidence: Annotated[float, typer.Option(help="Of the intervals.")] = 0.95,
    resamples: Annotated[int, typer.Option(help="Of the bootstrap over instructions.")] = 1000,
    seed: Annotated[int, typer.Option(help="Of the bootstrap.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Win rate, its standard error and interval, discrete and length-controlled win rate, average length."""
    from rewarden.evals.alpaca_win_rate import AlpacaEval, measure
    from rewarden.spec import check

    fields = {
        "annotations": str(annotations),
        "lc_reference": None if lc_reference is None else str(lc_reference),
        "match_leaderboard": match_leaderboard,
        "lc_c": lc_c if lc_c in ("cv", "none") else _number(lc_c),
        "generator": generator,
        "confidence": confidence,
        "resamples": resamples,
        "seed": seed,
    }
    cfg = check(AlpacaEval, fields, "eval win-rate")
    assert isinstance(cfg, AlpacaEval)
    measured = measure(cfg)
    text = json.dumps(measured.facts(), indent=2, ensure_ascii=False) + "\n" if as_json else measured.text()
    sys.stdout.write(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"eval win-rate: lc_c is {text!r}; use cv, none, or a number above 0") from None
