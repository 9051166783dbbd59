import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewarden.data.records import Labeled
from rewarden.data.sources import Data, load_comparisons, load_conversations, load_prompts, load_unpaired
from rewarden.data.write import comparison_row, conversation_row, labeled_row, prompt_row, write_jsonl
from rewarden.errors import DataError
from rewarden.types import Comparison, Conversation, Message

USER, YES, NO = (
    Message(role="user", text="Ça va? 你好\u2028x"),
    Message(role="assistant", text="Yes."),
    Message(role="assistant", text="No."),
)
META = {"user_seed": 3, "tags": ["a", None], "where": "old.jsonl:9"}


def without_place(record: Any) -> tuple[Any, dict[str, Any]]:
    import dataclasses

    fields = {field.name: getattr(record, field.name) for field in dataclasses.fields(record) if field.name != "meta"}
    return fields, {key: value for key, value in record.meta.items() if key != "where"}


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.jsonl"
    dialogue = Conversation(id="d", messages=(USER, YES), meta=META)
    question = Conversation(id="q", messages=(Message(role="system", text="s"), USER), meta=META)
    pairs = [
        Comparison(id="p", prompt=(USER,), chosen=(YES,), rejected=(NO,), meta=META),
        Comparison(id="t", prompt=(USER,), chosen=(YES,), rejected=(NO, USER, YES), preference=0.5, margin=-1.25, meta=META),
    ]
    label = Labeled(id="l", prompt=(USER,), completion=(NO,), label=False, meta=META)

    assert write_jsonl(path, [conversation_row(dialogue)]) == 1
    (again,) = load_conversations(Data(path=str(path))).rows
    assert without_place(again) == without_place(dialogue)
    write_jsonl(path, [prompt_row(question)])
    (again,) = load_prompts(Data(path=str(path))).rows
    assert without_place(again) == without_place(question)
    assert write_jsonl(path, map(comparison_row, pairs)) == 2
    assert [without_place(row) for row in load_comparisons(Data(path=str(path))).rows] == [without_place(row) for row in pairs]
    write_jsonl(path, [labeled_row(label)])
    (again_label,) = load_unpaired(Data(path=str(path))).rows
    assert without_place(again_label) == without_place(label)


def test_rows_have_the_columns_of_trl() -> None:
    pair = Comparison(id="p", prompt=(USER,), chosen=(YES,), rejected=(NO,), meta={"note": 1, "where": "x:1"})
    assert comparison_row(pair) == {
        "id": "p",
        "prompt": [{"role": "user", "content": USER.text}],
        "chosen": [{"role": "assistant", "content": "Yes."}],
        "rejected": [{"role": "assistant", "content": "No."}],
        "note": 1,
    }


@given(
    st.lists(
        st.dictionaries(st.text(max_size=5), st.text(max_size=20) | st.integers() | st.none(), max_size=3),
        min_size=1,
        max_size=5,
    )
)
def test_any_text_survives(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]) -> None:
    path = tmp_path_factory.mktemp("w") / "rows.jsonl"
    assert write_jsonl(path, rows) == len(rows)
    assert [json.loads(line) for line in path.read_bytes().decode("utf-8").split("\n")[:-1]] == rows


def test_a_gz_file_has_the_same_rows_and_equal_bytes_each_time(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_jsonl(tmp_path / name / "rows.jsonl.gz", [{"a": "ä"}, {"a": 2}])
    raw = (tmp_path / "a" / "rows.jsonl.gz").read_bytes()
    assert raw == (tmp_path / "b" / "rows.jsonl.gz").read_bytes()
    assert [json.loads(line) for line in gzip.decompress(raw).decode("utf-8").splitlines()] == [{"a": "ä"}, {"a": 2}]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"a": float("nan")}, "row 2 cannot be written: Out of range float"),
        ({"a": {1, 2}}, "row 2 cannot be written: .*set is not JSON serializable"),
        ({"a": "\ud83d"}, "row 2 cannot be written: .*surrogates not allowed"),
    ],
)
def test_a_row_that_cannot_be_written_leaves_the_old_file(tmp_path: Path, bad: dict[str, Any], message: str) -> None:
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, [{"old": 1}])
    with pytest.raises(DataError, match=message):
        write_jsonl(path, [{"new": 1}, bad])
    assert path.read_text(encoding="utf-8") == '{"old": 1}\n'
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.jsonl"]


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, [{"old": 1}])

    def rows() -> Iterator[dict[str, int]]:
        yield {"new": 1}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_jsonl(path, rows())
    assert path.read_text(encoding="utf-8") == '{"old": 1}\n'
    assert len(list(tmp_path.iterdir())) == 1


def test_the_new_file_takes_the_place_of_the_old_after_it_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (steps.append("fsync"), fsync(handle))[1])
    monkeypatch.setattr(os, "replace", lambda *paths: (steps.append("replace"), replace(*paths))[1])
    write_jsonl(tmp_path / "rows.jsonl", [{"a": 1}])
    assert steps == ["fsync", "replace", "fsync"]
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "rows.jsonl").stat().st_mode & 0o777 == 0o666 & ~mask


def test_an_extra_column_may_not_take_the_name_of_a_needed_one() -> None:
    with pytest.raises(DataError, match="row 'd': the extra column 'messages' has the name of one this row needs"):
        conversation_row(Conversation(id="d", messages=(USER,), meta={"messages": 1}))
