"""Lists of message dicts as Messages, and what every conversation and pair must satisfy."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rewarden.data.formats.row import BadRow, Drop, Item, Notice, meta, row_id, show
from rewarden.data.read import Row
from rewarden.spec import nearest
from rewarden.types import Comparison, Conversation, Message, Role

ROLES: dict[str, Role] = {
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
}
"""Role names of TRL, and the names ShareGPT and OpenAssistant files use for them."""


def is_conversational(value: Any) -> bool:
    """A list of message dicts (TRL's conversational format), not a string or a list of strings."""
    return isinstance(value, list) and bool(value) and all(isinstance(message, Mapping) for message in value)


def read_messages(row: Row, column: str) -> tuple[Message, ...]:
    """The messages in a column: dicts with role and content, or from and value.

    Content may be a list of text parts; they are joined. BadRow names the message that cannot be read.
    """
    value = row.fields.get(column)
    if not isinstance(value, list) or not value:
        raise BadRow(row.where, "no_messages", f"column {column!r} is {show(value)}; it must be a list of at least one message")
    return tuple(_message(row, f"{column}[{index}]", message) for index, message in enumerate(value))


def _message(row: Row, place: str, message: Any) -> Message:
    if not isinstance(message, Mapping):
        raise BadRow(row.where, "not_a_message", f"{place} is {show(message)}; a message is {{'role': ..., 'content': ...}}")
    name = message.get("role", message.get("from"))
    content = message.get("content", message.get("value"))
    role = ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise BadRow(row.where, "unknown_role", f"{place} has role {name!r:.60}; {nearest(str(name)[:60], ROLES)}")
    if isinstance(content, list) and all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise BadRow(
            row.where, "not_text", f"{place} has content {show(content)}; it must be text (tool calls and images are not read)"
        )
    return Message(role=role, text=content)


def blank(message: Message) -> bool:
    """Whether a message says nothing."""
    return not message.text.strip()


def disorder(messages: Sequence[Message]) -> str | None:
    """Why the roles are out of order, or None: an optional system message, then user and assistant in turn."""
    turns = messages[1:] if messages and messages[0].role == "system" else messages
    for index, message in enumerate(turns):
        expected = "assistant" if index % 2 else "user"
        if message.role != expected:
            return f"message {index + len(messages) - len(turns)} is {message.role}, expected {expected}"
    return None


def in_order(row: Row, messages: Sequence[Message]) -> None:
    """BadRow "roles_do_not_alternate" unless the roles are in order."""
    problem = disorder(messages)
    if problem:
        raise BadRow(
            row.where, "roles_do_not_alternate", f"{problem}; roles are an optional system, then user and assistant in turn"
        )


def conversation(
    row: Row, messages: tuple[Message, ...], used: Sequence[str], *, given: int | None = None, id: str | None = None
) -> Iterator[Item]:
    """One conversation to learn from: it must end with the assistant, and no turn that is learned may be empty.

    given: number of leading messages that are prompt and not learned; kept as meta["prompt_messages"].
    """
    in_order(row, messages)
    if messages[-1].role != "assistant":
        yield Drop("ends_with_user")
    elif any(blank(message) for message in messages[given or 0 :] if message.role == "assistant"):
        yield Drop("empty_answer")
    else:
        others = meta(row, used) if given is None else {**meta(row, used), "prompt_messages": given}
        yield Conversation(id=id or row_id(row), messages=messages, meta=others)


def prompt(row: Row, messages: tuple[Message, ...], used: Sequence[str], *, id: str | None = None) -> Iterator[Item]:
    """One prompt. Whether it ends with the user is for the loader to judge (it may be told to drop a last answer)."""
    in_order(row, messages)
    if blank(messages[-1]):
        yield Notice("empty_prompt")
    yield Conversation(id=id or row_id(row), messages=messages, meta=meta(row, used))


def comparison(
    row: Row,
    prompt: tuple[Message, ...],
    chosen: tuple[Message, ...],
    rejected: tuple[Message, ...],
    used: Sequence[str],
    *,
    preference: float = 1.0,
    margin: float | None = None,
    id: str | None = None,
) -> Iterator[Item]:
    """One pair: a prompt that ends with the user, and two different continuations that end with the assistant."""
    if not prompt or prompt[-1].role != "user":
        last = f"ends with {prompt[-1].role}" if prompt else "is empty"
        raise BadRow(row.where, "prompt_not_from_user", f"the prompt {last}; it must end with a user message")
    for name, side in (("chosen", chosen), ("rejected", rejected)):
        if not side or side[-1].role != "assistant":
            raise BadRow(
                row.where, "answer_not_from_assistant", f"{name} does not end with an assistant message after the prompt"
            )
        in_order(row, (*prompt, *side))
    if blank(chosen[-1]) or blank(rejected[-1]):
        yield Notice("empty_answer")
    if chosen == rejected:
        yield Drop("chosen_equals_rejected")
    else:
        yield Comparison(
            id=id or row_id(row),
            prompt=prompt,
            chosen=chosen,
            rejected=rejected,
            preference=preference,
            margin=margin,
            meta=meta(row, used),
        )
