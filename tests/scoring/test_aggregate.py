"""Aggregates of members: worked numbers, properties, and what is refused. Expected values are plain Python."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rewarden.errors import ConfigError, ScoreError
from rewarden.maths import Moments
from rewarden.scoring.aggregate import Aggregate, combine, comparable
from rewarden.spec import check

R = torch.tensor([[1.0, 2.0, 4.5]])

RULES = [
    Aggregate(),
    Aggregate(rule="median"),
    Aggregate(rule="worst_case"),
    Aggregate(rule="lower_bound", coef=0.7),
    Aggregate(rule="variance_penalty", coef=0.7),
    Aggregate(rule="soft_worst_case", temperature=0.3),
]


def named(aggregate: Aggregate) -> str:
    return aggregate.rule


def with_center(aggregate: Aggregate, center: str) -> Aggregate:
    return aggregate.model_copy(update={"center": center})


def test_worked_example_t1():
    """Members 1, 2 and 4.5: mean 2.5, variance 13/6 (ddof 0) or 13/4 (ddof 1)."""
    expected = {
        Aggregate(): 2.5,
        Aggregate(rule="worst_case"): 1.0,
        Aggregate(rule="median"): 2.0,
        Aggregate(rule="lower_bound", coef=0.1): 2.3528040,
        Aggregate(rule="lower_bound", coef=0.5): 1.7640199,
        Aggregate(rule="lower_bound", coef=1): 1.0280399,
        Aggregate(rule="lower_bound", coef=0.1, ddof=1): 2.3197224,
        Aggregate(rule="lower_bound", coef=0.5, ddof=1): 1.5986122,
        Aggregate(rule="lower_bound", coef=1, ddof=1): 0.6972244,
        Aggregate(rule="variance_penalty", coef=0.1): 2.2833333,
        Aggregate(rule="variance_penalty", coef=0.5): 1.4166667,
        Aggregate(rule="variance_penalty", coef=0.1, ddof=1): 2.175,
        Aggregate(rule="variance_penalty", coef=0.5, ddof=1): 0.875,
    }
    for aggregate, value in expected.items():
        assert float(combine(R, aggregate)) == pytest.approx(value, abs=1e-6), str(aggregate)


def test_worked_example_t6_centering_undoes_the_members_offsets():
    """Two answers that every member ranks the same way: the first is better by 2, 12 and 2.

    The raw minimum (-10 and -12) and the raw spread (8.16 and 9.43) are of the members' offsets. Member means over the two are
    -11, -6 and 9.
    """
    score = torch.tensor([[-10.0, 0.0, 10.0], [-12.0, -12.0, 8.0]])
    group = torch.tensor([7, 7])
    worst, bound = Aggregate(rule="worst_case"), Aggregate(rule="lower_bound", coef=1)
    assert combine(score, worst).tolist() == [-10.0, -12.0]
    raw = combine(score, bound).tolist()
    assert raw == pytest.approx([0 - 8.1649658, -16 / 3 - 9.4280904], abs=1e-6)
    assert comparable(score, worst, group_B=group).tolist() == [[1.0, 6.0, 1.0], [-1.0, -6.0, -1.0]]
    assert combine(score, worst, group_B=group).tolist() == [1.0, -6.0]
    spread = math.sqrt((1 + 36 + 1) / 3 - (8 / 3) ** 2)  # of (1, 6, 1), and of (-1, -6, -1)
    assert combine(score, bound, group_B=group).tolist() == pytest.approx([8 / 3 - spread, -8 / 3 - spread], abs=1e-6)


def test_the_mean_and_no_center_are_left_alone_by_a_group():
    score = torch.tensor([[11.0, -9.0, 2.0], [9.0, -11.0, -2.0]])
    group = torch.tensor([0, 0])
    assert torch.equal(combine(score, Aggregate(), group_B=group), combine(score, Aggregate()))
    worst = Aggregate(rule="worst_case", center="none")
    assert combine(score, worst, group_B=group).tolist() == [-9.0, -11.0]


def test_a_reference_answer_is_subtracted_member_by_member():
    score, reference = torch.tensor([[3.0, 1.0], [5.0, 9.0]]), torch.tensor([[1.0, 2.0], [1.0, 2.0]])
    worst = Aggregate(rule="worst_case", center="reference")
    assert combine(score, worst, reference_BK=reference).tolist() == [-1.0, 4.0]


def test_calibration_centers_and_scales():
    """Members with calibration scores (0, 2) and (10, 30): means 1 and 20, population stds 1 and 10."""
    moments = [Moments().update(torch.tensor([0.0, 2.0])), Moments().update(torch.tensor([10.0, 30.0]))]
    score = torch.tensor([[3.0, 20.0], [1.0, 10.0]])
    worst = Aggregate(rule="worst_case")
    assert combine(score, worst, calibration=moments).tolist() == [0.0, -10.0]
    scaled = Aggregate(rule="worst_case", scale=True)
    assert combine(score, scaled, calibration=moments).tolist() == [0.0, -1.0]
    mean = Aggregate(scale=True)  # scaled, not centered
    assert combine(score, mean, calibration=moments).tolist() == [(3.0 + 2.0) / 2, (1.0 + 1.0) / 2]
    grouped = combine(score, scaled, calibration=moments, group_B=torch.tensor([0, 0]))
    assert grouped.tolist() == [0.5, -1.0]  # less (2, 15), over (1, 10): (1, 0.5) and (-1, -0.5)


@pytest.mark.parametrize("scores", [[], [3.0], [3.0, 3.0], [3.0, 3.0 + 1e-9]])
def test_no_spread_never_divides(scores):
    flat = Moments().update(torch.tensor(scores, dtype=torch.float64))
    score = torch.tensor([[4.0, 6.0]])
    scaled = Aggregate(scale=True)
    assert combine(score, scaled, calibration=[flat, flat]).tolist() == [5.0]


numbers = st.floats(-20, 20, width=32)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), rows=st.integers(1, 5), members=st.integers(1, 5))
@pytest.mark.parametrize("aggregate", RULES, ids=named)
def test_the_order_of_members_does_not_matter(aggregate, seed, rows, members):
    generator = torch.Generator().manual_seed(seed)
    score = torch.randn(rows, members, generator=generator, dtype=torch.float64)
    order = torch.randperm(members, generator=generator)
    group = torch.randint(0, 2, (rows,), generator=generator)
    moments = [Moments().update(torch.randn(5, generator=generator)) for _ in range(members)]
    for options in ({}, {"group_B": group}, {"calibration": moments}):
        again = {**options, "calibration": [moments[i] for i in order.tolist()]} if "calibration" in options else options
        torch.testing.assert_close(combine(score[:, order], aggregate, **again), combine(score, aggregate, **options))


@settings(max_examples=30, deadline=None)
@given(
    score=st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=1, max_size=4),
    shift=st.lists(numbers, min_size=3, max_size=3),
)
def test_a_constant_per_member_moves_the_mean_by_the_mean_constant(score, shift):
    before, offset = torch.tensor(score, dtype=torch.float64), torch.tensor(shift, dtype=torch.float64)
    moved = combine(before + offset, Aggregate())
    torch.testing.assert_close(moved, combine(before, Aggregate()) + statistics.fmean(shift), rtol=1e-9, atol=1e-9)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
@pytest.mark.parametrize("aggregate", RULES[1:], ids=named)
def test_group_centering_removes_what_each_member_adds_to_each_prompt(aggregate, seed):
    """Offsets per prompt and member, as Bradley-Terry leaves them free, change nothing."""
    generator = torch.Generator().manual_seed(seed)
    group = torch.tensor([0, 1, 0, 2, 1, 0])
    score = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    offset = 100 * torch.randn(3, 3, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(
        combine(score + offset[group], aggregate, group_B=group), combine(score, aggregate, group_B=group), rtol=1e-9, atol=1e-9
    )
    for place in (0, 1, 2):  # and the mean of every member over a group is 0
        seen = comparable(score + offset[group], aggregate, group_B=group)[group == place]
        assert seen.mean(0).abs().max() < 1e-12


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("rule", ["lower_bound", "variance_penalty"])
def test_a_coefficient_of_zero_stays_zero_and_gives_the_mean(rule, ddof):
    """Not the default: 0 is a number, no absence."""
    score = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    aggregate = Aggregate(rule=rule, coef=0, ddof=ddof)
    assert aggregate.coef == 0
    assert torch.equal(combine(score, aggregate), combine(score, Aggregate()))
    assert check(Aggregate, aggregate.model_dump(exclude_none=True)) == aggregate


@pytest.mark.parametrize("center", ["auto", "none"])
@pytest.mark.parametrize("aggregate", RULES, ids=named)
def test_one_member_is_no_ensemble(aggregate, center):
    score = torch.randn(6, 1, generator=torch.Generator().manual_seed(1))
    moments = [Moments().update(torch.tensor([5.0, 9.0]))]
    group = torch.tensor([0, 0, 0, 1, 1, 1])
    got = combine(score, with_center(aggregate, center), calibration=moments, group_B=group)
    assert torch.equal(got, score[:, 0])


@pytest.mark.parametrize("rule", ["lower_bound", "variance_penalty"])
def test_one_member_has_no_unbiased_spread(rule):
    with pytest.raises(ConfigError, match="ddof is 1 with 1 member: a spread divided by 0; use ddof: 0, or more members"):
        combine(torch.ones(2, 1), Aggregate(rule=rule, coef=0.5, ddof=1))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rule": "lower_bound"}, "coef is missing: rule lower_bound"),
        ({"rule": "variance_penalty", "ddof": 1}, "coef is missing: rule variance_penalty"),
        ({"coef": 0.5}, "coef is 0.5, and rule mean has none"),
        ({"rule": "worst_case", "coef": 0}, "coef is 0.0, and rule worst_case has none"),
        ({"rule": "median", "ddof": 1}, "ddof is 1, and rule median has no spread"),
        ({"rule": "soft_worst_case"}, "temperature is missing"),
        ({"rule": "worst_case", "temperature": 1.0}, "temperature is 1.0, and rule worst_case has none"),
        ({"rule": "soft_worst_case", "temperature": 0}, "temperature is 0: Input should be greater than 0"),
        ({"rule": "lower_bound", "coef": -1}, "coef is -1: Input should be greater than or equal to 0"),
        ({"rule": "lower_bound", "coef": math.nan}, "coef is nan"),
        ({"rule": "lower_bound", "coef": 1, "ddof": 2}, "ddof is 2"),
        ({"rule": "min"}, "rule is 'min'"),
        ({"centre": "group"}, "unknown key 'centre'; did you mean 'center'"),
    ],
)
def test_an_aggregate_that_cannot_be_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        check(Aggregate, fields)


def test_what_a_transform_needs_must_be_given():
    score = torch.ones(2, 2)
    with pytest.raises(ConfigError, match="center is group, which needs all answers to a prompt"):
        combine(score, Aggregate(center="group"))
    with pytest.raises(ConfigError, match="center is calibration, and the reward model holds no moments"):
        combine(score, Aggregate(center="calibration"))
    with pytest.raises(ConfigError, match="center is reference, and no scores of reference answers"):
        combine(score, Aggregate(center="reference"))
    with pytest.raises(ConfigError, match="scale is true, and the reward model holds no moments"):
        combine(score, Aggregate(scale=True))
    with pytest.raises(ConfigError, match="calibration is of 3 members, the scores of 2"):
        combine(score, Aggregate(), calibration=[Moments()] * 3)


@pytest.mark.parametrize("aggregate", RULES, ids=named)
def test_nan_of_one_member_names_the_row_and_the_member(aggregate):
    score = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, math.nan]])
    with pytest.raises(ScoreError, match=r"row 1: member 2 \(of members 0 to 2\) gave nan"):
        combine(score, aggregate)
    with pytest.raises(ScoreError, match=r"row 0: member 0 \(of members 0 to 1\) gave inf"):
        combine(torch.tensor([[math.inf, 1.0]]), aggregate)


def test_nan_in_a_reference_answer_is_named_as_such():
    reference = torch.tensor([[1.0, math.nan]])
    with pytest.raises(ScoreError, match=r"the reference answer of row 0: member 1"):
        combine(torch.ones(1, 2), Aggregate(rule="median", center="reference"), reference_BK=reference)


@pytest.mark.parametrize("aggregate", RULES, ids=named)
def test_a_row_without_a_score_stays_without_and_out_of_its_group(aggregate):
    score = torch.tensor([[1.0, 2.0], [math.nan, math.nan], [3.0, 8.0]])
    got = combine(score, aggregate, group_B=torch.tensor([0, 0, 0]))
    assert got.isnan().tolist() == [False, True, False]
    assert torch.equal(got[[0, 2]], combine(score[[0, 2]], aggregate, group_B=torch.tensor([0, 0])))


def test_no_rows_are_fine():
    for aggregate in RULES:
        assert combine(torch.zeros(0, 3), aggregate, group_B=torch.zeros(0, dtype=torch.long)).shape == (0,)


def test_the_words_of_an_aggregate_say_what_was_chosen():
    assert str(Aggregate()) == "mean"
    assert str(Aggregate(rule="lower_bound", coef=0)) == "lower_bound (coef 0, ddof 0)"
    full = Aggregate(rule="soft_worst_case", temperature=0.5, center="none", scale=True)
    assert str(full) == "soft_worst_case (temperature 0.5, center none, scaled)"
