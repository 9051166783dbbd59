"""Weighted sums, the table of rewards, rewards from outside, and the report."""

import math

import pytest

from rewarden.errors import ConfigError, ScoreError
from rewarden.protocols import Scorer
from rewarden.scoring import SCORERS, FunctionScorer, SumScorer, build_scorer, parse_scorer, score_report, status_counts
from rewarden.scoring.answer import scores_of
from rewarden.scoring.combine import Part
from rewarden.types import Score


class Fixed:
    """Gives the scores it was made with."""

    def __init__(self, *scores):
        self.scores = scores

    def score(self, conversations):
        return list(self.scores)


def constant(*numbers):
    return FunctionScorer(lambda prompts, completions: list(numbers))


def test_the_sum_is_weighted_and_every_part_is_kept_raw_and_weighted(talk):
    scorer = SumScorer([Part("helpful", 2.0, constant(1.0, -3.0)), Part("short", -0.5, constant(4.0, 2.0))])
    first, second = scorer.score([talk("a", "b"), talk("c", "d")])
    assert (first.value, second.value) == (0.0, -7.0)
    assert first.parts == {"helpful": 1.0, "helpful/weighted": 2.0, "short": 4.0, "short/weighted": -2.0}


def test_what_does_not_apply_is_left_out_without_rescaling(talk):
    scorer = SumScorer([Part("a", 2.0, constant(1.0, None, None)), Part("b", 3.0, constant(5.0, 5.0, None))])
    both, one, none = scorer.score([talk("a", "b")] * 3)
    assert (both.value, one.value) == (17.0, 15.0)
    assert one.parts == {"b": 5.0, "b/weighted": 15.0}
    assert (none.status, none.parts) == ("not_applicable", {})
    assert math.isnan(none.value)


def test_any_other_status_becomes_the_status_of_the_sum(talk):
    too_long = Score(value=math.nan, status="too_long")
    scorer = SumScorer([Part("model", 1.0, Fixed(too_long)), Part("rule", 1.0, constant(2.0))])
    score = scorer.score([talk("a", "b")])[0]
    assert (score.status, score.parts) == ("too_long", {"rule": 2.0, "rule/weighted": 2.0})


def test_a_scorer_of_weight_zero_only_watches(talk):
    too_long = Score(value=math.nan, status="too_long")
    watching = SumScorer([Part("rule", 1.0, constant(2.0, None)), Part("gold", 0.0, Fixed(Score(value=9.0), Score(value=9.0)))])
    first, second = watching.score([talk("a", "b")] * 2)
    assert (first.value, first.parts["gold"]) == (2.0, 9.0)
    assert second.status == "not_applicable"
    blind = SumScorer([Part("rule", 1.0, constant(2.0)), Part("gold", 0.0, Fixed(too_long))])
    assert blind.score([talk("a", "b")])[0].value == 2.0


def test_members_of_one_ensemble_pass_through_the_sum_and_their_mean_is_the_value(talk):
    ensemble = Fixed(Score(value=2.0, members=(1.0, 2.0, 3.0)))
    single = Fixed(Score(value=10.0, members=(10.0,)))
    score = SumScorer([Part("e", 2.0, ensemble), Part("s", 0.5, single)]).score([talk("a", "b")])[0]
    assert (score.value, score.members) == (9.0, (7.0, 9.0, 11.0))


def test_ensembles_of_different_sizes_leave_no_members(talk):
    two, three = Fixed(Score(value=1.0, members=(0.0, 2.0))), Fixed(Score(value=2.0, members=(1.0, 2.0, 3.0)))
    score = SumScorer([Part("two", 1.0, two), Part("three", 1.0, three)]).score([talk("a", "b")])[0]
    assert (score.value, score.members) == (3.0, ())


def test_parts_of_a_part_keep_its_name_in_front(talk):
    raw = {
        "kind": "sum",
        "scorers": [
            {"scorer": {"kind": "length", "target": 1, "penalty": 0.5}, "weight": 2.0},
            {"scorer": {"kind": "regex", "pattern": "b"}, "name": "has b"},
        ],
    }
    score = build_scorer(raw).score([talk("a", "bcd")])[0]
    assert score.value == 2.0 * -1.0 + 1.0
    assert score.parts == {"length": -1.0, "length/weighted": -2.0, "length/length": 3.0, "has b": 1.0, "has b/weighted": 1.0}


def test_scorers_of_one_kind_are_numbered():
    regexes = [{"scorer": {"kind": "regex", "pattern": letter}} for letter in "ab"]
    assert parse_scorer({"kind": "sum", "scorers": regexes}).names() == ["regex_1", "regex_2"]


def test_a_scorer_that_loses_a_row_is_an_error(talk):
    with pytest.raises(ScoreError, match="'short' gave 1 scores for 2 conversations"):
        SumScorer([Part("short", 1.0, Fixed(Score(value=1.0)))]).score([talk("a", "b")] * 2)


@pytest.mark.parametrize(
    ("scorers", "message"),
    [
        ([], "scorers"),
        ([{"scorer": {"kind": "regx", "pattern": "a"}}], "did you mean 'regex'"),
        ([{"scorer": {"kind": "regex", "patern": "a"}}], "did you mean 'pattern'"),
        ([{"scorer": {"kind": "regex", "pattern": "a"}, "weight": 0.0}], "every weight is 0"),
        ([{"scorer": {"kind": "regex", "pattern": "a"}, "weight": math.nan}], "weight"),
        ([{"scorer": {"kind": "regex", "pattern": "a"}, "name": "x"}] * 2, "two scorers are named 'x'"),
    ],
)
def test_a_sum_that_cannot_be_is_refused_when_it_is_read(scorers, message):
    with pytest.raises(ConfigError, match=message):
        parse_scorer({"kind": "sum", "scorers": scorers})


SOURCE = '''
from rewarden.spec import Spec
from rewarden.types import Score


class Vowels(Spec):
    """Counts vowels."""

    weight_of_a: float = 1.0
    """What an a is worth."""

    def build(self):
        return self

    def score(self, conversations):
        return [Score(value=self.weight_of_a * row.messages[-1].text.count("a")) for row in conversations]


class NoBuild(Spec):
    """Builds nothing."""


class WrongBuild(Spec):
    """Builds a number."""

    def build(self):
        return 3


def my_reward(completions, **columns):
    return [0.0] * len(completions)
'''


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    file = tmp_path_factory.mktemp("mine") / "scorers_of_mine.py"
    file.write_text(SOURCE)
    return str(file)


def test_a_reward_from_outside_is_named_by_file_and_class(mine, talk):
    scorer = build_scorer({"kind": f"{mine}:Vowels", "weight_of_a": 2.0})
    assert isinstance(scorer, Scorer)
    assert scorer.score([talk("q", "banana")])[0].value == 6.0


def test_a_reward_from_outside_may_be_part_of_a_sum(mine, talk):
    raw = {"kind": "sum", "scorers": [{"scorer": {"kind": f"{mine}:Vowels"}, "weight": 0.5}]}
    score = build_scorer(raw).score([talk("q", "banana")])[0]
    assert (score.value, score.parts) == (1.5, {"Vowels": 3.0, "Vowels/weighted": 1.5})


def test_a_misspelt_key_of_a_reward_from_outside_is_refused(mine):
    with pytest.raises(ConfigError, match="did you mean 'weight_of_a'"):
        build_scorer({"kind": f"{mine}:Vowels", "weight_of_e": 2.0})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_reward", "for a plain function write {kind: function"),
        ("NoBuild", r"is no Spec with a build\(\)"),
        ("WrongBuild", r"build\(\) returned int"),
        ("Nothing", "has no 'Nothing'"),
    ],
)
def test_what_builds_no_scorer_is_refused(mine, name, message):
    with pytest.raises(ConfigError, match=message):
        build_scorer({"kind": f"{mine}:{name}"})


def test_an_unknown_kind_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="did you mean 'reward_model'"):
        build_scorer({"kind": "reward_modl"})


def test_every_kind_of_the_table_has_a_build_and_help_for_each_field():
    for spec in SCORERS.values():
        assert callable(spec.build)
        assert all(field.description for field in spec.model_fields.values())


def test_a_config_that_is_read_can_be_written_and_read_again():
    raw = {
        "scorers": (
            {"scorer": {"kind": "gold", "world": {"kind": "trip_desk", "trap": True}}, "weight": 0.5, "name": None},
            {"scorer": {"kind": "length", "target": 3, "penalty": 0.1}, "weight": 1.0, "name": "brief"},
        )
    }
    assert parse_scorer({"kind": "sum", **raw}).model_dump() == raw


def test_the_report_counts_statuses_and_averages_what_is_there():
    scores = [
        Score(value=1.0, members=(0.0, 2.0), parts={"a": 1.0}),
        Score(value=3.0, members=(3.0, 3.0), parts={"a": 2.0, "b": 5.0}),
        Score(value=math.nan, status="too_long"),
        Score(value=math.nan, status="not_applicable", parts={"b": 7.0}),
    ]
    assert status_counts(scores) == {"ok": 2, "too_long": 1, "not_applicable": 1}
    assert score_report(scores) == {
        "score/mean": 2.0,
        "score/std": 1.0,
        "score/num_too_long": 1.0,
        "score/num_not_applicable": 1.0,
        "score/disagreement": 0.5,
        "score/member_mean/0": 1.5,
        "score/member_std/0": 1.5,
        "score/member_mean/1": 2.5,
        "score/member_std/1": 0.5,
        "score/part/a": 1.5,
        "score/part/b": 6.0,
    }


def test_the_report_of_no_usable_score_has_no_mean():
    assert score_report([Score(value=math.nan, status="too_long")]) == {"score/num_too_long": 1.0}
    assert score_report([]) == {}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([Score(value=1.0)], "the scorer gave 1 scores for 2 conversations; one each"),
        ([1.0, 2.0], r"the scorer gave 1.0; it must give a list with one rewarden.types.Score per conversation"),
        (None, r"the scorer gave None; it must give a list"),
    ],
)
def test_what_a_scorer_of_your_own_gives_is_checked(given, message, talk):
    class Mine:
        def score(self, conversations):
            return given

    with pytest.raises(ScoreError, match=message):
        scores_of(Mine(), [talk("a", "b"), talk("c", "d")])
