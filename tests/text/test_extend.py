"""Multi-turn play: ids grow, they are never made again."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewarden.errors import DataError
from rewarden.text.render import load_template
from rewarden.types import Message, Span

NAMES = ("chatml", "llama3", "llama2", "world", "thinking")
words = st.lists(st.sampled_from(["Hello", "Yes", "why?", "fine.", "1 2", "<|im_end|>", "</s>", "<|eot_id|>"]), max_size=4).map(
    " ".join
)


@pytest.fixture(scope="module")
def templates(families):
    return {name: load_template(tokenizer) for name, tokenizer in families.items()}


def sampled(rollout, template, ids, ended="eos"):
    """What a sampler does: the ids it drew, a span, the text, nothing else."""
    start = len(rollout.token_ids)
    turn = sum(message.role == "assistant" for message in rollout.conversation.messages)
    message = Message(role="assistant", text=template.decode(ids))
    return replace(
        rollout,
        conversation=replace(rollout.conversation, messages=(*rollout.conversation.messages, message)),
        token_ids=rollout.token_ids + tuple(ids),
        spans=(*rollout.spans, Span(role="assistant", turn=turn, start=start, stop=start + len(ids), ended=ended)),
        logp_sampler=(*rollout.logp_sampler, *([-1.0] * len(ids))),
        seeds=(*rollout.seeds, 7),
        stop=ended,
    )


def answer_ids(template, talk, user, text):
    rollout = template.render(talk(user, text))
    span = next(span for span in rollout.spans if span.role == "assistant")
    return rollout.token_ids[span.start : span.stop]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(first=words, second=words)
def test_extending_gives_the_ids_of_starting_from_the_longer_conversation(templates, talk, name, first, second):
    template = templates[name]
    played = sampled(template.start(talk(first)), template, answer_ids(template, talk, first, "Yes. Why"))
    longer = template.extend(played, Message(role="user", text=second))
    expected = template.start(talk(first, "Yes. Why", second))
    assert longer.token_ids == expected.token_ids
    assert [replace(span, ended=None) for span in longer.spans] == list(expected.spans)
    assert longer.conversation.messages == expected.conversation.messages
    assert (longer.stop, longer.logp_sampler, longer.seeds) == ("open", played.logp_sampler, (7,))


@pytest.mark.parametrize("name", NAMES)
def test_ids_and_spans_so_far_stay_as_they_were_whatever_the_policy_wrote(templates, talk, name):
    template = templates[name]
    # Odd ids: no text would be tokenised like this.
    odd = [*reversed(answer_ids(template, talk, "Hello", "Yes. Why")[:-1]), template.end_of_turn_id]
    rollout = template.start(talk("Hello"))
    for turn in range(3):
        played = sampled(rollout, template, odd)
        rollout = template.extend(played, Message(role="user", text="Why"))
        assert rollout.token_ids[: len(played.token_ids)] == played.token_ids
        assert rollout.spans[: len(played.spans)] == played.spans
        assert [span.start for span in rollout.spans] == [0, *(span.stop for span in rollout.spans[:-1])]
        assert rollout.spans[-1].stop == len(rollout.token_ids)
        assert [s.turn for s in rollout.spans if s.role == "user"] == list(range(turn + 2))


def test_a_turn_cut_by_length_gets_its_end_of_turn_as_template(templates, talk):
    template = templates["chatml"]
    ids = answer_ids(template, talk, "Hello", "Yes")[:-1]
    played = sampled(template.start(talk("Hello")), template, ids, ended="length")
    longer = template.extend(played, Message(role="user", text="Why"))
    assert longer.token_ids == template.start(talk("Hello", "Yes", "Why")).token_ids
    at = len(played.token_ids)
    assert longer.token_ids[at] == template.end_of_turn_id
    assert longer.spans[: len(played.spans)] == played.spans
    assert longer.spans[len(played.spans)] == Span(role="template", turn=0, start=at, stop=at + 1)
    assert len(longer.logp_sampler) == len(ids)


def test_a_turn_of_no_tokens_gets_its_end_of_turn_too(templates, talk):
    template = templates["world"]
    played = sampled(template.start(talk("Hello")), template, [], ended="length")
    longer = template.extend(played, Message(role="user", text="Yes"))
    assert longer.token_ids == template.start(talk("Hello", "", "Yes")).token_ids


def test_a_turn_that_ended_with_eos_instead_of_the_end_of_turn_is_left_as_sampled(templates, talk):
    template = templates["llama3"]
    eos = template.tokenizer.eos_token_id
    ids = (*answer_ids(template, talk, "Hello", "Yes")[:-1], eos)
    played = sampled(template.start(talk("Hello")), template, ids)
    assert played.conversation.messages[-1].text == "Yes"
    longer = template.extend(played, Message(role="user", text="Why"))
    expected = template.start(talk("Hello", "Yes", "Why")).token_ids
    assert longer.token_ids == tuple(eos if i == len(played.token_ids) - 1 else t for i, t in enumerate(expected))


# The thinking family is left out: it renders a last answer otherwise than an earlier one.
@pytest.mark.parametrize("name", ["chatml", "llama3", "llama2", "world"])
def test_a_rendered_conversation_can_be_extended_as_well(templates, talk, name):
    template = templates[name]
    longer = template.extend(template.render(talk("Hello", "Yes")), Message(role="user", text="Why"))
    assert longer.token_ids == template.start(talk("Hello", "Yes", "Why")).token_ids
    assert longer.spans[-1].stop == len(longer.token_ids)


def test_the_text_of_a_sampled_thought_does_not_change_what_is_appended(templates, talk):
    template = templates["thinking"]
    ids = answer_ids(template, talk, "Hello", "<think>\nHello\n</think>\n\nYes")
    played = sampled(template.start(talk("Hello")), template, ids)
    assert played.conversation.messages[-1].text == "<think>\nHello\n</think>\n\nYes"
    longer = template.extend(played, Message(role="user", text="Why"))
    tail = longer.token_ids[len(played.token_ids) :]
    assert template.tokenizer.decode(tail) == "\n<|im_start|>user\nWhy<|im_end|>\n<|im_start|>assistant\n"


def test_what_cannot_be_extended_is_refused(templates, talk):
    template = templates["chatml"]
    with pytest.raises(DataError, match="only a rollout that ends with the assistant can be extended"):
        template.extend(template.start(talk("Hello")), Message(role="user", text="Why"))
    rendered = template.render(talk("Hello", "Yes"))
    with pytest.raises(DataError, match="the assistant is answered by 'user', not 'assistant'"):
        template.extend(rendered, Message(role="assistant", text="Why"))
    spoiled = replace(rendered, token_ids=(*rendered.token_ids[:-1], 5))
    with pytest.raises(DataError, match="are not what the template puts there"):
        template.extend(spoiled, Message(role="user", text="Why"))


def test_a_world_turn_is_followed_by_the_user_and_the_prompt(templates, talk):
    template = templates["world"]
    played = sampled(template.start(talk("Hello")), template, answer_ids(template, talk, "Hello", "Yes."))
    longer = template.extend(played, Message(role="user", text="Why"))
    names = template.tokenizer.convert_ids_to_tokens(list(longer.token_ids[len(played.token_ids) :]))
    assert names == ["<|user|>", "▁Why", "<|end|>", "<|assistant|>"]
