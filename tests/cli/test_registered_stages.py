"""Stages that read a registry: which stages they follow, and when what they read has changed."""

from pathlib import Path

import pytest

from rewarden.recipe.read import read_recipe
from rewarden.recipe.registries import Use, uses, without_registries, writers
from rewarden.recipe.stages import fingerprint, inputs
from rewarden.scoring import parse_scorer
from rewarden.scoring.registry import register

CHAIN = """
name: chain
stages:
  - {stage: first, kind: reward, model: {model_name_or_path: m}, data: {path: p.jsonl}}
  - {stage: second, kind: reward, model: {model_name_or_path: m}, data: {path: p.jsonl}}
  - {stage: other, kind: sft, model: {model_name_or_path: m}, data: {path: p.jsonl}}
  - stage: ppo
    kind: ppo
    policy: {model_name_or_path: m}
    data: {path: p.jsonl}
    reward: REWARD
"""


def chain(write, reward: str):
    return read_recipe(write(CHAIN.replace("REWARD", reward)))


@pytest.mark.parametrize(
    ("reward", "reads"),
    [
        ("{kind: registered, registry: runs/chain/models.yaml, name: second}", ("second",)),
        ("{kind: registered, registry: ./runs/chain/../chain/models.yaml, name: first}", ("first",)),
        ("{kind: registered, registry: runs/models.yaml, name: first}", ()),
        ("{kind: sum, scorers: [{scorer: {kind: registered, registry: runs/chain/models.yaml, name: first}}]}", ("first",)),
        ("{registry: runs/chain/models.yaml}", ("first", "second")),
        ("{registry: runs/chain/models.yaml, entries: [second]}", ("second",)),
        ("{kind: gold}", ()),
    ],
)
def test_a_stage_follows_the_stages_that_write_the_entries_it_asks_for(write, reward, reads):
    assert chain(write, reward).stages[-1].reads == reads


def test_every_registry_of_a_config_is_found_with_its_entries():
    config = {
        "a": [{"kind": "registered", "registry": "x.yaml", "name": "n"}],
        "b": {"registry": "y.yaml", "entries": ["p", "q"], "c": {"registry": "z.yaml"}},
    }
    assert list(uses(config)) == [Use(Path("x.yaml"), ("n",)), Use(Path("y.yaml"), ("p", "q")), Use(Path("z.yaml"), None)]
    assert without_registries(config) == {"a": [{"kind": "registered", "name": "n"}], "b": {"entries": ["p", "q"], "c": {}}}
    assert writers({"registry": 3}, Path("runs"), {}) == set()


@pytest.fixture
def models(here) -> Path:
    for name in ("a", "b"):
        (here / "runs" / name / "model").mkdir(parents=True)
        (here / "runs" / name / "model" / "weights").write_text(name)
        register("runs/models.yaml", name, {"kind": "reward_model", "path": f"runs/{name}/model"})
    return here / "runs"


REGISTERED = {"kind": "registered", "registry": "runs/models.yaml", "name": "a"}


def print_of(raw=REGISTERED, upstream=()) -> str:
    return fingerprint("job", parse_scorer(raw), {Path(folder): "1" for folder in upstream})


def test_another_entry_changes_nothing_and_the_named_one_does(models):
    before = print_of()
    register("runs/models.yaml", "c", {"kind": "gold"})
    register("runs/models.yaml", "b", {"kind": "gold"})
    assert print_of() == before
    register("runs/models.yaml", "a", {"kind": "reward_model", "path": "runs/a/model", "max_length": 9})
    assert print_of() != before
    register("runs/models.yaml", "a", {"kind": "reward_model", "path": "runs/b/model"})
    assert print_of() != before


def test_weights_behind_an_entry_count(models):
    before = print_of()
    (models / "b" / "model" / "weights").write_text("new")
    assert print_of() == before
    (models / "a" / "model" / "weights").write_text("new")
    assert print_of() != before
    assert sorted(inputs(REGISTERED, {})) == ["runs/a/model", "runs/models.yaml: a"]


def test_an_entry_that_an_earlier_stage_writes_changes_nothing_when_it_appears(models):
    (models / "models.yaml").rename(models / "aside.yaml")
    before = print_of(upstream=["runs/a"])
    (models / "aside.yaml").rename(models / "models.yaml")
    assert print_of(upstream=["runs/a"]) == before
    register("runs/models.yaml", "a", {"kind": "reward_model", "path": "runs/a/model", "aggregate": {"rule": "median"}})
    assert print_of(upstream=["runs/a"]) != before  # what people add is no work of that stage


def test_a_project_that_is_moved_is_the_same(models, monkeypatch):
    before = print_of()
    moved = models.parent.with_name(f"{models.parent.name}_moved")
    models.parent.rename(moved)
    monkeypatch.chdir(moved)
    assert print_of() == before
