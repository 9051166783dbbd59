"""AlpacaEval's length-controlled win rate: what the win rate would be if both answers were equally long.

Dubois et al. 2024 (arXiv:2404.04475); the fit is our own. Shape suffixes: N comparisons, M regularizer rows, D features.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor
from torch.nn.functional import softplus

from rewarden.maths.logistic import l1_logistic
from rewarden.maths.precision import Real

REGULARIZER_WEIGHT = 0.2
"""Weight of an instruction's regularizer rows together, where a comparison has weight 1."""

C_GRID = tuple(10 ** (-4 + 8 * i / 9) for i in range(10))
"""The ten values of C that AlpacaEval tries: 1e-4, 7.7e-4, ..., 2.78, 21.5, ..., 1e4."""

_RESAMPLES_AT_ONCE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Regularizer:
    """Comparisons of length-gamed versions of the reference with the reference, which hold the length slope in place."""

    std_difference_M: Float[Tensor, " M"]
    """Length difference of each row in standard deviations of its model."""
    difficulty_M: Float[Tensor, " M"]
    preference_M: Float[Tensor, " M"]
    """Probability that the gamed version is better, 0 to 1."""
    group_M: Int[Tensor, " M"]
    """Which instruction."""
    num_models: int
    """Gamed versions; each row has weight REGULARIZER_WEIGHT / num_models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthProblem:
    """One model's comparisons, ready to fit: features as columns length, difficulty (where known), constant."""

    difference_N: Float[Tensor, " N"]
    """Length of the reference's answer minus the model's, in characters."""
    difficulty_N: Float[Tensor, " N"] | None
    preference_N: Float[Tensor, " N"]
    """Probability that the model is better; NaN where the judge gave none."""
    group_N: Int[Tensor, " N"]
    """Which instruction: rows of a group share a fold."""
    regularizer: Regularizer | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthControl:
    """A length-controlled win rate and the fit behind it."""

    win_rate: float
    """Share of 1."""
    prediction_spread: float
    """Spread of the predictions over instructions, std (ddof 1) / sqrt(N): what AlpacaEval prints as standard error.

    It says how unlike the instructions are, not how far the rate may be off; for that resample the instructions.
    """
    length_slope: float
    difficulty_slope: float | None
    constant: float
    violation: float
    """How far the fit is from its optimum, see `LogisticFit`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossValidation:
    """Held-out cross-entropy of each C, and the C that was chosen."""

    c: float
    grid: tuple[float, ...]
    losses: tuple[float, ...]
    """Mean over folds of the weighted mean cross-entropy, in nats, of each C of the grid."""
    fold_sizes: tuple[int, ...]
    """Rows of each fold, the regularizer's included."""


def length_feature(difference_N: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """tanh(difference / std), std with ddof 1 over all comparisons; all 0 when the differences are all 0.

    Raises ValueError for fewer than two, or for differences that are equal but not 0: then nothing tells the effect of length
    from how good the model is.
    """
    difference = difference_N.detach().double()
    if difference.numel() < 2:
        raise ValueError(f"{difference.numel()} comparisons; the spread of the length differences needs 2 or more")
    if not bool(difference.any()):
        return difference
    std = difference.std(correction=1)
    if float(std) == 0:
        raise ValueError(
            f"the reference's answer is {float(difference[0]):g} characters longer in every comparison; without variation, "
            "the effect of length cannot be told from how good the model is"
        )
    return torch.tanh(difference / std)


def length_controlled_win_rate(problem: LengthProblem, *, c: Real) -> LengthControl:
    """Fit the GLM and predict every comparison as if both answers were equally long.

        P(model better) = sigmoid(w_length * tanh(difference / std) + w_difficulty * difficulty + w_constant)
        minimize |w|_1 + c * sum_n weight_n * cross-entropy_n
        win_rate = mean_n sigmoid(w_difficulty * difficulty_n + w_constant)

    Fitted on the comparisons with a verdict (weight 1) and the regularizer rows, whose constant is 0; predicted for all
    comparisons. Without difficulties that term is absent. `c` is liblinear's C; infinity is no penalty. Length-controlled
    AlpacaEval 2.0, Dubois et al. 2024, section 3; objective as its code has it.

    Raises ValueError when no comparison has a verdict, for lengths that `length_feature` refuses, or c <= 0.
    """
    _check_c(c)
    w, violation = _fit(problem, c)
    predicted_N = (_level_features(problem) @ w[1:]).sigmoid()
    spread = float(predicted_N.std(correction=1)) / predicted_N.numel() ** 0.5
    return LengthControl(
        win_rate=float(predicted_N.mean()),
        prediction_spread=spread,
        length_slope=float(w[0]),
        difficulty_slope=None if problem.difficulty_N is None else float(w[1]),
        constant=float(w[-1]),
        violation=violation,
    )


def _fit(problem: LengthProblem, c: Real) -> tuple[Tensor, float]:
    features, label, weight, _ = _rows(problem)
    fit = l1_logistic(features[None], label[None], weight[None], penalty_B=_penalty([c]))
    return fit.coefficients_BD[0], float(fit.violation_B[0])


def grouped_folds(group_N: Int[Tensor, " N"], *, num_folds: int) -> Int[Tensor, " N"]:
    """A fold for each row such that rows of a group share one: the largest groups first, each into the lightest fold.

    Equal sizes go by group number and fold number, so the folds do not depend on the machine; with equal groups, group g is
    in fold g modulo num_folds. (The reference code sorts unstably here, so that its choice of C can differ between machines.)

    Raises ValueError for fewer groups than folds.
    """
    names, place_N, count = torch.unique(group_N, return_inverse=True, return_counts=True)
    if num_folds < 2 or len(names) < num_folds:
        raise ValueError(f"{len(names)} groups for {num_folds} folds; use 2 folds or more, and a group or more for each")
    load = [0] * num_folds
    fold = torch.zeros(len(names), dtype=torch.long)
    for g in count.argsort(descending=True, stable=True).tolist():
        lightest = load.index(min(load))
        fold[g] = lightest
        load[lightest] += int(count[g])
    return fold[place_N]


def choose_c(problem: LengthProblem, *, grid: tuple[float, ...] = C_GRID, num_folds: int = 5) -> CrossValidation:
    """The C with the smallest held-out cross-entropy, folds by instruction; the smallest such C where several tie.

    All fits, one for each C and fold, run at once. Errors as `length_controlled_win_rate` and `grouped_folds`.
    """
    for c in grid:
        _check_c(c)
    features, label, weight, group = _rows(problem)
    fold_R = grouped_folds(group, num_folds=num_folds)
    held_FR = torch.stack([fold_R == f for f in range(num_folds)])
    held = held_FR.repeat(len(grid), 1)
    fits = len(held)
    rows = len(label)
    fit = l1_logistic(
        features.expand(fits, -1, -1),
        label.expand(fits, rows),
        weight * ~held,
        penalty_B=_penalty([c for c in grid for _ in range(num_folds)]),
    )
    z = fit.coefficients_BD @ features.T
    held_weight = weight * held
    loss = (held_weight * (softplus(z) - label * z)).sum(1) / held_weight.sum(1)
    losses = loss.view(len(grid), num_folds).mean(1)
    return CrossValidation(
        c=grid[int(losses.argmin())],
        grid=grid,
        losses=tuple(losses.tolist()),
        fold_sizes=tuple(held_FR.sum(1).tolist()),
    )


def length_controlled_interval(
    problem: LengthProblem, *, c: Real, confidence: Real, resamples: int, generator: Generator
) -> tuple[float, float]:
    """Percentile bootstrap interval of the length-controlled win rate: resample instructions, fit anew each time.

    Instructions are drawn with replacement, with all their comparisons; the standard deviation of the lengths is taken anew;
    the regularizer rows and `c` stay as they are, so the choice of C adds nothing to the width. A resample without a verdict,
    or whose lengths do not vary, keeps its prediction without a length effect. `generator` is a CPU generator.

    Raises ValueError for a confidence outside 0 to 1, fewer than one resample, or a resample whose fit does not converge.
    """
    if not 0 < confidence < 1 or resamples < 1:
        raise ValueError(f"confidence is {confidence}, resamples {resamples}; use e.g. 0.95 and 2000")
    _check_c(c)
    start_D, _ = _fit(problem, c)
    names, place_N = torch.unique(problem.group_N, return_inverse=True)
    rates = []
    for start in range(0, resamples, _RESAMPLES_AT_ONCE):
        count = min(_RESAMPLES_AT_ONCE, resamples - start)
        drawn = torch.randint(len(names), (count, len(names)), generator=generator)
        times = torch.zeros(count, len(names), dtype=torch.float64).scatter_add_(1, drawn, torch.ones_like(drawn).double())
        rates.append(_resampled_rates(problem, times[:, place_N], c, start_D))
    tail = (1 - confidence) / 2
    low, high = torch.cat(rates).quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return low, high


def _resampled_rates(problem: LengthProblem, times_BN: Tensor, c: Real, start_D: Tensor) -> Tensor:
    """The rate of each resample, in which comparison n occurs times_BN[b, n] times."""
    difference = problem.difference_N.detach().double()
    total_B = times_BN.sum(1, keepdim=True)
    center_B = (times_BN * difference).sum(1, keepdim=True) / total_B
    variance_B = (times_BN * (difference - center_B) ** 2).sum(1, keepdim=True) / (total_B - 1).clamp_min(1)
    length_BN = torch.where(variance_B > 0, torch.tanh(difference / variance_B.clamp_min(1e-300).sqrt()), 0.0)
    features, label, weight, _ = _rows(problem, length_BN)
    num_fixed = len(label) - int((~problem.preference_N.isnan()).sum())
    judged_BN = times_BN[:, ~problem.preference_N.isnan()]
    weights = torch.cat([weight[:num_fixed].expand(len(times_BN), -1), judged_BN], dim=1)
    penalty_B = _penalty([c] * len(times_BN))
    fit = l1_logistic(features, label.expand_as(weights), weights, penalty_B=penalty_B, start_D=start_D, tolerance=1e-8)
    if not bool(fit.converged().all()):
        raise ValueError(
            f"{int((~fit.converged()).sum())} of {len(times_BN)} resamples have no optimum within reach; give a smaller C "
            "(a penalty), or more comparisons"
        )
    predicted_BN = (fit.coefficients_BD[:, 1:] @ _level_features(problem).T).sigmoid()
    return (times_BN * predicted_BN).sum(1) / total_B[:, 0]


def _rows(problem: LengthProblem, length_BN: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features, labels, weights and groups of the rows of the fit: regularizer rows first, then comparisons with a verdict.

    `length_BN`, the length feature of each of B resamples, makes the features [B, R, D] instead of [R, D].
    """
    judged_N = ~problem.preference_N.isnan()
    if not bool(judged_N.any()):
        raise ValueError(f"none of {judged_N.numel()} comparisons has a verdict; there is nothing to fit")
    length = length_feature(problem.difference_N) if length_BN is None else length_BN
    level = _level_features(problem)[judged_N]
    features = torch.cat([length[..., judged_N, None], level.expand(*length.shape[:-1], *level.shape)], dim=-1)
    label, group = problem.preference_N[judged_N].double(), problem.group_N[judged_N]
    weight = torch.ones_like(label)
    gamed = problem.regularizer
    if gamed is None:
        return features, label, weight, group
    length_M = torch.tanh(gamed.std_difference_M.double())
    columns = [length_M, torch.zeros_like(length_M)]
    if problem.difficulty_N is not None:
        columns.insert(1, gamed.difficulty_M.double())
    fixed = torch.stack(columns, dim=-1)
    return (
        torch.cat([fixed.expand(*length.shape[:-1], *fixed.shape), features], dim=-2),
        torch.cat([gamed.preference_M.double(), label]),
        torch.cat([torch.full_like(length_M, REGULARIZER_WEIGHT / gamed.num_models), weight]),
        torch.cat([gamed.group_M, group]),
    )


def _level_features(problem: LengthProblem) -> Tensor:
    """The features other than length, of every comparison: difficulty where known, and the constant."""
    one_N = torch.ones_like(problem.difference_N, dtype=torch.float64)
    return torch.stack([one_N] if problem.difficulty_N is None else [problem.difficulty_N.double(), one_N], dim=-1)


def _penalty(cs: Sequence[Real]) -> Tensor:
    return torch.tensor([1 / c for c in cs], dtype=torch.float64)


def _check_c(c: Real) -> None:
    if not c > 0:
        raise ValueError(f"c is {c}; it must be above 0 (infinity is no penalty)")
