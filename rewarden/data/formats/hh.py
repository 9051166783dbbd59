"""Anthropic HH-RLHF: pairs of whole transcripts, "\\n\\nHuman: ...\\n\\nAssistant: ...".

Turns are cut at blank line + role + colon; the space around a turn's text is taken off. What is irregular in the real files,
and what becomes of it, is listed in docs/decisions/irregular_rows.md.
"""

import re
from collections.abc import Iterator
from itertools import pairwise

from rewarden.data.formats.messages import comparison, conversation, prompt
from rewarden.data.formats.row import BadRow, Drop, Item, Notice, missing, text
from rewarden.data.read import Row
from rewarden.types import Message

_TURN = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")
_ROLE_INSIDE = re.compile(r"(Human|Assistant):")
LONG = 20
"""Messages from which a transcript counts as long."""

Turns = tuple[Message, ...]


def matches(row: Row) -> bool:
    """Two transcripts."""
    return all(isinstance(row.fields.get(side), str) and _TURN.match(row.fields[side]) for side in ("chosen", "rejected"))


def conversations(row: Row) -> Iterator[Item]:
    """The chosen transcript, to learn from. One in which the assistant writes a role marker would teach it to."""
    turns = _turns(row, "chosen")
    yield from _notices({"chosen": turns})
    problem = _problem(turns)
    if problem:
        yield Drop(problem)
    elif any(_ROLE_INSIDE.search(turn.text) for turn in turns if turn.role == "assistant"):
        yield Drop("inline_role_marker")
    else:
        yield from conversation(row, turns, ("chosen", "rejected"))


def prompts(row: Row) -> Iterator[Item]:
    """The chosen transcript without its last answer."""
    turns = _turns(row, "chosen")
    yield from _notices({"chosen": turns})
    problem = _problem(turns)
    if problem:
        yield Drop(problem)
    else:
        yield from prompt(row, turns[:-1], ("chosen", "rejected"))


def comparisons(row: Row) -> Iterator[Item]:
    """The pair: everything before the last turn must be the same on both sides."""
    sides = {side: _turns(row, side) for side in ("chosen", "rejected")}
    chosen, rejected = sides["chosen"], sides["rejected"]
    yield from _notices(sides)
    differ, equal = chosen[:-1] != rejected[:-1], chosen == rejected
    if differ:
        yield Notice("prompts_differ")
    if equal:
        yield Notice("chosen_equals_rejected")
    problem = _problem(chosen) or _problem(rejected) or ("prompts_differ" if differ else None)
    if problem:
        yield Drop(problem)
    else:
        yield from _without_empty_notice(comparison(row, chosen[:-1], chosen[-1:], rejected[-1:], ("chosen", "rejected")))


def _turns(row: Row, side: str) -> Turns:
    if side not in row.fields:
        raise missing(row, [("chosen", "rejected")])
    pieces = _TURN.split(text(row, side))
    if pieces[0] or len(pieces) < 3:
        raise BadRow(row.where, "not_a_transcript", f"{side} starts with {pieces[0][:40]!r}; a transcript starts with 'Human:'")
    roles, texts = pieces[1::2], pieces[2::2]
    return tuple(
        Message(role="user" if role == "Human" else "assistant", text=turn.strip())
        for role, turn in zip(roles, texts, strict=True)
    )


def _problem(turns: Turns) -> str | None:
    """Why a transcript cannot be a conversation that ends with an answer, in the order in which we look."""
    if any(first.role == second.role for first, second in pairwise(turns)):
        return "consecutive_same_role"
    if turns[0].role != "user":
        return "starts_with_assistant"
    return "ends_with_human" if turns[-1].role == "user" else None


def _notices(sides: dict[str, Turns]) -> Iterator[Notice]:
    """The irregularities of a row under the names its source lists them by, each at most once."""
    for name, turns in sides.items():
        if any(first.role == second.role for first, second in pairwise(turns)):
            yield Notice(f"{name}_consecutive_same_role")
        if turns[-1].role == "user":
            yield Notice(f"{name}_ends_with_human")
        elif not turns[-1].text:
            yield Notice(f"{name}_empty_final_assistant")
        if any(not turn.text for turn in turns[:-1]):
            yield Notice(f"{name}_empty_turn_inside")
    if any(len(turns) >= LONG for turns in sides.values()):
        yield Notice("20_or_more_turns")
    texts = [turn.text for turns in sides.values() for turn in turns]
    if any(_ROLE_INSIDE.search(turn) for turn in texts):
        yield Notice("inline_role_marker")
    if any("\ufffd" in turn for turn in texts):
        yield Notice("replacement_char")


def _without_empty_notice(items: Iterator[Item]) -> Iterator[Item]:
    """An empty last answer is already noticed by side."""
    return (item for item in items if item != Notice("empty_answer"))
