"""The simulator's prompt and the reading of what the model writes."""

import pytest

from rewarden.errors import ConfigError
from rewarden.rollout.user_prompt import Simulator, parse_question, user_prompt
from rewarden.spec import check
from rewarden.types import Conversation, Message


def dialogue(*texts, name="d", system=None, **meta):
    roles = ("user", "assistant")
    messages = [Message(role=roles[i % 2], text=text) for i, text in enumerate(texts)]
    return Conversation(
        id=name, messages=tuple(([Message(role="system", text=system)] if system else []) + messages), meta=meta
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Justification: a\nQuestion: b", ("ok", "b")),
        ("Question: a\nJustification: c\nQuestion:  b \n", ("ok", "b")),
        ("Justification: a. Why is it so?", ("no_label", "")),
        ("Justification: a\nQuestion:  \n", ("empty", "")),
        ("Justification: a\nQuestion: b\nand c", ("ok", "b\nand c")),
        ("", ("no_label", "")),
        ("question: b", ("no_label", "")),
    ],
)
def test_the_reply_is_what_stands_behind_the_last_label(text, said):
    assert parse_question(text) == said


def test_the_references_reading_takes_the_whole_output_without_a_label_but_no_empty_one():
    assert parse_question(" Why? ", on_missing_label="whole") == ("ok", "Why?")
    assert parse_question("a Question: b", on_missing_label="whole") == ("ok", "b")
    assert parse_question(" ", on_missing_label="whole") == ("empty", "")
    assert parse_question("a Question:", on_missing_label="whole") == ("empty", "")


def test_the_stop_signal_counts_in_the_reply_and_not_in_the_justification():
    assert parse_question("Justification: x\nQuestion: Thanks! [DONE]", stop_signal="[DONE]") == ("left", "")
    assert parse_question("Justification: not [DONE] yet\nQuestion: b", stop_signal="[DONE]") == ("ok", "b")


def test_the_prompt_shows_every_message_of_user_and_assistant_and_asks_for_two_labelled_parts():
    prompt = user_prompt(dialogue("One?", "Two.", "Three?", "Four.", system="Be brief.").messages)
    assert "### user: One?\n\n### assistant: Two.\n\n### user: Three?\n\n### assistant: Four.\n\n" in prompt
    task = prompt.split("Four.\n\n")[1]
    assert 0 < task.index("Justification:") < task.index("Question:")
    assert "Be brief." not in prompt


def test_persona_and_stop_signal_stand_in_the_prompt_only_when_asked_for():
    talk = dialogue("One?", "Two.")
    plain = Simulator().prompt(talk)
    assert plain == user_prompt(talk.messages)
    rich = Simulator(personas=["You are twelve."], stop_signal="[DONE]").prompt(talk)
    assert "You are twelve." in rich
    assert "[DONE]" in rich
    assert "You are" not in plain


def test_a_row_keeps_its_persona_through_turns_and_branches_and_rows_differ():
    simulator = Simulator(personas=["a", "b", "c"])
    drawn = [simulator.persona_of(dialogue("One?", name=f"row{i}")) for i in range(300)]
    assert drawn == [simulator.persona_of(dialogue("One?", "x", "Two?", "y", name=f"row{i}")) for i in range(300)]
    assert all(drawn.count(persona) > 60 for persona in "abc")
    other = Simulator(personas=["a", "b", "c"], seed=1)
    assert drawn != [other.persona_of(dialogue("One?", name=f"row{i}")) for i in range(300)]


def test_a_column_of_the_data_may_hold_the_persona_and_must_then_hold_it():
    simulator = Simulator(personas=["a"], persona_column="who")
    assert simulator.persona_of(dialogue("One?", who="A cook.")) == "A cook."
    with pytest.raises(ConfigError, match="persona_column is 'who', where this row has None"):
        simulator.prompt(dialogue("One?"))


def test_a_cut_reply_is_refused_unless_it_is_asked_for():
    text = "Justification: a\nQuestion: Which of the"
    assert Simulator().read(text, truncated=True) == ("truncated", "")
    assert Simulator(on_truncated="keep").read(text, truncated=True) == ("ok", "Which of the")


def test_wrong_fields_are_refused_with_what_is_allowed():
    with pytest.raises(ConfigError, match="unknown key 'persona'; did you mean 'personas'"):
        check(Simulator, {"persona": "x"})
    with pytest.raises(ConfigError, match="personas holds an empty one"):
        check(Simulator, {"personas": ["a", " "]})
    with pytest.raises(ConfigError, match="max_asks"):
        check(Simulator, {"max_asks": 0})
