"""`rewarden eval win-rate` as a shell sees it, and every such command of its page."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "evaluation.md"
KEYS = [
    "win_rate",
    "standard_error",
    "discrete_win_rate",
    "length_controlled_win_rate",
    "n_total",
    "avg_length",
    "intervals",
    "confidence",
    "warnings",
]


@pytest.fixture
def folder(shared, tmp_path, monkeypatch):
    """The files that the page names: those of claude-2."""
    alpaca = shared / "data/alpaca_eval"
    shutil.copytree(alpaca / "lc_reference", tmp_path / "lc_reference")
    shutil.copy(alpaca / "full/claude-2/annotations.json.gz", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def page_blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def page_commands():
    lines = [line for block in page_blocks("bash") for line in block.splitlines()]
    return [line for line in lines if line.startswith("rewarden eval win-rate")]


def test_the_page_has_the_commands():
    assert len(page_commands()) >= 4


@pytest.mark.parametrize("line", page_commands())
def test_every_command_of_the_page_runs(folder, shell, line):
    code, out, err = shell(*shlex.split(line, comments=True)[1:])
    assert (code, err) == (0, "")
    if "--json" in line:
        facts = json.loads(out)
        assert list(facts)[: len(KEYS)] == KEYS
        assert facts["length_controlled_win_rate"] == pytest.approx(28.155, abs=0.02)
    else:
        assert "| win rate | 17.19 |" in out
        assert ("NOT comparable" in out) == ("--lc-reference" not in line)


def test_the_recipe_of_the_page_runs(folder, shell):
    (block,) = [block for block in page_blocks("yaml") if "kind: alpaca_eval" in block]
    (folder / "my_win_rate.yaml").write_text(block)
    code, _, _ = shell("run", "my_win_rate.yaml")
    assert code == 0
    facts = json.loads((folder / "runs/win_rate/win_rate.json").read_text())
    _, out, _ = shell(
        "eval", "win-rate", "annotations.json.gz", "--lc-reference", "lc_reference", "--match-leaderboard", "--json"
    )
    assert facts == json.loads(out)


def test_json_is_all_of_standard_output_and_holds_no_nan(tmp_path, shell):
    rows = [{"instruction": f"{i}", "output_1": "a", "output_2": "b", "preference": 1.5} for i in range(3)]
    (tmp_path / "ties.json").write_text(json.dumps(rows))
    code, out, err = shell("eval", "win-rate", tmp_path / "ties.json", "--json")
    assert (code, err) == (0, "")

    def refuse(constant):
        raise AssertionError(constant)

    facts = json.loads(out, parse_constant=refuse)
    assert (facts["win_rate"], facts["length_controlled_win_rate"], facts["model"]) == (50, None, "unnamed")
    assert len(facts["warnings"]) >= 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.json"], "error: nowhere.json: no such file or folder"),
        (["rows.json"], "rows.json:1[0]: preference is 3"),
        (["rows.json", "--lc-reference", "nowhere"], "rows.json:1[0]: preference is 3"),
        (["good.json", "--lc-reference", "nowhere"], "error: nowhere: no such folder of length-control tables"),
        (["good.json", "--lc-c", "some"], "lc_c is 'some'; use cv, none, or a number above 0"),
        (["good.json", "--lc-c", "-1"], "lc_c is -1; use cv, none, or a number above 0"),
        (["good.json", "--lc-c", "nan"], "lc_c is nan"),
        (["good.json", "--confidence", "95"], "confidence is 95.0"),
        (["good.json", "--resamples", "1"], "resamples is 1"),
        (["good.json", "--generator", "them"], "no row of the model 'them'; did you mean 'they'?"),
    ],
)
def test_what_is_wrong_is_one_message_and_exit_code_2(tmp_path, monkeypatch, shell, words, message):
    monkeypatch.chdir(tmp_path)
    row = {"instruction": "x", "output_1": "a", "output_2": "b", "generator_2": "they"}
    Path("rows.json").write_text(json.dumps([row | {"preference": 3}]))
    Path("good.json").write_text(json.dumps([row | {"preference": 2}]))
    code, out, err = shell("eval", "win-rate", *words)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert "Traceback" not in err


def test_help_names_the_command_and_its_options(shell):
    code, out, _ = shell("eval", "--help")
    assert code == 0
    assert "win-rate" in out
    code, out, _ = shell("eval", "win-rate", "--help")
    assert code == 0
    assert [name for name in ("--lc-reference", "--match-leaderboard", "--json") if name not in out] == []
