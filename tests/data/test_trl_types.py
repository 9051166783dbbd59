"""TRL's dataset types, row by row, conversational and plain."""

import json
from pathlib import Path
from typing import Any

import pytest

from rewarden.data.sources import Data, load_comparisons, load_conversations, load_prompts, load_unpaired
from rewarden.errors import ConfigError, DataError
from rewarden.types import Message


def user(text: str) -> Message:
    return Message(role="user", text=text)


def assistant(text: str) -> Message:
    return Message(role="assistant", text=text)


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


U, A, B = said("user", "What colour is the sky?"), said("assistant", "It is blue."), said("assistant", "It is green.")
USER, BLUE, GREEN = user("What colour is the sky?"), assistant("It is blue."), assistant("It is green.")


@pytest.fixture
def data(tmp_path: Path) -> Any:
    def make(*rows: Any, **options: Any) -> Data:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        return Data(path=str(path), **options)

    return make


@pytest.mark.parametrize(
    ("row", "messages", "given"),
    [
        ({"messages": [U, A]}, (USER, BLUE), None),
        ({"messages": [said("system", "Be brief."), U, A]}, (Message(role="system", text="Be brief."), USER, BLUE), None),
        ({"text": "Once upon a time"}, (user(""), assistant("Once upon a time")), None),
        ({"prompt": "The sky is", "completion": " blue."}, (user("The sky is"), assistant(" blue.")), 1),
        ({"prompt": [U], "completion": [A]}, (USER, BLUE), 1),
        ({"prompt": [U, A, U], "completion": [B]}, (USER, BLUE, USER, GREEN), 3),
        ({"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}, (user("The sky is"), assistant(" blue.")), 1),
        ({"prompt": [U], "chosen": [A], "rejected": [B]}, (USER, BLUE), 1),
        ({"chosen": [U, A], "rejected": [U, B]}, (USER, BLUE), None),
        ({"chosen": "The sky is blue.", "rejected": "The sky is green."}, (user("The sky is"), assistant(" blue.")), 1),
        (
            {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]},
            (user("hi"), assistant("ho")),
            None,
        ),
        ({"messages": [said("user", [{"type": "text", "text": "a"}, {"text": "b"}]), A]}, (user("ab"), BLUE), None),  # type: ignore[arg-type]
    ],
)
def test_what_fine_tuning_learns(data: Any, row: dict[str, Any], messages: tuple[Message, ...], given: int | None) -> None:
    (conversation,) = load_conversations(data(row)).rows
    assert conversation.messages == messages
    assert conversation.meta.get("prompt_messages") == given


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"prompt": "The sky is"}, (user("The sky is"),)),
        ({"prompt": [U]}, (USER,)),
        ({"prompt": [U, A, U]}, (USER, BLUE, USER)),
        ({"messages": [U, A, U]}, (USER, BLUE, USER)),
        ({"prompt": "The sky is", "completion": " blue."}, (user("The sky is"),)),
        ({"chosen": [U, A], "rejected": [U, B]}, (USER,)),
        ({"chosen": [U, A], "rejected": [U, A]}, (USER,)),
        ({"chosen": "The sky is blue.", "rejected": "The sky is green."}, (user("The sky is"),)),
    ],
)
def test_what_the_policy_answers(data: Any, row: dict[str, Any], messages: tuple[Message, ...]) -> None:
    assert load_prompts(data(row)).rows[0].messages == messages


@pytest.mark.parametrize(
    ("row", "prompt", "chosen", "rejected"),
    [
        ({"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}, user("The sky is"), " blue.", " green."),
        ({"chosen": "The sky is blue.", "rejected": "The sky is green."}, user("The sky is"), " blue.", " green."),
        ({"prompt": [U], "chosen": [A], "rejected": [B]}, USER, BLUE.text, GREEN.text),
        ({"chosen": [U, A], "rejected": [U, B]}, USER, BLUE.text, GREEN.text),
        (
            {"prompt": U["content"], "chosen": [U, A], "rejected": [U, B]},
            USER,
            BLUE.text,
            GREEN.text,
        ),  # the sides repeat the prompt
        ({"prompt": [U], "chosen": A["content"], "rejected": B["content"]}, USER, BLUE.text, GREEN.text),
    ],
)
def test_pairs_with_explicit_and_implicit_prompt(
    data: Any, row: dict[str, Any], prompt: Message, chosen: str, rejected: str
) -> None:
    (pair,) = load_comparisons(data(row)).rows
    assert pair.prompt == (prompt,)
    assert pair.chosen == (assistant(chosen),)
    assert pair.rejected == (assistant(rejected),)
    assert (pair.preference, pair.margin) == (1.0, None)


def test_margin_preference_and_other_columns_are_kept(data: Any) -> None:
    row = {
        "id": 7,
        "prompt": "p",
        "chosen": "a",
        "rejected": "b",
        "margin": 2,
        "preference": 0.75,
        "source": {"x": [1]},
        "n": None,
    }
    (pair,) = load_comparisons(data(row)).rows
    assert (pair.id, pair.margin, pair.preference) == ("7", 2.0, 0.75)
    assert pair.meta == {"source": {"x": [1]}, "n": None, "where": pair.meta["where"]}
    assert pair.meta["where"].endswith("rows.jsonl:1")
    (tie,) = load_comparisons(data({**row, "margin": None, "preference": 0.5})).rows
    assert (tie.margin, tie.preference) == (None, 0.5)


def test_all_columns_but_the_prompt_reach_the_reward_function(data: Any) -> None:
    (prompt,) = load_prompts(data({"prompt": "2+2?", "answer": "4", "difficulty": 1, "completion": "5"})).rows
    assert {key: value for key, value in prompt.meta.items() if key != "where"} == {
        "answer": "4",
        "difficulty": 1,
        "completion": "5",
    }


def test_unpaired_rows_keep_label_and_columns(data: Any) -> None:
    rows = (
        {"prompt": "The sky is", "completion": " blue.", "label": True, "rater": "r1"},
        {"prompt": [U], "completion": [B], "label": False},
        {"prompt": [U], "completion": [B], "label": 1},
    )
    loaded = load_unpaired(data(*rows))
    assert [(row.prompt, row.completion, row.label) for row in loaded.rows] == [
        ((user("The sky is"),), (assistant(" blue."),), True),
        ((USER,), (GREEN,), False),
        ((USER,), (GREEN,), True),
    ]
    assert loaded.rows[0].meta["rater"] == "r1"
    with pytest.raises(DataError, match=r"rows\.jsonl:1: label is 'good' \(str\); use true"):
        load_unpaired(data({"prompt": "p", "completion": "c", "label": "good"}))


def test_pairs_that_are_no_pairs_are_dropped_and_counted(data: Any) -> None:
    rows = (
        {"chosen": [U, A], "rejected": [U, B]},
        {"chosen": [U, A], "rejected": [U, A]},
        {"chosen": [U, A], "rejected": [said("user", "Other?"), B]},
        {"chosen": [U, A, U, A], "rejected": [U, A, said("user", "Other?"), A]},
        {"prompt": "p", "chosen": "same", "rejected": "same"},
        {"chosen": "all the same", "rejected": "all the same"},
        {"chosen": "Yes", "rejected": "No"},
        {"prompt": "p", "chosen": "a", "rejected": "  "},
    )
    loaded = load_comparisons(data(*rows))
    assert [row.meta["where"][-1] for row in loaded.rows] == ["1", "7", "8"]
    assert loaded.dropped == {"chosen_equals_rejected": 3, "prompts_differ": 2}
    assert loaded.noticed == {"empty_prompt": 1, "empty_answer": 1}
    assert loaded.total == 8


def test_dialogues_without_a_last_answer_and_empty_answers_are_not_learned(data: Any) -> None:
    rows = (
        {"messages": [U, A]},
        {"messages": [U, A, U]},
        {"messages": [U, said("assistant", " \n")]},
        {"messages": [U, said("assistant", ""), U, A]},
        {"text": ""},
    )
    loaded = load_conversations(data(*rows))
    assert len(loaded.rows) == 1
    assert loaded.dropped == {"ends_with_user": 1, "empty_answer": 3}
    given = {"prompt": [U, said("assistant", ""), U], "completion": [A]}  # the empty turn is prompt: it is not learned
    assert len(load_conversations(data(given)).rows) == 1


def test_a_dialogue_as_prompt_must_end_with_the_user(data: Any) -> None:
    rows = ({"messages": [U, A, U, A]}, {"messages": [U]})
    with pytest.raises(
        DataError, match=r"rows\.jsonl:1: a prompt of 4 turns ends with the assistant.*drop_last_assistant: true"
    ):
        load_prompts(data(*rows))
    loaded = load_prompts(data(*rows, drop_last_assistant=True))
    assert [row.messages for row in loaded.rows] == [(USER, BLUE, USER), (USER,)]
    assert loaded.noticed == {"last_assistant_turn_dropped": 1}
    with pytest.raises(DataError, match="the prompt is a system message alone"):
        load_prompts(data({"prompt": [said("system", "s")]}))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"mesages": [U, A]},
            r"columns are 'mesages'; needed: messages, or prompt \+ completion.*'mesages': did you mean 'messages'\?",
        ),
        ({"messages": [U, U, A]}, "message 1 is user, expected assistant"),
        ({"messages": [A]}, "message 0 is assistant, expected user"),
        ({"messages": [U, A, said("system", "s")]}, "message 2 is system, expected user"),
        ({"messages": [said("usr", "x"), A]}, r"messages\[0\] has role 'usr'; did you mean 'user'\?"),
        ({"messages": [U, {"role": "tool", "content": "x"}]}, r"messages\[1\] has role 'tool'; allowed: assistant, "),
        ({"messages": [U, {"role": "assistant", "content": None}]}, r"messages\[1\] has content None \(NoneType\)"),
        ({"messages": [U, {"role": "assistant", "content": [{"type": "image"}]}]}, r"messages\[1\] has content \["),
        ({"messages": []}, r"column 'messages' is \[\] \(list\); it must be a list of at least one message"),
        ({"messages": "hello"}, "column 'messages' is 'hello'"),
        ({"messages": ["hello"]}, r"messages\[0\] is 'hello' \(str\); a message is"),
        ({"prompt": 5, "completion": "x"}, r"prompt is 5 \(int\); it must be text or a list of messages"),
        ({"prompt": "p", "completion": 5}, r"completion is 5 \(int\); it must be text or a list of messages"),
        ({"prompt": [U], "completion": [U, A, U, B]}, None),
        ({"prompt": "x", "completion": [U, A]}, "completion starts with a user message and does not repeat the prompt"),
        ({"text": 3}, r"column 'text' is 3 \(int\); it must be text"),
    ],
)
def test_rows_of_another_shape_are_refused_with_line_and_hint(data: Any, row: dict[str, Any], message: str | None) -> None:
    source = data({"messages": [U, A]}, row)
    if message is None:
        assert load_conversations(source).rows[1].messages == (USER, BLUE, USER, GREEN)
        return
    with pytest.raises(DataError, match=r"rows\.jsonl:2: .*" + message + r".*on_bad_row: drop"):
        load_conversations(source)
    assert len(load_conversations(data({"messages": [U, A]}, row, on_bad_row="drop")).rows) == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosn": "a", "rejected": "b"}, r"'chosn': did you mean 'chosen'\?"),
        ({"prompt": "p", "chosen": "a"}, r"needed: prompt \+ chosen \+ rejected"),
        ({"prompt": "p", "chosen": "a", "rejected": "b", "margin": "big"}, r"margin is 'big' \(str\)"),
        ({"prompt": "p", "chosen": "a", "rejected": "b", "margin": True}, r"margin is True \(bool\)"),
        ({"prompt": "p", "chosen": "a", "rejected": "b", "margin": float("nan")}, r"margin is nan \(float\)"),
        ({"prompt": "p", "chosen": "a", "rejected": "b", "preference": 2}, "preference is 2.0; it is the probability"),
        ({"prompt": [U, A], "chosen": [A], "rejected": [B]}, "the prompt ends with assistant; it must end with a user message"),
        ({"prompt": [U], "chosen": [A, U], "rejected": [B]}, "chosen must end with an assistant message|chosen does not end"),
        ({"chosen": "a", "rejected": None}, r"column 'rejected' is None \(NoneType\); it must be text"),
    ],
)
def test_pairs_of_another_shape_are_refused_with_line(data: Any, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl:1: .*(" + message + ")"):
        load_comparisons(data(row))


def test_columns_we_do_not_render_are_noticed(data: Any) -> None:
    row = {"prompt": [U], "images": ["x.png"], "tools": [], "chat_template_kwargs": {"a": 1}}
    loaded = load_prompts(data(row))
    assert loaded.noticed == {"images_not_read": 1, "chat_template_kwargs_not_read": 1}
    assert loaded.rows[0].meta["images"] == ["x.png"]


def test_bare_strings_are_prompts_and_nothing_else(data: Any) -> None:
    assert load_prompts(data("Hello?", "Why?")).rows[1].messages == (user("Why?"),)
    with pytest.raises(DataError, match=r"rows\.jsonl:1: the row is 'Hello\?' \(str\); it must be an object with"):
        load_comparisons(data("Hello?"))


def test_a_format_without_the_kind_of_record_is_a_config_error(data: Any) -> None:
    with pytest.raises(ConfigError, match="format is 'hh', which holds no unpaired; formats that do: trl"):
        load_unpaired(data({"prompt": "p", "completion": "c", "label": True}, format="hh"))
