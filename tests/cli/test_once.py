"""`sample` and `worlds`; `score` has test_score.py and test_explain.py."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rewarden.cli import app
from rewarden.errors import ConfigError, DataError
from rewarden.recipe.once import read_prompts
from rewarden.types import Message
from rewarden.worlds import TripDesk


def call(*words):
    """The result of one command; what it raises is raised here."""
    return CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)


def rows(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_sample_answers_a_text_and_repeats_with_its_seed(world_files):
    words = ("sample", world_files.policy, "Hello, I want a trip.", "--max-completion-length", 5, "--n", 2)
    first = call(*words)
    assert first.exit_code == 0
    lines = first.output.splitlines()
    assert lines[::2] == ["--- answer 1 of 2", "--- answer 2 of 2"]
    assert len(lines) == 4
    assert call(*words).output == first.output
    assert call(*words, "--seed", 1).output != first.output


def test_sample_writes_jsonl_with_the_end_and_the_probability_of_every_answer(world_files, here):
    result = call(
        "sample", world_files.policy, world_files.prompts, "--max-completion-length", 3, "--n", 2, "--output", "a/out.jsonl"
    )
    assert "8 answers written to a/out.jsonl" in result.output
    answers = rows(Path("a/out.jsonl").read_text())
    assert len(answers) == 8
    assert {answer["stop"] for answer in answers} <= {"eos", "length"}
    assert all(1 <= answer["num_tokens"] <= 3 and answer["logp"] < 0 for answer in answers)
    assert answers[0]["prompt"] == answers[1]["prompt"]
    assert answers[0]["prompt"][0]["role"] == "user"


def test_sample_tells_the_answers_of_several_prompts_apart(world_files):
    lines = call("sample", world_files.policy, world_files.prompts, "--max-completion-length", 2).output.splitlines()
    assert lines[::2] == [f"--- prompt {number} of 4, answer 1 of 1" for number in (1, 2, 3, 4)]


def test_sample_says_where_an_answer_was_cut(world_files):
    assert "[cut at 1 tokens]" in call("sample", world_files.policy, "Hello", "--max-completion-length", 1).output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--n", 0), "n is 0"),
        (("--max-completion-length", 0), "sample: max_completion_length is 0"),
        (("--temperature", -1), "sample: temperature is -1"),
        (("--top-p", 2), "sample: top_p is 2"),
        (("--template", "chatt"), "chatt"),
    ],
)
def test_sample_refuses_impossible_settings(world_files, words, message):
    with pytest.raises(ConfigError, match=message):
        call("sample", world_files.policy, "Hello", *words)


def test_a_prompt_is_a_text_or_a_file_that_exists(world_files):
    assert len(read_prompts(str(world_files.prompts))) == 4
    assert read_prompts("Hello")[0].messages == (Message(role="user", text="Hello"),)
    assert read_prompts("What is in data.json")[0].messages[0].text == "What is in data.json"
    long = "Tell me a story. " * 500
    assert read_prompts(long)[0].messages[0].text == long
    with pytest.raises(DataError, match=r"promts.jsonl: no such file of prompts"):
        read_prompts("promts.jsonl")


def test_worlds_plays_a_scripted_dialogue_of_each_with_its_gold():
    result = call("worlds", "--seed", 3)
    assert result.exit_code == 0
    assert "trip_desk" in result.stdout
    assert "trip_desk with trap: true" in result.stdout
    world = TripDesk()
    dialogue = world.scripted("good", 3)
    assert dialogue.messages[0].text.split()[0] in result.stdout
    assert f"{world.gold(dialogue.messages):+.3f}" in result.stdout


@pytest.mark.parametrize("command", ["sample", "score"])
def test_an_output_that_is_a_folder_is_refused_before_the_work(command, world_files, here):
    (here / "there").mkdir()
    words = (world_files.policy, "Hello") if command == "sample" else (world_files.dialogues, "--reward", world_files.reward)
    with pytest.raises(ConfigError, match=r"output: there is a folder; give the path of a file, such as there/rows.jsonl"):
        call(command, *words, "--output", "there")
