"""Folds: every first prompt in one of them, whatever other rows there are."""

import pytest

from rewarden.data.sources import Data, load_comparisons
from rewarden.data.split import fold_of
from rewarden.data.write import write_jsonl
from rewarden.errors import ConfigError, DataError
from rewarden.types import Message


@pytest.fixture
def path(tmp_path) -> str:
    rows = [{"id": f"{n}", "prompt": f"question {n // 2}", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(60)]
    write_jsonl(tmp_path / "pairs.jsonl", rows)
    return str(tmp_path / "pairs.jsonl")


def ids(**fields) -> set[str]:
    return {row.id for row in load_comparisons(Data(**fields)).rows}


def test_each_row_is_in_one_fold_with_all_rows_of_its_prompt(path):
    held = [ids(path=path, folds=3, fold=fold, part="heldout") for fold in range(3)]
    assert sorted(row for fold in held for row in fold) == sorted(str(n) for n in range(60))
    for fold, rows in enumerate(held):
        assert len(rows) >= 8
        assert {str(int(row) ^ 1) for row in rows} == rows
        assert ids(path=path, folds=3, fold=fold, part="train") == {str(n) for n in range(60)} - rows


def test_the_fold_of_a_prompt_is_a_function_of_prompt_and_seed_alone(path, tmp_path):
    first = ids(path=path, folds=3, fold=1, part="heldout")
    assert first != ids(path=path, folds=3, fold=1, part="heldout", split_seed=5)
    rows = [{"id": f"{n}", "prompt": f"Question {n // 2}!", "chosen": f"yes {n}", "rejected": "no"} for n in range(20, 30)]
    write_jsonl(tmp_path / "few.jsonl", rows)
    assert ids(path=str(tmp_path / "few.jsonl"), folds=3, fold=1, part="heldout") == {r for r in first if 20 <= int(r) < 30}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"folds": 3, "fold": 3, "part": "train"}, "fold is 3 and folds is 3; folds count from 0"),
        ({"fold": 0, "part": "train"}, "fold is 0 and folds is 0"),
        ({"folds": 3, "part": "train"}, "part is 'train' of 3 folds, and fold is null"),
        ({"folds": 3, "fold": 0}, "fold is 0 and part is 'all'"),
        ({"folds": 1, "fold": 0, "part": "train"}, "folds is 1, so one fold holds all rows"),
        ({"folds": 3, "fold": 0, "part": "train", "holdout_prompts": 2}, "set one of them"),
    ],
)
def test_folds_that_make_no_sense_are_refused(path, fields, words):
    with pytest.raises(ConfigError, match=words):
        load_comparisons(Data(path=path, **fields))


def test_a_fold_without_rows_is_refused(tmp_path):
    write_jsonl(tmp_path / "one.jsonl", [{"prompt": "q", "chosen": "a", "rejected": "b"}])
    messages = (Message(role="user", text="q"),)
    empty = 1 - fold_of(messages, folds=2, seed=0)
    with pytest.raises(DataError, match="no comparisons are left"):
        load_comparisons(Data(path=str(tmp_path / "one.jsonl"), folds=2, fold=empty, part="heldout"))
