"""The examples run, and do what they say."""

import runpy
import sys
from pathlib import Path

import pytest

from rewarden.recipe.jobs import parse_recipe
from rewarden.recipe.read import read_recipe
from rewarden.scoring import build_scorer
from rewarden.types import Conversation, Message

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def play(monkeypatch, capsys, name, *words) -> str:
    monkeypatch.setattr(sys, "argv", [name, *words])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def test_custom_reward_scores_with_a_function_and_with_a_config(monkeypatch, capsys):
    lines = play(monkeypatch, capsys, "custom_reward.py").splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["function", "+0.00"],
        ["function", "-1.70"],
        ["function", "not_applicable"],
        ["Keywords", "+1.00"],
        ["Keywords", "+0.00"],
        ["Keywords", "+0.00"],
    ]


@pytest.mark.parametrize(
    "overrides",
    [
        ["reward.kind=function", "reward.path=examples/custom_reward.py:brief"],
        ["reward={kind: 'examples/custom_reward.py:Keywords', words: [thank, please]}"],
    ],
)
def test_the_commands_of_custom_reward_name_a_reward(monkeypatch, overrides):
    monkeypatch.chdir(ROOT)
    ((spec, _),) = parse_recipe(read_recipe(Path("recipes/ppo_world.yaml"), overrides))
    row = Conversation(id="1", messages=(Message(role="user", text="Hello"), Message(role="assistant", text="thank you")))
    (score,) = build_scorer(spec.reward).score([row])
    assert score.status == "ok"


def test_library_use_trains_and_prints_every_round(monkeypatch, capsys):
    out = play(monkeypatch, capsys, "library_use.py", "--dialogues", "32", "--rounds", "2", "--prompts", "8")
    assert "sft 2/2: loss " in out
    assert [line.split(":")[0] for line in out.splitlines() if line.startswith("ppo")] == ["ppo 1/2", "ppo 2/2"]
    assert "KL 0.000" in out.splitlines()[1]
