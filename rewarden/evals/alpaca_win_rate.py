"""AlpacaEval's leaderboard row of one annotation file, with intervals and warnings."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from rewarden.errors import ConfigError, DataError
from rewarden.evals.alpaca_eval import Annotation, read_annotations
from rewarden.evals.lc_reference import LengthReference, read_reference
from rewarden.evals.length_controlled import LengthControlled, control_length
from rewarden.evals.winrate import Interval, Judged, WinRate, summarize
from rewarden.spec import Spec, nearest


class AlpacaEval(Spec):
    """Win rates of a model from AlpacaEval's annotations of it."""

    annotations: str
    """annotations.json of one model, also .gz."""
    lc_reference: str | None = None
    """Folder with instruction_difficulty*.csv and df_gamed*.csv; without it length control is not the leaderboard's."""
    match_leaderboard: bool = False
    """Find difficulties by row position and count missing rows as empty answers, as the leaderboard does."""
    lc_c: Literal["cv", "none"] | float = "cv"
    """C of the length-control fit: cv (chosen by cross-validation), none (no penalty), or a number above 0."""
    generator: str | None = None
    """Which model, where the file holds several."""
    confidence: float = Field(0.95, gt=0, lt=1)
    """Of the intervals (bootstrap over instructions)."""
    resamples: int = Field(1000, ge=100)
    """Of the bootstrap."""
    seed: int = 0
    """Of the bootstrap."""

    @model_validator(mode="after")
    def _c_is_above_0(self) -> "AlpacaEval":
        if not isinstance(self.lc_c, str) and self.lc_c <= 0:
            raise ConfigError(f"lc_c is {self.lc_c:g}; use cv, none, or a number above 0")
        return self

    def run(self, folder: Path) -> dict[str, float]:
        """Write win_rate.json and win_rate.md; return the figures that are numbers."""
        measured = measure(self)
        facts = measured.facts()
        (folder / "win_rate.json").write_text(json.dumps(facts, indent=2, ensure_ascii=False), encoding="utf-8")
        (folder / "win_rate.md").write_text(measured.text(), encoding="utf-8")
        return {key: float(value) for key, value in facts.items() if isinstance(value, int | float)}


@dataclass(frozen=True, slots=True, kw_only=True)
class AlpacaWinRate:
    """A leaderboard row with what it rests on."""

    model: str
    reference: str
    annotator: str
    rates: WinRate
    avg_length: int
    """Mean length of the model's answers in characters, truncated as on the leaderboard."""
    length_controlled: LengthControlled
    confidence: float
    warnings: tuple[str, ...]

    def facts(self) -> dict[str, Any]:
        """Everything as JSON takes it; what could not be computed is null, and a warning says why."""
        rates, controlled = self.rates, self.length_controlled
        fit, chosen = controlled.fit, controlled.cross_validation
        return {
            "win_rate": rates.win_rate,
            "standard_error": rates.standard_error,
            "discrete_win_rate": rates.discrete_win_rate,
            "length_controlled_win_rate": controlled.win_rate,
            "n_total": rates.n_total,
            "avg_length": self.avg_length,
            "intervals": {name: list(interval) for name, interval in self.intervals().items()},
            "confidence": self.confidence,
            "warnings": list(self.warnings),
            "model": self.model,
            "reference": self.reference,
            "annotator": self.annotator,
            "n_wins": rates.n_wins,
            "n_wins_base": rates.n_wins_base,
            "n_draws": rates.n_draws,
            "n_without_verdict": rates.n_without_verdict,
            "avg_length_reference": rates.length_reference,
            "length_difference": rates.length_difference,
            "length_control": {
                "comparable_with_leaderboard": controlled.comparable_with_leaderboard,
                "reason": controlled.reason,
                "form": controlled.form,
                "join": controlled.join,
                "c": controlled.c,
                "coefficients": None
                if fit is None
                else {"length": fit.length_slope, "difficulty": fit.difficulty_slope, "constant": fit.constant},
                "prediction_spread": None if fit is None else 100 * fit.prediction_spread,
                "cross_validation": None
                if chosen is None
                else {"c": chosen.grid, "losses": chosen.losses, "fold_sizes": chosen.fold_sizes},
                "num_rows": controlled.num_rows,
                "num_regularizer_rows": controlled.num_regularizer_rows,
                "optimality_breach": None if fit is None else fit.violation,
            },
        }

    def intervals(self) -> dict[str, Interval]:
        """Intervals by name of the figure."""
        controlled = self.length_controlled.interval
        return self.rates.intervals | ({} if controlled is None else {"length_controlled_win_rate": controlled})

    def text(self) -> str:
        """A table people can read, then the warnings."""
        rates, controlled = self.rates, self.length_controlled
        rows = [
            ("win rate", _percent(rates.win_rate), "win_rate"),
            ("length-controlled win rate", _percent(controlled.win_rate), "length_controlled_win_rate"),
            ("discrete win rate", _percent(rates.discrete_win_rate), "discrete_win_rate"),
            ("standard error of the win rate", _percent(rates.standard_error), None),
            ("won / lost / drawn", f"{rates.n_wins} / {rates.n_wins_base} / {rates.n_draws}", None),
            ("average length", str(self.avg_length), None),
            ("longer than the reference by", f"{rates.length_difference:+.0f}", "length_difference"),
        ]
        lines = [
            f"{self.model} against {self.reference}, judged by {self.annotator}: {rates.n_total} comparisons.",
            "",
            f"| | | {self.confidence:.0%} interval |",
            "|---|---|---|",
        ]
        for title, value, name in rows:
            interval = self.intervals().get(name) if name else None
            lines.append(f"| {title} | {value} | {'' if interval is None else f'{interval[0]:.2f} .. {interval[1]:.2f}'} |")
        lines += ["", _fit_line(controlled)] if controlled.fit is not None else []
        lines += ["", *(f"warning: {warning}" for warning in self.warnings)] if self.warnings else []
        return "\n".join(lines) + "\n"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _fit_line(controlled: LengthControlled) -> str:
    fit = controlled.fit
    assert fit is not None
    chosen = "no penalty" if controlled.c is None else f"C = {controlled.c:.4g}"
    how = " by cross-validation" if controlled.cross_validation else ""
    slope = "" if fit.difficulty_slope is None else f", difficulty {fit.difficulty_slope:+.3f}"
    what = "" if controlled.comparable_with_leaderboard else "; NOT comparable with the leaderboard"
    return (
        f"Length control: {controlled.form}, {chosen}{how}; length {fit.length_slope:+.3f}{slope}, "
        f"constant {fit.constant:+.3f}; "
        f"spread of the predictions {100 * fit.prediction_spread:.2f} (AlpacaEval's lc_standard_error, no error bar){what}."
    )


def measure(cfg: AlpacaEval) -> AlpacaWinRate:
    """The leaderboard row of the annotations a config names.

    Errors: DataError for files that cannot be read, several models without `generator`, or no verdict at all.
    """
    rows, warnings = _of_one_model(read_annotations(cfg.annotations), cfg.generator, cfg.annotations)
    reference = None if cfg.lc_reference is None else read_reference(cfg.lc_reference)
    rates = summarize(
        [
            Judged(prompt=r.instruction, preference=r.model_wins, length=len(r.output_2), length_reference=len(r.output_1))
            for r in rows
        ],
        confidence=cfg.confidence,
        resamples=cfg.resamples,
        seed=cfg.seed,
        where=cfg.annotations,
    )
    names = {side: _name(rows, side) for side in ("generator_2", "generator_1", "annotator")}
    controlled = _length_controlled(cfg, rows, reference, names)
    return AlpacaWinRate(
        model=names["generator_2"],
        reference=names["generator_1"],
        annotator=names["annotator"],
        rates=rates,
        avg_length=_average_length(cfg, rows, reference),
        length_controlled=controlled,
        confidence=cfg.confidence,
        warnings=(*warnings, *rates.warnings, *controlled.warnings),
    )


def _length_controlled(
    cfg: AlpacaEval, rows: Sequence[Annotation], reference: LengthReference | None, names: dict[str, str]
) -> LengthControlled:
    if names["generator_2"] == names["generator_1"] != UNNAMED:
        note = f"the model is the reference itself ({names['generator_1']}): its length-controlled win rate is 50 by definition"
        return LengthControlled(win_rate=50.0, reason=None, comparable_with_leaderboard=True, warnings=(note,))
    return control_length(
        rows,
        reference,
        join="row" if cfg.match_leaderboard else "instruction",
        c=cfg.lc_c,
        confidence=cfg.confidence,
        resamples=cfg.resamples,
        seed=cfg.seed,
    )


def _average_length(cfg: AlpacaEval, rows: Sequence[Annotation], reference: LengthReference | None) -> int:
    """The leaderboard divides by all instructions: those without a row had an empty answer."""
    count = len(rows)
    if cfg.match_leaderboard and reference is not None and reference.difficulty is not None:
        count = max(count, len(reference.difficulty))
    return sum(len(row.output_2) for row in rows) // count


UNNAMED = "unnamed"


def _of_one_model(rows: Sequence[Annotation], wanted: str | None, where: str) -> tuple[list[Annotation], list[str]]:
    """The rows of the model asked for, or of the only one; with warnings about rows without a name."""
    names = sorted({row.generator_2 for row in rows if row.generator_2 is not None})
    nameless = [row for row in rows if row.generator_2 is None]
    first = f"{len(nameless)} of {len(rows)} rows have no generator_2 (the first: {nameless[0].where})" if nameless else ""
    if wanted is not None:
        kept = [row for row in rows if row.generator_2 == wanted]
        if not kept:
            hint = nearest(wanted, names) if names else "no row names its model"
            raise DataError(f"{where}: no row of the model {wanted!r}; {hint}")
        return kept, [f"{first} and are left out"] if nameless else []
    if len(names) > 1:
        raise DataError(
            f"{where}: rows of {len(names)} models: {', '.join(names[:10])}; say which with generator "
            "(--generator NAME), or give a file of one"
        )
    note = f"{first}: they are taken for those of {names[0] if names else 'one model'}"
    return list(rows), [note] if nameless else []


def _name(rows: Sequence[Annotation], column: str) -> str:
    names = list(dict.fromkeys(getattr(row, column) for row in rows if getattr(row, column) is not None))
    return " + ".join(names) if names else UNNAMED
