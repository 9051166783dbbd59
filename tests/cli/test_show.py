"""`rewarden show`: every key with its value, whether it was set, its help, and the batch plan."""

import re
from pathlib import Path

import pytest

from rewarden.algos.ppo_config import PPO
from rewarden.algos.sft import SFT
from rewarden.recipe.show import lines, show_recipe
from rewarden.spec import Spec

RECIPES = Path(__file__).parents[2] / "recipes"


def shown(capsys, path, *overrides) -> dict[str, tuple[str, str, str]]:
    """key -> (set or default, value, help) of the last stage shown."""
    show_recipe(path, overrides)
    text = capsys.readouterr().out.rpartition("\n\n")[2]
    return {m[2]: (m[1], m[3], m[4]) for m in re.finditer(r"^  (set|default) +(\S+) = (.*?)  (.*)$", text, re.MULTILINE)}


def leaves(spec_class: type[Spec], prefix: str = "") -> set[str]:
    """Dotted names of all fields whose type is no Spec, by the classes alone."""
    names = set()
    for name, field in spec_class.model_fields.items():
        options = [field.annotation, *getattr(field.annotation, "__args__", ())]
        inner = next((o for o in options if isinstance(o, type) and issubclass(o, Spec)), None)
        names |= leaves(inner, f"{prefix}{name}.") if inner else {f"{prefix}{name}"}
    return names


def test_every_key_is_shown_with_its_help(capsys):
    keys = shown(capsys, RECIPES / "sft_hh.yaml")
    assert leaves(SFT) <= set(keys)
    assert {"save_steps", "report_to", "view"} <= set(keys)
    assert [key for key, (_, _, text) in keys.items() if not text] == []


def test_set_and_default_are_told_apart(capsys):
    keys = shown(capsys, RECIPES / "sft_hh.yaml", "save_steps=7", "optim.eps=1e-5")
    assert keys["model.lora_r"][:2] == ("set", "16")
    assert keys["optim.eps"][:2] == ("set", "1e-05")
    assert keys["optim.betas"][0] == "default"
    assert keys["save_steps"][:2] == ("set", "7")
    assert keys["seed"][:2] == ("default", "0")


def test_the_parts_of_a_default_are_defaults(capsys, write):
    text = "kind: ppo\npolicy: {model_name_or_path: m}\nreward: {kind: gold}\ndata: {path: d}\n"
    keys = shown(capsys, write(text))
    assert keys["optim.learning_rate"][:2] == ("default", "3e-06")  # PPO's own, not Optim's
    assert keys["critic"][:2] == ("default", "None")


def test_the_keys_of_a_reward_are_shown_too(capsys):
    keys = shown(capsys, RECIPES / "ppo_world.yaml", "reward.max_length=300")
    assert keys["reward.kind"][:2] == ("set", "'reward_model'")
    assert keys["reward.max_length"][:2] == ("set", "300")
    assert keys["reward.dtype"][:2] == ("default", "'auto'")


def test_the_demo_shows_its_stages_and_what_each_reads(capsys):
    show_recipe(RECIPES / "demo.yaml", ())
    text = capsys.readouterr().out
    assert text.startswith("runs/demo  (6 stages)")
    assert "\nppo: ppo, after sft, pairs, reward\n" in text
    assert "scorers.proxy.path = 'runs/demo/reward/model'" in text


@pytest.mark.parametrize("name", ["demo.yaml", "ppo_hh.yaml", "reward_hh.yaml", "ppo_world_vanilla.yaml"])
def test_every_shipped_recipe_can_be_shown(capsys, name):
    show_recipe(RECIPES / name, ())
    assert " plan " in capsys.readouterr().out


def plan(capsys, path, *overrides) -> list[str]:
    show_recipe(path, overrides)
    return re.findall(r"^  plan +(.*)$", capsys.readouterr().out, re.MULTILINE)


def test_the_batch_plan_of_sft_counts_microbatches(capsys):
    (line,) = plan(capsys, RECIPES / "sft_hh.yaml", "train_batch_size=20", "per_device_train_batch_size=8")
    assert line.startswith("20 rows per optimizer step over 1 rank(s): at most 20 a rank in 3 microbatch(es) of 8 or fewer")


def test_the_batch_plan_of_ppo_counts_rollouts_and_steps(capsys):
    overrides = ["max_steps=3", "rollout_batch_size=20", "mini_batch_size=8", "num_ppo_epochs=2"]
    text = plan(capsys, RECIPES / "ppo_world.yaml", *overrides, "per_device_train_batch_size=4")
    assert text == [
        "3 rounds x 20 rollouts, 60 in all",
        "each round: 2 epochs x 3 minibatches = 6 optimizer steps, 18 in all",
        "each optimizer step: at most 7 rollouts a rank in 2 microbatch(es)",
    ]


def test_lines_of_a_spec_built_in_python_say_what_was_given():
    spec = PPO(policy={"model_name_or_path": "m"}, reward={"kind": "gold"}, data={"path": "d"}, beta=0.1)
    given = {line.key for line in lines(spec) if line.given}
    assert {"policy.model_name_or_path", "reward.kind", "data.path", "beta"} <= given
    assert not {"optim.learning_rate", "lam", "policy.lora_r"} & given
