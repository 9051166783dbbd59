"""The length-controlled win rate of annotations: which rows, which features, which C, and what it may be compared with."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from rewarden.errors import DataError
from rewarden.evals.alpaca_eval import Annotation
from rewarden.evals.alpaca_eval_set import instruction_number
from rewarden.evals.lc_reference import DIFFICULTIES, REGULARIZER, LengthReference
from rewarden.maths.length_control import (
    CrossValidation,
    LengthControl,
    LengthProblem,
    Regularizer,
    choose_c,
    length_controlled_interval,
    length_controlled_win_rate,
    length_feature,
)
from rewarden.runtime.seed import generator

Join = Literal["instruction", "row"]
Form = Literal["official", "no_regularizer", "no_difficulty"]
C = Literal["cv", "none"] | float

MIN_COMPARISONS = 20
"""Fewer instructions with a verdict cannot carry a fit of three coefficients."""

CONVERGED = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthControlled:
    """A length-controlled win rate in percent, or None with the reason, and how it came about."""

    win_rate: float | None
    reason: str | None
    """Why there is no number."""
    comparable_with_leaderboard: bool
    form: Form | None = None
    """official: difficulties and regularizer rows; no_regularizer: difficulties alone; no_difficulty: neither."""
    join: Join | None = None
    """How rows found their difficulty."""
    interval: tuple[float, float] | None = None
    c: float | None = None
    """liblinear's C; None is no penalty."""
    cross_validation: CrossValidation | None = None
    fit: LengthControl | None = None
    num_rows: int = 0
    num_regularizer_rows: int = 0
    warnings: tuple[str, ...] = ()


def control_length(
    rows: Sequence[Annotation],
    reference: LengthReference | None,
    *,
    join: Join,
    c: C,
    confidence: float,
    resamples: int,
    seed: int,
) -> LengthControlled:
    """Length-controlled win rate of the rows, with an interval that resamples instructions.

    join: by "instruction", or by "row": row i is instruction i, as the leaderboard has it even for files that lack rows.
    c: "cv" chooses it by 5-fold cross-validation over instructions, "none" is no penalty, a number is that C.

    Errors: DataError when rows are joined by position and there are more of them than difficulties.
    """
    problem, form, warnings = _problem(rows, reference, join)
    reason = _hindrance(problem)
    if reason is not None:
        return _without(reason, warnings)
    chosen = choose_c(problem) if c == "cv" else None
    number = chosen.c if chosen else math.inf if c == "none" else float(c)
    fit = length_controlled_win_rate(problem, c=number)
    if fit.violation > CONVERGED:
        return _without(f"the fit did not converge (optimality breach {fit.violation:.1e}); give a smaller C", warnings)
    interval = None
    try:
        low, high = length_controlled_interval(
            problem,
            c=number,
            confidence=confidence,
            resamples=resamples,
            generator=generator(seed, "bootstrap", "length_control"),
        )
        interval = (100 * low, 100 * high)
    except ValueError as error:
        warnings.append(f"no interval of the length-controlled win rate: {error}")
    raw = 100 * float(problem.preference_N.nanmean())
    warnings += _doubts(problem, fit, raw)
    whole = (
        reference is not None and reference.difficulty is not None and len(problem.preference_N) == len(reference.difficulty)
    )
    return LengthControlled(
        win_rate=100 * fit.win_rate,
        reason=None,
        comparable_with_leaderboard=form == "official" and (join == "row" or whole),
        form=form,
        join=None if form == "no_difficulty" else join,
        interval=interval,
        c=None if math.isinf(number) else number,
        cross_validation=chosen,
        fit=fit,
        num_rows=len(problem.preference_N),
        num_regularizer_rows=0 if problem.regularizer is None else len(problem.regularizer.preference_M),
        warnings=tuple(warnings),
    )


def _hindrance(problem: LengthProblem) -> str | None:
    """Why these comparisons cannot carry the fit, or None."""
    num_judged = len(set(problem.group_N[~problem.preference_N.isnan()].tolist()))
    if num_judged < MIN_COMPARISONS:
        return f"{num_judged} instructions with a verdict are too few to fit 2 or 3 coefficients; {MIN_COMPARISONS} is least"
    try:
        length_feature(problem.difference_N)
    except ValueError as error:
        return str(error)
    return None


def _without(reason: str, warnings: Sequence[str]) -> LengthControlled:
    why = f"no length-controlled win rate: {reason}"
    return LengthControlled(win_rate=None, reason=reason, comparable_with_leaderboard=False, warnings=(*warnings, why))


def _problem(
    rows: Sequence[Annotation], reference: LengthReference | None, join: Join
) -> tuple[LengthProblem, Form, list[str]]:
    """The rows as tensors, with what is known of their instructions; warnings say what is not."""
    warnings: list[str] = []
    numbers: list[int | None] = []
    if reference is None:
        warnings.append(
            "no length-control tables (--lc-reference): the length-controlled win rate is of an unregularized fit without "
            "instruction difficulties, and is NOT comparable with the leaderboard (8 points off on text_davinci_001)"
        )
    elif reference.difficulty is None:
        warnings.append(
            f"{DIFFICULTIES} is not there: the length-controlled win rate is of an unregularized fit without instruction "
            "difficulties, and is NOT comparable with the leaderboard"
        )
    else:
        numbers = _numbers(rows, reference, join, warnings)
    known = [(row, number) for row, number in zip(rows, numbers, strict=bool(numbers)) if number is not None]
    if reference is None or reference.difficulty is None or not known:
        places: dict[str, int] = {}
        group = [places.setdefault(row.instruction, len(places)) for row in rows]
        return _tensors(rows, group, None, None), "no_difficulty", warnings
    difficulty = [reference.difficulty[number] for _, number in known]
    problem = _tensors([row for row, _ in known], [number for _, number in known], difficulty, reference.regularizer)
    if reference.regularizer is None:
        warnings.append(
            f"{REGULARIZER} is not there: the length-controlled win rate is of an unregularized fit, and is NOT comparable "
            "with the leaderboard"
        )
    return problem, "no_regularizer" if reference.regularizer is None else "official", warnings


def _tensors(
    rows: Sequence[Annotation], group: Sequence[int], difficulty: Sequence[float] | None, regularizer: Regularizer | None
) -> LengthProblem:
    wins = [math.nan if row.model_wins is None else row.model_wins for row in rows]
    return LengthProblem(
        difference_N=torch.tensor([row.length_difference for row in rows], dtype=torch.float64),
        difficulty_N=None if difficulty is None else torch.tensor(difficulty, dtype=torch.float64),
        preference_N=torch.tensor(wins, dtype=torch.float64),
        group_N=torch.tensor(group),
        regularizer=regularizer,
    )


def _numbers(rows: Sequence[Annotation], reference: LengthReference, join: Join, warnings: list[str]) -> list[int | None]:
    """The number of each row's instruction in the tables; warns of rows without one."""
    difficulty = reference.difficulty
    assert difficulty is not None
    if join == "row":
        if len(rows) > len(difficulty):
            raise DataError(
                f"{len(rows)} annotations, but {len(difficulty)} difficulties: row positions cannot be matched; leave out "
                "--match-leaderboard to join by instruction"
            )
        order = [number for number in (instruction_number(row.instruction) for row in rows) if number is not None]
        if len(order) < len(rows) or order != sorted(order):
            warnings.append(
                "rows are joined with difficulties by position, but are not AlpacaEval's instructions in AlpacaEval's order: "
                "the length-controlled win rate is of difficulties that belong to other instructions"
            )
        elif shifted := [i for i, number in enumerate(order) if number != i]:
            warnings.append(
                f"{len(rows)} of {len(difficulty)} instructions are there, joined by position as on the leaderboard: "
                f"{len(shifted)} rows, from {rows[shifted[0]].where or f'row {shifted[0]}'} on, get the difficulty of another "
                "instruction; leave out --match-leaderboard to join by instruction"
            )
        return list(range(len(rows)))
    numbers = [reference.number(row.instruction) for row in rows]
    unknown = [i for i, number in enumerate(numbers) if number is None]
    if len(unknown) == len(rows):
        warnings.append(
            "no instruction is in the difficulty table, so this is another set of instructions: the length-controlled win rate "
            "is of an unregularized fit without difficulties, and is NOT comparable with the leaderboard"
        )
    elif unknown:
        where = rows[unknown[0]].where or f"row {unknown[0]}"
        warnings.append(
            f"{len(unknown)} of {len(rows)} instructions are not in the difficulty table (the first: {where}) and are left out "
            "of the length-controlled win rate"
        )
    if len(unknown) < len(rows) and len(rows) != len(difficulty):
        warnings.append(
            f"{len(rows)} of {len(difficulty)} instructions are there; the leaderboard joins such files by row position, which "
            "gives another length-controlled win rate: --match-leaderboard does the same"
        )
    return numbers


def _doubts(problem: LengthProblem, fit: LengthControl, raw: float) -> list[str]:
    """What should make a reader doubt the number."""
    found = []
    controlled = 100 * fit.win_rate
    if fit.constant == 0 and abs(raw - 50) > 1e-9:
        found.append(
            f"the penalty leaves the fit's constant at 0, so that {controlled:.2f} says more of the penalty than of the model: "
            "give a larger C, or none (--lc-c none)"
        )
    if not bool(problem.difference_N.any()):
        found.append("both answers are equally long in every comparison: there is no effect of length to control for")
    low, high = min(raw - raw / 4, raw - 10), max(raw + (100 - raw) / 4, raw + 10)
    if not low <= controlled <= high:
        found.append(
            f"length control moves the win rate from {raw:.2f} to {controlled:.2f}, outside AlpacaEval's band {low:.2f} to "
            f"{high:.2f}: the answers are unusually long or short for how they fare; read some"
        )
    return found
