"""The grammar of recipes: values, overrides, references, and what is refused."""

import math
from pathlib import Path

import pytest

from rewarden.errors import ConfigError
from rewarden.recipe.read import merge, read_recipe

CHAIN = """
seed: 3
rate: 1e-4
stages:
  - stage: start
    kind: world_start
    seed: ${seed}
  - stage: sft
    kind: sft
    model: {model_name_or_path: "${start}/model"}
    data: {path: "${start}/sft.jsonl"}
    optim: {learning_rate: "${rate}"}
"""


def stage(recipe, name):
    return next(stage for stage in recipe.stages if stage.name == name)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1E5", 1e5),
        ("1.5e-3", 1.5e-3),
        (".5", 0.5),
        ("-2", -2),
        ("1_000", 1000),
        ("010", 10),
        ("None", None),
        ("null", None),
        ("", None),
        ('"None"', "None"),
        ("true", True),
        ("off", "off"),
        ("no", "no"),
        ("1:30", "1:30"),
        ("[1, 2e-3]", [1, 2e-3]),
        ("{a: 1}", {"a": 1}),
        (".inf", math.inf),
        ("some/file.jsonl", "some/file.jsonl"),
        ("a=b", "a=b"),
    ],
)
def test_the_value_of_an_override_is_yaml(write, text, value):
    path = write("kind: sft\n")
    read = read_recipe(path, [f"x.y={text}"]).stages[0].raw["x"]["y"]
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize(("text", "value"), [("1e-5", 1e-5), ("None", None), ("off", "off"), ("010", 10)])
def test_a_file_reads_the_same_values_as_an_override(write, text, value):
    assert read_recipe(write(f"kind: sft\nx: {text}\n")).stages[0].raw["x"] == value


def test_a_single_recipe_is_one_stage_in_the_folder_of_its_name(write):
    recipe = read_recipe(write("kind: sft\nmax_steps: 2\ndescription: mine\n", "tiny.yaml"))
    assert not recipe.is_chain
    assert (recipe.name, recipe.folder) == ("tiny", Path("runs/tiny"))
    assert recipe.stages[0].folder == recipe.folder
    assert recipe.stages[0].raw == {"kind": "sft", "max_steps": 2}


def test_name_and_output_dir_can_be_overridden(write):
    for text in ("kind: sft\n", CHAIN):
        assert read_recipe(write(text), ["name=other", "output_dir=here/there"]).folder == Path("here/there/other")


def test_overrides_reach_deep_and_leave_neighbours_alone(write):
    path = write("kind: sft\noptim: {learning_rate: 1.0, betas: [0.9, 0.95]}\n")
    raw = read_recipe(path, ["optim.learning_rate=1e-5", "data.path=a.jsonl"]).stages[0].raw
    assert raw["optim"] == {"learning_rate": 1e-5, "betas": [0.9, 0.95]}
    assert raw["data"] == {"path": "a.jsonl"}


def test_the_last_override_wins(write):
    assert read_recipe(write("kind: sft\n"), ["seed=1", "seed=2"]).stages[0].raw["seed"] == 2


def test_an_override_of_a_null_part_makes_it(write):
    raw = read_recipe(write("kind: sft\neval_data: null\n"), ["eval_data.path=x"]).stages[0].raw
    assert raw["eval_data"] == {"path": "x"}


def test_a_stage_is_overridden_by_its_name(write):
    recipe = read_recipe(write(CHAIN), ["sft.optim.learning_rate=1", "seed=5"])
    assert stage(recipe, "sft").raw["optim"] == {"learning_rate": 1}
    assert stage(recipe, "start").raw["seed"] == 5


@pytest.mark.parametrize("text", ["seed", "=1", "a..b=1", ".a=1", "seed.x=1", "optim.learning_rate.x=1"])
def test_a_malformed_override_is_refused_with_its_text(write, text):
    path = write("kind: sft\nseed: 1\noptim: {learning_rate: 1.0}\n")
    with pytest.raises(ConfigError) as error:
        read_recipe(path, [text])
    assert repr(text) in str(error.value)


def test_an_override_that_is_not_yaml_is_refused(write):
    with pytest.raises(ConfigError, match=r"override 'x=\[1': the value is not YAML .* quote it"):
        read_recipe(write("kind: sft\n"), ["x=[1"])


def test_an_override_of_a_stage_that_is_not_there_names_the_nearest(write):
    with pytest.raises(ConfigError, match=r"override 'stf.max_steps=2': the recipe has no 'stf'; did you mean 'sft'\?"):
        read_recipe(write(CHAIN), ["stf.max_steps=2"])


def test_a_stage_cannot_be_overridden_by_a_plain_value(write):
    with pytest.raises(ConfigError, match="stage sft is 5; a stage is a mapping"):
        read_recipe(write(CHAIN), ["sft=5"])


def test_a_reference_to_a_stage_is_its_folder_and_is_noted(write):
    recipe = read_recipe(write(CHAIN))
    assert recipe.is_chain
    assert stage(recipe, "sft").raw["data"] == {"path": "runs/recipe/start/sft.jsonl"}
    assert stage(recipe, "sft").reads == ("start",)
    assert stage(recipe, "start").reads == ()


def test_a_reference_to_a_value_keeps_its_type(write):
    recipe = read_recipe(write(CHAIN))
    assert stage(recipe, "start").raw["seed"] == 3
    assert stage(recipe, "sft").raw["optim"] == {"learning_rate": 1e-4}


def test_a_value_inside_a_text_is_written_out(write):
    text = "name: run-${seed}\nseed: 4\nstages:\n  - {stage: a, kind: sft, note: 'seed ${seed} of ${name}'}\n"
    with pytest.raises(ConfigError, match="comes later in the recipe; move it up"):
        read_recipe(write(text))
    turned = "seed: 4\nname: run-${seed}\nstages:\n  - {stage: a, kind: sft, note: 'seed ${seed} of ${name}'}\n"
    recipe = read_recipe(write(turned))
    assert recipe.folder == Path("runs/run-4")
    assert recipe.stages[0].raw["note"] == "seed 4 of run-4"


def test_a_doubled_dollar_is_no_reference(write):
    assert read_recipe(write("kind: sft\nnote: a $${b} c\n")).stages[0].raw["note"] == "a ${b} c"


def test_a_path_into_a_stage_counts_as_reading_it(write):
    text = "stages:\n  - {stage: a, kind: sft}\n  - {stage: b, kind: sft, data: {path: runs/recipe/a/x.jsonl}}\n"
    assert stage(read_recipe(write(text)), "b").reads == ("a",)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("${start}/model", "${strat}/model", r"sft.model.model_name_or_path: \$\{strat\} is neither .* did you mean 'start'\?"),
        ("${start}/model", "${sft}/model", r"\$\{sft\} comes later in the recipe"),
        ("seed: ${seed}", "seed: ${sft}", r"start.seed: \$\{sft\} comes later in the recipe; move it up"),
        ("${start}/model", "${start.model}", r"\$\{start.model\} is neither"),
        ("rate: 1e-4", "ratee: 1e-4", r"sft.optim.learning_rate: \$\{rate\} is neither .* did you mean 'ratee'\?"),
    ],
)
def test_a_wrong_reference_is_refused(write, old, new, message):
    with pytest.raises(ConfigError, match=message):
        read_recipe(write(CHAIN.replace(old, new, 1)))


def test_a_reference_in_a_single_recipe_has_nothing_but_name_and_folder_to_name(write):
    recipe = read_recipe(write("kind: sft\nrun_name: ${name}\n", "tiny.yaml"))
    assert recipe.stages[0].raw["run_name"] == "tiny"
    with pytest.raises(ConfigError, match=r"\$\{seed\} is neither"):
        read_recipe(write("kind: sft\nseed: 1\nrun_name: x-${seed}\n"))


def test_a_value_that_no_stage_uses_is_refused_with_the_nearest_key(write):
    with pytest.raises(ConfigError, match=r"no stage uses the value 'output_dri'; .* did you mean 'output_dir'\?"):
        read_recipe(write("output_dri: elsewhere\n" + CHAIN))


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ("  - {stage: a, kind: sft}\n  - {stage: a, kind: sft}\n", "two stages are named 'a'"),
        ("  - {stage: 'a b', kind: sft}\n", "stage name 'a b' is no plain word"),
        ("  - {kind: sft}\n", r"stages\[0\] has no `stage:` name"),
        ("  - sft\n", r"stages\[0\] has no `stage:` name"),
        ("  {stage: a, kind: sft}\n", "write a list"),
        ("  []\n", "write a list"),
        ("  - {stage: name, kind: sft}\n", "'name' is both a value and a stage"),
    ],
)
def test_a_wrong_list_of_stages_is_refused(write, stages, message):
    with pytest.raises(ConfigError, match=message):
        read_recipe(write(f"stages:\n{stages}"))


def test_a_stage_takes_another_recipe_and_lays_its_own_keys_over_it(write):
    write("name: other\nkind: sft\nmax_length: 5\noptim: {learning_rate: 1.0, eps: 2.0}\n", "base.yaml")
    text = "stages:\n  - {stage: a, recipe: base.yaml, optim: {eps: 3.0}}\n"
    raw = read_recipe(write(text), ["a.max_length=6"]).stages[0].raw
    assert raw == {"kind": "sft", "max_length": 6, "optim": {"learning_rate": 1.0, "eps": 3.0}}


def test_a_stage_cannot_take_a_chain_or_a_recipe_that_is_not_there(write):
    write(CHAIN, "chain.yaml")
    with pytest.raises(ConfigError, match=r"chain.yaml is a chain itself"):
        read_recipe(write("stages:\n  - {stage: a, recipe: chain.yaml}\n"))
    with pytest.raises(ConfigError, match=r"chian.yaml: no such recipe; did you mean 'chain.yaml'\?"):
        read_recipe(write("stages:\n  - {stage: a, recipe: chian.yaml}\n"))


def test_a_part_of_another_kind_replaces_the_one_below_it():
    under = {"reward": {"kind": "reward_model", "path": "a", "max_length": 9}}
    assert merge(under, {"reward": {"kind": "length", "target": 3}}) == {"reward": {"kind": "length", "target": 3}}
    assert merge(under, {"reward": {"path": "b"}})["reward"] == {"kind": "reward_model", "path": "b", "max_length": 9}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind: [sft\n", r"recipe.yaml: not a valid recipe: .* line 2, column 1"),
        ("- kind\n", "holds list; a recipe is a mapping"),
        ("", "holds NoneType; a recipe is a mapping"),
        ("kind: sft\nseed: 1\nseed: 2\n", "the key 'seed' is given twice, line 3"),
        ("kind: sft\noptim:\n  eps: 1\n  eps: 2\n", "the key 'eps' is given twice, line 4"),
        ("kind: sft\n1: x\n", "the key 1 is no word"),
        ("kind: sft\nname: [a]\n", r"name is \['a'\]; write a word"),
        ("kind: !!python/name:os.system ''\n", "not a valid recipe"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(write, text, message):
    with pytest.raises(ConfigError, match=message):
        read_recipe(write(text))


def test_anchors_and_merge_keys_are_yaml_too(write):
    text = "kind: sft\noptim: &o {learning_rate: 1.0}\ncritic_optim: {<<: *o, eps: 2.0}\n"
    assert read_recipe(write(text)).stages[0].raw["critic_optim"] == {"learning_rate": 1.0, "eps": 2.0}


def test_a_missing_file_names_the_nearest(write):
    write("kind: sft\n", "sft_world.yaml")
    with pytest.raises(ConfigError, match=r"stf_world.yaml: no such recipe; did you mean 'sft_world.yaml'\?"):
        read_recipe(Path("stf_world.yaml"))
    with pytest.raises(ConfigError, match="no such recipe; give the path"):
        read_recipe(Path("nowhere/sft.yaml"))
    Path("folder.yaml").mkdir()
    with pytest.raises(ConfigError, match=r"folder.yaml: cannot be read"):
        read_recipe(Path("folder.yaml"))
