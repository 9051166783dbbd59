"""Grids: the cells, what stages share, and what is refused before anything runs."""

from pathlib import Path

import pytest

from rewarden.errors import ConfigError
from rewarden.recipe.jobs import parse_recipe
from rewarden.recipe.read import read_recipe
from rewarden.recipe.show import show_recipe

STUDY = """
seed: 0
trap: false
flip: 0.25
twice: "${seed}${seed}"
grid:
  - {seed: [0, 1], trap: [false, true], flip: [0.25]}
  - {seed: [0], trap: [false], flip: [0.25, 0.0]}
stages:
  - {stage: base, kind: "jobs.py:Write", text: b}
  - {stage: sft, kind: "jobs.py:Write", text: "${seed}${trap}", path: "${base}/out.txt"}
  - {stage: pairs, kind: "jobs.py:Write", text: "${flip}", path: "${sft}/out.txt"}
  - {stage: odd, kind: "jobs.py:Write", text: "${twice}", only: {trap: false, flip: [0.25, 0.5]}}
gather:
  - {stage: all, kind: "jobs.py:Write", text: end, path: "${cells}"}
"""


def names(recipe) -> list[str]:
    return [stage.name for stage in recipe.stages]


def test_stages_carry_the_keys_they_depend_on_and_cells_share_them(write):
    recipe = read_recipe(write(STUDY))
    assert [dict(cell.keys) for cell in recipe.cells] == [
        {"seed": 0, "trap": False, "flip": 0.25},
        {"seed": 0, "trap": True, "flip": 0.25},
        {"seed": 1, "trap": False, "flip": 0.25},
        {"seed": 1, "trap": True, "flip": 0.25},
        {"seed": 0, "trap": False, "flip": 0.0},
    ]
    assert names(recipe) == [
        "base",
        "sft@seed=0,trap=false",
        "pairs@seed=0,trap=false,flip=0.25",
        "odd@seed=0",
        "sft@seed=0,trap=true",
        "pairs@seed=0,trap=true,flip=0.25",
        "sft@seed=1,trap=false",
        "pairs@seed=1,trap=false,flip=0.25",
        "odd@seed=1",
        "sft@seed=1,trap=true",
        "pairs@seed=1,trap=true,flip=0.25",
        "pairs@seed=0,trap=false,flip=0.0",
        "all",
    ]
    assert recipe.cells[4].stages == {
        "base": "base",
        "sft": "sft@seed=0,trap=false",
        "pairs": "pairs@seed=0,trap=false,flip=0.0",
    }
    pairs = recipe.stages[2]
    assert pairs.folder == Path("runs/recipe/pairs@seed=0,trap=false,flip=0.25")
    assert pairs.raw == {"kind": "jobs.py:Write", "text": 0.25, "path": "runs/recipe/sft@seed=0,trap=false/out.txt"}
    assert pairs.reads == ("sft@seed=0,trap=false",)
    assert recipe.stages[-1].reads == tuple(names(recipe)[:-1])
    assert recipe.stages[-1].raw["path"] == "runs/recipe/cells.json"


@pytest.mark.parametrize(
    ("overrides", "cells"),
    [
        (["seed=[4,5]"], ["4 False 0.25", "4 True 0.25", "5 False 0.25", "5 True 0.25", "4 False 0.0", "5 False 0.0"]),
        (["grid.seed=[4]"], ["4 False 0.25", "4 True 0.25", "4 False 0.0"]),
        (["seed=4", "trap=true"], ["4 True 0.25", "4 True 0.0"]),
        (["grid={seed: [7], trap: [true], flip: [0.5]}"], ["7 True 0.5"]),
    ],
)
def test_overrides_replace_lists_of_the_grid(write, overrides, cells):
    recipe = read_recipe(write(STUDY), overrides)
    assert [" ".join(str(value) for value in cell.keys.values()) for cell in recipe.cells] == cells


def test_without_its_grid_a_recipe_is_one_cell_with_the_values_above(write):
    recipe = read_recipe(write(STUDY), ["grid=null", "seed=3", "trap=true"])
    assert names(recipe) == ["base", "sft", "pairs", "all"]
    assert recipe.stages[1].raw["text"] == "3True"
    assert len(recipe.cells) == 1


def test_a_key_of_a_stage_can_be_varied_and_only_those_that_read_it_differ(write):
    recipe = read_recipe(write(STUDY), ["grid={seed: [0]}", "grid.pairs.text=[x, y]"])
    assert names(recipe) == ["base", "sft@seed=0", "pairs@seed=0,text=x", "odd@seed=0", "pairs@seed=0,text=y", "all"]
    later = STUDY.replace("gather:", '  - {stage: last, kind: "jobs.py:Write", text: l, path: "${pairs}/out.txt"}\ngather:')
    recipe = read_recipe(write(later), ["grid={seed: [0]}", "grid.pairs.text=[x]"])
    assert "last@seed=0,pairs.text=x" in names(recipe)


def test_a_single_job_with_a_grid_is_a_stage_for_each_cell(write, world_files):
    text = f"kind: sft\nname: s\nmodel: {{model_name_or_path: {world_files.policy}}}\ndata: {{path: {world_files.dialogues}}}\n"
    recipe = read_recipe(write(text), ["grid.seed=[0,1]", "grid.optim.learning_rate=[1e-3]", "max_steps=2"])
    assert names(recipe) == ["sft@seed=0,optim.learning_rate=0.001", "sft@seed=1,optim.learning_rate=0.001"]
    assert recipe.stages[1].raw["optim"] == {"learning_rate": 1e-3}
    assert recipe.stages[1].raw["max_steps"] == 2
    assert recipe.stages[1].folder == Path("runs/s/sft@seed=1,optim.learning_rate=0.001")
    assert len(parse_recipe(recipe)) == 2


def test_values_that_are_no_file_names_get_a_hash_and_stay_apart(write):
    recipe = read_recipe(write(STUDY), ["grid={seed: [0]}", "grid.base.text=[a/b, 'a b']"])
    first, second = (name for name in names(recipe) if name.startswith("base@"))
    assert first.startswith("base@text=a-b-")
    assert second.startswith("base@text=a-b-")
    assert first != second


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["grid.sed=[1]"], r"grid.sed: the recipe has no 'sed'; did you mean 'seed'\?"),
        (["grid.pairz.text=[1]"], r"the recipe has no 'pairz'; did you mean 'pairs'\?"),
        (["grid.pairs=[1]"], "grid.pairs is a stage; name a key of it, such as pairs.seed"),
        (["grid.seed=[]"], r"grid\[0\].seed is \[\]; write a list of one value or more"),
        (["grid.seed=[1, 1]"], r"grid\[0\].seed has 1 twice"),
        (
            ["grid=[{seed: [1]}, {trap: [true]}]"],
            r"grid\[1\] has the keys trap, grid\[0\] seed; name all of them in every block",
        ),
        (["grid=3"], "grid is 3; write"),
        (["grid=[]", "odd.only={sed: 1}"], r"stage odd: only.sed is no key of the grid; did you mean 'seed'\?"),
        (["odd.only=3"], "stage odd: only is 3; write"),
        (["jobs=0"], "jobs is 0; write how many stages run at a time"),
        (["jobs=true"], "jobs is True; write how many"),
        (["all.path=${sft}/x"], r"gather all.path: \$\{sft\} depends on seed, trap, so there are many; read \$\{cells\}"),
        (["all.text=${seed}"], r"gather all.text: \$\{seed\} depends on seed"),
    ],
)
def test_a_grid_that_cannot_be_is_refused(write, overrides, message):
    with pytest.raises(ConfigError, match=message):
        read_recipe(write(STUDY), overrides)


def test_a_stage_that_reads_one_which_its_cell_does_not_have_is_refused(write):
    text = STUDY.replace("gather:", '  - {stage: last, kind: "jobs.py:Write", text: l, path: "${odd}/out.txt"}\ngather:')
    message = r"last.path: \$\{odd\} is not in the cell seed=0,trap=true,flip=0.25: its `only:` is .*give this stage the same"
    with pytest.raises(ConfigError, match=message):
        read_recipe(write(text))
    assert "last@seed=0" in names(read_recipe(write(text), ["trap=[false]", "flip=[0.25]"]))


def test_the_folder_of_a_grid_is_one(write):
    with pytest.raises(ConfigError, match=r"name is the same in every cell, and here depends on grid.seed"):
        read_recipe(write(STUDY.replace("twice:", 'name: "n${seed}"\ntwice:')))


def test_a_value_of_the_wrong_type_is_refused_before_anything_runs(write):
    text = "seed: 0\ngrid: {seed: [0, one]}\nstages:\n  - {stage: start, kind: world_start, seed: '${seed}'}\n"
    with pytest.raises(ConfigError, match=r"stage start@seed=one: seed is 'one': Input should be a valid integer"):
        parse_recipe(read_recipe(write(text)))
    deep = "grid: {start.world.trap: [maybe]}\nstages:\n  - {stage: start, kind: world_start, world: {kind: trip_desk}}\n"
    with pytest.raises(ConfigError, match=r"stage start@world.trap=maybe: world: trap is 'maybe'"):
        parse_recipe(read_recipe(write(deep)))
    text = "grid: {start.sede: [0]}\nstages:\n  - {stage: start, kind: world_start}\n"
    with pytest.raises(ConfigError, match=r"stage start@sede=0: unknown key 'sede'; did you mean 'seed'\?"):
        parse_recipe(read_recipe(write(text)))


def test_the_names_a_grid_uses_are_refused(write):
    with pytest.raises(ConfigError, match="'logs' is a name that a grid uses itself"):
        read_recipe(write(STUDY.replace("stage: base", "stage: logs").replace("${base}", "${logs}")))


def test_a_path_written_out_into_a_stage_of_another_cell_is_found(write):
    text = STUDY.replace("${sft}/out.txt", "runs/recipe/sft@seed=0,trap=false/out.txt")
    recipe = read_recipe(write(text), ["grid={seed: [0], trap: [false], flip: [0.25]}"])
    assert recipe.stages[2].reads == ("sft@seed=0,trap=false",)


SIZES = """
size: small
sizes:
  small: {}
  large: {count: 9, grid: {seed: [1, 2]}, last.text: "long${seed}"}
count: 3
seed: 0
grid: {seed: [1]}
stages:
  - {stage: last, kind: "jobs.py:Write", text: "${count}${seed}"}
"""


def test_a_size_is_so_many_changes_and_overrides_win_over_it(write):
    assert names(read_recipe(write(SIZES))) == ["last@seed=1"]
    large = read_recipe(write(SIZES), ["size=large"])
    assert names(large) == ["last@seed=1", "last@seed=2"]
    assert large.stages[0].raw["text"] == "long1"
    mixed = read_recipe(write(SIZES), ["last.text=own", "seed=5", "size=large"])
    assert (names(mixed), mixed.stages[0].raw["text"]) == (["last"], "own")
    with pytest.raises(ConfigError, match=r"size is 'lrage'; did you mean 'large'\?"):
        read_recipe(write(SIZES), ["size=lrage"])
    with pytest.raises(ConfigError, match=r"sizes.large: cuont: the recipe has no 'cuont'; did you mean 'count'\?"):
        read_recipe(write(SIZES.replace("{count: 9", "{cuont: 9")), ["size=large"])
    with pytest.raises(ConfigError, match="sizes is 3; write"):
        read_recipe(write("kind: sft\nsizes: 3\n"))
    alone = read_recipe(write("kind: sft\nsize: b\nsizes: {a: {seed: 1}, b: {seed: 2, optim.learning_rate: 1}}\n"))
    assert alone.stages[0].raw == {"kind": "sft", "seed": 2, "optim": {"learning_rate": 1}}


def test_only_works_in_a_chain_without_a_grid(write):
    text = """
seed: 0
stages:
  - {stage: one, kind: "jobs.py:Write", text: "${seed}"}
  - {stage: two, kind: "jobs.py:Write", text: t, only: {seed: 0}}
"""
    assert names(read_recipe(write(text))) == ["one", "two"]
    assert names(read_recipe(write(text), ["seed=1"])) == ["one"]
    reader = text + '  - {stage: three, kind: "jobs.py:Write", text: u, path: "${two}/out.txt"}\n'
    with pytest.raises(ConfigError, match=r"\$\{two\} is not in this recipe as it is: its `only:` is \{'seed': 0\}"):
        read_recipe(write(reader), ["seed=1"])


def test_show_prints_cells_shared_stages_and_each_stage_once(write, capsys):
    show_recipe(write(STUDY.replace('text: "${flip}"', 'text: "f${flip}"')), ["jobs=2", "odd.only={seed: 7}"])
    text = capsys.readouterr().out
    assert "(11 stages)" in text
    assert "grid: 5 cells, 2 stages at a time" in text
    assert "cell 5: seed=0,trap=false,flip=0.0" in text
    assert "base: 1 for 5 cells, such as base" in text
    assert "sft: 4 for 5 cells, such as sft@seed=0,trap=false" in text
    assert "pairs: 5 for 5 cells, such as pairs@seed=0,trap=false,flip=0.25" in text
    assert "odd: in no cell, because its `only:` holds in none" in text
    assert "all: once, from all cells" in text
    assert text.count("after sft@") == 1
