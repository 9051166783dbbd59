"""`rewarden doctor` as a shell sees it, and every command of its page."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from rewarden.data.write import write_jsonl
from rewarden.worlds import TripDesk

PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"
USER, ANSWER, OTHER = (
    {"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("assistant", "c"))
)
GOOD = {"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]}


@pytest.fixture
def folder(world_files, here):
    """The files that the page names."""
    shutil.copytree(world_files.policy, here / "model")
    rows = [json.loads(line) for line in world_files.pairs.read_text().splitlines()]
    write_jsonl(here / "pairs.jsonl", rows)
    opening = [{"role": "user", "content": TripDesk().start(40).messages[-1].text}]
    write_jsonl(here / "held.jsonl", [{**rows[0], "prompt": opening}])
    shutil.copy(world_files.prompts, here / "prompts.jsonl")
    return here


def page_commands():
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith("rewarden ")]


def test_the_page_has_the_commands():
    assert len(page_commands()) >= 5


@pytest.mark.parametrize("line", page_commands())
def test_every_command_of_the_page_runs(folder, shell, line):
    code, out, err = shell(*shlex.split(line, comments=True)[1:])
    assert err == ""
    assert code in (0, 1)  # the scripted pairs may lean to longer answers; nothing is an error
    if "--json" in line:
        facts = json.loads(out)
        assert (facts["exit_code"], facts["counts"]["error"]) == (code, 0)
        assert list(facts["sources"]) == ["data", "eval_data"]
    else:
        assert "rows by type: " in out
        assert ("loss mask" in out) == ("--model" in line)


@pytest.mark.parametrize(
    ("row", "code", "word"),
    [
        ({**GOOD, "prompt": "d"}, 0, "nothing found"),
        ({**GOOD, "prompt": "d", "preference": 0.5}, 0, "note    tie: 1"),
        (GOOD, 1, "warning duplicate_row: 1"),
        ({"prompt": "d"}, 3, "error   mixed_types: 1"),
        ({**GOOD, "margin": "big"}, 3, "error   bad_margin: 1"),
    ],
)
def test_the_exit_code_says_how_bad_it_is(here, shell, row, code, word):
    Path("rows.jsonl").write_text(json.dumps(GOOD) + "\n" + json.dumps(row) + "\n")
    assert shell("doctor", "rows.jsonl")[0] == code
    got, out, err = shell("doctor", "rows.jsonl", "--json")
    assert (got, err, json.loads(out)["exit_code"]) == (code, "", code)
    assert word in shell("doctor", "rows.jsonl")[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.jsonl"], "nowhere.jsonl: no such file or folder"),
        (["rows.jsonl", "--eval-data", "nowhere.jsonl"], "nowhere.jsonl: no such file or folder"),
        (["rows.jsonl", "--model", "nowhere"], "nowhere"),
        (["rows.jsonl", "--max-length", "5"], "max_length is in tokens, which needs a model"),
        (["rows.jsonl", "--template", "hh"], "template is 'hh', but no model is given"),
        (["rows.jsonl", "--target", "pairs"], "target is 'pairs'"),
        (["rows.jsonl", "--format", "hhh"], "data.format is 'hhh'"),
        (["rows.jsonl", "--columns", "prompt"], "columns: got 'prompt'; write name=column"),
        (["rows.jsonl", "--eval-split", "train"], "eval_data is the training data itself"),
        (["rows.jsonl", "--rows", "-1"], "rows is -1"),
    ],
)
def test_what_cannot_be_looked_at_is_one_message_and_exit_code_2(here, shell, words, message):
    Path("rows.jsonl").write_text(json.dumps(GOOD) + "\n")
    code, out, err = shell("doctor", *words)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert "Traceback" not in err


def test_an_unknown_template_is_refused(folder, shell):
    code, _, err = shell("doctor", "pairs.jsonl", "--model", "model", "--template", "chatt")
    assert code == 2
    assert "chatt" in err


def test_splits_of_one_folder_are_compared(here, shell):
    there = here / "there"
    there.mkdir()
    (there / "train.jsonl").write_text(json.dumps(GOOD) + "\n")
    (there / "test.jsonl").write_text(json.dumps({**GOOD, "prompt": [{**USER, "content": " A!"}]}) + "\n")
    code, out, _ = shell("doctor", "there", "--eval-split", "test", "--json")
    assert code == 1
    found = {one["code"]: one for one in json.loads(out)["findings"]}
    assert found["prompt_in_both_splits"]["examples"] == [
        {"where": "there/test.jsonl:1", "detail": "also at there/train.jsonl:1"}
    ]


def test_renamed_columns_are_read(here, shell):
    Path("rows.jsonl").write_text(json.dumps({"question": "a", "chosen": "b", "rejected": "c"}) + "\n")
    code, out, _ = shell("doctor", "rows.jsonl", "--columns", "prompt=question", "--json")
    assert (code, json.loads(out)["sources"]["data"]["types"]) == (0, {"preference": 1})


def test_help_names_the_options(shell):
    code, out, _ = shell("doctor", "--help")
    assert code == 0
    names = ("--model", "--eval-data", "--max-length", "--max-prompt-length", "--template", "--rows", "--json")
    assert [name for name in names if name not in out] == []
