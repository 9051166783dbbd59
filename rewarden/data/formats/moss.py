"""MOSS-RLHF: dialogues as lists of strings that alternate user, assistant, ..., the user first, without role names.

Pairs: {"chosen": [u, a, ..., A+], "rejected": [u, a, ..., A-]}. PPO prompts: lists of odd length. SFT: lists of even length.
Roles are counted from the first turn, as they were written; the reference counts from the last, and so swaps the roles of
lists of even length (20 of the 31 it ships). Columns such as "mean preference difference" go to meta.
"""

from collections.abc import Iterator
from typing import Any

from rewarden.data.formats.messages import comparison, conversation, prompt
from rewarden.data.formats.row import BadRow, Drop, Item, missing, show
from rewarden.data.read import VALUE, Row
from rewarden.types import Message


def is_turns(value: Any) -> bool:
    """A list of strings."""
    return isinstance(value, list) and all(isinstance(turn, str) for turn in value)


def matches_pair(row: Row) -> bool:
    """Two lists of strings."""
    return all(is_turns(row.fields.get(side)) for side in ("chosen", "rejected"))


def matches_dialogue(row: Row) -> bool:
    """A row that is itself a list of strings."""
    return is_turns(row.fields.get(VALUE))


def comparisons(row: Row) -> Iterator[Item]:
    """The two last turns, when everything before them is equal (the reference only looks at the lengths)."""
    chosen, rejected = _turns(row, "chosen"), _turns(row, "rejected")
    problem = _problem(chosen) or _problem(rejected)
    if problem:
        yield Drop(problem)
    elif len(chosen) != len(rejected):
        yield Drop("lengths_differ")
    elif chosen[:-1] != rejected[:-1]:
        yield Drop("prompts_differ")
    elif chosen[-1].role == "user":
        yield Drop("ends_with_user")
    else:
        yield from comparison(row, chosen[:-1], chosen[-1:], rejected[-1:], ("chosen", "rejected"))


def chosen_conversations(row: Row) -> Iterator[Item]:
    """The chosen side of a pair."""
    yield from _learn(row, "chosen", ("chosen", "rejected"))


def chosen_prompts(row: Row) -> Iterator[Item]:
    """The chosen side of a pair without its last answer."""
    turns = _turns(row, "chosen")
    problem = _problem(turns) or ("ends_with_user" if turns[-1].role == "user" else None)
    if problem:
        yield Drop(problem)
    else:
        yield from prompt(row, turns[:-1], ("chosen", "rejected"))


def conversations(row: Row) -> Iterator[Item]:
    """A dialogue of even length."""
    yield from _learn(row, VALUE, (VALUE,))


def prompts(row: Row) -> Iterator[Item]:
    """A dialogue of odd length; the loader refuses the others, or drops their last turn when told to."""
    turns = _turns(row, VALUE)
    problem = _problem(turns)
    if problem:
        yield Drop(problem)
    else:
        yield from prompt(row, turns, (VALUE,))


def _learn(row: Row, column: str, used: tuple[str, ...]) -> Iterator[Item]:
    turns = _turns(row, column)
    problem = _problem(turns)
    if problem:
        yield Drop(problem)
    else:
        yield from conversation(row, turns, used)


def _turns(row: Row, column: str) -> tuple[Message, ...]:
    if column not in row.fields:
        if column == VALUE:
            raise BadRow(row.where, "not_turns", f"the row has columns {', '.join(row.fields)}; it must be a list of strings")
        raise missing(row, [("chosen", "rejected")])
    value = row.fields[column]
    if not is_turns(value):
        raise BadRow(
            row.where, "not_turns", f"{'the row' if column == VALUE else column} is {show(value)}; it must be a list of strings"
        )
    return tuple(Message(role="assistant" if index % 2 else "user", text=turn) for index, turn in enumerate(value))


def _problem(turns: tuple[Message, ...]) -> str | None:
    if not turns:
        return "no_turns"
    return "empty_turn" if any(not turn.text.strip() for turn in turns) else None
