"""OpenAssistant message trees: one tree a row, replies nested, sibling replies of the assistant ranked (0 is the best).

Conversations are paths from the root to a leaf; prompts are paths to a prompter message; pairs are two ranked sibling replies.
A deleted message, or one that failed review, takes everything under it along. Synthetic messages (written by a model) are kept
and noticed. `rank` may be absent or null.
"""

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

from rewarden.data.formats.messages import ROLES, comparison, conversation, prompt
from rewarden.data.formats.row import BadRow, Drop, Item, Notice, missing, show
from rewarden.data.read import Row
from rewarden.spec import nearest
from rewarden.types import Message

_USED = ("prompt",)
Path = tuple[Mapping[str, Any], ...]


def matches(row: Row) -> bool:
    """A tree."""
    root = row.fields.get("prompt")
    return isinstance(root, Mapping) and "replies" in root


def conversations(row: Row) -> Iterator[Item]:
    """Each path from the root to a leaf that the assistant wrote; the others are dropped as "ends_with_user"."""
    yield from _notices(row)
    for path in _paths(row):
        if isinstance(path, Drop):
            yield path
        elif all(_fate(reply) for reply in _replies(row, path[-1])):
            yield from conversation(row, _messages(row, path), _USED, id=_id(path))


def prompts(row: Row) -> Iterator[Item]:
    """Each path to a message of a prompter, answered or not."""
    yield from _notices(row)
    for path in _paths(row):
        if isinstance(path, Drop):
            yield path
        elif path[-1].get("role") == "prompter":
            yield from prompt(row, _messages(row, path), _USED, id=_id(path))


def comparisons(row: Row) -> Iterator[Item]:
    """Each two replies to one message, the one of lower rank chosen. Without both ranks, or with equal ones, no pair."""
    yield from _notices(row)
    for path in _paths(row):
        if isinstance(path, Drop):
            yield path
        elif path[-1].get("role") == "prompter":
            given = _messages(row, path)
            alive = [reply for reply in _replies(row, path[-1]) if _fate(reply) is None]
            for first, second in combinations(alive, 2):
                yield from _pair(row, given, first, second)


def _pair(row: Row, given: tuple[Message, ...], first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[Item]:
    ranks = _rank(row, first), _rank(row, second)
    if ranks[0] is None or ranks[1] is None:
        yield Drop("rank_missing")
    elif ranks[0] == ranks[1]:
        yield Drop("ranks_equal")
    else:
        better, worse = (first, second) if ranks[0] < ranks[1] else (second, first)
        chosen, rejected = _messages(row, (better,)), _messages(row, (worse,))
        yield from comparison(row, given, chosen, rejected, _USED, id=f"{_id((better,))}>{_id((worse,))}")


def _paths(row: Row) -> Iterator[Path | Drop]:
    """Every path from the root, parents first; a Drop where a message is not alive, and nothing below it."""
    if not matches(row):
        raise missing(row, [("prompt",)]) if "prompt" not in row.fields else _no_tree(row)
    waiting: list[Path] = [(row.fields["prompt"],)]
    while waiting:
        path = waiting.pop()
        fate = _fate(path[-1])
        if fate:
            yield Drop(fate)
        else:
            yield path
            waiting += [(*path, reply) for reply in reversed(_replies(row, path[-1]))]


def _fate(message: Mapping[str, Any]) -> str | None:
    if message.get("deleted"):
        return "deleted"
    return "review_failed" if message.get("review_result") is False else None


def _replies(row: Row, message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    replies = message.get("replies") or []
    if not isinstance(replies, list) or not all(isinstance(reply, Mapping) for reply in replies):
        raise BadRow(
            row.where, "bad_tree", f"message {message.get('message_id')!r} has replies {show(replies)}; want a list of messages"
        )
    return replies


def _messages(row: Row, path: Path) -> tuple[Message, ...]:
    return tuple(_message(row, message) for message in path)


def _message(row: Row, message: Mapping[str, Any]) -> Message:
    role = ROLES.get(str(message.get("role")))
    if role is None:
        hint = nearest(str(message.get("role")), ("prompter", "assistant"))
        raise BadRow(
            row.where, "unknown_role", f"message {message.get('message_id')!r} has role {message.get('role')!r}; {hint}"
        )
    if not isinstance(message.get("text"), str):
        raise BadRow(row.where, "not_text", f"message {message.get('message_id')!r} has text {show(message.get('text'))}")
    return Message(role=role, text=message["text"])


def _rank(row: Row, message: Mapping[str, Any]) -> int | None:
    rank = message.get("rank")
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int)):
        raise BadRow(
            row.where, "bad_rank", f"message {message.get('message_id')!r} has rank {show(rank)}; want an integer or null"
        )
    return rank


def _id(path: Path) -> str | None:
    own = path[-1].get("message_id")
    return str(own) if own else None


def _no_tree(row: Row) -> BadRow:
    return BadRow(row.where, "bad_tree", f"prompt is {show(row.fields['prompt'])}; want a message with `replies`")


def _notices(row: Row) -> Iterator[Notice]:
    """One notice for each synthetic message, and for each reply of the assistant without a rank."""
    waiting = [row.fields["prompt"]] if matches(row) else []
    while waiting:
        message = waiting.pop()
        if message.get("synthetic"):
            yield Notice("synthetic_message")
        if message.get("role") == "assistant" and message.get("rank") is None:
            yield Notice("assistant_without_rank")
        waiting += _replies(row, message)
