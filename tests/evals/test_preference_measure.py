"""The figures of a reward report, from scores and labels worked by hand."""

import math
import statistics

import pytest
import torch

from rewarden.data.records import Loaded
from rewarden.evals.preference_measure import Ruler
from rewarden.evals.preference_members import measure_members
from rewarden.evals.preference_pairs import labels_of, pair_set, quantile_names, splits_of
from rewarden.evals.preference_rules import ScorerFacts, check_aggregates, measure_rules, with_drops
from rewarden.evals.preference_rules import report_data as data_report
from rewarden.evals.preference_scores import PairScores
from rewarden.maths import Moments
from rewarden.scoring.aggregate import Aggregate
from rewarden.types import Comparison, Message

GAPS = [[2.0, 1.0], [-1.0, 3.0], [-2.0, -1.0], [1.0, -4.0]]
"""Score differences of two members in four pairs. Their means are 1.5, 1, -1.5, -1.5: two of four are right."""

LENGTHS = [(9, 3), (5, 5), (8, 4), (2, 6)]
"""Characters of both answers: the longer one is the chosen one, neither, the chosen one, the other."""


AGGREGATES = (Aggregate(), Aggregate(rule="worst_case"))


def pair(place, lengths=(2, 1), *, preference=1.0, margin=None, **meta):
    sides = [(Message(role="assistant", text="x" * length),) for length in lengths]
    prompt = (Message(role="user", text=f"question {place}"),)
    return Comparison(
        id=str(place), prompt=prompt, chosen=sides[0], rejected=sides[1], preference=preference, margin=margin, meta=meta
    )


def ruler(rows, *, by=(), bins=2, confidence=0.95):
    pairs = pair_set("data", Loaded(rows=tuple(rows), dropped={}, noticed={}, total=len(rows)))
    labels = labels_of(pairs)
    splits = splits_of(pairs, labels, by=by, bins=bins)
    return Ruler(labels=labels, splits=splits, confidence=confidence, bins=bins, calibration_bins=5, seed=0)


def scores(gaps=GAPS, *, value=None):
    """The chosen side's members score the gap, the other side's 0; the value is their mean unless given."""
    members = torch.tensor([[gap, [0.0] * len(gap)] for gap in gaps], dtype=torch.float64)
    value_B2 = members.mean(dim=2) if value is None else torch.tensor([[v, 0.0] for v in value], dtype=torch.float64)
    return PairScores(value_B2=value_B2, members_B2K=members, failed={})


def rules(found=None, facts=None, rows=None, aggregates=AGGREGATES):
    facts = facts or ScorerFacts(name="ens", num_members=2)
    rows = rows or [pair(i, lengths) for i, lengths in enumerate(LENGTHS)]
    return {item.row.rule: item.row for item in measure_rules(facts, found or scores(), aggregates, ruler(rows))}


def test_the_rows_of_an_ensemble_by_hand():
    """The worst member's score of the chosen side: 1, -1, -2, -4, against 0 for the other."""
    found = rules()
    assert list(found) == ["member 0", "member 1", "one member", "mean", "worst_case", "mean probability"]
    right = {rule: row.accuracy.num_right for rule, row in found.items()}
    assert right == {"member 0": 2, "member 1": 2, "one member": 2, "mean": 2, "worst_case": 1, "mean probability": 2}
    assert [rule for rule, row in found.items() if row.own] == ["mean"]
    assert {row.accuracy.num for row in found.values()} == {4}


def test_log_loss_brier_and_calibration_error_of_the_mean_by_hand():
    """Means 1.5, 1, -1.5, -1.5; sigmoid(1.5) = .817574, sigmoid(1) = .731059. Bins: .8176 three times, one of them right."""
    row = rules()["mean"]
    assert row.log_loss == pytest.approx((0.201413 + 0.313262 + 2 * 1.701413) / 4, abs=1e-6)
    assert row.brier == pytest.approx((0.182426**2 + 0.268941**2 + 2 * 0.817574**2) / 4, abs=1e-6)
    assert row.calibration_error == pytest.approx((3 * 0.817574 - 1 + 1 - 0.731059) / 4, abs=1e-6)
    assert [bin_.num for bin_ in row.reliability] == [0, 0, 1, 3, 0]
    assert row.reliability[3].accuracy == pytest.approx(1 / 3)


def test_the_mean_probability_is_another_probability_than_that_of_the_mean():
    """(sigmoid(2) + sigmoid(1)) / 2 = .805928, (.268941 + .952574) / 2, (.119203 + .268941) / 2, (.731059 + .017986) / 2."""
    row = rules()["mean probability"]
    probabilities = (0.805928, 0.610758, 0.194072, 0.374523)
    assert row.log_loss == pytest.approx(-sum(math.log(p) for p in probabilities) / 4, abs=1e-5)
    assert row.brier == pytest.approx(sum((1 - p) ** 2 for p in probabilities) / 4, abs=1e-5)
    assert row.score_length_correlation is None


def test_a_label_that_prefers_the_rejected_side_and_a_soft_one_and_a_tie():
    """Differences 1, 1, 1 at preferences 0, .8 and .5: wrong, right, not counted. Log loss by cross-entropy at p = .731059."""
    rows = [pair(0, preference=0.0), pair(1, preference=0.8), pair(2, preference=0.5)]
    row = rules(scores([[1.0, 1.0]] * 3), rows=rows)["mean"]
    assert (row.accuracy.num, row.accuracy.num_right) == (2, 1.0)
    cross = [-(y * math.log(0.7310586) + (1 - y) * math.log(0.2689414)) for y in (0, 0.8, 0.5)]
    assert row.log_loss == pytest.approx(sum(cross) / 3, abs=1e-6)
    assert row.brier == pytest.approx(sum((0.7310586 - y) ** 2 for y in (0, 0.8, 0.5)) / 3, abs=1e-6)


def test_the_longer_answer_rule_has_its_own_interval_and_a_tie_in_length_counts_half():
    """Right, half, right, wrong."""
    row = ruler([pair(i, lengths) for i, lengths in enumerate(LENGTHS)]).longer_answer().row
    assert (row.accuracy.num_right, row.accuracy.num) == (2.5, 4)
    z, p = 1.959963984540054, 2.5 / 4
    center, half = p + z * z / 8, z * math.sqrt(p * (1 - p) / 4 + z * z / 64)
    assert (row.accuracy.low, row.accuracy.high) == pytest.approx(
        ((center - half) / (1 + z * z / 4), (center + half) / (1 + z * z / 4))
    )
    assert row.log_loss is None


def test_differences_to_the_longer_answer_and_to_a_member_are_paired():
    """Mean minus longer: 0, .5, -1, 0. Mean minus the members' average: 0, .5, 0, -.5. All resamples lie between the extremes."""
    row = rules()["mean"]
    assert row.over_longer.value == pytest.approx(-0.125)
    assert row.over_member.value == pytest.approx(0.0)
    assert -1 <= row.over_longer.low <= -0.125 <= row.over_longer.high <= 0.5
    assert rules()["one member"].over_member is None


def test_a_rule_that_errs_exactly_like_another_differs_by_nothing():
    found = ruler([pair(i) for i in range(4)])
    right = found.right(torch.tensor([1.0, -1.0, 2.0, 3.0], dtype=torch.float64))
    assert found.paired(right, right).low == found.paired(right, right).high == 0.0


def test_the_length_correlations_by_hand():
    """Scores 1.5, 0, 1, 0, -1.5, 0, -1.5, 0 against lengths 9, 3, 5, 5, 8, 4, 2, 6."""
    row = rules()["mean"]
    score, length = [1.5, 0, 1, 0, -1.5, 0, -1.5, 0], [9, 3, 5, 5, 8, 4, 2, 6]
    assert row.score_length_correlation == pytest.approx(statistics.correlation(score, length), abs=1e-9)
    assert row.margin_length_correlation == pytest.approx(statistics.correlation([1.5, 1, -1.5, -1.5], [6, 0, 4, -4]), abs=1e-9)


def test_accuracy_by_length_follows_the_preferred_answer():
    """The preferred answer is longer by 2/3, 0, 1/2, and -2/3 of the longer one."""
    row = rules()["mean"]
    by = {name: (rate.num, rate.num_right) for name, rate in row.accuracy_by["preferred answer longer by"].items()}
    assert by == {
        "-100 to -50 %": (1, 0.0),
        "-50 to -10 %": (0, 0.0),
        "-10 to 10 %": (1, 1.0),
        "10 to 50 %": (1, 0.0),
        "50 to 100 %": (1, 1.0),
    }
    assert row.accuracy_by["preferred answer longer by"]["-50 to -10 %"].value is None


def test_accuracy_by_margin_gold_and_source():
    rows = [
        pair(0, margin=0.1, gold_chosen=3.0, gold_rejected=1.0, source="b"),
        pair(1, margin=0.2, gold_chosen=1.0, gold_rejected=1.5, source="a"),
        pair(2, margin=0.3, gold_chosen=0.0, gold_rejected=9.0, source="b"),
        pair(3, gold_chosen=1.0, gold_rejected=1.1),
    ]
    found = ruler(rows, by=("source", "absent")).accuracy_by
    splits = ruler(rows, by=("source", "absent")).splits
    assert [split.name for split in splits] == ["gold gap", "margin", "preferred answer longer by", "source"]
    by = found(torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64), splits)
    # Gold gaps 2, .5, 9, .1: the median is 1.25. Margins .1, .2, .3: the median is .2; the last pair has none.
    assert {name: (r.num, r.num_right) for name, r in by["gold gap"].items()} == {"to 1.25": (2, 1.0), "1.25 to 9": (2, 1.0)}
    assert {name: (r.num, r.num_right) for name, r in by["margin"].items()} == {"to 0.2": (2, 2.0), "0.2 to 0.3": (1, 0.0)}
    assert {name: (r.num, r.num_right) for name, r in by["source"].items()} == {
        "(none)": (1, 0.0),
        "a": (1, 1.0),
        "b": (2, 1.0),
    }


def test_columns_with_many_values_keep_the_frequent_ones_and_numbers_in_order():
    rows = [pair(i, turn=i % 12) for i in range(24)]
    (split,) = [s for s in ruler(rows, by=("turn",)).splits if s.name == "turn"]
    assert split.groups == tuple(str(turn) for turn in range(12))
    rows = [pair(i, source=f"s{i // 2:02}") for i in range(50)] + [pair(50, source="s00")]
    (split,) = [s for s in ruler(rows, by=("source",)).splits if s.name == "source"]
    assert len(split.groups) == 20
    assert split.groups[-1] == "(others)"
    assert int((split.group_B == 19).sum()) == 2 * 6


def test_the_names_of_groups_differ_however_near_their_ends_are():
    assert quantile_names([0.25, 1.0, 12345.0]) == ("to 0.25", "0.25 to 1", "1 to 1.23e+04")
    assert quantile_names([0.12341, 0.12344, 2.0]) == ("to 0.12341", "0.12341 to 0.12344", "0.12344 to 2")
    assert len(set(quantile_names([0.1, 0.1 + 1e-16, 0.1 + 4e-16]))) == 3


def test_members_by_hand():
    """Signs differ in pairs 2 and 4. Disagreement .5, 2, .5, 2.5; the mean errs in pairs 3 and 4: area (.5 + 0 + 1 + 1) / 4."""
    gaps = torch.tensor(GAPS, dtype=torch.float64)
    found = measure_members("ens", gaps, ruler([pair(i) for i in range(4)]))
    assert (found.num_members, found.mean_sign_disagreement) == (2, 0.5)
    assert found.mean_disagreement == pytest.approx(5.5 / 4)
    assert found.mean_correlation == pytest.approx(statistics.correlation([2, -1, -2, 1], [1, 3, -1, -4]), abs=1e-9)
    assert found.error_correlation == pytest.approx(0.0)  # (1, 0, 0, 1) and (1, 1, 0, 0)
    assert found.error_by_disagreement.value == pytest.approx(2.5 / 4)
    # Small gaps of the mean: 1.5 and 1.5 wrong, 1.5 and 1 right; equal ones count half.
    assert found.error_by_small_gap.value == pytest.approx((0.5 + 0 + 0.5 + 0) / 4)
    assert [rate.num_right for rate in found.accuracy_by_disagreement.values()] == [1.0, 1.0]
    assert found.relative_disagreement == pytest.approx((5.5 / 4) / statistics.pstdev([1.5, 1, -1.5, -1.5]))


def test_without_errors_disagreement_predicts_none():
    found = measure_members("ens", torch.tensor([[1.0, 2.0]] * 4, dtype=torch.float64), ruler([pair(i) for i in range(4)]))
    assert found.error_by_disagreement is None
    assert found.mean_sign_disagreement == 0.0


def test_a_rule_of_its_own_gets_a_row_and_the_star():
    own = [-1.0, 0.5, 2.0, 1.0]
    found = rules(scores(value=own), facts=ScorerFacts(name="ens", num_members=2, aggregate="lower_bound (coef 3, ddof 0)"))
    assert [rule for rule, row in found.items() if row.own] == ["own: lower_bound (coef 3, ddof 0)"]
    assert found["own: lower_bound (coef 3, ddof 0)"].accuracy.num_right == 3


def test_members_are_centered_by_their_calibration_before_the_worst_case():
    """Offsets 10 and 0: raw, member 1 is always the lower one. Centered, the lower one is 1, -1, -2, -4 again."""
    shifted = [[a + 10, b] for a, b in GAPS]
    members = torch.tensor([[gap, [10.0, 0.0]] for gap in shifted], dtype=torch.float64)
    found = PairScores(value_B2=members.mean(dim=2), members_B2K=members, failed={})
    moments = (Moments(count=4, mean=10.0, m2=1.0), Moments(count=4, mean=0.0, m2=1.0))
    with_moments = ScorerFacts(name="ens", num_members=2, calibration=moments)
    assert rules(found, with_moments)["worst_case"].log_loss == pytest.approx(rules()["worst_case"].log_loss)
    assert rules(found)["worst_case"].accuracy.num_right == 2
    assert check_aggregates(with_moments, (Aggregate(rule="worst_case"),)) == []
    (note,) = check_aggregates(ScorerFacts(name="ens", num_members=2), (Aggregate(), Aggregate(rule="worst_case")))
    assert "ens: its 2 members are not centered before worst_case" in note


def test_a_group_is_the_two_sides_of_a_pair():
    """Centered within the pair, sides are +-gap / 2: the worst case prefers by (min + max) / 2 of the gaps."""
    row = rules(aggregates=(Aggregate(rule="worst_case", center="group"),))["worst_case (center group)"]
    expected = [(2 + 1) / 2, (-1 + 3) / 2, (-2 - 1) / 2, (1 - 4) / 2]
    assert row.log_loss == pytest.approx(sum(math.log1p(math.exp(-d)) for d in expected) / 4, abs=1e-6)


def test_the_drop_is_newcombes_interval_of_two_independent_accuracies():
    """56 of 70 and 48 of 80 right: .2 with the published interval .0524 to .3339."""

    def report(right, total):
        value = [1.0] * right + [-1.0] * (total - right)
        found = PairScores(value_B2=torch.tensor([[v, 0.0] for v in value], dtype=torch.float64), members_B2K=None, failed={})
        rows = [pair(i) for i in range(total)]
        return data_report({"one": found}, {"one": ScorerFacts(name="one", num_members=1)}, (), ruler(rows))

    inside, outside = report(56, 70), report(48, 80)
    (_, row) = with_drops(inside, outside, confidence=0.95).rows
    assert (row.drop.value, row.drop.num) == (pytest.approx(0.2), 70)
    assert (row.drop.low, row.drop.high) == pytest.approx((0.0524, 0.3339), abs=5e-5)


def test_two_scorers_are_compared_pair_by_pair():
    """Right in pairs 1, 2, 3 and in 1, 4: differences 0, 1, 1, -1.

    Of 256 resamples of four, 16 have the mean 1; 5 are at or below -.75 and 19 at or below -.5.
    """

    def one(*values):
        value_B2 = torch.tensor([[float(v), 0.0] for v in values], dtype=torch.float64)
        return PairScores(value_B2=value_B2, members_B2K=None, failed={})

    facts = {name: ScorerFacts(name=name, num_members=1) for name in "ab"}
    report = data_report({"a": one(1, 1, 1, -1), "b": one(1, -1, -1, 1)}, facts, (), ruler([pair(i) for i in range(4)]))
    (comparison,) = report.comparisons
    assert (comparison.first, comparison.second, comparison.accuracy.value) == ("a", "b", 0.25)
    assert comparison.accuracy.low in (-0.75, -0.5)
    assert comparison.accuracy.high == 1.0
