"""`best_of_n_data`: the winners as rows to imitate, and a count of every prompt without one."""

import json
import math

import pytest

from rewarden.collect.choice import Choice
from rewarden.collect.winners import BestOfNData
from rewarden.data.sources import Data, load_conversations
from rewarden.errors import ConfigError, DataError
from tests.collect.stores import write_scores, write_store

NAN = math.nan
TEXTS = [["a", "b", "c"], ["d", " ", "f"], ["g", "h", "i"], ["j", "k", "l"], ["m", "n", "o"]]
ENDED = ["eos"] * 9 + ["eos", "length", "eos"] + ["eos"] * 3
SCORE = [[0, 2, 2], [1, 3, 2], [NAN, NAN, NAN], [1, 5, 3], [4, 4, 4]]
"""Winners: b (the first of equal ones), an empty answer, none, a cut answer, m (nothing to choose)."""


@pytest.fixture
def folders(tmp_path):
    prompts = [
        {"id": f"p{p}", "prompt": [{"role": "user", "content": f"q{p}"}], "completion": "recorded", "topic": "x"}
        for p in range(5)
    ]
    samples = write_store(tmp_path / "samples", TEXTS, prompts=prompts, ended=ENDED)
    return samples, write_scores(tmp_path / "scores", samples, "proxy", SCORE)


def made(folders, out, **fields):
    samples, scores = folders
    out.mkdir(exist_ok=True)
    cfg = BestOfNData(samples=str(samples), scores=str(scores), **{"choose": Choice(scorer="proxy"), **fields})
    facts = cfg.run(out)
    return facts, [json.loads(line) for line in (out / "sft.jsonl").read_text().splitlines()]


def test_winners_become_prompt_completion_rows_that_sft_reads(folders, tmp_path):
    facts, rows = made(folders, tmp_path / "out")
    assert [row["completion"] for row in rows] == [[{"role": "assistant", "content": text}] for text in ("b", "m")]
    assert rows[0]["prompt"] == [{"role": "user", "content": "q0"}]
    assert (rows[0]["id"], rows[0]["topic"], rows[0]["best_of_n_sample"], rows[0]["best_of_n_score"]) == ("p0", "x", 1, 2.0)
    assert facts == {
        "winners/rows": 2.0, "winners/without_score": 1.0, "winners/empty": 1.0, "winners/cut": 1.0, "winners/tied": 0.0,
    }  # fmt: skip
    loaded = load_conversations(Data(path=str(tmp_path / "out" / "sft.jsonl")))
    assert [c.messages[-1].text for c in loaded.rows] == ["b", "m"]
    assert [c.meta["prompt_messages"] for c in loaded.rows] == [1, 1]


def test_only_the_first_n_answers_are_looked_at(folders, tmp_path):
    _, rows = made(folders, tmp_path / "out", n=1)
    assert [row["completion"][0]["content"] for row in rows] == ["a", "d", "j", "m"]


def test_cut_winners_can_be_kept_and_tied_ones_left_out(folders, tmp_path):
    facts, rows = made(folders, tmp_path / "out", keep_cut=True, keep_tied=False)
    assert [row["completion"][0]["content"] for row in rows] == ["b", "k"]
    assert (facts["winners/cut"], facts["winners/tied"]) == (0.0, 1.0)


def test_more_than_there_are_and_nothing_left_are_refused(folders, tmp_path):
    with pytest.raises(ConfigError, match=r"n: 4 with 3 answers to each prompt in .*use 1 to 3, or draw more"):
        made(folders, tmp_path / "out", n=4)
    samples, scores = folders
    write_scores(scores, samples, "none", [[NAN] * 3] * 5)
    with pytest.raises(DataError, match=r"'none' has no score for any answer .0 ok, 15 not_applicable"):
        made(folders, tmp_path / "out", choose=Choice(scorer="none"))
    write_scores(scores, samples, "blank", [[NAN] * 3, [0, 1, 0], [NAN] * 3, [0, 9, 0], [NAN] * 3])
    with pytest.raises(DataError, match=r"no winner is left to learn from .1 cut, 1 empty, 3 without_score"):
        made(folders, tmp_path / "out", choose=Choice(scorer="blank"))


def test_scores_of_other_samples_are_refused(folders, tmp_path):
    samples = write_store(tmp_path / "others", [["x", "y", "z"]] * 5)
    with pytest.raises(DataError, match="scores are of other samples"):
        made((samples, folders[1]), tmp_path / "out")
