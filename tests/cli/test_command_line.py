"""What a shell sees: exit codes, one message, every command within reach."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from rewarden.cli import app
from rewarden.recipe.demo import demo_recipe
from rewarden.recipe.read import read_recipe


def test_help_names_every_command():
    text = CliRunner().invoke(app, ["--help"]).output
    assert [name for name in ("demo", "run", "show", "sample", "score", "worlds") if f"  {name} " not in text] == []


@pytest.mark.parametrize("command", ["demo", "run", "show", "sample", "score", "worlds"])
def test_every_command_has_help(command):
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert f"rewarden {command}" in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run", "nowhere.yaml"), "error: nowhere.yaml: no such recipe"),
        (("show", "bad.yaml"), "error: bad.yaml: unknown key 'txet'; did you mean 'text'?"),
        (("run", "bad.yaml", "txet"), "error: override 'txet'"),
        (("run", "good.yaml", "--resume", "maybe"), "error: resume is 'maybe'"),
        (("run", "good.yaml", "--resume", "must"), "error: runs/good holds no finished run"),
        (("sample", "nowhere/model", "Hello"), "error: "),
        (("sample", "nowhere/model", "promts.jsonl"), "error: promts.jsonl: no such file"),
        (("score", "nowhere.jsonl", "--reward", "nowhere/model"), "error: nowhere.jsonl"),
    ],
)
def test_what_is_wrong_is_one_message_and_exit_code_2(here, shell, words, message):
    Path("bad.yaml").write_text("kind: 'jobs.py:Write'\ntxet: a\n")
    Path("good.yaml").write_text("kind: 'jobs.py:Write'\ntext: a\n")
    code, _, errors = shell(*words)
    assert code == 2
    assert errors.startswith(message)
    assert errors.count("error: ") == 1
    assert "Traceback" not in errors


def test_a_wrong_option_is_exit_code_2_too(shell):
    code, _, errors = shell("run", "--nonsense")
    assert code == 2
    assert "--nonsense" in errors


def test_an_interrupted_command_is_one_line_and_exit_code_130(write, shell):
    write("kind: 'jobs.py:Interrupted'\n")
    code, _, errors = shell("run", "recipe.yaml")
    assert (code, errors) == (130, "interrupted\n")
    assert not Path("runs/recipe/lock").exists()


def test_interrupted_training_says_where_it_can_go_on(write, world_files, shell):
    Path("stop.py").write_text(
        "calls = 0\n\n"
        "def stop(prompts, completions):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    if calls == 2:\n"
        "        raise KeyboardInterrupt\n"
        "    return [0.0] * len(prompts)\n"
    )
    write(
        f"kind: ppo\npolicy: {{model_name_or_path: {world_files.policy}}}\nreward: {{kind: function, path: 'stop.py:stop'}}\n"
        f"data: {{path: {world_files.prompts}}}\nsampling: {{max_completion_length: 2}}\nrollout_batch_size: 4\n"
        "mini_batch_size: 4\nmax_steps: 2\nsave_steps: 1\nview: plain\n"
    )
    code, out, errors = shell("run", "recipe.yaml")
    assert code == 130
    assert errors.endswith("interrupted\n")
    assert (
        "stopped after step 1 by KeyboardInterrupt; the last checkpoint is step-00000001; run again to resume" in out + errors
    )
    code, _, errors = shell("run", "recipe.yaml", "--resume", "must")
    assert code == 0, errors
    assert Path("runs/recipe/done.json").exists()


def test_a_successful_run_is_exit_code_0(write, shell):
    write("kind: 'jobs.py:Write'\ntext: a\n")
    code, out, _ = shell("run", "recipe.yaml", "text=b")
    assert code == 0
    assert "results in runs/recipe" in out
    assert Path("runs/recipe/out.txt").read_text() == "b"


def test_the_demo_recipe_is_found_from_anywhere(here):
    assert [stage.name for stage in read_recipe(demo_recipe()).stages] == ["start", "sft", "pairs", "reward", "ppo", "compare"]


def test_the_demo_runs_to_its_table_in_miniature_and_is_skipped_the_second_time(here, shell):
    tiny = [
        *(
            "start.num_dialogues=8",
            "start.num_heldout=2",
            "sft.max_steps=1",
            "sft.num_train_epochs=1",
            "sft.train_batch_size=8",
        ),
        *("pairs.num_pairs=6", "pairs.num_test_pairs=0", "pairs.num_prompts=4", "pairs.num_selection=2", "pairs.num_heldout=2"),
        *(
            "pairs.sampling.max_completion_length=4",
            "reward.max_steps=1",
            "reward.eval_data=null",
            "ppo.max_steps=1",
            "ppo.rollout_batch_size=4",
        ),
        *("ppo.mini_batch_size=4", "ppo.num_ppo_epochs=1", "ppo.sampling.max_completion_length=4"),
        *("compare.sampling.max_completion_length=4", "compare.num_examples=1", "name=small"),
    ]
    code, out, errors = shell("demo", *tiny)
    assert code == 0, errors
    for words in ("gold_turn", "gold_end", "proxy", "malformed", "small: compare (6 of 6)", "files: runs/small/compare"):
        assert words in out
    assert {path.name for path in Path("runs/small").iterdir()} == {
        "start",
        "sft",
        "pairs",
        "reward",
        "ppo",
        "compare",
        "models.yaml",
    }
    code, again, _ = shell("demo", *tiny)
    assert code == 0
    assert again.count("finished and unchanged, skipped") == 6
    assert "gold_turn" in again
