"""Votes on pairs: the columns, out of fold scoring, strata, and what is refused."""

import json
import re

import pytest

from rewarden.collect.vote import Vote
from rewarden.data.sources import Data, load_comparisons
from rewarden.data.write import write_jsonl
from rewarden.errors import ConfigError, DataError, ScoreError
from rewarden.spec import Spec
from rewarden.types import Score

HERE = f"{__file__}:"
MEAN, STD = "mean preference difference", "std preference difference"
CHOSEN = [3.71875, 0.58984375, 3.390625, 0.006805419921875, -0.6953125, 1.0390625, 1.4140625, 0.8359375, 3.078125, 2.0]
REJECTED = [3.546875, 0.9921875, 2.125, -0.330078125, 1.171875, 1.2578125, 1.078125, 1.0546875, 3.546875, 2.265625]


class Published(Spec):
    """A scorer whose members give what a published row says."""

    def build(self):
        return self

    def score(self, conversations):
        return [
            Score(value=0.0, members=tuple(CHOSEN if row.messages[-1].text.startswith("good") else REJECTED))
            for row in conversations
        ]


class Lengths(Spec):
    """Members who like long answers, each with an offset of its own, shifted by `mark`; some texts are too long."""

    mark: float = 0.0
    members: int = 2

    def build(self):
        return self

    def score(self, conversations):
        out = []
        for row in conversations:
            length = len(row.messages[-1].text)
            one = Score(value=0.0, members=tuple(self.mark + k * length for k in range(1, self.members + 1)))
            out.append(Score(value=float("nan"), status="too_long") if length > 40 else one)
        return out


class One(Spec):
    """A scorer without members."""

    value: float = 1.0

    def build(self):
        return self

    def score(self, conversations):
        return [Score(value=self.value * len(row.messages[-1].text)) for row in conversations]


def pairs(path, number=24, **more) -> str:
    rows = [
        {
            "id": f"{n}",
            "prompt": f"question {n}",
            "chosen": "good" + "!" * (n % 7),
            "rejected": "bad",
            "gold_chosen": float(n % 3),
            "gold_rejected": 1.0,
            **more,
        }
        for n in range(number)
    ]
    write_jsonl(path, rows)
    return str(path)


def vote(folder, path, scorers, **fields):
    folder.mkdir()
    facts = Vote(data={"path": path}, scorers=scorers, **fields).run(folder)
    return facts, [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]


def test_columns_are_those_of_the_published_card(tmp_path):
    facts, rows = vote(tmp_path / "out", pairs(tmp_path / "p.jsonl", 1), {"ten": {"kind": f"{HERE}Published"}})
    assert rows[0][MEAN] == pytest.approx(-0.133109, abs=1e-6)
    assert rows[0][STD] == pytest.approx(0.755961, abs=1e-6)
    assert (rows[0]["chosen score list"], rows[0]["rejected score list"]) == (CHOSEN, REJECTED)
    assert (facts["vote/members"], facts["vote/share_negative"]) == (10.0, 1.0)
    table = json.loads((tmp_path / "out" / "vote.json").read_text())["strata"]
    assert table[0]["votes_for_chosen"] == pytest.approx(0.4)


def test_members_of_all_scorers_vote_and_the_pairs_stay_pairs(tmp_path):
    path = pairs(tmp_path / "p.jsonl")
    scorers = {"two": {"kind": f"{HERE}Lengths", "mark": 50.0}, "one": {"kind": f"{HERE}One", "value": 3.0}}
    facts, rows = vote(tmp_path / "out", path, scorers)
    assert facts["vote/members"] == 3.0
    for number, row in enumerate(rows):
        difference = 1 + number % 7
        assert row[MEAN] == pytest.approx(2 * difference)
        assert row[STD] == pytest.approx(difference * (2 / 3) ** 0.5)
        assert row["rejected score list"] == [53.0, 56.0, 9.0]
    voted = load_comparisons(Data(path=str(tmp_path / "out" / "pairs.jsonl"))).rows
    given = load_comparisons(Data(path=path)).rows
    assert [(r.id, r.prompt, r.chosen, r.rejected) for r in voted] == [(r.id, r.prompt, r.chosen, r.rejected) for r in given]


def test_the_report_says_how_right_labels_and_votes_are_by_stratum(tmp_path):
    """Gold is above the other side for n % 3 == 2, below for n % 3 == 0; the voters always like the chosen side."""
    facts, _ = vote(tmp_path / "out", pairs(tmp_path / "p.jsonl"), {"two": {"kind": f"{HERE}Lengths"}}, strata=4)
    assert (facts["vote/known"], facts["vote/label_accuracy"], facts["vote/accuracy"]) == (16.0, 0.5, 0.5)
    body = json.loads((tmp_path / "out" / "vote.json").read_text())
    assert [row["pairs"] for row in body["strata"]] == [6, 6, 6, 6]
    order = sorted(range(24), key=lambda n: (n % 7, n))
    for number, row in enumerate(body["strata"]):
        places = order[6 * number : 6 * number + 6]
        known = [n for n in places if n % 3 != 1]
        assert row["known"] == len(known)
        assert row["label_accuracy"] == pytest.approx(sum(n % 3 == 2 for n in known) / len(known))
        assert (row["mu_low"], row["mu_high"]) == (1.5 * (1 + places[0] % 7), 1.5 * (1 + places[-1] % 7))
    page = (tmp_path / "out" / "vote.md").read_text()
    assert "| 3 | 6 |" in page
    assert "by models that may have been trained on these pairs" in page


LABELS = (1, 0, -1, 1)


def test_another_judge_is_compared_where_the_data_has_one(tmp_path):
    path = tmp_path / "p.jsonl"
    pairs(path, 4)
    rows = [
        {**json.loads(line), "GPT4 label": label} for line, label in zip(path.read_text().splitlines(), LABELS, strict=True)
    ]
    write_jsonl(path, rows)
    vote(tmp_path / "out", str(path), {"two": {"kind": f"{HERE}Lengths"}}, strata=1)
    (row,) = json.loads((tmp_path / "out" / "vote.json").read_text())["strata"]
    assert (row["judged"], row["judge_agrees"]) == (3, pytest.approx(2 / 3))
    assert "| GPT4 label |" in (tmp_path / "out" / "vote.md").read_text()


def test_out_of_fold_each_pair_is_scored_only_by_models_that_did_not_train_on_it(tmp_path):
    path = pairs(tmp_path / "p.jsonl")
    scorers = {f"without_{fold}": {"kind": f"{HERE}Lengths", "mark": 1000.0 * fold} for fold in range(3)}
    unseen = {f"without_{fold}": fold for fold in range(3)}
    facts, rows = vote(tmp_path / "out", path, scorers, folds=3, unseen=unseen)
    assert (len(rows), facts["vote/folds"]) == (24, 3.0)
    assert [row["id"] for row in rows] == [str(n) for n in range(24)]
    for fold in range(3):
        trained = {row.id for row in load_comparisons(Data(path=path, folds=3, fold=fold, part="train")).rows}
        scored = {row["id"] for row in rows if row["rejected score list"][0] // 1000 == fold}
        assert scored
        assert not scored & trained
    assert "out of fold (3 folds)" in (tmp_path / "out" / "vote.md").read_text()


def test_pairs_without_a_score_are_left_out_and_counted(tmp_path):
    path = tmp_path / "p.jsonl"
    pairs(path)
    lines = path.read_text().splitlines()
    write_jsonl(path, [{**json.loads(line), **({"rejected": "x" * 50} if n < 2 else {})} for n, line in enumerate(lines)])
    facts, rows = vote(tmp_path / "out", str(path), {"two": {"kind": f"{HERE}Lengths"}})
    assert (len(rows), facts["vote/without_score/too_long"]) == (22, 2.0)
    assert "Without a score: 2 too_long" in (tmp_path / "out" / "vote.md").read_text()
    write_jsonl(path, [{**json.loads(line), "rejected": "x" * 50} for line in lines])
    with pytest.raises(DataError, match=r"no pair has a score of every voter .24 too_long"):
        vote(tmp_path / "none", str(path), {"two": {"kind": f"{HERE}Lengths"}})


def test_older_columns_are_replaced_and_counted(tmp_path):
    path = pairs(tmp_path / "p.jsonl", 3, **{MEAN: 7.0, "chosen score list": [1.0]})
    facts, rows = vote(tmp_path / "out", path, {"two": {"kind": f"{HERE}Lengths"}})
    assert facts["vote/replaced_columns"] == 3.0
    assert [row[MEAN] for row in rows] == [1.5, 3.0, 4.5]


TWO = {"kind": f"{HERE}Lengths"}


@pytest.mark.parametrize(
    ("scorers", "fields", "words"),
    [
        ({"one": {"kind": f"{HERE}One"}}, {}, "scorers: one has one vote in all; a vote needs two or more models"),
        ({"a": TWO}, {"unseen": {"a": 0}}, "unseen is set and folds is 0"),
        (
            {"a": TWO},
            {"folds": 1, "unseen": {"a": 0}},
            "folds is 1, and a model that has not seen the one fold has seen nothing",
        ),
        ({"a": TWO}, {"folds": 2, "unseen": {}}, "unseen: a is in one of scorers and unseen alone"),
        ({"a": TWO}, {"folds": 2, "unseen": {"a": 2}}, "unseen: fold 2 with folds 2; folds are 0 to 1"),
        ({"a": TWO}, {"folds": 2, "unseen": {"a": 0}}, "unseen: no scorer for fold 1, whose pairs nobody could judge"),
        (
            {"a": TWO, "b": {**TWO, "members": 3}},
            {"folds": 2, "unseen": {"a": 0, "b": 1}},
            "unseen: 2 in fold 0, 3 in fold 1 votes; every pair needs as many",
        ),
    ],
)
def test_votes_that_cannot_be_counted_are_refused(tmp_path, scorers, fields, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        vote(tmp_path / "out", pairs(tmp_path / "p.jsonl"), scorers, **fields)


def test_a_model_that_saw_the_fold_by_its_own_recipe_is_refused(tmp_path):
    path = pairs(tmp_path / "p.jsonl")
    scorers = {name: {"kind": "reward_model", "path": str(tmp_path / name / "model")} for name in ("a", "b")}
    for name, fold in (("a", 0), ("b", 1)):
        (tmp_path / name).mkdir()
        data = f"data: {{path: p, folds: 2, fold: {fold}, part: train, split_seed: 0}}"
        (tmp_path / name / "recipe.yaml").write_text(f"kind: reward\n{data}\n")
    swapped = Vote(data={"path": path}, scorers=scorers, folds=2, unseen={"a": 1, "b": 0})
    with pytest.raises(ConfigError, match=r"unseen: a is said not to have seen fold 1, .* fold: 0.* it needs .*fold: 1"):
        swapped.run(tmp_path)
    (tmp_path / "b" / "recipe.yaml").write_text("kind: reward\ndata: {path: p}\n")
    whole = Vote(data={"path": path}, scorers=scorers, folds=2, unseen={"a": 0, "b": 1})
    with pytest.raises(ConfigError, match=r"unseen: b .* says data: .folds: 0, fold: null, part: all"):
        whole.run(tmp_path)


def test_a_part_of_the_pairs_is_no_vote_by_fold(tmp_path):
    data = {"path": pairs(tmp_path / "p.jsonl"), "folds": 2, "fold": 0, "part": "train"}
    cfg = Vote(data=data, scorers={"a": TWO, "b": TWO}, folds=2, unseen={"a": 0, "b": 1})
    with pytest.raises(ConfigError, match="with folds a vote takes all pairs, each in its fold"):
        cfg.run(tmp_path)


def test_a_score_that_is_not_finite_is_refused_with_its_row(tmp_path):
    with pytest.raises(ScoreError, match=r"scorer 'a': got inf for .*p.jsonl:1"):
        vote(tmp_path / "out", pairs(tmp_path / "p.jsonl"), {"a": {"kind": f"{HERE}Infinite"}, "b": TWO})


class Infinite(Spec):
    """A scorer that is broken."""

    def build(self):
        return self

    def score(self, conversations):
        return [Score(value=float("inf")) for _ in conversations]
