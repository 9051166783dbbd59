"""AlpacaEval's files, read and written."""

import gzip
import json
import math

import pytest

from rewarden.errors import DataError
from rewarden.evals.alpaca_eval import (
    Annotation,
    ModelOutput,
    read_annotations,
    read_outputs,
    write_annotations,
    write_outputs,
)
from rewarden.evals.alpaca_eval_set import NUM_INSTRUCTIONS, instruction_number

MODELS = ("alpaca-7b", "claude-2", "text_davinci_001")


def rows_of(path):
    return json.loads(gzip.decompress(path.read_bytes()))


def row(**changes):
    return {
        "instruction": "Say hi.",
        "output_1": "Hi.",
        "generator_1": "them",
        "output_2": "Hi there.",
        "generator_2": "us",
        "annotator": "judge",
        "preference": 1.5,
        **changes,
    }


def file(tmp_path, rows, name="annotations.json"):
    path = tmp_path / name
    path.write_text(json.dumps(rows, indent=1))
    return path


@pytest.mark.parametrize(
    ("code", "wins"), [(1, 0.0), (2, 1.0), (1.5, 0.5), (0, 0.5), (0.0, 0.5), (1.25, 0.25), (None, None), (math.nan, None)]
)
def test_every_code_of_a_preference(tmp_path, code, wins):
    (read,) = read_annotations(file(tmp_path, [row(preference=code)]))
    assert read.model_wins == wins


@pytest.mark.parametrize("code", [0.5, 2.5, -1, "1", True, [1], math.inf])
def test_a_preference_that_is_no_code_is_refused_with_file_and_row(tmp_path, code):
    path = file(tmp_path, [row(), row(preference=code)])
    with pytest.raises(
        DataError, match=r"annotations\.json:\d+\[1\]: preference is .*1 \(the reference is better\) to 2"
    ) as error:
        read_annotations(path)
    assert repr(code) in str(error.value)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row(), {"instruction": "x"}], r"\[1\]: no column 'output_1', 'output_2', 'preference'; the row has instruction"),
        ([{"instruction": "x", "output": "y", "generator": "z"}], "these are model outputs, give annotations"),
        ([row(output_2=None)], r"\[0\]: output_2 is None; it must be text \(an empty answer is an empty text\)"),
        ([row(generator_2=7)], r"\[0\]: generator_2 is 7; it must be text, or null"),
        (["just text"], r"\[0\]: the row is 'just text', no object"),
        ([], "no rows in the file"),
    ],
)
def test_a_row_that_is_no_annotation_is_refused_with_file_and_row(tmp_path, rows, message):
    with pytest.raises(DataError, match=message):
        read_annotations(file(tmp_path, rows))


def test_missing_generators_and_unknown_columns_are_kept_as_what_they_are(tmp_path):
    (read,) = read_annotations(file(tmp_path, [row(generator_2=None, annotator="", glm_preference=0.25)]))
    assert (read.generator_1, read.generator_2, read.annotator, read.dataset) == ("them", None, None, None)
    assert read.extra == {"glm_preference": 0.25}
    assert read.length_difference == 3 - 9


def test_lengths_are_characters_not_bytes(tmp_path):
    (read,) = read_annotations(file(tmp_path, [row(output_1="éé", output_2="🙂")]))
    assert read.length_difference == 1


@pytest.mark.parametrize(
    ("model", "name"),
    [("alpaca-7b", "annotations.json"), ("claude-2", "annotations.json.gz"), ("text_davinci_001", "annotations.json")],
)
def test_the_real_annotations_survive_writing_and_reading(shared, tmp_path, model, name):
    source = shared / f"data/alpaca_eval/full/{model}/annotations.json.gz"
    original = rows_of(source)
    read = read_annotations(source)
    write_annotations(tmp_path / name, read)
    written = rows_of(tmp_path / name) if name.endswith(".gz") else json.loads((tmp_path / name).read_text())
    assert written == original
    assert [list(r)[:8] for r in written] == [list(r)[:8] for r in original]


@pytest.mark.parametrize("model", MODELS)
def test_the_real_outputs_survive_writing_and_reading(shared, tmp_path, model):
    source = shared / f"data/alpaca_eval/full/{model}/model_outputs.json.gz"
    write_outputs(tmp_path / "out.json", read_outputs(source))
    assert json.loads((tmp_path / "out.json").read_text()) == rows_of(source)


def test_what_cannot_be_written_leaves_the_old_file(tmp_path):
    path = tmp_path / "annotations.json"
    kept = Annotation(instruction="a", output_1="b", output_2="c", preference=None)
    write_annotations(path, [kept])
    before = path.read_bytes()
    assert json.loads(before) == [{"instruction": "a", "output_1": "b", "output_2": "c", "preference": None}]
    bad = Annotation(instruction="a", output_1="b", output_2="c", preference=1, extra={"price_per_example": math.nan})
    with pytest.raises(DataError, match="cannot be written"):
        write_annotations(path, [bad])
    with pytest.raises(DataError, match="'preference' has the name of one of AlpacaEval's"):
        write_annotations(
            path, [Annotation(instruction="a", output_1="b", output_2="c", preference=1, extra={"preference": 2})]
        )
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["annotations.json"]


def test_equal_rows_give_equal_compressed_bytes(tmp_path):
    rows = [ModelOutput(instruction="a", output="b", generator="c")]
    write_outputs(tmp_path / "1.json.gz", rows)
    write_outputs(tmp_path / "2.json.gz", rows)
    assert (tmp_path / "1.json.gz").read_bytes() == (tmp_path / "2.json.gz").read_bytes()
    (read,) = read_outputs(tmp_path / "1.json.gz")
    assert (read.instruction, read.output, read.generator) == ("a", "b", "c")


def test_instructions_of_the_set_are_numbered_in_the_order_of_its_files(shared):
    rows = rows_of(shared / "data/alpaca_eval/full/claude-2/annotations.json.gz")
    assert [instruction_number(r["instruction"]) for r in rows] == list(range(NUM_INSTRUCTIONS))
    assert instruction_number(f"\n{rows[7]['instruction']} ") == 7
    assert instruction_number("What is the best way to peel a kiwi?") is None
