"""A registry of scorers: names, relative paths, what is refused, and writing by several processes at once."""

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import yaml

from rewarden.errors import ConfigError, RewardenError
from rewarden.runtime.lock import FolderLock
from rewarden.scoring import build_scorer, parse_scorer, registry
from rewarden.scoring.registry import entry_of, named, read_registry, register, resolve
from rewarden.scoring.reward_model import RewardModelScorer


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def runs(here, reward_folder) -> Path:
    """runs/models.yaml with a single reward model, an ensemble of three heads, and two rules."""
    for name, heads in (("single", 1), ("three", 3)):
        shutil.copytree(reward_folder("words", num_heads=heads), f"runs/{name}/model")
    (here / "rules.py").write_text("def zero(completions, **_):\n    return [0.0 for _ in completions]\n")
    register("runs/models.yaml", "single", {"kind": "reward_model", "path": "runs/single/model"})
    bound = {"rule": "lower_bound", "coef": 0.5}
    register("runs/models.yaml", "three", {"kind": "reward_model", "path": "runs/three/model", "aggregate": bound})
    register("runs/models.yaml", "zero", {"kind": "function", "path": "rules.py:zero"})
    parts = [{"scorer": {"kind": "registered", "registry": "runs/models.yaml", "name": name}} for name in ("single", "zero")]
    register("runs/models.yaml", "both", {"kind": "sum", "scorers": parts})
    return here / "runs"


def scorer_named(name: str, path: str = "runs/models.yaml", **more):
    return build_scorer({"kind": "registered", "registry": path, "name": name, **more})


def test_paths_are_written_relative_to_the_registry_in_the_order_of_registration(runs):
    assert yaml.safe_load((runs / "models.yaml").read_text()) == {
        "single": {"kind": "reward_model", "path": "single/model"},
        "three": {"kind": "reward_model", "path": "three/model", "aggregate": {"rule": "lower_bound", "coef": 0.5}},
        "zero": {"kind": "function", "path": "../rules.py:zero"},
        "both": {
            "kind": "sum",
            "scorers": [
                {"scorer": {"kind": "registered", "registry": "models.yaml", "name": "single"}},
                {"scorer": {"kind": "registered", "registry": "models.yaml", "name": "zero"}},
            ],
        },
    }
    assert list(read_registry(runs / "models.yaml")) == ["single", "three", "zero", "both"]
    text = (runs / "models.yaml").read_text()
    assert str(runs) not in text
    assert sorted(p.name for p in runs.iterdir()) == ["models.yaml", "single", "three"]  # no lock, no draft


def test_paths_are_read_absolute_from_any_working_directory(runs, monkeypatch, tmp_path_factory):
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    entries = read_registry(runs / "models.yaml")
    assert entries["single"] == {"kind": "reward_model", "path": str(runs / "single" / "model")}
    assert entries["zero"]["path"] == f"{runs.parent / 'rules.py'}:zero"
    assert entry_of(runs / "models.yaml", "three")["path"] == str(runs / "three" / "model")


def test_an_entry_scores_like_what_it_describes(runs, talk):
    rows = [talk("hello", "yes"), talk("hello", "no thanks")]
    alone = build_scorer({"kind": "reward_model", "path": "runs/single/model"}).score(rows)
    assert scorer_named("single").score(rows) == alone
    assert [score.value for score in scorer_named("both").score(rows)] == [score.value for score in alone]
    three = scorer_named("three").score(rows)
    for score in three:
        mean = sum(score.members) / 3
        spread = (sum((m - mean) ** 2 for m in score.members) / 3) ** 0.5
        assert score.value == pytest.approx(mean - 0.5 * spread, abs=1e-5)
        assert score.parts == {"std": pytest.approx(spread, abs=1e-5)}


def test_an_aggregate_beside_the_name_replaces_that_of_the_entry(runs, talk):
    (score,) = scorer_named("three", aggregate={"rule": "worst_case"}).score([talk("hello", "yes")])
    assert score.value == min(score.members)
    with pytest.raises(ConfigError, match="entry 'zero' is a function; aggregate belongs to reward models"):
        scorer_named("zero", aggregate={"rule": "worst_case"})


def test_a_folder_that_was_moved_still_works(runs, talk):
    before = scorer_named("three").score([talk("hello", "yes")])
    shutil.move(runs, runs.parent / "moved")
    assert scorer_named("three", "moved/models.yaml").score([talk("hello", "yes")]) == before


def test_absolute_paths_are_read_as_they_are_and_written_relative(runs):
    where = runs / "single" / "model"
    (runs / "mine.yaml").write_text(f"one: {{kind: reward_model, path: {where}}}\n")
    assert read_registry(runs / "mine.yaml")["one"]["path"] == str(where)
    register(runs / "mine.yaml", "two", {"kind": "reward_model", "path": str(where)})
    assert yaml.safe_load((runs / "mine.yaml").read_text())["two"]["path"] == "single/model"


def test_entries_with_different_tokenizers_live_in_one_registry(here, reward_folder, talk):
    for kind in ("words", "bytes"):
        register("models.yaml", kind, {"kind": "reward_model", "path": str(reward_folder(kind))})
    scorers = [scorer_named(kind, "models.yaml") for kind in ("words", "bytes")]
    assert all(scorer.score([talk("hello", "yes")])[0].status == "ok" for scorer in scorers)
    assert scorers[0].members.tokenizer.get_vocab() != scorers[1].members.tokenizer.get_vocab()


def test_a_model_of_the_hub_is_marked_as_one(here):
    register("models.yaml", "far", {"kind": "reward_model", "path": "hub:org/name"})
    assert entry_of("models.yaml", "far") == {"kind": "reward_model", "path": "org/name"}
    assert yaml.safe_load(Path("models.yaml").read_text()) == {"far": {"kind": "reward_model", "path": "hub:org/name"}}


def test_an_entry_that_points_nowhere_names_file_line_and_entry_and_spares_the_others(runs, talk):
    shutil.rmtree(runs / "three")
    line = 1 + (runs / "models.yaml").read_text().splitlines().index("three:")
    message = rf"^runs/models.yaml:{line}: entry 'three': 'three/model' is not there \(looked for {runs}/three/model\)"
    with pytest.raises(ConfigError, match=message):
        scorer_named("three")
    assert scorer_named("single").score([talk("hello", "yes")])[0].status == "ok"


def test_an_unknown_name_is_refused_with_the_nearest(runs):
    with pytest.raises(ConfigError, match=r"runs/models.yaml: no entry 'singel'; did you mean 'single'\?"):
        scorer_named("singel")
    Path("empty.yaml").write_text("")
    assert read_registry("empty.yaml") == {}
    with pytest.raises(ConfigError, match="no entry 'a'; it is empty"):
        entry_of("empty.yaml", "a")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "a: {kind: gold}\nb: {kind: gold}\na: {kind: gold}\n",
            "bad.yaml: not a valid registry: the key 'a' is given twice, line 3",
        ),
        ("a: {kind: gold\n", "bad.yaml: not a valid registry: .*line"),
        ("- a\n", "bad.yaml: holds list; a registry is a mapping"),
        ("a: {kind: gold}\n\nb: runs/model\n", "bad.yaml:3: entry 'b' is 'runs/model'; write a scorer"),
        ("b: {path: runs/model}\n", r"bad.yaml:1: entry 'b' is \{'path': 'runs/model'\}; write a scorer"),
    ],
)
def test_what_is_no_registry_is_refused_with_its_line(here, text, message):
    Path("bad.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_registry("bad.yaml")


def test_a_registry_that_is_not_there_is_refused_when_it_is_read_not_when_a_recipe_is(here):
    raw = {"kind": "registered", "registry": "models.yaml", "name": "a"}
    assert parse_scorer(raw).name == "a"  # an earlier stage may write the file
    with pytest.raises(ConfigError, match=r"models.yaml: no such registry; reward training writes models.yaml beside"):
        build_scorer(raw)


def test_an_entry_of_an_unknown_kind_or_key_says_where(here):
    Path("models.yaml").write_text("a: {kind: gould}\nb: {kind: gold, wrld: x}\n")
    with pytest.raises(ConfigError, match=r"models.yaml: a: kind is 'gould'; did you mean 'gold'"):
        scorer_named("a", "models.yaml")
    with pytest.raises(ConfigError, match=r"models.yaml: b: unknown key 'wrld'; did you mean 'world'"):
        scorer_named("b", "models.yaml")


def test_entries_that_lead_back_to_themselves_are_refused(here):
    Path("models.yaml").write_text(
        "a: {kind: registered, registry: models.yaml, name: b}\nb: {kind: registered, registry: models.yaml, name: a}\n"
    )
    with pytest.raises(ConfigError, match=r"models.yaml: entry 'a' leads back to itself"):
        scorer_named("a", "models.yaml")


def test_resolving_leaves_other_rewards_as_they_are(runs):
    raw = {"kind": "sum", "scorers": [{"scorer": {"kind": "registered", "registry": "runs/models.yaml", "name": "zero"}}]}
    found = resolve(raw)
    assert found["scorers"][0]["scorer"] == {"kind": "function", "path": f"{runs.parent / 'rules.py'}:zero"}
    assert resolve({"kind": "gold"}) == {"kind": "gold"}


def test_registering_again_keeps_the_place_and_what_people_added(runs):
    table = yaml.safe_load((runs / "models.yaml").read_text())
    table["single"]["aggregate"] = {"rule": "median"}
    table["single"]["max_length"] = 99
    (runs / "models.yaml").write_text(yaml.safe_dump(table, sort_keys=False))
    register("runs/models.yaml", "single", {"kind": "reward_model", "path": "runs/three/model", "max_length": 50})
    after = yaml.safe_load((runs / "models.yaml").read_text())
    assert list(after) == ["single", "three", "zero", "both"]
    assert after["single"] == {
        "kind": "reward_model",
        "path": "three/model",
        "max_length": 50,
        "aggregate": {"rule": "median"},
    }
    register("runs/models.yaml", "single", {"kind": "gold"})
    assert yaml.safe_load((runs / "models.yaml").read_text())["single"] == {"kind": "gold"}


@pytest.mark.parametrize("name", ["", "a/b", "a:b", "a\nb"])
def test_a_name_that_a_command_line_cannot_give_is_refused(here, name):
    with pytest.raises(ConfigError, match="is no name for an entry"):
        register("models.yaml", name, {"kind": "gold"})


def test_registering_a_path_that_is_not_there_is_refused(here):
    with pytest.raises(ConfigError, match="entry 'a': 'gone/model' is not there"):
        register("models.yaml", "a", {"kind": "reward_model", "path": "gone/model"})
    assert not Path("models.yaml").exists()


def test_registering_into_a_damaged_file_leaves_it_as_it_is(here):
    Path("models.yaml").write_text("a: {kind: gold\n")
    with pytest.raises(ConfigError, match="not a valid registry"):
        register("models.yaml", "b", {"kind": "gold"})
    assert Path("models.yaml").read_text() == "a: {kind: gold\n"
    register("other.yaml", "b", {"kind": "gold"})  # and no lock is left behind
    assert not list(here.glob(".*lock"))


def both_got_in() -> None:
    entries = read_registry("models.yaml")
    assert sorted(entries) == sorted(f"{name}_{number}" for name in "ab" for number in range(10))
    for name in "ab":  # each in its own order
        assert [key for key in entries if key[0] == name] == [f"{name}_{number}" for number in range(10)]


def test_two_that_register_at_the_same_time_both_get_in(here):
    """The lock is of the open file, so threads stand for processes."""

    def work(name: str) -> None:
        for number in range(10):
            register("models.yaml", f"{name}_{number}", {"kind": "gold"})

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, "ab"))
    both_got_in()


CHILD = """
import sys
from rewarden.scoring.registry import register

for number in range(10):
    register("models.yaml", f"{sys.argv[1]}_{number}", {"kind": "gold"})
"""


@pytest.mark.slow
def test_two_processes_that_register_at_the_same_time_both_get_in(here):
    environment = {**os.environ, "PYTHONPATH": str(Path(registry.__file__).parents[2])}
    children = [subprocess.Popen([sys.executable, "-c", CHILD, name], env=environment) for name in "ab"]
    assert [child.wait(timeout=300) for child in children] == [0, 0]
    both_got_in()


def test_a_lock_that_is_held_is_waited_for_and_then_named(here, monkeypatch):
    monkeypatch.setattr(registry, "LOCK_WAIT_S", 0.1)
    lock = FolderLock(Path(".models.yaml.lock"))
    lock.acquire()
    with pytest.raises(RewardenError, match=rf"models.yaml is being written by another process.*pid {os.getpid()}"):
        register("models.yaml", "a", {"kind": "gold"})
    lock.release()
    register("models.yaml", "a", {"kind": "gold"})
    assert read_registry("models.yaml") == {"a": {"kind": "gold"}}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("runs/models.yaml", ("runs/models.yaml", None)),
        ("runs/models.yml:a@seed=0,b", ("runs/models.yml", "a@seed=0,b")),
        ("runs/model", None),
        ("org/name", None),
        ("C:/runs/model", None),
    ],
)
def test_a_registry_on_the_command_line_is_told_from_a_folder(text, expected):
    found = named(text)
    assert (None if found is None else (found[0].as_posix(), found[1])) == expected


def test_a_learned_entry_is_frozen_like_any_reward_model(runs):
    scorer = scorer_named("three")
    assert isinstance(scorer, RewardModelScorer)
    assert not any(p.requires_grad for module in scorer.members.modules() for p in module.parameters())


def test_calibration_of_a_checkpoint_centers_the_members(runs, talk):
    card = {"num_heads": 3, "calibration": {"members": [{"count": 4, "mean": m, "m2": 4.0 * s * s} for m, s in CALIBRATION]}}
    (runs / "three" / "model" / "rewarden.json").write_text(json.dumps(card))
    rows = [talk("hello", "yes"), talk("hello", "no")]
    raw = [score.members for score in scorer_named("three", aggregate={"rule": "mean"}).score(rows)]
    worst = scorer_named("three", aggregate={"rule": "worst_case"})
    scaled = scorer_named("three", aggregate={"rule": "worst_case", "scale": True})
    plain = scorer_named("three", aggregate={"rule": "worst_case", "center": "none"})
    assert worst.notes == scaled.notes == plain.notes == ()
    for row, members in enumerate(raw):
        centered = [member - mean for member, (mean, _) in zip(members, CALIBRATION, strict=True)]
        divided = [number / std for number, (_, std) in zip(centered, CALIBRATION, strict=True)]
        assert worst.score(rows)[row].value == pytest.approx(min(centered), abs=1e-5)
        assert scaled.score(rows)[row].value == pytest.approx(min(divided), abs=1e-5)
        assert plain.score(rows)[row].value == pytest.approx(min(members), abs=1e-5)
        assert worst.score(rows)[row].members == members  # raw, whatever the rule sees
        spread = float(torch.tensor(centered, dtype=torch.float64).std(correction=0))
        assert worst.score(rows)[row].parts["std"] == pytest.approx(spread, abs=1e-5)


CALIBRATION = [(1.0, 0.5), (-2.0, 2.0), (0.5, 1.0)]
