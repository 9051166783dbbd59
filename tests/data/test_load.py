"""What every source has in common: ids, renamed columns, limits, held-out prompts, bad rows."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rewarden.data.sources import Data, load_comparisons, load_conversations, load_prompts
from rewarden.data.split import first_prompt
from rewarden.errors import ConfigError, DataError


def put(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    """30 rows, 3 of each of 10 first prompts, spelt differently."""
    marks = ("", "?", " !")
    return put(tmp_path / "p.jsonl", [{"prompt": f"Question {n % 10}{marks[n // 10]}", "n": n} for n in range(30)])


def test_ids_come_from_the_id_column_or_the_line_and_never_repeat(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "id": "x"},
        {"prompt": "b"},
        {"prompt": "c", "id": 12},
        {"prompt": "d", "id": "x"},
        {"prompt": "e", "id": ""},
    ]
    loaded = load_prompts(Data(path=put(tmp_path / "p.jsonl", rows)))
    assert [row.id for row in loaded.rows] == ["x", "p.jsonl:2", "12", "x~2", "p.jsonl:5"]
    assert loaded.noticed == {"repeated_id": 1}


def test_ids_do_not_depend_on_the_folder(tmp_path: Path) -> None:
    ids = []
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        put(tmp_path / name / "p.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
        ids.append([row.id for row in load_prompts(Data(path=str(tmp_path / name))).rows])
    assert ids[0] == ids[1] == ["p.jsonl:1", "p.jsonl:2"]


def test_max_rows_keeps_the_first_usable_rows_and_reads_no_further(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    put(path, [{"messages": [{"role": "user", "content": "u"}]}, *({"text": f"t{n}"} for n in range(5))])
    path.write_text(path.read_text(encoding="utf-8") + "broken", encoding="utf-8")
    loaded = load_conversations(Data(path=str(path), max_rows=3))
    assert [row.messages[1].text for row in loaded.rows] == ["t0", "t1", "t2"]
    assert (loaded.dropped, loaded.total) == ({"ends_with_user": 1}, 4)
    with pytest.raises(DataError, match=r"p\.jsonl:7: broken JSON"):
        load_conversations(Data(path=str(path)))


def test_held_out_prompts_are_on_one_side_only(prompts: str) -> None:
    train = load_prompts(Data(path=prompts, holdout_prompts=3, part="train"))
    held = load_prompts(Data(path=prompts, holdout_prompts=3, part="heldout"))
    assert len(held.rows) == 9
    assert len(train.rows) == 21
    assert {first_prompt(row.messages) for row in train.rows} & {first_prompt(row.messages) for row in held.rows} == set()
    assert sorted(row.meta["n"] for row in (*train.rows, *held.rows)) == list(range(30))
    assert train.dropped == {"in_the_other_part": 9}
    assert len(load_prompts(Data(path=prompts, holdout_prompts=3)).rows) == 30
    others = load_prompts(Data(path=prompts, holdout_prompts=3, part="heldout", split_seed=1))
    assert {row.id for row in others.rows} != {row.id for row in held.rows}


def test_max_rows_counts_within_the_part(prompts: str) -> None:
    whole = load_prompts(Data(path=prompts, holdout_prompts=3, part="heldout"))
    some = load_prompts(Data(path=prompts, holdout_prompts=3, part="heldout", max_rows=4))
    assert some.rows == whole.rows[:4]
    assert some.dropped == {"in_the_other_part": 21, "beyond_max_rows": 5}
    assert some.total == len(some.rows) + sum(some.dropped.values()) == 30


def test_a_part_needs_a_holdout(prompts: str) -> None:
    with pytest.raises(ConfigError, match="part is 'train' but holdout_prompts is 0"):
        load_prompts(Data(path=prompts, part="train"))
    with pytest.raises(DataError, match="10 first prompts to hold out of 10"):
        load_prompts(Data(path=prompts, part="train", holdout_prompts=10))
    with pytest.raises(ValidationError, match="max_rows"):
        Data(path=prompts, max_rows=0)


def test_columns_are_read_under_other_names(tmp_path: Path) -> None:
    path = put(tmp_path / "q.jsonl", [{"question": "2+2?", "answer": "4", "level": 1}])
    renamed = {"prompt": "question", "completion": "answer"}
    (row,) = load_conversations(Data(path=path, columns=renamed)).rows
    assert [message.text for message in row.messages] == ["2+2?", "4"]
    assert row.meta["level"] == 1
    with pytest.raises(
        DataError, match=r"q\.jsonl:1: columns names 'qestion', which the row lacks; it has question, answer, level"
    ):
        load_conversations(Data(path=path, columns={"prompt": "qestion"}))


def test_a_column_named_where_is_never_lost(tmp_path: Path) -> None:
    path = put(tmp_path / "p.jsonl", [{"prompt": "a", "where": "Rome"}])
    with pytest.raises(DataError, match=r"p\.jsonl:1: a column is named 'where'.*columns: \{place: where\}"):
        load_prompts(Data(path=path))
    (row,) = load_prompts(Data(path=path, columns={"place": "where"})).rows
    assert row.meta == {"place": "Rome", "where": f"{path}:1"}


def test_bad_rows_are_errors_or_counted_as_the_config_says(tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": 3}, {"promt": "c"}, {"prompt": "d"}]
    path = put(tmp_path / "p.jsonl", rows)
    with pytest.raises(DataError, match=r"p\.jsonl:2: prompt is 3 .*format 'trl', told from the first row; on_bad_row: drop"):
        load_prompts(Data(path=path))
    loaded = load_prompts(Data(path=path, on_bad_row="drop"))
    assert [row.id for row in loaded.rows] == ["p.jsonl:1", "p.jsonl:4"]
    assert loaded.dropped == {"bad_prompt": 1, "missing_column": 1}
    assert loaded.summary() == "2 of 4 rows; dropped: 1 bad_prompt, 1 missing_column"


def test_a_source_without_usable_rows_is_an_error_with_the_counts(tmp_path: Path) -> None:
    path = put(tmp_path / "p.jsonl", [{"prompt": "p", "chosen": "a", "rejected": "a"}] * 3)
    with pytest.raises(DataError, match=r"no comparisons are left \(0 of 3 rows; dropped: 3 chosen_equals_rejected\)"):
        load_comparisons(Data(path=path))


def test_blank_lines_of_the_file_are_in_the_report(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n', encoding="utf-8")
    assert load_prompts(Data(path=str(path))).noticed == {"blank_line": 1}


def test_a_folder_of_files_is_one_source(tmp_path: Path) -> None:
    put(tmp_path / "a.jsonl", [{"prompt": "a"}])
    (tmp_path / "b.json").write_text('[{"prompt": "b"}]', encoding="utf-8")
    assert [row.id for row in load_prompts(Data(path=str(tmp_path))).rows] == ["a.jsonl:1", "b.json:1[0]"]
