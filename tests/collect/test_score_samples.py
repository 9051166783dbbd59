"""`score_samples`: every answer scored once by every scorer, kept, and never scored again."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from rewarden.collect.choice import proxy_of
from rewarden.collect.sample_store import read_samples, read_scores, score_names
from rewarden.collect.scores import ScoreSamples
from rewarden.errors import ConfigError, DataError, ScoreError
from rewarden.models.load import Model, save_model
from rewarden.models.reward import load_reward_model
from rewarden.scoring import Aggregate, build_scorer
from rewarden.scoring.registry import register
from tests.collect.stores import run, write_store

CODE = '''
from pathlib import Path

LOG = Path(__file__).with_name("asked.txt")

def length(prompts, completions, **columns):
    """The number of words; nothing for "skip"."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    with LOG.open("a") as log:
        log.writelines(f"{text}\\n" for text in texts)
    return [None if text == "skip" else float(len(text.split())) for text in texts]

def initial(prompts, completions, **columns):
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [float(ord(text[0])) if text else 0.0 for text in texts]
'''

OWN_SCORER = '''
from rewarden.spec import Spec
from rewarden.types import Score

class Broken(Spec):
    """Gives no number for the text "nan", and an infinite member for "member"."""
    def build(self):
        return self
    def score(self, conversations):
        texts = [c.messages[-1].text for c in conversations]
        return [Score(value=float("nan") if t == "nan" else 1.0, members=(1.0, float("inf") if t == "member" else 1.0)) for t in texts]
'''

TEXTS = [["a b", "a b", "c", ""], ["skip", "d e f", "d e f", "d"], ["skip", "skip", "skip", "skip"]]


@pytest.fixture
def code(tmp_path) -> Path:
    (tmp_path / "rewards.py").write_text(CODE)
    return tmp_path / "rewards.py"


def asked(code: Path) -> list[str]:
    log = code.with_name("asked.txt")
    return log.read_text().splitlines() if log.exists() else []


def function(code: Path, name: str) -> dict:
    return {"kind": "function", "path": f"{code}:{name}"}


@pytest.fixture
def store(tmp_path) -> Path:
    return write_store(tmp_path / "samples", TEXTS)


def test_distinct_answers_are_scored_once_and_those_without_a_score_are_counted(store, code, tmp_path):
    run(ScoreSamples(samples=str(store), scorers={"words": function(code, "length")}), tmp_path / "scores")
    found = read_scores(tmp_path / "scores", "words", read_samples(store))
    nan = math.nan
    expected = torch.tensor([[2.0, 2, 1, 0], [nan, 3, 3, 1], [nan, nan, nan, nan]]).unsqueeze(2)
    torch.testing.assert_close(found.score_PNK, expected, equal_nan=True, rtol=0, atol=0)
    assert found.facts["status"] == {"ok": 7, "not_applicable": 5}
    assert found.facts["distinct"] == 7
    assert sorted(asked(code)) == sorted(["a b", "c", "", "skip", "d e f", "d", "skip"])


def test_another_scorer_is_scored_alone_and_the_first_one_stays_to_the_bit(store, code, tmp_path):
    run(ScoreSamples(samples=str(store), scorers={"words": function(code, "length")}), tmp_path / "one")
    before = asked(code)
    both = ScoreSamples(samples=str(store), scorers={"words": function(code, "length"), "first": function(code, "initial")})
    run(both, tmp_path / "two")
    assert asked(code) == before
    for name in ("words.npy", "words.json"):
        assert (tmp_path / "two" / "scores" / name).read_bytes() == (tmp_path / "one" / "scores" / name).read_bytes()
    assert score_names(tmp_path / "two") == ["first", "words"]
    assert read_scores(tmp_path / "two", "first").score_PNK[0, :, 0].tolist() == [97.0, 97.0, 99.0, 0.0]
    lines = [json.loads(line) for line in (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()]
    assert [line["scores/cached"] for line in lines] == [1.0, 0.0]


def test_a_scorer_whose_code_has_changed_is_scored_again(store, code, tmp_path):
    cfg = ScoreSamples(
        samples=str(store), scorers={"first": {"kind": "regex", "pattern": "a"}, "words": function(code, "length")}
    )
    run(cfg, tmp_path / "one")
    num = len(asked(code))
    code.write_text(CODE + "\n# another version\n")
    run(cfg, tmp_path / "two")
    assert len(asked(code)) == 2 * num
    other = ScoreSamples(samples=str(store), scorers={"first": {"kind": "regex", "pattern": "d"}})
    run(other, tmp_path / "three")
    assert read_scores(tmp_path / "three", "first").score_PNK[1, :, 0].tolist() == [0.0, 1.0, 1.0, 1.0]


def test_a_run_that_stops_anywhere_goes_on_and_stores_the_same(store, code, tmp_path, monkeypatch):
    """One prompt a step; the third call fails. Then without the cache, which a resumed run makes again."""
    fields = {"samples": str(store), "rows_per_step": 4, "score_cache_dir": str(tmp_path / "cache")}
    cfg = ScoreSamples(**fields, scorers={"words": function(code, "length"), "first": function(code, "initial")})
    run(cfg, tmp_path / "once")
    once = {path.name: path.read_bytes() for path in (tmp_path / "once" / "scores").iterdir()}
    for stop in (1, 2, 4):
        cache = tmp_path / f"cache{stop}"
        cfg = ScoreSamples(**{**fields, "score_cache_dir": str(cache)}, scorers=cfg.scorers)
        write = Path.replace
        parts = iter(range(stop))

        def failing(self, target, parts=parts, write=write):
            if Path(target).suffix == ".npz" and next(parts, None) is None:
                raise KeyboardInterrupt
            return write(self, target)

        monkeypatch.setattr(Path, "replace", failing)
        with pytest.raises(KeyboardInterrupt):
            run(cfg, tmp_path / f"run{stop}")
        monkeypatch.undo()
        assert not (tmp_path / f"run{stop}" / "scores").exists()
        if stop == 4:
            for path in cache.rglob("step-*.npz"):
                path.unlink()
        assert run(cfg, tmp_path / f"run{stop}", resume="must").resumed_from == stop
        assert {path.name: path.read_bytes() for path in (tmp_path / f"run{stop}" / "scores").iterdir()} == once


@pytest.fixture(scope="module")
def ensemble(desk, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ensemble") / "model"
    model = load_reward_model(Model(model_name_or_path=str(desk.policy)), num_heads=3, head="fresh", head_seed=1)
    extra = {
        "role": "reward",
        "template": "chat",
        "num_heads": 3,
        "calibration": {"texts": "some", "members": [{"count": 4, "mean": float(k), "m2": 4.0} for k in range(3)]},
    }
    save_model(model.model, model.tokenizer, folder, extra=extra)
    return folder


@pytest.fixture
def said(tmp_path) -> Path:
    """Answers in the world's words, the second prompt with a reference answer."""
    texts = [["I would like a hotel.", "Yes please.", "Yes please."], ["No thanks.", "Hello.", "Thank you."]]
    rows = [{"id": f"p{p}", "prompt": [{"role": "user", "content": "Hello."}], "reference": "Yes."} for p in range(2)]
    return write_store(tmp_path / "said", texts, prompts=rows)


def test_members_are_stored_raw_and_any_rule_can_be_applied_later(ensemble, said, tmp_path):
    raw = {"kind": "reward_model", "path": str(ensemble), "aggregate": {"rule": "lower_bound", "coef": 0.5, "center": "group"}}
    run(ScoreSamples(samples=str(said), scorers={"proxy": raw}), tmp_path / "scores")
    samples = read_samples(said)
    scores = read_scores(tmp_path / "scores", "proxy", samples)
    alone = build_scorer({"kind": "reward_model", "path": str(ensemble)})
    members = torch.tensor([[alone.score([samples.conversation(p, i)])[0].members for i in range(3)] for p in range(2)])
    torch.testing.assert_close(scores.score_PNK, members, rtol=1e-5, atol=1e-5)
    centered = members - members.mean(1, keepdim=True)
    own = centered.mean(2) - 0.5 * centered.std(2, correction=0)
    torch.testing.assert_close(proxy_of(scores).score_PN, own.double(), rtol=1e-4, atol=1e-4)
    assert [moments.mean for moments in scores.calibration or ()] == [0.0, 1.0, 2.0]
    scaled = proxy_of(scores, Aggregate(rule="worst_case", center="calibration", scale=True)).score_PN
    torch.testing.assert_close(scaled, (members - torch.tensor([0.0, 1, 2])).amin(2).double(), rtol=1e-4, atol=1e-4)
    reference = torch.tensor(alone.score([samples.conversation(0, 0)])[0].members)
    assert scores.reference_PK is not None
    assert scores.reference_PK.shape == (2, 3)
    to_reference = proxy_of(scores, Aggregate(rule="worst_case", center="reference")).score_PN
    torch.testing.assert_close(
        to_reference, (members - scores.reference_PK.unsqueeze(1)).amin(2).double(), rtol=1e-4, atol=1e-4
    )
    assert not torch.equal(scores.reference_PK[0], reference)


def test_another_aggregate_scores_nothing_again(ensemble, said, tmp_path):
    for place, rule in enumerate(("mean", "worst_case")):
        raw = {"kind": "reward_model", "path": str(ensemble), "aggregate": {"rule": rule}}
        run(ScoreSamples(samples=str(said), scorers={"proxy": raw}), tmp_path / f"run{place}")
        assert read_scores(tmp_path / f"run{place}", "proxy").facts["aggregate"]["rule"] == rule
    (line,) = (tmp_path / "run1" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["scores/cached"] == 1.0


def test_all_entries_of_a_registry_are_scored_and_a_name_may_not_be_there_twice(ensemble, said, tmp_path):
    registry = tmp_path / "models.yaml"
    register(registry, "trio", {"kind": "reward_model", "path": str(ensemble)})
    register(registry, "polite", {"kind": "regex", "pattern": "please"})
    run(ScoreSamples(samples=str(said), registry=str(registry)), tmp_path / "all")
    assert score_names(tmp_path / "all") == ["polite", "trio"]
    assert read_scores(tmp_path / "all", "polite").score_PNK[0, :, 0].tolist() == [0.0, 1.0, 1.0]
    same = {"mine": {"kind": "registered", "registry": str(registry), "name": "trio"}}
    run(ScoreSamples(samples=str(said), scorers=same, registry=str(registry), entries=("polite",)), tmp_path / "some")
    assert torch.equal(read_scores(tmp_path / "some", "mine").score_PNK, read_scores(tmp_path / "all", "trio").score_PNK)
    twice = ScoreSamples(samples=str(said), scorers={"polite": {"kind": "gold"}}, registry=str(registry))
    with pytest.raises(ConfigError, match="'polite' is named twice, in scorers and in"):
        run(twice, tmp_path / "twice")
    with pytest.raises(ConfigError, match=r"has no 'tri'; did you mean 'trio'"):
        run(ScoreSamples(samples=str(said), registry=str(registry), entries=("tri",)), tmp_path / "misspelt")


def test_a_registry_entry_that_points_nowhere_is_refused_before_anything_is_scored(said, tmp_path):
    (tmp_path / "models.yaml").write_text("gone: {kind: reward_model, path: nowhere}\n")
    with pytest.raises(ConfigError, match="entry 'gone': 'nowhere' is not there"):
        run(ScoreSamples(samples=str(said), registry=str(tmp_path / "models.yaml")), tmp_path / "scores")


def test_a_value_or_a_member_that_is_no_number_is_counted(tmp_path):
    (tmp_path / "own.py").write_text(OWN_SCORER)
    store = write_store(tmp_path / "samples", [["fine", "nan", "member", "fine"]])
    run(ScoreSamples(samples=str(store), scorers={"own": {"kind": f"{tmp_path / 'own.py'}:Broken"}}), tmp_path / "scores")
    found = read_scores(tmp_path / "scores", "own")
    assert found.facts["status"] == {"ok": 2, "not_finite": 2}
    assert found.score_PNK.isnan().squeeze(2).tolist() == [[False, True, True, False]]


def test_a_reward_model_whose_member_gives_nan_stops_the_run_and_names_it(ensemble, said, tmp_path):
    spec = Model(model_name_or_path=str(ensemble))
    model = load_reward_model(spec)
    model.model.config.pad_token_id = 0
    with torch.no_grad():
        model.model.score.weight[1] = 1e38
    save_model(model.model, model.tokenizer, tmp_path / "bad", extra={"role": "reward", "template": "chat", "num_heads": 3})
    cfg = ScoreSamples(samples=str(said), scorers={"bad": {"kind": "reward_model", "path": str(tmp_path / "bad")}})
    with pytest.raises(ScoreError, match=r"member 1 .of members 0 to 2. gave"):
        run(cfg, tmp_path / "scores")


def test_texts_that_are_too_long_for_a_reward_model_are_counted(ensemble, said, tmp_path):
    raw = {"kind": "reward_model", "path": str(ensemble), "max_length": 2}
    run(ScoreSamples(samples=str(said), scorers={"short": raw}), tmp_path / "scores")
    found = read_scores(tmp_path / "scores", "short")
    assert found.facts["status"] == {"ok": 0, "too_long": 6}
    assert bool(found.score_PNK.isnan().all())


def test_scores_of_other_samples_are_refused(store, code, tmp_path):
    run(ScoreSamples(samples=str(store), scorers={"words": function(code, "length")}), tmp_path / "scores")
    other = read_samples(write_store(tmp_path / "other", [[text + " x" for text in row] for row in TEXTS]))
    with pytest.raises(
        DataError, match=r"these scores are of other samples than those in .*another policy, prompt file or number"
    ):
        read_scores(tmp_path / "scores", "words", other)
    with pytest.raises(DataError, match="no scores by 'word'; did you mean 'words'"):
        read_scores(tmp_path / "scores", "word")
    with pytest.raises(DataError, match="it holds none; give the folder of a finished run"):
        read_scores(tmp_path, "words")


def test_damaged_scores_are_refused_with_words(store, code, tmp_path):
    cfg = ScoreSamples(samples=str(store), scorers={"words": function(code, "length")}, score_cache_dir=str(tmp_path / "cache"))
    run(cfg, tmp_path / "scores")
    np.save(tmp_path / "scores" / "scores" / "words.npy", np.zeros((3, 2, 1), dtype=np.float32))
    with pytest.raises(DataError, match=r"its shape is \(3, 2, 1\), its facts say \(3, 4, 1\)"):
        read_scores(tmp_path / "scores", "words")
    (part,) = (tmp_path / "cache").rglob("step-*.npz")
    part.write_bytes(b"PK")
    with pytest.raises(ScoreError, match=r"cannot be read .*remove it, then run again"):
        run(cfg, tmp_path / "again")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "scorers is empty; name at least one"),
        ({"scorers": {"a/b": {"kind": "gold"}}}, "'a/b' cannot be the name of a file"),
        ({"scorers": {"a": {"kind": "gold"}}, "entries": ["b"]}, "entries names scorers of a registry, and there is none"),
        ({"scorers": {"a": {"kind": "golden"}}}, "did you mean 'gold'"),
    ],
)
def test_configs_that_name_no_scorer_are_refused(fields, words):
    with pytest.raises(Exception, match=words):
        ScoreSamples(samples="somewhere", **fields)
