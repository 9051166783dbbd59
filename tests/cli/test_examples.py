"""The examples run, and do what they say."""

import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest

from rewarden.recipe.jobs import parse_recipe
from rewarden.recipe.read import read_recipe
from rewarden.recipe.yaml_text import read_value
from rewarden.rollout.users import build_user, parse_user
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


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_the_tour_runs_from_its_first_line_to_its_last(here, capsys):
    names = {"__name__": "tour"}
    for block in blocks("tour.md", "python"):
        exec(compile(block, "tour.md", "exec"), names)
    assert names["scores"][0].status == "ok"
    assert names["facts"]["kl/sequence"] == pytest.approx(0.0, abs=1e-5)
    assert names["report"]["policy/ratio"] == pytest.approx(1.0, abs=1e-5)
    assert Path("runs/tour/run/done.json").exists()
    assert "PPO: done, 2 steps" in capsys.readouterr().out


def test_the_code_of_the_page_on_users_runs(here, capsys):
    configs, dialogues, own = blocks("users.md", "python")
    names = {"__name__": "users"}
    exec(compile(configs, "users.md", "exec"), names)
    kinds = [type(parse_user(names[kind])).__name__ for kind in ("recorded", "model", "endpoint")]
    assert kinds == ["RecordedTurns", "ModelSimulator", "EndpointSimulator"]
    exec(compile(dialogues, "users.md", "exec"), names)
    roles = ["user", *["assistant", "user"] * 2, "assistant"]
    assert capsys.readouterr().out.splitlines() == [f"turns None {roles}"] * 3
    Path("my_file.py").write_text(own)
    user = build_user({"kind": "my_file.py:Ticket", "lines": ["It still fails.", "And now?"]})
    assert user.reply(names["rollouts"][0].conversation, 3).text == "And now?"


def test_the_code_of_the_page_on_extending_does_what_it_says(here):
    function, scorer, job = blocks("extending.md", "python")
    Path("my_file.py").write_text(f"{function}\n\n{scorer}\n\n{job}")
    row = Conversation(id="1", messages=(Message(role="user", text="Hello"), Message(role="assistant", text="thank you")))
    for raw, value in (
        ({"kind": "function", "path": "my_file.py:brief"}, 0.0),
        ({"kind": "my_file.py:Keywords", "words": ["thank", "please"], "points": 0.5}, 0.5),
    ):
        (score,) = build_scorer(raw).score([row])
        assert score.value == pytest.approx(value)
    one, several, data, chain = blocks("extending.md", "yaml")
    build_scorer(read_value(one, one)["reward"])
    names = [part.get("name", part["scorer"]["kind"]) for part in read_value(several, several)["reward"]["scorers"]]
    assert names == ["reward_model", "length", "thanks"]
    for text, kind in ((data, "reward"), (several, "ppo")):
        Path("part.yaml").write_text(
            f"kind: {kind}\n{'model' if kind == 'reward' else 'policy'}: {{model_name_or_path: m}}\n{text}"
        )
        parse_recipe(read_recipe(Path("part.yaml"), [] if kind == "reward" else ["data.path=d"]))
    shutil.copy(ROOT / "recipes" / "sft_hh.yaml", "sft_hh.yaml")
    Path("chain.yaml").write_text(chain)
    recipe = read_recipe(Path("chain.yaml"))
    (few, _), (sft, _) = parse_recipe(recipe)
    Path("all.jsonl").write_text("1\n2\n" * 100)
    assert few.run(here) == {"rows": 100.0}
    assert sft.data.path == "runs/chain/few/rows.jsonl"


def test_the_recipes_of_the_page_on_recipes_parse(here):
    single, chain, grid, _ = blocks("recipes.md", "yaml")
    Path("my_file.py").write_text(
        "from rewarden.spec import Spec\n\nclass Report(Spec):\n    cells: str\n\n    def run(self, folder):\n        return {}\n"
    )
    Path("grid.yaml").write_text(grid)
    names = [stage.name for stage in read_recipe(Path("grid.yaml")).stages]
    assert sorted(name for name in names if name.startswith("start")) == ["start@seed=0", "start@seed=1", "start@seed=2"]
    Path("single.yaml").write_text(single)
    ((spec, _),) = parse_recipe(read_recipe(Path("single.yaml")))
    assert (spec.model.lora_r, spec.optim.learning_rate, spec.max_steps) == (16, 1e-4, 100)
    shutil.copy(ROOT / "recipes" / "sft_world.yaml", "sft_world.yaml")
    Path("chain.yaml").write_text(chain)
    recipe = read_recipe(Path("chain.yaml"))
    assert recipe.folder == Path("runs/mine")
    (sft, _), (reward, _) = parse_recipe(recipe)
    assert (sft.num_train_epochs, sft.data.path) == (3, "dialogues.jsonl")
    assert reward.model.model_name_or_path == "runs/mine/sft/model"
