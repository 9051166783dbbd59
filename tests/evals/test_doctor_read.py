"""The doctor reads on: past broken lines, elements, files and rows; and every word a reader may say has an explanation."""

import ast
import gzip
import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from doctor_desk import as_lines, clean, put

from rewarden.data.read import read_rows
from rewarden.data.sources import Data, load_comparisons, load_conversations, load_prompts
from rewarden.errors import ConfigError, DataError
from rewarden.evals.doctor import Diagnosis, Doctor, diagnose
from rewarden.evals.doctor_kinds import KINDS

ROOT = Path(__file__).parents[2]


def counts(diagnosis: Diagnosis) -> dict[str, int]:
    return {found.code: found.count for found in diagnosis.findings}


def examine(path: Path, **options: object) -> Diagnosis:
    split = {"split": options.pop("split")} if "split" in options else {}
    return diagnose(Doctor(data={"path": str(path), **split}, **options))  # type: ignore[arg-type]


def test_the_irregular_rows_of_hh_have_the_counts_of_their_source(shared):
    folder = shared / "data" / "hh_rlhf_helpful"
    (stated,) = re.findall(r"Irregular rows \(of 6240\): (\{.*?\})", (folder / "SOURCE.md").read_text(encoding="utf-8"))
    diagnosis = examine(folder / "original", split="test")
    found = counts(diagnosis)
    assert {code: found.get(code) for code in ast.literal_eval(stated)} == ast.literal_eval(stated)
    # Beyond these: two rows whose rejected answer says the user's words again (helpful-base, lines 414 and 528).
    assert found.keys() - ast.literal_eval(stated).keys() == {"answer_repeats_prompt"}
    assert [
        one.where.rsplit("/", 1)[1] for f in diagnosis.findings if f.code == "answer_repeats_prompt" for one in f.examples
    ] == [
        "helpful-base.test.jsonl.gz:414",
        "helpful-base.test.jsonl.gz:528",
    ]
    source = diagnosis.examined[0].source
    assert (source.num_rows, len(source.entries), source.types) == (6240, 6184, {"hh_pair": 6240})
    assert source.left_out == {"chosen_equals_rejected": 36, "consecutive_same_role": 18, "ends_with_human": 2}
    assert diagnosis.exit_code == 1


def test_the_lines_of_each_irregularity_are_those_that_are_flagged(shared):
    file = shared / "data" / "hh_rlhf_helpful" / "edge_cases.jsonl"
    flags = [json.loads(line)["flags"] for line in file.read_text(encoding="utf-8").splitlines()]
    found = {one.code: one for one in examine(file).findings}
    assert found.keys() == {flag for row in flags for flag in row} | {"ignored_column"}
    for flag in found.keys() - {"ignored_column"}:
        lines = [number for number, row in enumerate(flags, 1) if flag in row]
        assert found[flag].count == len(lines), flag
        assert [one.where for one in found[flag].examples] == [f"{file}:{line}" for line in lines[:5]], flag


@pytest.mark.parametrize(
    ("name", "load", "target"),
    [
        ("hh_rlhf_helpful/edge_cases.jsonl", load_comparisons, "comparisons"),
        ("hh_rlhf_helpful/edge_cases.jsonl", load_conversations, "conversations"),
        ("hh_rlhf_helpful/edge_cases.jsonl", load_prompts, "prompts"),
        ("oasst_100/en_100_tree.jsonl", load_comparisons, "comparisons"),
        ("oasst_100/en_100_tree.jsonl", load_conversations, "conversations"),
    ],
)
def test_what_can_be_used_is_what_the_loaders_use(shared, name, load, target):
    path = shared / "data" / name
    loaded = load(Data(path=str(path), on_bad_row="drop"))
    source = examine(path, target=target).examined[0].source
    assert [entry.record.id.split("~")[0] for entry in source.entries] == [row.id.split("~")[0] for row in loaded.rows]
    assert source.left_out + source.refused == loaded.dropped


def test_all_faults_of_one_file_are_reported_together(tmp_path):
    rows = clean("pairs")
    rows[1]["chosen"] = 3
    rows[2]["prompt"] = []
    lines = as_lines(rows)
    lines[0] = "{\n"
    lines[3] = '{"a": 1, "a": 2}\n'
    lines[5] = '"text"\n'
    diagnosis = examine(put(tmp_path / "rows.jsonl", "".join(lines)))
    assert counts(diagnosis) == {
        "broken_json": 1, "repeated_key": 1, "bad_answer": 1, "bad_prompt": 1, "mixed_types": 1,
    }  # fmt: skip
    assert diagnosis.exit_code == 3
    source = diagnosis.examined[0].source
    assert (source.num_rows, source.num_unreadable, source.types) == (4, 2, {"preference": 3, "prompt_only": 1})
    assert [entry.where.rsplit(":", 1)[1] for entry in source.entries] == ["5", "6"]


def test_a_file_that_cannot_be_read_leaves_the_others_of_its_folder(tmp_path):
    put(tmp_path / "a.jsonl", as_lines(clean("pairs"))[0])
    put(tmp_path / "b.json", '["cut off')
    put(tmp_path / "c.jsonl.gz", b"no gzip")
    put(tmp_path / "d.jsonl", "")
    put(tmp_path / "e.jsonl", as_lines(clean("pairs"))[1])
    diagnosis = examine(tmp_path)
    assert counts(diagnosis) == {"broken_json": 1, "damaged_file": 1, "no_rows": 1}
    assert len(diagnosis.examined[0].source.entries) == 2


def test_reading_goes_on_behind_what_cannot_be_read(tmp_path):
    elements = [f' {{"n": {n}, "inner": [\n  {{"x": 1}}]}}' for n in range(5)]
    for spoil in (
        lambda e: e.replace('"n"', "n"),
        lambda e: e.replace('{"x": 1}', '{"x" 1}'),
        lambda e: e.replace("1}]", "1}]]"),
    ):
        spoiled = [spoil(e) if n in (1, 3) else e for n, e in enumerate(elements)]
        path = put(tmp_path / "a.json", "[\n" + ",\n".join(spoiled) + "\n]")
        broken: list = []
        rows = list(read_rows(path, broken=broken.append))
        assert [(row.fields["n"], row.name) for row in rows] == [(n, f"a.json:{2 + 2 * n}[{n}]") for n in (0, 2, 4)]
        assert [(error.reason, error.where.rsplit(":", 1)[1] in ("4", "5", "8", "9")) for error in broken] == [
            ("broken_json", True)
        ] * 2
        with pytest.raises(DataError, match="broken JSON"):
            list(read_rows(path))


def test_a_missing_comma_loses_no_element(tmp_path):
    broken: list = []
    path = put(tmp_path / "a.json", '[{"n": 0} {"n": 1},\n {"n": 2}]')
    assert [row.fields["n"] for row in read_rows(path, broken=broken.append)] == [0, 1, 2]
    assert [str(error) for error in broken] == [
        f"{path}:1: broken JSON at column 11: Expecting ',' or ']' after an element; mend the file"
    ]


def test_an_array_that_is_cut_off_ends_there(tmp_path):
    broken: list = []
    path = put(tmp_path / "a.json", '[{"n": 0},\n {"n": 1},\n {"n": ')
    assert [row.fields["n"] for row in read_rows(path, broken=broken.append)] == [0, 1]
    assert [error.where for error in broken] == [f"{path}:3"]


def test_lines_before_damage_in_a_gzip_file_are_read(tmp_path):
    whole = gzip.compress("".join(f'{{"n": {n}}}\n' for n in range(20_000)).encode())
    path = put(tmp_path / "a.jsonl.gz", whole[: len(whole) // 2])
    broken: list = []
    rows = list(read_rows(path, broken=broken.append))
    assert 0 < len(rows) < 20_000
    assert [(error.reason, error.where) for error in broken] == [("damaged_file", f"{path}:{len(rows) + 1}")]


def test_every_reason_of_the_readers_is_explained():
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "rewarden" / "data").rglob("*.py"))
    patterns = (
        r'(?:Drop|Notice)\("(\w+)"',
        r'BadRow\(\s*row\.where,\s*"(\w+)"',
        r'Unreadable\(\s*"(\w+)"',
        r'(?:return|_id else|\) or \() ?"(\w+_\w+)"',
        r'(?:noticed|dropped)\["(\w+)"\]',
    )
    reasons = {reason for pattern in patterns for reason in re.findall(pattern, code)}
    assert len(reasons) > 50
    sides = {"_consecutive_same_role", "_ends_with_human", "_empty_final_assistant", "_empty_turn_inside"}
    reasons |= {f"{side}{what}" for side in ("chosen", "rejected") for what in sides}
    elsewhere = {"in_the_other_part", "beyond_max_rows", "skipped_rows", "bad_"}  # of the loaders' options, not of the rows
    assert reasons - elsewhere - KINDS.keys() == set()


def test_every_code_of_the_doctor_is_explained():
    files = (ROOT / "rewarden" / "evals").glob("doctor*.py")
    code = "\n".join(path.read_text(encoding="utf-8") for path in files)
    used = set(re.findall(r'add\((?:SOURCE|source|source\.name|name|evaluation\.name), "(\w+)"', code))
    used |= set(re.findall(r'row\.add\("(\w+)"', code))
    assert len(used) > 30
    assert used - KINDS.keys() == set()


def test_what_rows_are_for_can_be_told_and_is_else_told_from_the_columns(tmp_path):
    path = put(tmp_path / "rows.jsonl", "".join(as_lines(clean("pairs"))))
    targets = {target: examine(path, target=target).examined[0].source.target for target in (None, "prompts", "conversations")}
    assert targets == {None: "comparisons", "prompts": "prompts", "conversations": "conversations"}
    assert counts(examine(path, target="unpaired")) == {"missing_column": 6, "nothing_usable": 1}


def test_dialogues_are_prompts_when_most_end_with_the_user(tmp_path):
    rows = [{"messages": row["prompt"]} for row in clean("prompts")] + clean("messages")[:1]
    diagnosis = examine(put(tmp_path / "rows.jsonl", "".join(as_lines(rows))))
    assert diagnosis.examined[0].source.target == "prompts"
    assert counts(diagnosis) == {"ends_with_assistant": 1}


def test_columns_are_renamed_and_rows_without_them_refused(tmp_path):
    rows = [{"question": row["prompt"], "completion": row["completion"]} for row in clean("completions")]
    del rows[2]["question"]
    path = put(tmp_path / "rows.jsonl", "".join(as_lines(rows)))
    diagnosis = diagnose(Doctor(data={"path": str(path), "columns": {"prompt": "question"}}))
    assert counts(diagnosis) == {"missing_column": 1}
    assert diagnosis.findings[0].examples[0].where == f"{path}:3"
    assert len(diagnosis.examined[0].source.entries) == 5


def test_what_cannot_be_looked_at_is_an_error_of_the_command(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        examine(tmp_path / "nowhere.jsonl")
    path = put(tmp_path / "rows.jsonl", "".join(as_lines(clean("pairs"))))
    with pytest.raises(ConfigError, match="format is 'hh', which holds no unpaired"):
        diagnose(Doctor(data={"path": str(path), "format": "hh"}, target="unpaired"))
    with pytest.raises(ConfigError, match=r"nothing"):
        examine(path, model={"model_name_or_path": str(tmp_path / "nothing")})


def test_a_file_of_unknown_columns_is_named_row_by_row(tmp_path):
    diagnosis = examine(put(tmp_path / "rows.jsonl", '{"question": "a", "answer": "b"}\n' * 3))
    assert counts(diagnosis) == {"missing_column": 3, "nothing_usable": 1}
    assert diagnosis.examined[0].source.types == {"unknown": 3}
