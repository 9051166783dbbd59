"""TRL's dataset types, conversational and plain, read as they are.

| type | columns |
| language modelling | text, or messages (also under the name conversations) |
| prompt-only | prompt |
| prompt-completion | prompt, completion |
| preference, explicit prompt | prompt, chosen, rejected |
| preference, implicit prompt | chosen, rejected |
| unpaired preference | prompt, completion, label |

Pairs may have a `margin`, and our own `preference`: the probability that chosen is better (0.5: a tie). In the plain format a
prompt becomes a user message and an answer an assistant message, with their text unchanged; a bare `text` becomes the answer
to an empty user message.
"""

import sys
from collections.abc import Generator, Iterator

from rewarden.data.formats.messages import blank, comparison, conversation, in_order, is_conversational, prompt, read_messages
from rewarden.data.formats.row import BadRow, Drop, Item, Notice, meta, missing, row_id, show, text
from rewarden.data.formats.shared_prompt import extract_prompt, extract_prompt_messages
from rewarden.data.read import VALUE, Row
from rewarden.data.records import Labeled
from rewarden.types import Message

_NOT_READ = ("tools", "images", "chat_template_kwargs")
"""TRL columns that change the text a model sees, and that we do not render."""

Messages = tuple[Message, ...]


def conversations(row: Row) -> Iterator[Item]:
    """What supervised fine-tuning learns: a dialogue, a completion, a text, or the chosen side of a pair."""
    yield from _not_read(row)
    has = row.fields.keys()
    if {"prompt", "completion"} <= has:
        given = _prompt(row)
        yield from conversation(row, (*given, *_answer(row, "completion", given)), ("prompt", "completion"), given=len(given))
    elif dialogue := _dialogue_column(row):
        yield from conversation(row, read_messages(row, dialogue), (dialogue,))
    elif {"prompt", "chosen"} <= has:
        given = _prompt(row)
        answer = _answer(row, "chosen", given)
        yield from conversation(row, (*given, *answer), ("prompt", "chosen", "rejected"), given=len(given))
    elif is_conversational(row.fields.get("chosen")):
        yield from conversation(row, read_messages(row, "chosen"), ("chosen", "rejected"))
    elif {"chosen", "rejected"} <= has:
        sides = yield from _sides(row)
        if sides:
            yield from conversation(row, (*sides[0], *sides[1]), ("chosen", "rejected"), given=len(sides[0]))
    elif "text" in has:
        yield from conversation(row, (_user(""), _assistant(text(row, "text"))), ("text",))
    else:
        raise missing(row, [("messages",), ("prompt", "completion"), ("text",), ("prompt", "chosen"), ("chosen", "rejected")])


def prompts(row: Row) -> Iterator[Item]:
    """What the policy answers: a prompt, a dialogue, or the prompt of a pair."""
    yield from _not_read(row)
    has = row.fields.keys()
    if "prompt" in has:
        yield from prompt(row, _prompt(row), ("prompt",))
    elif dialogue := _dialogue_column(row):
        yield from prompt(row, read_messages(row, dialogue), (dialogue,))
    elif {"chosen", "rejected"} <= has:
        sides = yield from _sides(row)
        if sides:
            yield from prompt(row, sides[0], ("chosen", "rejected"))
    elif isinstance(row.fields.get(VALUE), str):
        yield from prompt(row, (_user(text(row, VALUE)),), (VALUE,))
    else:
        raise missing(row, [("prompt",), ("messages",), ("chosen", "rejected")])


def comparisons(row: Row) -> Iterator[Item]:
    """A pair, its prompt given or found as what both sides begin with."""
    if not {"chosen", "rejected"} <= row.fields.keys():
        raise missing(row, [("prompt", "chosen", "rejected"), ("chosen", "rejected")])
    yield from _not_read(row)
    margin = _number(row, "margin")
    if margin is not None and margin < 0:
        yield Notice("negative_margin")
    preference = _number(row, "preference")
    if preference is not None and not 0 <= preference <= 1:
        meaning = "the probability that chosen is better, from 0 to 1"
        raise BadRow(row.where, "bad_preference", f"preference is {preference}; it is {meaning}")
    sides = yield from _sides(row)
    if sides:
        used = ("prompt", "chosen", "rejected", "margin", "preference")
        yield from comparison(row, *sides, used, margin=margin, preference=1.0 if preference is None else preference)


def unpaired(row: Row) -> Iterator[Item]:
    """One answer with a thumb up or down."""
    if not {"prompt", "completion", "label"} <= row.fields.keys():
        raise missing(row, [("prompt", "completion", "label")])
    yield from _not_read(row)
    label = row.fields["label"]
    if label not in (True, False):
        raise BadRow(row.where, "bad_label", f"label is {show(label)}; use true (good) or false")
    given = _prompt(row)
    answer = _answer(row, "completion", given)
    in_order(row, (*given, *answer))
    if blank(answer[-1]):
        yield Notice("empty_answer")
    others = meta(row, ("prompt", "completion", "label"))
    yield Labeled(id=row_id(row), prompt=given, completion=answer, label=bool(label), meta=others)


def _sides(row: Row) -> Generator[Item, None, tuple[Messages, Messages, Messages] | None]:
    """Prompt, chosen and rejected; a Drop and None when the two sides do not share a prompt."""
    chosen, rejected = row.fields["chosen"], row.fields["rejected"]
    if "prompt" in row.fields:
        given = _prompt(row)
        return given, _answer(row, "chosen", given), _answer(row, "rejected", given)
    if is_conversational(chosen) and is_conversational(rejected):
        whole = read_messages(row, "chosen"), read_messages(row, "rejected")
        for side in whole:
            in_order(row, side)
        found = extract_prompt_messages(*whole)
        if found is None:
            yield Drop("prompts_differ")
        return found
    if chosen == rejected:
        yield Drop("chosen_equals_rejected")
        return None
    start, good, bad = extract_prompt(text(row, "chosen"), text(row, "rejected"))
    if not start.strip():
        yield Notice("empty_prompt")
    return (_user(start),), (_assistant(good),), (_assistant(bad),)


def _prompt(row: Row) -> Messages:
    if isinstance(row.fields["prompt"], str):
        return (_user(row.fields["prompt"]),)
    if is_conversational(row.fields["prompt"]):
        return read_messages(row, "prompt")
    raise BadRow(row.where, "bad_prompt", f"prompt is {show(row.fields['prompt'])}; it must be text or a list of messages")


def _answer(row: Row, column: str, given: Messages) -> Messages:
    """The messages of an answer; a side that repeats the prompt in front of the answer is cut to the answer."""
    value = row.fields[column]
    if isinstance(value, str):
        return (_assistant(value),)
    if not is_conversational(value):
        raise BadRow(row.where, "bad_answer", f"{column} is {show(value)}; it must be text or a list of messages")
    messages = read_messages(row, column)
    if messages[0].role == "assistant":
        return messages
    if messages[: len(given)] == given and len(messages) > len(given):
        return messages[len(given) :]
    problem = f"{column} starts with a {messages[0].role} message and does not repeat the prompt"
    raise BadRow(row.where, "prompts_differ", f"{problem}; give the answer only, or prompt and answer")


def _dialogue_column(row: Row) -> str | None:
    return next((name for name in ("messages", "conversations") if name in row.fields), None)


def _number(row: Row, column: str) -> float | None:
    value = row.fields.get(column)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise BadRow(row.where, f"bad_{column}", f"{column} is {show(value)}; it must be a finite number or null")
    return float(value)


def _not_read(row: Row) -> Iterator[Notice]:
    for column in _NOT_READ:
        if row.fields.get(column):
            yield Notice(f"{column}_not_read")


def _user(content: str) -> Message:
    return Message(role="user", text=content)


def _assistant(content: str) -> Message:
    return Message(role="assistant", text=content)
