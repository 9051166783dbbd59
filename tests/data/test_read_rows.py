import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from rewarden.data.read import VALUE, read_rows
from rewarden.errors import DataError

ROWS = [{"prompt": "Wie geht's, ñandú 你好?"}, {"prompt": "b"}, {"prompt": "c", "n": 3}]


def lines(rows: list) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def fields(path: Path, **options: str) -> list:
    return [row.fields for row in read_rows(path, **options)]


def wheres(path: Path, **options: str) -> list[str]:
    return [row.where for row in read_rows(path, **options)]


def put(path: Path, content: str | bytes) -> Path:
    raw = content.encode("utf-8") if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(raw) if path.name.endswith(".gz") else raw)
    return path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", lines(ROWS)),
        ("a.jsonl.gz", lines(ROWS)),
        ("a.json", json.dumps(ROWS)),
        ("a.json.gz", json.dumps(ROWS, indent=1)),
        ("b.json", json.dumps({"version": [1, {"data": 2}], "data": ROWS, "after": "x"})),
        ("c.json", lines(ROWS)),
    ],
)
def test_every_text_form_gives_the_same_rows(tmp_path: Path, name: str, text: str) -> None:
    assert fields(put(tmp_path / name, text)) == ROWS


def test_parquet_gives_the_same_rows_numbered_from_one(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [{"prompt": "ä", "turns": [{"role": "user", "content": "x"}], "n": None}, {"prompt": "b", "turns": [], "n": 2}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    read = list(read_rows(tmp_path / "a.parquet"))
    assert [row.fields for row in read] == rows
    assert [row.name for row in read] == ["a.parquet:1", "a.parquet:2"]


def test_where_is_the_path_and_line_and_name_is_without_the_folder(tmp_path: Path) -> None:
    path = put(tmp_path / "deep" / "a.jsonl", lines(ROWS))
    rows = list(read_rows(path))
    assert [row.where for row in rows] == [f"{path}:1", f"{path}:2", f"{path}:3"]
    assert [row.name for row in rows] == ["a.jsonl:1", "a.jsonl:2", "a.jsonl:3"]


def test_a_row_of_an_array_says_its_line_and_position(tmp_path: Path) -> None:
    path = put(tmp_path / "a.json", '[\n  {"a": "x\\ny"},\n  {"a":\n 2}, {"a": 3},\n\n {"a": 4}]\n')
    assert wheres(path) == [f"{path}:2[0]", f"{path}:3[1]", f"{path}:4[2]", f"{path}:6[3]"]
    inner = put(tmp_path / "b.json", '{\n"n": 1,\n"data": [\n{"a": 1},\n{"a": 2}]}')
    assert wheres(inner) == [f"{inner}:4[0]", f"{inner}:5[1]"]


def test_line_separators_inside_a_text_do_not_end_a_line(tmp_path: Path) -> None:
    text = "one\u2028two\u2029three\x85four\x0bfive"
    path = put(tmp_path / "a.jsonl", json.dumps({"a": text}, ensure_ascii=False) + "\r\n" + '{"a": 1}')
    assert fields(path) == [{"a": text}, {"a": 1}]
    assert wheres(path)[1] == f"{path}:2"


def test_byte_order_mark_and_blank_lines_are_tolerated_and_counted(tmp_path: Path) -> None:
    path = put(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"a": 1}\n\n  \r\n{"a": 2}\n\n')
    rows = read_rows(path)
    assert [(row.fields["a"], row.name) for row in rows] == [(1, "a.jsonl:1"), (2, "a.jsonl:4")]
    assert rows.noticed == {"byte_order_mark": 1, "blank_line": 3}
    array = read_rows(put(tmp_path / "a.json", b'\xef\xbb\xbf [{"a": 1}] \n'))
    assert [row.fields for row in array] == [{"a": 1}]
    assert array.noticed == {"byte_order_mark": 1}


def test_rows_that_are_not_objects_stand_under_value(tmp_path: Path) -> None:
    assert fields(put(tmp_path / "a.jsonl", '"hi"\n["u", "a"]\n')) == [{VALUE: "hi"}, {VALUE: ["u", "a"]}]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"a": 1}\n{"a": 2,}\n', r"a\.jsonl:2: broken JSON at column \d+: "),
        ("a.jsonl", '{"a": 1}\n\n  {"a" 2}\n', r"a\.jsonl:3: broken JSON at column 8: Expecting ':'"),
        ("a.jsonl.gz", '{"a": 1}\n{"a": 2', r"a\.jsonl\.gz:2: broken JSON at column \d+: "),
        ("a.json", '[{"a": 1},\n {"b" 2}]', r"a\.json:2: broken JSON at column 7: Expecting ':'"),
        ("a.json", '[{"a": 1}\n {"b": 2}]', r"a\.json:2: broken JSON at column 2: Expecting ',' or ']'"),
        ("a.json", '[{"a": 1},\n {"b": 2}', r"a\.json:2: broken JSON at column \d+: Expecting ',' or ']'"),
        ("a.json", '[{"a": 1}]\n[2]', r"a\.json:2: broken JSON at column 1: Extra data"),
        ("a.json", '{"a": 1} 7', r"a\.json:1: broken JSON at column 10: Extra data"),
        ("a.json", '{"rows": []}', r"a\.json:1: an object with keys rows; rows are a JSON array"),
        ("a.json", '"text"', r"a\.json:1: starts with '\"text\"'"),
        ("a.jsonl", "", r"a\.jsonl: no rows in the file"),
        ("a.jsonl", "\n \n", r"a\.jsonl: no rows in the file"),
        ("a.json", "  ", r"a\.json: no rows in the file"),
        ("a.json", "[ ]", r"a\.json: no rows in the file"),
        ("a.csv", "a,b", r"a\.csv: cannot tell the kind of file"),
        ("a.jsonl", '{"a": "\\ud83d"}\n', r"a\.jsonl:1: \\ud83d is half of a character"),
        ("a.json", '[\n{"a": "x\\uDE00"}]', r"a\.json:2: \\ude00 is half of a character"),
    ],
)
def test_what_cannot_be_read_is_refused_with_file_and_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        list(read_rows(put(tmp_path / name, text)))


def test_a_whole_surrogate_pair_is_one_character(tmp_path: Path) -> None:
    assert fields(put(tmp_path / "a.jsonl", '{"a": "\\ud83d\\ude00"}')) == [{"a": "\U0001f600"}]


def test_bytes_that_are_not_utf8_are_refused_with_line_and_column(tmp_path: Path) -> None:
    latin = b'{"a": 1}\n{"a": "caf\xe9"}\n'
    with pytest.raises(DataError, match=r"a\.jsonl:2: byte 0xe9 at column 11 is not UTF-8; save the file as UTF-8"):
        list(read_rows(put(tmp_path / "a.jsonl", latin)))
    with pytest.raises(DataError, match=r"a\.json:2: byte 0xe9 at column 11 is not UTF-8"):
        list(read_rows(put(tmp_path / "a.json", latin)))


def test_damaged_gzip_and_parquet_are_refused(tmp_path: Path) -> None:
    whole = gzip.compress(lines([{"a": index} for index in range(5000)]).encode())
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"cut\.jsonl\.gz:\d+: the gzip data are damaged or cut off"):
        list(read_rows(tmp_path / "cut.jsonl.gz"))
    (tmp_path / "plain.json.gz").write_bytes(b"[1]")
    with pytest.raises(DataError, match="the gzip data are damaged"):
        list(read_rows(tmp_path / "plain.json.gz"))
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match=r"a\.parquet:1: not readable as Parquet"):
        list(read_rows(tmp_path / "a.parquet"))


def test_text_is_read_as_utf8_whatever_the_locale(tmp_path: Path) -> None:
    path = put(tmp_path / "a.jsonl", lines(ROWS))
    code = "import sys; from rewarden.data.read import read_rows; print(ascii(next(read_rows(sys.argv[1])).fields['prompt']))"
    done = subprocess.run(
        [sys.executable, "-X", "utf8=0", "-c", code, str(path)],
        env={"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PATH": "/usr/bin"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == ascii(ROWS[0]["prompt"])


def test_reading_text_files_imports_neither_torch_nor_datasets(tmp_path: Path) -> None:
    path = put(tmp_path / "a.jsonl", lines(ROWS))
    code = "import sys; from rewarden.data.read import read_rows; list(read_rows(sys.argv[1])); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    assert {"torch", "datasets", "pyarrow"} & set(done.stdout.split()) == set()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.train.jsonl", "a-train.json", "sub/train.jsonl.gz", "c_valid.jsonl", "d.test.jsonl", ".hidden/train.jsonl"):
        content = [{"from": name}]
        put(tmp_path / name, json.dumps(content) if name.endswith(".json") else lines(content))
    put(tmp_path / "README.md", "no data")
    put(tmp_path / "index.json", "{}")
    return tmp_path


def test_a_folder_gives_the_files_of_a_split_in_order_of_name(folder: Path) -> None:
    rows = read_rows(folder)
    assert [row.fields["from"] for row in rows] == ["a-train.json", "b.train.jsonl", "sub/train.jsonl.gz"]
    assert rows.noticed == {"file_of_another_split": 3}  # valid, test, index
    assert [row.name for row in read_rows(folder)] == ["a-train.json:1[0]", "b.train.jsonl:1", "sub/train.jsonl.gz:1"]
    assert fields(folder, split="validation") == fields(folder, split="valid") == [{"from": "c_valid.jsonl"}]
    assert fields(folder, split="test") == [{"from": "d.test.jsonl"}]
    assert fields(folder, subset="sub") == [{"from": "sub/train.jsonl.gz"}]


def test_a_folder_without_split_names_is_all_train(tmp_path: Path) -> None:
    put(tmp_path / "y.jsonl", lines([{"n": 2}]))
    put(tmp_path / "x.jsonl", lines([{"n": 1}]))
    assert fields(tmp_path) == [{"n": 1}, {"n": 2}]
    with pytest.raises(DataError, match="no file of split 'test'; no file name names a split"):
        list(read_rows(tmp_path, split="test"))


def test_paths_splits_and_subsets_that_do_not_exist_are_refused_with_a_hint(folder: Path) -> None:
    with pytest.raises(DataError, match=r"no file of split 'tast'; did you mean 'test'\?"):
        list(read_rows(folder, split="tast"))
    with pytest.raises(DataError, match=r"subset='sup' is no subfolder; did you mean 'sub'\?"):
        list(read_rows(folder, subset="sup"))
    with pytest.raises(DataError, match=r"no such file or folder; did you mean 'b\.train\.jsonl'\?"):
        list(read_rows(folder / "b.trian.jsonl"))
    with pytest.raises(DataError, match="one file; a subset is a subfolder"):
        list(read_rows(folder / "b.train.jsonl", subset="sub"))
    with pytest.raises(DataError, match="split='test', but this is one file"):
        list(read_rows(folder / "b.train.jsonl", split="test"))
    assert fields(folder / "d.test.jsonl", split="test") == [{"from": "d.test.jsonl"}]
    with pytest.raises(DataError, match="no file ends in"):
        list(read_rows(put(folder / "empty" / "x.txt", "").parent))


def test_every_real_file_is_read_with_the_row_counts_its_source_states(shared: Path) -> None:
    counts = {
        "hh_rlhf_helpful/original/helpful-base.test.jsonl.gz": 2354,
        "hh_rlhf_helpful/original/helpful-rejection-sampled.test.jsonl.gz": 2749,
        "hh_rlhf_helpful/original/helpful-online.test.jsonl.gz": 1137,
        "hh_rlhf_helpful/resplit/train.jsonl.gz": 5240,
        "hh_rlhf_helpful/resplit/test.jsonl.gz": 1000,
        "alpaca_farm/outputs_pairs.json": 6,
        "alpaca_farm/eval_gpt-3.5-turbo-0301.json": 805,
        "alpaca_eval/full/text_davinci_001/annotations.json.gz": 803,
        "moss_rlhf/ppo_data/train.json": 31,
        "moss_rlhf/ppo_data/valid.json": 31,
        "oasst_100/en_100_tree.jsonl": 100,
        "oasst_100/prompt_lottery_en_250_text.jsonl": 250,
        "ultrainteract/ultrainteract_format_from_gsm8k.jsonl": 700,
        "pandalm/testset-v1.json": 999,
        "llmbar/chosen_rejected.jsonl": 885,
        "taskmaster/tm4_dialogs.messages.jsonl.gz": 3710,
        "gsm8k/test.jsonl.gz": 1319,
        "self_instruct/user_oriented_instructions.jsonl": 252,
        "mt_bench/dummy_conversation.json": 500,
    }
    assert {name: sum(1 for _ in read_rows(shared / "data" / name)) for name in counts} == counts


@pytest.mark.parametrize("row", ["[" * 100_000, '{"a": ' + "9" * 5000 + "}"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_json_that_python_cannot_hold_is_refused_with_its_place(row, name, tmp_path):
    file = put(tmp_path / name, row if name == "a.jsonl" else f"[{row}]")
    with pytest.raises(DataError, match=rf"{name}:1: (JSON that|broken JSON at column 2:) cannot be read"):
        fields(file)
