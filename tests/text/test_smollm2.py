"""A real chat model's tokenizer: SmolLM2, whose pad, eos and end of turn are one token and whose template adds a system message."""

from dataclasses import replace

import pytest
from transformers import AutoTokenizer

from rewarden.text.render import load_template
from rewarden.types import Message, Span


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return AutoTokenizer.from_pretrained(smollm2)


@pytest.fixture(scope="module")
def template(tokenizer):
    return load_template(tokenizer)


def test_the_end_of_turn_is_im_end_and_nothing_is_unusual(template):
    assert (template.end_of_turn_id, template.stop_ids, template.notes) == (2, frozenset({2}), ())


def test_ids_are_those_of_the_templated_string(tokenizer, template, talk):
    rows = [
        {"role": "user", "content": "What is 2+2?"},
        {"role": "assistant", "content": "It is 4."},
        {"role": "user", "content": "  Sure?\n"},
    ]
    expected = tokenizer.apply_chat_template(rows, add_generation_prompt=True, return_dict=False)
    rollout = template.start(talk(*[row["content"] for row in rows]))
    assert list(rollout.token_ids) == list(expected)
    spans = {
        (s.role, s.turn): tokenizer.decode(rollout.token_ids[s.start : s.stop]) for s in rollout.spans if s.role != "template"
    }
    assert spans[("assistant", 0)] == "It is 4.<|im_end|>"
    assert spans[("user", 0)] == "What is 2+2?"


def test_the_default_system_message_is_template_and_a_given_one_is_not(tokenizer, template, talk):
    default = template.start(talk("Hi"))
    assert [span.role for span in default.spans] == ["template", "user", "template"]
    given = template.start(talk("Hi", system="Be brief."))
    assert [span.role for span in given.spans] == ["template", "system", "template", "user", "template"]
    assert tokenizer.decode(given.token_ids[given.spans[1].start : given.spans[1].stop]) == "Be brief."


@pytest.mark.parametrize("ended", ["eos", "length"])
def test_play_appends_separator_user_and_prompt(tokenizer, template, talk, ended):
    rollout = template.start(talk("Hi"))
    ids = tuple(tokenizer("Hello! How can I help?", add_special_tokens=False)["input_ids"]) + ((2,) if ended == "eos" else ())
    start = len(rollout.token_ids)
    message = Message(role="assistant", text=template.decode(ids))
    assert message.text == "Hello! How can I help?"
    played = replace(
        rollout,
        conversation=replace(rollout.conversation, messages=(*rollout.conversation.messages, message)),
        token_ids=rollout.token_ids + ids,
        spans=(*rollout.spans, Span(role="assistant", turn=0, start=start, stop=start + len(ids), ended=ended)),
        stop=ended,
    )
    longer = template.extend(played, Message(role="user", text="Say <|im_end|> please"))
    assert longer.token_ids[: len(played.token_ids)] == played.token_ids
    added = longer.token_ids[len(played.token_ids) :]
    separator = "" if ended == "eos" else "<|im_end|>"
    assert tokenizer.decode(added) == separator + "\n<|im_start|>user\nSay <|im_end|> please<|im_end|>\n<|im_start|>assistant\n"
    # One end of turn of the assistant, where it was cut, and one of the user: the spelled one is text.
    assert added.count(2) == (1 if ended == "eos" else 2)


def test_decode_keeps_blanks_before_punctuation_and_drops_special_tokens(tokenizer, template):
    ids = tokenizer("Well , I 'm  sure .\n", add_special_tokens=False)["input_ids"]
    assert template.decode([*ids, 2]) == "Well , I 'm  sure .\n"
    assert template.decode([ids[0], 1, *ids[1:]]) == "Well , I 'm  sure .\n"
    assert template.decode([2]) == template.decode([]) == ""
