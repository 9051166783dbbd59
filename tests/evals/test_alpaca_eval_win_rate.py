"""AlpacaEval's leaderboard row from real annotation files, and what is said of files that cannot give one."""

import csv
import json
import math
import random
import shutil
from dataclasses import replace

import pytest

from rewarden.errors import ConfigError, DataError
from rewarden.evals.alpaca_eval import Annotation, read_annotations, write_annotations
from rewarden.evals.alpaca_win_rate import AlpacaEval, measure
from rewarden.evals.lc_reference import read_reference
from rewarden.evals.length_controlled import control_length
from rewarden.spec import check

MODELS = ("alpaca-7b", "claude-2", "text_davinci_001")
FEW = 100
"""Resamples where the interval is not what is looked at."""


@pytest.fixture(scope="module")
def alpaca(shared):
    return shared / "data/alpaca_eval"


@pytest.fixture(scope="module")
def leaderboard(alpaca):
    with (alpaca / "lc_reference/expected.csv").open(newline="") as stream:
        return {row["model"]: {k: float(v) for k, v in row.items() if k != "model"} for row in csv.DictReader(stream)}


def facts_of(annotations, *, reference=None, **changes):
    fields = {"annotations": str(annotations), "resamples": FEW, **changes}
    if reference is not None:
        fields["lc_reference"] = str(reference)
    return measure(AlpacaEval(**fields)).facts()


def real(alpaca, model, **changes):
    return facts_of(
        alpaca / f"full/{model}/annotations.json.gz", reference=alpaca / "lc_reference", match_leaderboard=True, **changes
    )


@pytest.fixture(scope="module")
def official(alpaca):
    """What the command gives for each model, as on the leaderboard."""
    return {model: real(alpaca, model) for model in MODELS}


@pytest.fixture(scope="module")
def claude_rows(alpaca):
    return list(read_annotations(alpaca / "full/claude-2/annotations.json.gz"))


@pytest.fixture(scope="module")
def sweep(alpaca):
    """The length control of alpaca-7b at a C, joined by row."""
    rows = read_annotations(alpaca / "full/alpaca-7b/annotations.json.gz")
    reference = read_reference(alpaca / "lc_reference")
    return lambda c: control_length(rows, reference, join="row", c=c, confidence=0.95, resamples=1, seed=0)


def said(facts):
    return "\n".join(facts["warnings"])


@pytest.mark.parametrize("model", MODELS)
def test_rates_and_errors_are_those_of_the_leaderboard(official, leaderboard, model):
    facts, row = official[model], leaderboard[model]
    assert facts["win_rate"] == pytest.approx(row["lb_win_rate"], abs=1e-8)
    assert facts["standard_error"] == pytest.approx(row["lb_standard_error"], abs=1e-8)
    assert facts["discrete_win_rate"] == pytest.approx(row["lb_discrete_win_rate"], abs=1e-8)
    assert facts["avg_length"] == row["lb_avg_length"]
    assert (facts["n_wins"], facts["n_wins_base"], facts["n_draws"]) == (
        row["lb_n_wins"],
        row["lb_n_wins_base"],
        row["lb_n_draws"],
    )
    assert facts["n_total"] == row["n"]


@pytest.mark.parametrize("model", MODELS)
def test_the_length_controlled_rate_is_that_of_the_leaderboard_with_l1_and_c_by_cross_validation(official, leaderboard, model):
    facts = official[model]
    assert facts["length_controlled_win_rate"] == pytest.approx(leaderboard[model]["lb_length_controlled_winrate"], abs=0.02)
    control = facts["length_control"]
    assert control["comparable_with_leaderboard"]
    assert (control["form"], control["join"], control["num_regularizer_rows"]) == ("official", "row", 1610)
    assert control["optimality_breach"] < 1e-8
    assert len(facts["warnings"]) == (model == "text_davinci_001")  # the file that lacks rows


@pytest.mark.parametrize("model", MODELS)
def test_without_penalty_the_length_controlled_rate_is_within_15_hundredths(alpaca, leaderboard, model):
    found = real(alpaca, model, lc_c="none")
    assert found["length_controlled_win_rate"] == pytest.approx(leaderboard[model]["lb_length_controlled_winrate"], abs=0.15)
    assert found["length_controlled_win_rate"] == pytest.approx(leaderboard[model]["lc_refit_unpenalised"], abs=1e-3)
    assert found["length_control"]["c"] is None
    assert found["length_control"]["cross_validation"] is None


@pytest.mark.parametrize(
    ("model", "c"), [("alpaca-7b", 10 ** (4 / 3)), ("claude-2", 10 ** (4 / 9)), ("text_davinci_001", 10 ** (4 / 9))]
)
def test_with_the_official_c_the_length_controlled_rate_is_within_2_hundredths(alpaca, leaderboard, model, c):
    found = real(alpaca, model, lc_c=c)
    assert found["length_controlled_win_rate"] == pytest.approx(leaderboard[model]["lb_length_controlled_winrate"], abs=0.02)
    assert found["length_control"]["c"] == c


@pytest.mark.parametrize(("c", "rate"), [(0.3593814, 6.7433), (2.7825594, 5.9773), (21.5443469, 5.8749), (166.81005, 5.8617)])
def test_the_sweep_over_c_of_alpaca_7b_is_that_of_liblinear(sweep, c, rate):
    assert sweep(c).win_rate == pytest.approx(rate, abs=2e-3)


def test_the_coefficients_of_alpaca_7b_are_those_of_liblinear(sweep):
    found = sweep(21.5443469).fit
    assert [found.length_slope, found.difficulty_slope, found.constant] == pytest.approx([-2.2068, 0.9861, -3.6912], abs=2e-3)


def test_the_order_of_rows_does_not_matter_when_they_are_joined_by_instruction(alpaca, official, claude_rows, tmp_path):
    rows = [replace(row, extra={}) for row in claude_rows]
    random.Random(0).shuffle(rows)
    write_annotations(tmp_path / "shuffled.json", rows)
    straight = official["claude-2"]
    mixed = facts_of(tmp_path / "shuffled.json", reference=alpaca / "lc_reference")
    assert mixed["length_controlled_win_rate"] == pytest.approx(straight["length_controlled_win_rate"], abs=1e-7)
    assert mixed["length_control"]["comparable_with_leaderboard"]
    by_row = facts_of(tmp_path / "shuffled.json", reference=alpaca / "lc_reference", match_leaderboard=True)
    assert "not AlpacaEval's instructions in AlpacaEval's order" in said(by_row)


def test_a_file_that_lacks_rows_is_joined_right_by_default_and_says_that_the_leaderboard_does_not(
    alpaca, leaderboard, claude_rows
):
    path, reference = alpaca / "full/text_davinci_001/annotations.json.gz", alpaca / "lc_reference"
    facts = facts_of(path, reference=reference)
    assert "803 of 805 instructions are there" in said(facts)
    assert "--match-leaderboard" in said(facts)
    assert not facts["length_control"]["comparable_with_leaderboard"]
    assert facts["avg_length"] == 297
    official = leaderboard["text_davinci_001"]["lb_length_controlled_winrate"]
    assert abs(facts["length_controlled_win_rate"] - official) > 2
    # With the missing rows put back, position and instruction agree: the joined rows are those of their own instruction.
    whole = {row.instruction: i for i, row in enumerate(claude_rows)}
    table = read_reference(reference)
    for row in read_annotations(path):
        assert table.number(row.instruction) == whole[row.instruction]


def test_rows_that_get_the_difficulty_of_another_instruction_are_counted(official, alpaca):
    rows = read_annotations(alpaca / "full/text_davinci_001/annotations.json.gz")
    whole = [row.instruction for row in read_annotations(alpaca / "full/claude-2/annotations.json.gz")]
    shifted = [i for i, row in enumerate(rows) if whole[i] != row.instruction]
    warning = said(official["text_davinci_001"])
    assert f"803 of 805 instructions are there, joined by position as on the leaderboard: {len(shifted)} rows, from" in warning
    assert f"{rows[shifted[0]].where} on, get the difficulty of another instruction" in warning


def test_without_the_side_tables_the_number_is_labelled_and_far_off(alpaca, leaderboard):
    facts = facts_of(alpaca / "full/text_davinci_001/annotations.json.gz")
    assert "no length-control tables" in said(facts)
    assert "NOT comparable with the leaderboard" in said(facts)
    control = facts["length_control"]
    assert (control["comparable_with_leaderboard"], control["form"], control["join"]) == (False, "no_difficulty", None)
    assert abs(facts["length_controlled_win_rate"] - leaderboard["text_davinci_001"]["lb_length_controlled_winrate"]) > 6


@pytest.mark.parametrize(
    ("gone", "form", "message"),
    [
        ("df_gamed_surrogate.csv", "no_regularizer", "df_gamed*.csv is not there"),
        ("instruction_difficulty_recovered.csv", "no_difficulty", "instruction_difficulty*.csv is not there"),
    ],
)
def test_one_missing_table_is_named(alpaca, tmp_path, gone, form, message):
    for file in (alpaca / "lc_reference").iterdir():
        if file.name != gone:
            shutil.copy(file, tmp_path / file.name)
    facts = facts_of(alpaca / "full/alpaca-7b/annotations.json.gz", reference=tmp_path)
    assert message in said(facts)
    assert "NOT comparable" in said(facts)
    assert facts["length_control"]["form"] == form
    assert not facts["length_control"]["comparable_with_leaderboard"]


def test_the_interval_is_one_of_resampling_and_much_wider_than_the_official_error(official):
    """AlpacaEval's lc_standard_error of claude-2 is 0.88 points; the bootstrap's interval is some 7 wide."""
    facts = official["claude-2"]
    low, high = facts["intervals"]["length_controlled_win_rate"]
    assert low < facts["length_controlled_win_rate"] < high
    assert high - low > 1.5 * 2 * 1.96 * facts["length_control"]["prediction_spread"]
    low, high = facts["intervals"]["win_rate"]
    assert high - low == pytest.approx(2 * 1.96 * facts["standard_error"], rel=0.3)


def test_more_rows_than_difficulties_are_refused_by_position_and_fine_by_instruction(alpaca, claude_rows, tmp_path):
    rows = [replace(row, extra={}) for row in claude_rows]
    extra = Annotation(instruction="One of my own", output_1="a", output_2="bb", preference=1.0, generator_2="claude-2")
    write_annotations(tmp_path / "more.json", [*rows, extra])
    with pytest.raises(DataError, match="806 annotations, but 805 difficulties"):
        facts_of(tmp_path / "more.json", reference=alpaca / "lc_reference", match_leaderboard=True)
    facts = facts_of(tmp_path / "more.json", reference=alpaca / "lc_reference")
    assert "1 of 806 instructions are not in the difficulty table (the first: " in said(facts)
    assert facts["length_control"]["num_rows"] == 805
    assert facts["n_total"] == 806


def own(n, *, seed=0, **changes):
    draw = random.Random(seed)
    rows = []
    for i in range(n):
        fields = {
            "instruction": f"Task {i}",
            "output_1": "a" * draw.randint(5, 60),
            "output_2": "b" * draw.randint(5, 60),
            "preference": float(draw.choice([1, 2])),
            "generator_1": "them",
            "generator_2": "us",
        }
        fields.update({key: value(i) if callable(value) else value for key, value in changes.items()})
        rows.append(Annotation(**fields))
    return rows


def facts_of_rows(tmp_path, rows, **changes):
    write_annotations(tmp_path / "annotations.json", rows)
    facts = facts_of(tmp_path / "annotations.json", **changes)
    json.dumps(facts, allow_nan=False)  # null where there is no number, never NaN
    return facts


def test_instructions_of_another_set_get_a_labelled_number(alpaca, tmp_path):
    facts = facts_of_rows(tmp_path, own(60), reference=alpaca / "lc_reference")
    assert "no instruction is in the difficulty table, so this is another set" in said(facts)
    assert facts["length_control"]["form"] == "no_difficulty"


def test_ties_only_are_explained(tmp_path):
    facts = facts_of_rows(tmp_path, own(60, preference=1.5))
    assert (facts["win_rate"], facts["discrete_win_rate"], facts["standard_error"]) == (50, 50, 0)
    assert facts["length_controlled_win_rate"] == pytest.approx(50)
    assert "all 60 comparisons are ties" in said(facts)


def test_lengths_that_never_vary_are_explained(tmp_path):
    facts = facts_of_rows(tmp_path, own(60, output_1="a" * 10, output_2="b" * 17))
    assert facts["length_controlled_win_rate"] is None
    assert "no length-controlled win rate: the reference's answer is -7 characters longer in every comparison" in said(facts)
    assert facts["win_rate"] is not None
    equal = facts_of_rows(tmp_path, own(60, output_1="a" * 10, output_2="b" * 10), lc_c="none")
    assert equal["length_controlled_win_rate"] == pytest.approx(equal["win_rate"], abs=1e-6)
    assert "both answers are equally long in every comparison" in said(equal)


def test_three_rows_are_explained(tmp_path):
    facts = facts_of_rows(tmp_path, own(3))
    assert facts["length_controlled_win_rate"] is None
    assert "3 instructions with a verdict are too few to fit" in said(facts)
    assert "3 prompts are few" in said(facts)
    assert facts["n_total"] == 3


def test_rows_without_generator_are_explained(tmp_path):
    some = facts_of_rows(tmp_path, own(40, generator_2=lambda i: None if i % 4 == 0 else "us"))
    assert "10 of 40 rows have no generator_2" in said(some)
    assert "they are taken for those of us" in said(some)
    assert (some["model"], some["n_total"]) == ("us", 40)
    none = facts_of_rows(tmp_path, own(40, generator_2=None, generator_1=None), lc_c="none")
    assert (none["model"], none["reference"]) == ("unnamed", "unnamed")
    assert "40 of 40 rows have no generator_2" in said(none)
    assert "by definition" not in said(none)


def test_two_models_in_one_file_must_be_told_apart(tmp_path):
    rows = own(40, generator_2=lambda i: "one" if i < 25 else "two")
    write_annotations(tmp_path / "annotations.json", rows)
    with pytest.raises(DataError, match=r"rows of 2 models: one, two; say which with generator \(--generator NAME\)"):
        facts_of(tmp_path / "annotations.json")
    assert facts_of(tmp_path / "annotations.json", generator="one")["n_total"] == 25
    with pytest.raises(DataError, match=r"no row of the model 'tow'; did you mean 'two'\?"):
        facts_of(tmp_path / "annotations.json", generator="tow")


def test_rows_without_verdict_are_counted_and_files_of_them_refused(tmp_path):
    facts = facts_of_rows(tmp_path, own(60, preference=lambda i: None if i < 20 else 1.0 + i % 2))
    assert (facts["n_total"], facts["n_without_verdict"], facts["win_rate"]) == (40, 20, 50)
    assert "20 of 60 comparisons have no verdict" in said(facts)
    assert math.isfinite(facts["length_controlled_win_rate"])
    write_annotations(tmp_path / "none.json", own(5, preference=None))
    with pytest.raises(DataError, match=r"none\.json: none of 5 comparisons has a verdict"):
        facts_of(tmp_path / "none.json")


@pytest.mark.parametrize("c", ["cv", "none", 1.0])
def test_a_model_that_always_wins_or_loses_gets_numbers(alpaca, tmp_path, c):
    for code, rate in ((1.0, 0), (2.0, 100)):
        facts = facts_of_rows(tmp_path, own(80, preference=code), lc_c=c)
        assert facts["win_rate"] == rate
        assert facts["length_controlled_win_rate"] == pytest.approx(rate, abs=20)
        assert "same outcome" in said(facts)


def test_a_penalty_that_swallows_the_constant_is_said(tmp_path):
    facts = facts_of_rows(tmp_path, own(60, preference=lambda i: 2.0 if i % 10 else 1.0), lc_c=1e-3)
    assert facts["length_controlled_win_rate"] == 50
    assert "the penalty leaves the fit's constant at 0" in said(facts)


def test_the_reference_against_itself_is_50_by_definition(tmp_path):
    facts = facts_of_rows(tmp_path, own(40, generator_2="them"))
    assert facts["length_controlled_win_rate"] == 50
    assert "its length-controlled win rate is 50 by definition" in said(facts)


def test_repeated_instructions_are_resampled_together(tmp_path):
    facts = facts_of_rows(tmp_path, own(90, instruction=lambda i: f"Task {i % 30}"))
    assert "90 comparisons are of 30 different prompts" in said(facts)
    assert facts["length_controlled_win_rate"] is not None


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "neither instruction_difficulty"),
        ({"instruction_difficulty.csv": "index,hardness\n0,1\n"}, r"\.csv:1: no column 'instruction_difficulty'"),
        (
            {"instruction_difficulty.csv": "index,instruction_difficulty\n0,hard\n"},
            r"\.csv:2: instruction_difficulty is 'hard'",
        ),
        ({"instruction_difficulty.csv": "index,instruction_difficulty\n0,1\n0,2\n"}, r"\.csv:3: index 0 is given twice"),
        ({"instruction_difficulty.csv": "index,instruction_difficulty\nx,1\n"}, "index is 'x'; it must be a whole number"),
        ({"instruction_difficulty.csv": "index,instruction_difficulty\n"}, "a header without rows"),
        ({"instruction_difficulty.csv": "index,instruction_difficulty\n0,1,2\n"}, r":2: 3 values for 2 columns"),
        (
            {"df_gamed.csv": "model,index,preference,std_delta_len,instruction_difficulty\nm,0,1.5,0.1,0\n"},
            r"df_gamed\.csv:2: preference is 1\.5; it must be a probability",
        ),
        ({"instruction_difficulty.csv": "", "instruction_difficulty_2.csv": ""}, r"all match instruction_difficulty"),
    ],
)
def test_side_tables_that_cannot_be_used_are_named_with_file_and_line(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        read_reference(tmp_path)


def test_a_folder_that_is_not_there_is_named_with_its_nearest(tmp_path):
    (tmp_path / "lc_reference").mkdir()
    with pytest.raises(DataError, match=r"no such folder of length-control tables; did you mean 'lc_reference'\?"):
        read_reference(tmp_path / "lc_refrence")


def test_a_table_may_name_its_own_instructions(tmp_path):
    tables = tmp_path / "tables"
    tables.mkdir()
    lines = ["instruction,index,instruction_difficulty", *(f"Task {i},{i},{i / 10 - 2}" for i in range(40))]
    (tables / "instruction_difficulty.csv").write_text("\n".join(lines) + "\n")
    rows = own(40)
    random.Random(1).shuffle(rows)
    facts = facts_of_rows(tmp_path, rows, reference=tables)
    assert facts["length_control"]["form"] == "no_regularizer"
    assert facts["length_control"]["num_rows"] == 40
    assert read_reference(tables).number("Task 7") == 7


@pytest.mark.parametrize("value", ["sometimes", 0, -1.5])
def test_a_c_that_is_none_is_refused(value):
    with pytest.raises(ConfigError, match="lc_c"):
        check(AlpacaEval, {"annotations": "a.json", "lc_c": value})


def test_as_a_job_it_writes_what_the_command_prints(alpaca, tmp_path):
    cfg = AlpacaEval(annotations=str(alpaca / "full/alpaca-7b/annotations.json.gz"), resamples=FEW)
    figures = cfg.run(tmp_path)
    facts = json.loads((tmp_path / "win_rate.json").read_text())
    assert facts == json.loads(json.dumps(measure(cfg).facts()))
    assert figures["win_rate"] == facts["win_rate"]
    assert "| win rate | 2.59 |" in (tmp_path / "win_rate.md").read_text()
