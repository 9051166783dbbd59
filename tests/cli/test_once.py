"""`sample`, `score` and `worlds`."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rewarden.cli import app
from rewarden.data.write import write_jsonl
from rewarden.errors import ConfigError, DataError
from rewarden.models.load import Model
from rewarden.models.reward import load_reward_model
from rewarden.recipe.once import read_prompts
from rewarden.text.collate import collate
from rewarden.text.render import load_template
from rewarden.types import Conversation, Message
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
    assert len(first.output.splitlines()) == 2
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


def reward_by_hand(files, messages) -> float:
    model = load_reward_model(Model(model_name_or_path=str(files.reward)))
    template = load_template(model.tokenizer, "chat", generates=False)
    conversation = Conversation(id="x", messages=tuple(Message(role=m["role"], text=m["content"]) for m in messages))
    return float(model.score(collate([template.render(conversation).token_ids]))[0, 0])


def test_score_gives_pairs_both_scores_and_the_winner(world_files):
    result = call("score", world_files.reward, world_files.pairs)
    scored, given = rows(result.stdout), rows(world_files.pairs.read_text())
    assert [row["id"] for row in scored] == [row["id"] for row in given]
    for row, pair in zip(scored, given, strict=True):
        chosen, rejected = (reward_by_hand(world_files, pair["prompt"] + pair[side]) for side in ("chosen", "rejected"))
        assert row["chosen_score"] == pytest.approx(chosen, abs=1e-5)
        assert row["rejected_score"] == pytest.approx(rejected, abs=1e-5)
        assert row["chosen_wins"] == float(row["chosen_score"] > row["rejected_score"])
        assert row["status"] == "ok"
    share = sum(row["chosen_wins"] for row in scored) / len(scored)
    assert f"{len(scored)} pairs, chosen wins {share:.3f} (ties half)" in result.stderr


def test_score_gives_conversations_one_score_and_writes_jsonl(world_files, here):
    result = call("score", world_files.reward, world_files.dialogues, "--output", "scores.jsonl")
    assert result.stdout == ""
    assert "12 rows written to scores.jsonl" in result.stderr
    scored, given = rows(Path("scores.jsonl").read_text()), rows(world_files.dialogues.read_text())
    assert len(scored) == 12
    assert scored[3] == {"id": given[3]["id"], "score": scored[3]["score"], "status": "ok"}
    assert scored[3]["score"] == pytest.approx(reward_by_hand(world_files, given[3]["messages"]), abs=1e-5)


def test_score_says_how_many_texts_were_too_long_and_gives_them_no_score(world_files, here):
    words = "I would like a cheap trip. " * 400
    pair = {"prompt": "Hello", "chosen": words, "rejected": "Thank you."}
    write_jsonl("pairs.jsonl", [pair])
    result = call("score", world_files.reward, "pairs.jsonl")
    (row,) = rows(result.stdout)
    assert (row["status"], row["chosen_score"], row["chosen_wins"]) == ("too_long", None, None)
    assert "1 without a score: too_long" in result.stderr
    assert "chosen wins" not in result.stderr


def test_score_reads_hh_transcripts(world_files, here):
    pair = {"chosen": "\n\nHuman: Hello\n\nAssistant: Thank you.", "rejected": "\n\nHuman: Hello\n\nAssistant: No."}
    write_jsonl("hh.jsonl", [pair])
    for words in ((), ("--format", "hh")):
        (row,) = rows(call("score", world_files.reward, "hh.jsonl", *words).stdout)
        assert row["chosen_score"] is not None
        assert row["rejected_score"] is not None


def test_score_refuses_an_unknown_format_a_missing_file_and_a_policy(world_files):
    with pytest.raises(ConfigError, match="score: format is 'hhh'"):
        call("score", world_files.reward, world_files.pairs, "--format", "hhh")
    with pytest.raises(DataError, match=r"nowhere\.jsonl"):
        call("score", world_files.reward, "nowhere.jsonl")
    with pytest.raises(ConfigError, match="no scalar head"):
        call("score", world_files.policy, world_files.pairs)


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
    words = (world_files.policy, "Hello") if command == "sample" else (world_files.reward, world_files.dialogues)
    with pytest.raises(ConfigError, match=r"output: there is a folder; give the path of a file, such as there/rows.jsonl"):
        call(command, *words, "--output", "there")
