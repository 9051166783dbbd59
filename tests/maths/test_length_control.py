"""The length-control fit against numbers of liblinear, optimality conditions by hand, and brute force."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rewarden.maths import standard_error
from rewarden.maths.length_control import (
    C_GRID,
    LengthProblem,
    Regularizer,
    choose_c,
    grouped_folds,
    length_controlled_interval,
    length_controlled_win_rate,
    length_feature,
)
from rewarden.maths.logistic import l1_logistic


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


TINY = f64([[-0.5, 1, 1], [0.5, -1, 1], [0.2, 0.3, 1], [-0.8, 0.1, 1]])
TINY_LABEL = f64([0.1, 0.8, 0.4, 0.3])


def fit(features, label, weight, penalties):
    b, n = len(penalties), len(label)
    return l1_logistic(features.expand(b, -1, -1), label.expand(b, n), weight.expand(b, n), penalty_B=f64(penalties))


def optimality(features, label, weight, w, penalty):
    """Breach of 0 in the subdifferential, coefficient by coefficient, in plain Python."""
    breaches = []
    for d in range(len(w)):
        slope = 0.0
        for x, y, s in zip(features.tolist(), label.tolist(), weight.tolist(), strict=True):
            z = sum(a * b for a, b in zip(x, w, strict=True))
            slope += s * (1 / (1 + math.exp(-z)) - y) * x[d]
        breaches.append(abs(slope + penalty * math.copysign(1, w[d])) if w[d] else max(0.0, abs(slope) - penalty))
    return max(breaches)


def test_ensemble_t19_tiny_glm_as_liblinear_solves_it():
    found = fit(TINY, TINY_LABEL, torch.ones(4), [1.0, 0.1, 0.001])
    assert found.coefficients_BD[0].tolist() == [0.0, 0.0, 0.0]
    assert found.coefficients_BD[1].tolist() == pytest.approx([0.361024, -1.221983, -0.158226], abs=1e-6)
    assert found.coefficients_BD[2].tolist() == pytest.approx([0.663079, -1.382941, -0.234821], abs=1e-6)
    assert bool(found.converged().all())
    level = (found.coefficients_BD[:, 1:] @ TINY[:, 1:].T).sigmoid().mean(1)
    assert level.tolist() == pytest.approx([0.5, 0.436615, 0.418882], abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(4, 60),
    columns=st.integers(1, 4),
    penalty=st.sampled_from([0.0, 1e-3, 0.1, 1.0, 10.0]),
)
def test_every_fit_meets_the_optimality_conditions(seed, rows, columns, penalty):
    random = torch.Generator().manual_seed(seed)
    features = 2 * torch.randn(rows, columns, generator=random, dtype=torch.float64)
    label = 0.05 + 0.9 * torch.rand(rows, generator=random, dtype=torch.float64)
    weight = 2 * torch.rand(rows, generator=random, dtype=torch.float64)
    found = fit(features, label, weight, [penalty])
    assert optimality(features, label, weight, found.coefficients_BD[0].tolist(), penalty) < 1e-7
    assert bool(found.converged().all())


def test_no_point_of_a_grid_around_the_optimum_is_better():
    penalty = 0.1
    best = fit(TINY, TINY_LABEL, torch.ones(4), [penalty]).coefficients_BD[0].tolist()

    def objective(w):
        total = penalty * sum(map(abs, w))
        for x, y in zip(TINY.tolist(), TINY_LABEL.tolist(), strict=True):
            z = sum(a * b for a, b in zip(x, w, strict=True))
            total += math.log1p(math.exp(z)) - y * z
        return total

    steps = (-0.1, -0.001, 0.0, 0.001, 0.1)
    around = [objective([best[0] + a, best[1] + b, best[2] + c]) for a in steps for b in steps for c in steps]
    assert min(around) == objective(best)


def test_a_row_of_weight_two_is_the_row_twice_and_a_soft_label_is_both_labels_by_weight():
    doubled = fit(torch.cat([TINY, TINY[:1]]), torch.cat([TINY_LABEL, TINY_LABEL[:1]]), torch.ones(5), [0.05])
    weighted = fit(TINY, TINY_LABEL, f64([2, 1, 1, 1]), [0.05])
    hard = fit(torch.cat([TINY, TINY]), f64([1] * 4 + [0] * 4), torch.cat([TINY_LABEL, 1 - TINY_LABEL]), [0.05])
    soft = fit(TINY, TINY_LABEL, torch.ones(4), [0.05])
    assert doubled.coefficients_BD[0].tolist() == pytest.approx(weighted.coefficients_BD[0].tolist(), abs=1e-9)
    assert hard.coefficients_BD[0].tolist() == pytest.approx(soft.coefficients_BD[0].tolist(), abs=1e-9)


def test_fits_of_a_batch_do_not_touch_one_another_and_the_start_does_not_matter():
    penalties = [0.0, 0.01, 0.3, 2.0]
    together = fit(TINY, TINY_LABEL, torch.ones(4), penalties).coefficients_BD
    for row, penalty in zip(together, penalties, strict=True):
        alone = l1_logistic(
            TINY[None], TINY_LABEL[None], torch.ones(1, 4), penalty_B=f64([penalty]), start_D=f64([5.0, -5.0, 3.0])
        )
        assert alone.coefficients_BD[0].tolist() == pytest.approx(row.tolist(), abs=1e-8)


def test_a_column_of_zeros_gets_no_coefficient_and_separable_labels_end_near_their_limit():
    zeros = torch.cat([TINY, torch.zeros(4, 1)], dim=1)
    assert fit(zeros, TINY_LABEL, torch.ones(4), [0.0]).coefficients_BD[0, 3] == 0
    apart = fit(f64([[1], [2], [-1]]), f64([1, 1, 0]), torch.ones(3), [0.0])
    assert bool(apart.converged().all())
    assert 10 < float(apart.coefficients_BD[0, 0]) < 100


def test_what_is_not_finite_and_negative_weights_are_refused():
    with pytest.raises(ValueError, match="label holds a value that is not finite"):
        fit(TINY, f64([0.1, math.nan, 0.4, 0.3]), torch.ones(4), [1.0])
    with pytest.raises(ValueError, match="weight is -1"):
        fit(TINY, TINY_LABEL, f64([1, -1, 1, 1]), [1.0])
    with pytest.raises(ValueError, match=r"penalty is -0\.5"):
        fit(TINY, TINY_LABEL, torch.ones(4), [-0.5])


def test_length_feature_by_hand():
    """Differences 0, 3, -3 have std (ddof 1) 3."""
    assert length_feature(f64([0, 3, -3])).tolist() == pytest.approx([0, math.tanh(1), -math.tanh(1)], abs=1e-12)
    assert length_feature(torch.zeros(4)).tolist() == [0, 0, 0, 0]
    with pytest.raises(ValueError, match="7 characters longer in every comparison"):
        length_feature(torch.full((4,), 7.0))
    with pytest.raises(ValueError, match="1 comparisons"):
        length_feature(torch.zeros(1))


def test_the_grid_is_that_of_scikit_learn():
    assert [f"{c:.4g}" for c in C_GRID] == [
        "0.0001",
        "0.0007743",
        "0.005995",
        "0.04642",
        "0.3594",
        "2.783",
        "21.54",
        "166.8",
        "1292",
        "1e+04",
    ]


def synthetic(n, *, seed=0, slope=-2.0, level=0.4, regularizer=True):
    """Comparisons drawn from the model that is fitted, so that the true length-controlled rate is known."""
    random = torch.Generator().manual_seed(seed)
    difference = 300 * torch.randn(n, generator=random, dtype=torch.float64) - 200
    difficulty = torch.randn(n, generator=random, dtype=torch.float64)
    z = slope * length_feature(difference) + 0.7 * difficulty + level
    gamed = torch.randn(2 * n, generator=random, dtype=torch.float64)
    rows = Regularizer(
        std_difference_M=gamed,
        difficulty_M=difficulty.repeat(2),
        preference_M=(slope * gamed.tanh() + 0.7 * difficulty.repeat(2)).sigmoid(),
        group_M=torch.arange(n).repeat(2),
        num_models=2,
    )
    problem = LengthProblem(
        difference_N=difference,
        difficulty_N=difficulty,
        preference_N=torch.bernoulli(z.sigmoid(), generator=random),
        group_N=torch.arange(n),
        regularizer=rows if regularizer else None,
    )
    return problem, float((0.7 * difficulty + level).sigmoid().mean())


def test_the_length_effect_is_taken_out_of_a_model_that_wins_by_length():
    problem, truth = synthetic(4000)
    raw = float(problem.preference_N.mean())
    controlled = length_controlled_win_rate(problem, c=100)
    assert raw > truth + 0.08
    assert controlled.win_rate == pytest.approx(truth, abs=0.02)
    assert controlled.length_slope == pytest.approx(-2.0, abs=0.15)


def test_the_rate_is_the_mean_prediction_at_equal_length_with_the_reported_coefficients():
    problem, _ = synthetic(200)
    found = length_controlled_win_rate(problem, c=2.0)
    predictions = [1 / (1 + math.exp(-(found.difficulty_slope * d + found.constant))) for d in problem.difficulty_N.tolist()]
    assert found.win_rate == pytest.approx(sum(predictions) / 200, abs=1e-12)
    assert found.prediction_spread == pytest.approx(standard_error(f64(predictions)), abs=1e-12)


def test_the_fit_of_a_problem_meets_the_optimality_conditions_of_its_written_out_rows():
    """Regularizer rows: weight 0.2 / 2, constant 0; rows without a verdict are in the spread of lengths, not in the fit."""
    problem, _ = synthetic(40)
    preference = problem.preference_N.clone()
    preference[[3, 17]] = math.nan
    problem = LengthProblem(
        difference_N=problem.difference_N,
        difficulty_N=problem.difficulty_N,
        preference_N=preference,
        group_N=problem.group_N,
        regularizer=problem.regularizer,
    )
    difference = problem.difference_N.tolist()
    center = sum(difference) / 40
    std = math.sqrt(sum((d - center) ** 2 for d in difference) / 39)
    rows, labels, weights = [], [], []
    gamed = problem.regularizer
    for x, g, y in zip(gamed.std_difference_M.tolist(), gamed.difficulty_M.tolist(), gamed.preference_M.tolist(), strict=True):
        rows.append([math.tanh(x), g, 0.0])
        labels.append(y)
        weights.append(0.1)
    for d, g, y in zip(difference, problem.difficulty_N.tolist(), preference.tolist(), strict=True):
        if not math.isnan(y):
            rows.append([math.tanh(d / std), g, 1.0])
            labels.append(y)
            weights.append(1.0)
    for c in (0.5, 20.0, math.inf):
        found = length_controlled_win_rate(problem, c=c)
        w = [found.length_slope, found.difficulty_slope, found.constant]
        assert optimality(f64(rows), f64(labels), f64(weights), w, 1 / c) < 1e-7


def test_without_difficulties_the_rate_is_the_sigmoid_of_the_constant():
    problem, _ = synthetic(100, regularizer=False)
    plain = LengthProblem(
        difference_N=problem.difference_N,
        difficulty_N=None,
        preference_N=problem.preference_N,
        group_N=problem.group_N,
        regularizer=None,
    )
    found = length_controlled_win_rate(plain, c=math.inf)
    assert found.difficulty_slope is None
    assert found.win_rate == pytest.approx(1 / (1 + math.exp(-found.constant)), abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 6), min_size=5, max_size=40), folds=st.integers(2, 5))
def test_folds_keep_groups_whole_and_sizes_close(sizes, folds):
    group = torch.tensor([g for g, size in enumerate(sizes) for _ in range(size)])
    fold = grouped_folds(group, num_folds=folds)
    for g in range(len(sizes)):
        assert len(set(fold[group == g].tolist())) == 1
    loads = [int((fold == f).sum()) for f in range(folds)]
    assert max(loads) - min(loads) <= max(sizes)


def test_equal_groups_go_round_the_folds():
    group = torch.arange(10).repeat(3)
    assert grouped_folds(group, num_folds=5).tolist() == [g % 5 for g in group.tolist()]
    with pytest.raises(ValueError, match="3 groups for 5 folds"):
        grouped_folds(torch.tensor([0, 1, 2, 2]), num_folds=5)


def test_cross_validation_is_fitting_without_each_fold_and_scoring_on_it():
    problem, _ = synthetic(30)
    grid = (0.05, 1.0, 50.0)
    chosen = choose_c(problem, grid=grid)
    gamed = problem.regularizer
    x = torch.cat([gamed.std_difference_M.tanh(), length_feature(problem.difference_N)])
    g = torch.cat([gamed.difficulty_M, problem.difficulty_N])
    features = torch.stack([x, g, f64([0.0] * 60 + [1.0] * 30)], dim=1)
    label = torch.cat([gamed.preference_M, problem.preference_N])
    weight = f64([0.1] * 60 + [1.0] * 30)
    held = torch.cat([gamed.group_M, problem.group_N]) % 5
    for c, loss in zip(grid, chosen.losses, strict=True):
        total = 0.0
        for fold in range(5):
            train = held != fold
            w = fit(features[train], label[train], weight[train], [1 / c]).coefficients_BD[0]
            p = (features[~train] @ w).sigmoid()
            entropy = -(label[~train] * p.log() + (1 - label[~train]) * (1 - p).log())
            total += float((weight[~train] * entropy).sum() / weight[~train].sum())
        assert loss == pytest.approx(total / 5, abs=1e-9)
    assert chosen.c == grid[min(range(3), key=lambda i: chosen.losses[i])]
    assert chosen.fold_sizes == (18, 18, 18, 18, 18)


def test_the_interval_is_the_quantiles_of_refits_on_resampled_instructions():
    problem, _ = synthetic(25)
    low, high = length_controlled_interval(
        problem, c=3.0, confidence=0.8, resamples=40, generator=torch.Generator().manual_seed(1)
    )
    drawn = torch.randint(25, (40, 25), generator=torch.Generator().manual_seed(1))
    rates = []
    for row in drawn:
        again = LengthProblem(
            difference_N=problem.difference_N[row],
            difficulty_N=problem.difficulty_N[row],
            preference_N=problem.preference_N[row],
            group_N=problem.group_N[row],
            regularizer=problem.regularizer,
        )
        rates.append(length_controlled_win_rate(again, c=3.0).win_rate)
    expected = f64(rates).quantile(f64([0.1, 0.9])).tolist()
    assert [low, high] == pytest.approx(expected, abs=1e-6)


def test_comparisons_of_one_instruction_are_resampled_together():
    """Twice the same rows under the same groups are no new evidence: the interval does not shrink."""
    problem, _ = synthetic(60, regularizer=False)
    twice = LengthProblem(
        difference_N=problem.difference_N.repeat(2),
        difficulty_N=problem.difficulty_N.repeat(2),
        preference_N=problem.preference_N.repeat(2),
        group_N=problem.group_N.repeat(2),
        regularizer=None,
    )
    asked = {"confidence": 0.95, "resamples": 200}
    once = length_controlled_interval(problem, c=math.inf, generator=torch.Generator().manual_seed(0), **asked)
    both = length_controlled_interval(twice, c=math.inf, generator=torch.Generator().manual_seed(0), **asked)
    assert once == pytest.approx(both, abs=0.01)


def test_c_and_confidence_are_checked():
    problem, _ = synthetic(20)
    with pytest.raises(ValueError, match="c is 0"):
        length_controlled_win_rate(problem, c=0)
    with pytest.raises(ValueError, match="confidence is 95"):
        length_controlled_interval(problem, c=1, confidence=95, resamples=10, generator=torch.Generator())
