"""Pairs of several sources: one held-out set of prompts, whatever the sources share."""

import json
from pathlib import Path

import pytest

from rewarden.collect.join import JoinPairs
from rewarden.data.sources import Data, load_comparisons
from rewarden.errors import ConfigError, DataError


def pair(number: int, better: int) -> dict:
    answers = {"output_1": f"short {number}", "output_2": f"a longer answer {number}"}
    return {"instruction": f"Task {number}", "input": "x" if number % 2 else "", **answers, "preference": better}


@pytest.fixture
def sources(tmp_path) -> dict[str, Data]:
    """Two files over the same 20 instructions that disagree about every pair."""
    for name, better in (("noisy", 1), ("human", 2)):
        (tmp_path / f"{name}.json").write_text(json.dumps([pair(number, better) for number in range(20)]))
    return {name: Data(path=str(tmp_path / f"{name}.json"), format="alpaca_farm") for name in ("noisy", "human")}


def read(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_a_held_out_prompt_is_in_no_training_file_of_any_source(sources, tmp_path):
    facts = JoinPairs(data=sources, holdout_prompts=5).run(tmp_path)
    assert facts == {"pairs/noisy": 15.0, "pairs/human": 15.0, "pairs/all": 30.0, "pairs/heldout": 10.0}
    held = {row["instruction"] for row in read(tmp_path, "heldout")}
    assert len(held) == 5
    assert sorted(row["source"] for row in read(tmp_path, "heldout")) == ["human"] * 5 + ["noisy"] * 5
    for name in ("noisy", "human", "all"):
        assert not held & {row["instruction"] for row in read(tmp_path, name)}
    assert [row["source"] for row in read(tmp_path, "all")] == ["noisy"] * 15 + ["human"] * 15


def test_the_split_is_a_function_of_its_own_seed(sources, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        JoinPairs(data=sources, holdout_prompts=5, split_seed=seed).run(tmp_path / name)
    a, b, c = ({row["instruction"] for row in read(tmp_path / name, "heldout")} for name in "abc")
    assert a == b != c


def test_what_is_written_is_read_as_the_same_pairs(sources, tmp_path):
    JoinPairs(data=sources).run(tmp_path)
    assert not (tmp_path / "heldout.jsonl").exists()
    rows = load_comparisons(Data(path=str(tmp_path / "all.jsonl"))).rows
    assert [row.chosen[0].text for row in (rows[1], rows[21])] == ["short 1", "a longer answer 1"]
    assert [row.meta["input"] for row in rows[:2]] == ["", "x"]  # for the template that has a section for it
    assert rows[1].prompt[0].text == "Task 1\n\nx"


def test_a_column_named_source_is_not_replaced(tmp_path):
    (tmp_path / "pairs.json").write_text(json.dumps([{**pair(0, 1), "source": "forum"}]))
    with pytest.raises(DataError, match=r"pairs.json.*a column is named 'source'.*data.one.columns: \{origin: source\}"):
        JoinPairs(data={"one": Data(path=str(tmp_path / "pairs.json"))}).run(tmp_path)
    facts = JoinPairs(data={"one": Data(path=str(tmp_path / "pairs.json"), columns={"origin": "source"})}).run(tmp_path)
    assert facts["pairs/one"] == 1


@pytest.mark.parametrize("name", ["all", "heldout", "a/b", ""])
def test_a_name_that_is_no_file_of_its_own_is_refused(name):
    with pytest.raises((ConfigError, ValueError), match="cannot be the name of a source"):
        JoinPairs(data={name: Data(path="pairs.json")})
