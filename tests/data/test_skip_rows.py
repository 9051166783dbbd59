"""`skip_rows` and `max_rows` cut one file into parts that do not overlap."""

import pytest

from rewarden.data.sources import Data, load_prompts
from rewarden.data.write import write_jsonl
from rewarden.errors import DataError


@pytest.fixture
def file(tmp_path):
    write_jsonl(tmp_path / "p.jsonl", [{"id": str(i), "prompt": [{"role": "user", "content": f"q{i}"}]} for i in range(7)])
    return str(tmp_path / "p.jsonl")


def ids(**fields) -> list[str]:
    return [row.id for row in load_prompts(Data(**fields)).rows]


def test_the_first_rows_and_the_rest_make_up_the_file(file):
    assert ids(path=file, max_rows=3) == ["0", "1", "2"]
    assert ids(path=file, skip_rows=3) == ["3", "4", "5", "6"]
    assert ids(path=file, skip_rows=3, max_rows=2) == ["3", "4"]
    loaded = load_prompts(Data(path=file, skip_rows=3))
    assert loaded.dropped == {"skipped_rows": 3}
    assert loaded.total == 7


def test_rows_are_skipped_within_a_part(file):
    train = ids(path=file, holdout_prompts=2, part="train")
    assert ids(path=file, holdout_prompts=2, part="train", skip_rows=2, max_rows=2) == train[2:4]


def test_skipping_all_rows_is_refused(file):
    with pytest.raises(DataError, match="no prompts are left"):
        ids(path=file, skip_rows=7)
