"""`best_of_n`: curves over n from stored answers and scores, against brute force over subsets."""

import itertools
import json
import math
import statistics

import pytest
import torch

from rewarden.collect.choice import Choice
from rewarden.data.sources import Data, load_prompts
from rewarden.errors import ConfigError, DataError
from rewarden.evals.alpaca_eval import read_outputs
from rewarden.evals.best_of_n import BestOfN, default_ns
from tests.collect.stores import write_scores, write_store

NAN = math.nan
NUM_PROMPTS, NUM = 12, 6


def draw(seed: int) -> list[list[float]]:
    """Few different values, so that there are ties."""
    values = torch.randint(0, 4, (NUM_PROMPTS, NUM), generator=torch.Generator().manual_seed(seed))
    return values.double().tolist()


PROXY, GOLD = draw(0), draw(1)
MEMBERS = torch.randn(NUM_PROMPTS, NUM, 3, generator=torch.Generator().manual_seed(2)).tolist()
TEXTS = [[f"answer {p} {'word ' * ((p * 5 + i * 3) % 7)}".strip() for i in range(NUM)] for p in range(NUM_PROMPTS)]


@pytest.fixture
def stores(tmp_path):
    prompts = [
        {"id": f"p{p}", "prompt": [{"role": "user", "content": f"Do {p}."}], "dataset": "koala" if p else "vicuna"}
        for p in range(NUM_PROMPTS)
    ]
    samples = write_store(tmp_path / "samples", TEXTS, prompts=prompts)
    for name, score in (("proxy", PROXY), ("gold", GOLD), ("trio", MEMBERS)):
        write_scores(tmp_path / "scores", samples, name, score)
    return samples, tmp_path / "scores"


def report(stores, out, **fields):
    samples, scores = stores
    out.mkdir(exist_ok=True)
    facts = BestOfN(samples=str(samples), scores=str(scores), resamples=200, **fields).run(out)
    return json.loads((out / "best_of_n.json").read_text()), facts


def over_subsets(proxy, value, n) -> float:
    """Mean over all subsets of n, ties at random."""
    picked = []
    for subset in itertools.combinations(range(len(proxy)), n):
        best = max(proxy[i] for i in subset)
        picked.append(statistics.fmean(value[i] for i in subset if proxy[i] == best))
    return statistics.fmean(picked)


def first_n(proxy, value, n) -> float:
    return value[max(range(n), key=lambda i: (proxy[i], -i))]


def test_values_are_means_over_prompts_and_subsets_and_of_the_first_n(stores, tmp_path):
    found, facts = report(stores, tmp_path / "out", choose={"p": Choice(scorer="proxy")}, judges=("gold",), n=(4, 1, 2, 6))
    (curve,) = found["curves"]
    assert [point["n"] for point in curve["points"]] == [1, 2, 4, 6]
    tokens = [[float(len(text.split())) for text in row] for row in TEXTS]
    for point in curve["points"]:
        n = point["n"]
        for measure, table in (("gold", GOLD), ("score", PROXY), ("tokens", tokens)):
            expected = statistics.fmean(over_subsets(p, v, n) for p, v in zip(PROXY, table, strict=True))
            first = statistics.fmean(first_n(p, v, n) for p, v in zip(PROXY, table, strict=True))
            got = point["measures"][measure]
            assert got["value"] == pytest.approx(expected, abs=1e-9)
            assert got["first"] == pytest.approx(first, abs=1e-9)
            assert got["gain"] == pytest.approx(expected - statistics.fmean(map(statistics.fmean, table)), abs=1e-9)
            assert got["low"] <= got["value"] <= got["high"]
            assert got["num_prompts"] == NUM_PROMPTS
        assert point["kl_bound"] == pytest.approx(math.log(n) - (n - 1) / n)
        assert 0 <= point["kl"] <= point["kl_bound"] + 1e-12
        assert facts[f"p/n={n}/gold"] == point["measures"]["gold"]["value"]
    assert curve["points"][0]["measures"]["gold"]["gain"] == 0


def test_every_aggregate_of_an_ensemble_chooses_from_the_same_scores(stores, tmp_path):
    """Each member centered on its mean over the answers to a prompt, then the lowest; the mean needs no centering."""
    choose = {
        "mean": Choice(scorer="trio"),
        "low": Choice.model_validate({"scorer": "trio", "aggregate": {"rule": "worst_case"}}),
        "raw": Choice.model_validate({"scorer": "trio", "aggregate": {"rule": "worst_case", "center": "none"}}),
    }
    found, _ = report(stores, tmp_path / "out", choose=choose, judges=("gold",), n=(3,))
    members = torch.tensor(MEMBERS, dtype=torch.float64)
    proxies = {
        "mean": members.mean(2),
        "low": (members - members.mean(1, keepdim=True)).amin(2),
        "raw": members.amin(2),
    }
    for curve in found["curves"]:
        expected = statistics.fmean(over_subsets(p, g, 3) for p, g in zip(proxies[curve["name"]].tolist(), GOLD, strict=True))
        assert curve["points"][0]["measures"]["gold"]["value"] == pytest.approx(expected, abs=1e-9)


def test_without_ways_every_scorer_but_the_judges_chooses_and_n_runs_to_all(stores, tmp_path):
    found, _ = report(stores, tmp_path / "out", judges=("gold",))
    assert [curve["name"] for curve in found["curves"]] == ["proxy", "trio"]
    assert [point["n"] for point in found["curves"][0]["points"]] == [1, 2, 4, 6]
    assert default_ns(200) == [1, 2, 4, 8, 16, 32, 64, 128, 200]


def test_outputs_are_read_back_as_alpaca_eval_files(stores, tmp_path):
    report(stores, tmp_path / "out", choose={"p": Choice(scorer="proxy")}, outputs=(1, 4), generator="mine")
    for n in (1, 4):
        rows = read_outputs(tmp_path / "out" / "outputs" / f"p_n{n}.json")
        assert [row.instruction for row in rows] == [f"Do {p}." for p in range(NUM_PROMPTS)]
        assert [row.output for row in rows] == [first_n(PROXY[p], TEXTS[p], n) for p in range(NUM_PROMPTS)]
        assert {row.generator for row in rows} == {f"mine_p_n{n}"}
        assert [row.dataset for row in rows] == ["vicuna"] + ["koala"] * (NUM_PROMPTS - 1)
        raw = json.loads((tmp_path / "out" / "outputs" / f"p_n{n}.json").read_text())
        assert list(raw[0]) == ["dataset", "instruction", "output", "generator"]
    assert (
        len(load_prompts(Data(path=str(tmp_path / "out" / "outputs" / "p_n4.json"), format="alpaca_farm")).rows) == NUM_PROMPTS
    )


def test_an_instruction_with_an_input_is_the_user_message_and_a_dialogue_shows_who_spoke(tmp_path):
    dialogue = [{"role": role, "content": text} for role, text in (("user", "Hi."), ("assistant", "Yes?"), ("user", "Go."))]
    prompts = [{"id": "a", "prompt": [{"role": "user", "content": "Sum.\n\n1 2"}]}, {"id": "b", "prompt": dialogue}]
    samples = write_store(tmp_path / "samples", [["x", ""], ["y", "z"]], prompts=prompts)
    write_scores(tmp_path / "scores", samples, "s", [[0, 1], [1, 0]])
    report((samples, tmp_path / "scores"), tmp_path / "out", outputs=(2,))
    rows = read_outputs(tmp_path / "out" / "outputs" / "s_n2.json")
    assert [(row.instruction, row.output) for row in rows] == [
        ("Sum.\n\n1 2", ""),
        ("user: Hi.\n\nassistant: Yes?\n\nuser: Go.", "y"),
    ]


def test_missing_scores_ties_and_empty_answers_are_counted_and_said(tmp_path):
    """p0 has no score, p1 ties, p2 misses one score and its best answer has no gold, p3 is whole and its best answer is empty."""
    texts = [["a", "b", "c"]] * 3 + [["d", "", "f"]]
    samples = write_store(tmp_path / "samples", texts)
    write_scores(tmp_path / "scores", samples, "s", [[NAN] * 3, [1, 1, 1], [NAN, 2, 3], [0, 5, 1]])
    write_scores(tmp_path / "scores", samples, "gold", [[1, 1, 1], [0, 3, 6], [1, 2, NAN], [0, 8, 2]])
    found, facts = report((samples, tmp_path / "scores"), tmp_path / "out", judges=("gold",), n=(1, 2, 3), outputs=(1,))
    (curve,) = found["curves"]
    assert (curve["num_without_score"], curve["num_tied"], curve["num_unscored"]) == (1, 1, 4)
    gold = [point["measures"]["gold"] for point in curve["points"]]
    assert [point["num_prompts"] for point in gold] == [2, 2, 2]
    assert [point["value"] for point in gold] == pytest.approx([(3 + 10 / 3) / 2, (3 + 18 / 3) / 2, (3 + 8) / 2])
    assert curve["points"][2]["measures"]["empty"]["value"] == pytest.approx(1 / 3)
    # p2's first answer has no score, so its best of 1 has none; p0 never has one
    assert facts["s/n=1/outputs_skipped"] == 2.0
    text = (tmp_path / "out" / "best_of_n.md").read_text()
    assert "4 prompts are few" in text
    assert "s: 1 of 4 prompts have no answer with a score and are left out" in text
    assert "s: 4 of 12 answers have no score and are never chosen" in text
    assert "s: all answers to 1 of 4 prompts have one score, so nothing is chosen there" in text
    assert "s: gold has no score for a possible choice of 1 prompts" in text


def test_when_everything_ties_nothing_moves(tmp_path):
    samples = write_store(tmp_path / "samples", [["a", "b", "c", "d"]] * 3)
    write_scores(tmp_path / "scores", samples, "s", [[1.0] * 4] * 3)
    write_scores(tmp_path / "scores", samples, "gold", [[0.0, 1, 2, 3]] * 3)
    found, _ = report((samples, tmp_path / "scores"), tmp_path / "out", judges=("gold",), n=(1, 4))
    for point in found["curves"][0]["points"]:
        assert point["measures"]["gold"]["value"] == pytest.approx(1.5)
        assert point["kl"] == pytest.approx(0, abs=1e-12)
        assert point["measures"]["gold"]["first"] == 0.0


def test_the_figure_has_a_panel_for_the_score_each_judge_and_the_length(stores, tmp_path):
    report(stores, tmp_path / "out", judges=("gold",))
    picture = (tmp_path / "out" / "best_of_n.svg").read_text()
    assert [title for title in ("own score", ">gold<", ">length<") if title not in picture] == []
    assert picture.count("<polyline") == 6
    assert picture.count("<polygon") == 6
    assert ">proxy<" in picture
    assert ">trio<" in picture


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"n": (7,)}, ConfigError, "n: 7 with 6 answers to each prompt in .*use 1 to 6, or draw more .num_generations"),
        ({"n": (0,)}, ConfigError, "n: 0 with 6"),
        ({"outputs": (9,)}, ConfigError, "outputs: 9 with 6"),
        ({"judges": ("golden",)}, DataError, "no scores by 'golden'; did you mean 'gold'"),
        ({"judges": ("proxy", "gold", "trio")}, DataError, "no scorer that could choose"),
        ({"judges": ("gold", "gold")}, ConfigError, "'gold' is named twice"),
        ({"judges": ("score",)}, ConfigError, "a measure that is always taken"),
        ({"choose": {"a/b": {"scorer": "proxy"}}}, ConfigError, "'a/b' cannot be the name of a file"),
        ({"choose": {"a": {"scorer": "prox"}}}, DataError, "no scores by 'prox'; did you mean 'proxy'"),
        (
            {"choose": {"a": {"scorer": "trio", "aggregate": {"rule": "worst_case", "center": "calibration"}}}},
            ConfigError,
            "'trio': center is calibration, and the reward model holds no moments",
        ),
        (
            {"choose": {"a": {"scorer": "trio", "aggregate": {"rule": "worst_case", "center": "reference"}}}},
            ConfigError,
            "'trio': center is reference, and no scores of reference answers",
        ),
        (
            {"choose": {"a": {"scorer": "proxy", "aggregate": {"rule": "lower_bound", "coef": 1.0, "ddof": 1}}}},
            ConfigError,
            "'proxy': ddof is 1 with 1 member",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused_with_words(stores, tmp_path, fields, error, words):
    from rewarden.spec import check

    samples, scores = stores
    with pytest.raises(error, match=words):
        check(BestOfN, {"samples": str(samples), "scores": str(scores), **fields}).run(tmp_path)


def test_scores_of_other_samples_are_refused(stores, tmp_path):
    other = write_store(tmp_path / "other", [[text + "!" for text in row] for row in TEXTS])
    with pytest.raises(DataError, match="these scores are of other samples"):
        report((other, stores[1]), tmp_path / "out")
