"""A reward report from end to end: real scorers, the files that are written, and input that cannot be measured."""

import json
import math
import xml.etree.ElementTree as ET

import pytest
import torch

from rewarden.collect.world import WorldStart
from rewarden.data.sources import Data, load_comparisons
from rewarden.data.write import comparison_row, write_jsonl
from rewarden.errors import ConfigError, DataError, ScoreError
from rewarden.evals.preference import Preference
from rewarden.models.load import Model, load_tokenizer, save_model
from rewarden.models.reward import load_reward_model
from rewarden.recipe.run import run_recipe
from rewarden.scoring import build_scorer
from rewarden.scoring.registry import register
from rewarden.spec import check
from rewarden.types import Comparison, Conversation
from rewarden.worlds import TripDesk

TABLE = '''
import json
import math
from pathlib import Path

from rewarden.spec import Spec
from rewarden.types import Score


class Table(Spec):
    """Looks the answer up: a number, a list of members, or a status."""

    scores: str

    def build(self):
        return Scorer(json.loads(Path(self.scores).read_text(encoding="utf-8")))


class Scorer:
    def __init__(self, table):
        self.table = table

    def score(self, conversations):
        return [self.one(self.table[row.messages[-1].text]) for row in conversations]

    def one(self, found):
        if isinstance(found, str):
            return Score(value=math.nan, status=found)
        if isinstance(found, list):
            return Score(value=sum(found) / len(found), members=tuple(found))
        return Score(value=found)
'''


@pytest.fixture
def desk(tmp_path):
    """Writes pairs and tables of scores, and makes configs of them."""
    (tmp_path / "table.py").write_text(TABLE, encoding="utf-8")
    return Desk(tmp_path)


class Desk:
    def __init__(self, folder):
        self.folder = folder

    def pairs(self, name, *pairs, **columns):
        """Each pair is (chosen, rejected) or (chosen, rejected, preference)."""
        rows = []
        for place, (chosen, rejected, *rest) in enumerate(pairs):
            row = {"prompt": f"question {place}", "chosen": chosen, "rejected": rejected, **columns}
            rows.append(row | ({"preference": rest[0]} if rest else {}))
        return self.rows(name, rows)

    def rows(self, name, rows):
        path = self.folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return {"path": str(path)}

    def table(self, name, scores):
        (self.folder / f"{name}.json").write_text(json.dumps(scores), encoding="utf-8")
        return {"kind": f"{self.folder / 'table.py'}:Table", "scores": str(self.folder / f"{name}.json")}

    def run(self, cfg):
        out = self.folder / "out"
        out.mkdir(exist_ok=True)
        facts = cfg.run(out)
        report = json.loads((out / "preference.json").read_text(encoding="utf-8"))
        ET.parse(out / "preference.svg")
        return facts, report, (out / "preference.md").read_text(encoding="utf-8")


FOUR = (("a1", "b1"), ("a2", "b2"), ("a3", "b3"), ("a4", "b4"))


def plain(**scores):
    """Scores of answers; 0 for those that are not named."""
    return {f"{side}{place}": 0.0 for side in "ab" for place in range(1, 5)} | scores


def test_the_files_hold_one_row_for_every_scorer_and_rule(desk):
    members = {answer: [score, -score] for answer, score in plain(a1=1.0, a2=2.0, b3=1.0).items()}
    cfg = Preference(
        data={"pairs": desk.pairs("pairs", *FOUR)},
        scorers={"one": desk.table("one", plain(a1=1.0, a2=1.0, a3=1.0)), "two": desk.table("two", members)},
    )
    facts, report, text = desk.run(cfg)
    rows = {(row["scorer"], row["rule"]): row for row in report["data"]["pairs"]["rows"]}
    aggregates = ["mean", "worst_case", "lower_bound (coef 1, ddof 0)", "mean probability"]
    assert list(rows) == [
        ("longer answer", ""),
        ("one", "score"),
        *(("two", rule) for rule in ["member 0", "member 1", "one member", *aggregates]),
    ]
    # Right in three pairs and undecided in the last.
    assert facts["pairs/one/accuracy"] == rows["one", "score"]["accuracy"]["value"] == 3.5 / 4
    assert rows["two", "member 0"]["accuracy"]["value"] == (1 + 1 + 0 + 0.5) / 4
    assert rows["two", "member 1"]["accuracy"]["value"] == (0 + 0 + 1 + 0.5) / 4
    assert rows["two", "mean"]["accuracy"]["value"] == 0.5
    assert report["scorers"]["two"] == {"num_members": 2, "aggregate": None, "calibrated": False}
    assert "| one | score * | 87.5 |" in text
    assert "| two | mean * | 50.0 |" in text
    assert "member 0" not in text


def test_pairs_that_one_scorer_cannot_score_are_left_out_for_all_and_counted(desk):
    """The second scorer would be right in two pairs of four; of the three that both score, in one."""
    cfg = Preference(
        data={"pairs": desk.pairs("pairs", *FOUR)},
        scorers={
            "short": desk.table("short", plain(b2="too_long")),
            "any": desk.table("any", plain(a1=1.0, a2=1.0, b3=1.0, b4=1.0)),
        },
    )
    facts, report, text = desk.run(cfg)
    data = report["data"]["pairs"]
    assert (data["num_pairs"], data["num_without_score"], data["without_score"]) == (3, 1, {"short": {"too_long": 1}})
    assert facts["pairs/any/accuracy"] == pytest.approx(1 / 3)
    assert "1 of 4 pairs left out for all, without a score (short: 1 too_long)." in text


def test_another_data_set_shows_the_drop_from_the_one_that_was_trained_on(desk):
    cfg = Preference(
        data={"other": desk.pairs("other", *FOUR[:2]), "home": desk.pairs("home", *FOUR)},
        in_distribution="home",
        scorers={"one": desk.table("one", plain(a1=1.0, b2=1.0, a3=1.0, a4=1.0))},
    )
    _, report, text = desk.run(cfg)
    row = report["data"]["other"]["rows"][1]
    assert row["drop"]["value"] == pytest.approx(3 / 4 - 1 / 2)
    assert row["drop"]["low"] < 0 < row["drop"]["high"]
    assert all(row["drop"] is None for row in report["data"]["home"]["rows"])
    assert text.count("drop from home") == 1


def test_labels_that_are_all_ties_give_no_accuracy_and_say_so(desk):
    ties = [(*pair, 0.5) for pair in FOUR]
    two = {answer: [score, score] for answer, score in plain(a1=1.0).items()}
    cfg = Preference(
        data={"pairs": desk.pairs("pairs", *ties)},
        scorers={"one": desk.table("one", plain(a1=1.0)), "two": desk.table("two", two)},
    )
    facts, report, text = desk.run(cfg)
    row = report["data"]["pairs"]["rows"][1]
    assert (row["accuracy"]["num"], row["accuracy"]["value"], row["calibration_error"], row["over_longer"]) == (
        0,
        None,
        None,
        None,
    )
    # log loss of a tie at d = 1: softplus(1) - .5 = .813262; at 0: ln 2.
    assert row["log_loss"] == pytest.approx((0.8132617 + 3 * math.log(2)) / 4, abs=1e-6)
    assert report["data"]["pairs"]["members"][0]["error_by_disagreement"] is None
    assert report["data"]["pairs"]["num_tied_labels"] == 4
    assert report["data"]["pairs"]["comparisons"] == []
    assert "Every label is a tie" in text
    assert "pairs/one/accuracy" not in facts


def test_equal_members_and_one_pair_can_be_measured(desk):
    cfg = Preference(
        data={"pairs": desk.pairs("pairs", FOUR[0])},
        scorers={"same": desk.table("same", {"a1": [1.0, 1.0, 1.0], "b1": [0.0, 0.0, 0.0]})},
    )
    facts, report, text = desk.run(cfg)
    assert facts["pairs/same/accuracy"] == 1.0
    assert report["data"]["pairs"]["members"][0]["mean_disagreement"] == 0.0
    assert "1 pairs are few" in text


def test_pairs_of_one_prompt_are_said(desk):
    rows = [{"prompt": "q", "chosen": a, "rejected": b} for a, b in FOUR]
    cfg = Preference(data={"pairs": desk.rows("pairs", rows)}, scorers={"one": desk.table("one", plain())})
    assert "4 pairs of 1 prompts; the intervals take pairs as independent." in desk.run(cfg)[2]


def test_names_with_a_bar_do_not_break_the_table(desk):
    rows = [{"prompt": str(i), "chosen": a, "rejected": b, "source": "x|y"} for i, (a, b) in enumerate(FOUR)]
    text = desk.run(Preference(data={"p": desk.rows("p", rows)}, scorers={"one": desk.table("one", plain())}))[2]
    assert "| scorer | x\\|y |" in text


BAD = {
    "nan": (plain(a2=math.nan), ScoreError, r"scorer 'bad': got nan for .*pairs.jsonl:2.*a score is a finite number"),
    "nan_member": (
        {key: [0.0, math.nan if key == "b3" else 1.0] for key in plain()},
        ScoreError,
        r"scorer 'bad': got nan \(members \[0.0, nan\]\) for .*pairs.jsonl:3",
    ),
    "members": (
        {key: [0.0] * (3 if key == "a3" else 2) for key in plain()},
        ScoreError,
        r"scorer 'bad': 3 member\(s\) for .*pairs.jsonl:3.* and 2 for .*pairs.jsonl:1",
    ),
    "some_without_members": (
        {key: 0.0 if key == "b4" else [0.0, 1.0] for key in plain()},
        ScoreError,
        r"scorer 'bad': 0 member\(s\) for .*pairs.jsonl:4.* and 2 for",
    ),
    "none_scored": (
        dict.fromkeys(plain(), "too_long"),
        DataError,
        r"data.pairs: none of its 4 pairs has a score of every scorer \(bad: 4 too_long\)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_scores_that_are_none_are_refused(desk, name):
    scores, kind, words = BAD[name]
    cfg = Preference(
        data={"pairs": desk.pairs("pairs", *FOUR)},
        scorers={"good": desk.table("good", plain()), "bad": desk.table("bad", scores)},
    )
    with pytest.raises(kind, match=words):
        desk.run(cfg)
    assert not list((desk.folder / "out").iterdir())


def test_other_members_for_another_data_set_are_refused(desk):
    table = {key: [0.0, 1.0] for key in plain()} | {"c": 1.0, "d": 0.0}
    data = {"in_distribution": desk.pairs("a", *FOUR), "b": desk.pairs("b", ("c", "d"))}
    with pytest.raises(ScoreError, match=r"scorer 'bad': 1 member\(s\) for one data set and 2 for another"):
        desk.run(Preference(data=data, scorers={"bad": desk.table("bad", table)}))


def test_a_rule_that_the_members_do_not_allow_is_refused_before_the_next_scorer_is_loaded(desk):
    table = {key: [0.0, 1.0] for key in plain()}
    cfg = Preference(
        data={"pairs": desk.pairs("pairs", *FOUR)},
        scorers={"two": desk.table("two", table), "gone": {"kind": "reward_model", "path": str(desk.folder / "gone")}},
        aggregates=({"rule": "worst_case", "center": "calibration"},),
    )
    with pytest.raises(
        ConfigError, match=r"aggregates: worst_case \(center calibration\) of scorer 'two': center is calibration"
    ):
        desk.run(cfg)


def test_rows_without_pairs_or_prompts_are_refused(desk):
    scorers = {"one": desk.table("one", plain())}
    same = [{"prompt": "q", "chosen": "x", "rejected": "x"}]
    with pytest.raises(DataError, match=r"no comparisons are left \(0 of 1 rows; dropped: 1 chosen_equals_rejected"):
        desk.run(Preference(data={"pairs": desk.rows("same", same)}, scorers=scorers))
    with pytest.raises(DataError, match=r"empty.jsonl: "):
        desk.run(Preference(data={"pairs": desk.rows("empty", [])}, scorers=scorers))
    lost = [{"chosen": [{"role": "assistant", "content": "a1"}], "rejected": [{"role": "assistant", "content": "b1"}]}]
    with pytest.raises(DataError, match=r"lost.jsonl:1: "):
        desk.run(Preference(data={"pairs": desk.rows("lost", lost)}, scorers=scorers))


LENGTH = {"kind": "length", "target": 0, "penalty": 1.0}
ONE_FILE = {"path": "pairs.jsonl"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"data": {"a": ONE_FILE}}, "scorers is empty, and there is no registry"),
        ({"data": {"a": ONE_FILE}, "scorers": {"one": LENGTH}, "entries": ("x",)}, "there is none; set registry"),
        ({"data": {}, "scorers": {"one": LENGTH}}, "data is {}"),
        ({"data": {"a": ONE_FILE, "b": ONE_FILE}, "scorers": {"one": LENGTH}}, "no data set is called 'in_distribution'"),
        ({"data": {"home": ONE_FILE}, "in_distribution": "hme", "scorers": {"one": LENGTH}}, "did you mean 'home'"),
        ({"data": {"a/b": ONE_FILE}, "scorers": {"one": LENGTH}}, "name 'a/b' is no plain word"),
        ({"data": {"a": ONE_FILE}, "scorers": {"one": {"kind": "lenght"}}}, "did you mean 'length'"),
        ({"data": {"a": ONE_FILE}, "scorers": {"one": LENGTH}, "aggregates": ({}, {})}, "aggregates: mean is there twice"),
        ({"data": {"a": ONE_FILE}, "scorers": {"one": LENGTH}, "aggregates": ({"rule": "lower_bound"},)}, "coef is missing"),
        ({"data": {"a": ONE_FILE}, "scorers": {"one": LENGTH}, "bins": 0}, "bins is 0"),
    ],
)
def test_configs_that_say_nothing_are_refused(fields, words):
    with pytest.raises(ConfigError, match=words):
        check(Preference, fields)


def scripted_pair(user):
    """Two turns of a good and of a hasty assistant with one user; every third label is turned round."""
    dialogues = [TripDesk().scripted(assistant, user, turns=2) for assistant in ("good", "hasty")]
    sides = [(dialogue.messages[1:], TripDesk().gold(dialogue.messages)) for dialogue in dialogues]
    (chosen, better), (rejected, worse) = reversed(sides) if user % 3 == 0 else sides
    meta = {"gold_chosen": better, "gold_rejected": worse, "turn": user % 2}
    return Comparison(id=str(user), prompt=dialogues[0].messages[:1], chosen=chosen, rejected=rejected, meta=meta)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Pairs of the built-in world, and two tiny reward models on its policy: a single one, and a linear ensemble of three."""
    root = tmp_path_factory.mktemp("world")
    (root / "start").mkdir()
    WorldStart(num_dialogues=4, num_heldout=2).run(root / "start")
    policy = Model(model_name_or_path=str(root / "start" / "model"))
    for name, users in (("pairs", range(24)), ("pairs_test", range(100, 110))):
        write_jsonl(root / f"{name}.jsonl", [comparison_row(scripted_pair(user)) for user in users])
    for name, num_heads in (("single", 1), ("linear", 3)):
        model = load_reward_model(policy, num_heads=num_heads, head="fresh", head_seed=num_heads)
        extra = {"role": "reward", "template": "chat", "num_heads": num_heads}
        save_model(model.model, load_tokenizer(policy), root / name / "model", extra=extra)
    return root


def test_the_registry_of_the_world_is_measured_whole(world, tmp_path):
    register(world / "models.yaml", "single", {"kind": "reward_model", "path": str(world / "single" / "model")})
    entry = {"kind": "reward_model", "path": str(world / "linear" / "model"), "aggregate": {"rule": "lower_bound", "coef": 0.5}}
    register(world / "models.yaml", "linear", entry)
    data = {"in_distribution": {"path": str(world / "pairs.jsonl")}}
    cfg = Preference(data=data, registry=str(world / "models.yaml"), scorers={"gold": {"kind": "gold"}}, by=("turn",))
    facts = cfg.run(tmp_path)
    report = json.loads((tmp_path / "preference.json").read_text(encoding="utf-8"))["data"]["in_distribution"]
    rows = {(row["scorer"], row["rule"]): row for row in report["rows"]}
    assert {scorer for scorer, _ in rows} == {"longer answer", "single", "linear", "gold"}
    assert [row["rule"] for row in report["rows"] if row["own"]] == [
        "",
        "score",
        "score",
        "own: lower_bound (coef 0.5, ddof 0)",
    ]

    scorer = build_scorer({"kind": "reward_model", "path": str(world / "linear" / "model")})
    pairs = load_comparisons(Data(path=str(world / "pairs.jsonl"))).rows
    right = torch.zeros(3)
    for pair in pairs:
        sides = [Conversation(id="x", messages=(*pair.prompt, *side)) for side in (pair.chosen, pair.rejected)]
        chosen, rejected = (torch.tensor(score.members) for score in scorer.score(sides))
        right += (chosen > rejected).float() + 0.5 * (chosen == rejected)
    measured = [rows["linear", f"member {k}"]["accuracy"]["value"] for k in range(3)]
    assert measured == pytest.approx((right / len(pairs)).tolist())
    assert facts["in_distribution/num_pairs"] == len(pairs)

    # Gold as a scorer is right as often as the labels follow the gold beside them.
    agree = [pair.meta["gold_chosen"] - pair.meta["gold_rejected"] for pair in pairs]
    assert rows["gold", "score"]["accuracy"]["value"] == pytest.approx(
        sum((d > 0) + 0.5 * (d == 0) for d in agree) / len(agree)
    )
    assert {"gold gap", "preferred answer longer by", "turn"} <= set(rows["single", "score"]["accuracy_by"])


def test_equal_configs_give_equal_bytes(world, tmp_path):
    data = {"in_distribution": {"path": str(world / "pairs.jsonl")}, "test": {"path": str(world / "pairs_test.jsonl")}}
    cfg = Preference(data=data, scorers={"linear": {"kind": "reward_model", "path": str(world / "linear" / "model")}})
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        cfg.run(tmp_path / name)
    for name in ("preference.json", "preference.md", "preference.svg"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_a_registry_and_a_scorer_of_one_name_are_refused(world, tmp_path):
    (tmp_path / "empty.yaml").write_text("", encoding="utf-8")
    data = {"a": {"path": str(world / "pairs.jsonl")}}
    with pytest.raises(ConfigError, match=r"empty.yaml is empty; train a reward model, or name scorers"):
        Preference(data=data, registry=str(tmp_path / "empty.yaml")).run(tmp_path)
    register(tmp_path / "models.yaml", "one", {"kind": "reward_model", "path": str(world / "single" / "model")})
    with pytest.raises(ConfigError, match=r"scorers: 'one' is named twice, in scorers and in .*models.yaml"):
        Preference(data=data, registry=str(tmp_path / "models.yaml"), scorers={"one": LENGTH}).run(tmp_path)
    with pytest.raises(ConfigError, match=r"models.yaml has no 'two'"):
        Preference(data=data, registry=str(tmp_path / "models.yaml"), entries=("two",)).run(tmp_path)
    with pytest.raises(ConfigError, match=r"gone.yaml: no such registry"):
        Preference(data=data, registry=str(tmp_path / "gone.yaml")).run(tmp_path)


def test_the_recipe_runs_and_is_skipped_when_nothing_changed(world, tmp_path, capsys):
    recipe = tmp_path / "report.yaml"
    recipe.write_text(
        f"""
kind: preference
output_dir: {tmp_path / "runs"}
data: {{in_distribution: {{path: {world / "pairs.jsonl"}}}}}
scorers:
  short: {{kind: length, target: 0, penalty: 1.0}}
""",
        encoding="utf-8",
    )
    folder = run_recipe(recipe)
    assert {"preference.json", "preference.md", "preference.svg", "facts.json"} <= {path.name for path in folder.iterdir()}
    capsys.readouterr()
    run_recipe(recipe)
    assert "skipped" in capsys.readouterr().out


@pytest.mark.slow
def test_a_small_real_model_is_measured_on_pairs_people_made(smollm2, shared, tmp_path, record_property):
    """Fresh heads on a real trunk know nothing: their accuracy on human labels holds a half within its interval."""
    record_property("point", "reward report: three heads on SmolLM2, HH helpful pairs")
    model = load_reward_model(Model(model_name_or_path=str(smollm2)), num_heads=3, head="fresh", head_seed=0)
    extra = {"role": "reward", "template": "chat", "num_heads": 3}
    save_model(model.model, model.tokenizer, tmp_path / "model", extra=extra)
    path = shared / "data" / "hh_rlhf_helpful" / "original" / "helpful-base.test.jsonl.gz"
    cfg = Preference(
        data={"hh": {"path": str(path), "format": "hh", "max_rows": 10}},
        scorers={"heads": {"kind": "reward_model", "path": str(tmp_path / "model"), "max_length": 256}},
    )
    (tmp_path / "out").mkdir()
    cfg.run(tmp_path / "out")
    report = json.loads((tmp_path / "out" / "preference.json").read_text(encoding="utf-8"))["data"]["hh"]
    row = next(row for row in report["rows"] if row["rule"] == "mean")
    record_property("accuracy", row["accuracy"]["value"])
    assert row["own"]
    assert row["accuracy"]["low"] < 0.5 < row["accuracy"]["high"]
    assert report["members"][0]["num_members"] == 3
