"""UltraInteract: a trajectory of user and assistant turns, and two next answers; also its instruction-response rows.

Columns: trajectory (list of {from, value}), chosen, rejected; or instruction, response. task, dataset and parent_id go to meta.
The real data hold rows whose turns do not alternate and rows that repeat the user turns of another (REFUEL's pipeline filters
both): the first are dropped, the second kept as pairs, where another answer is news, and dropped as dialogues and prompts.
"""

from collections.abc import Hashable, Iterator

from rewarden.data.formats.messages import comparison, conversation, disorder, prompt, read_messages
from rewarden.data.formats.row import Drop, Item, missing, text
from rewarden.data.read import Row
from rewarden.types import Message

_USED = ("trajectory", "chosen", "rejected")


def matches(row: Row) -> bool:
    """A trajectory, or an instruction and its response."""
    return "trajectory" in row.fields or {"instruction", "response"} <= row.fields.keys()


def user_turns(messages: tuple[Message, ...]) -> Hashable:
    """Rows with equal user turns are the same dialogue to REFUEL's pipeline."""
    return tuple(message.text for message in messages if message.role == "user")


def conversations(row: Row) -> Iterator[Item]:
    """The trajectory with the chosen answer as its last turn. Earlier wrong attempts are prompt: only the answer is learned."""
    if "trajectory" not in row.fields:
        dialogue = (Message(role="user", text=text(row, "instruction")), Message(role="assistant", text=text(row, "response")))
        yield from conversation(row, dialogue, ("instruction", "response"))
        return
    trajectory = _trajectory(row)
    if _from_user_to_user(trajectory):
        answer = Message(role="assistant", text=text(row, "chosen"))
        yield from conversation(row, (*trajectory, answer), _USED, given=len(trajectory))
    else:
        yield Drop("roles_do_not_alternate")


def prompts(row: Row) -> Iterator[Item]:
    """The trajectory, which ends with the user; or the instruction."""
    if "trajectory" not in row.fields:
        yield from prompt(row, (Message(role="user", text=text(row, "instruction")),), ("instruction",))
        return
    trajectory = _trajectory(row)
    if _from_user_to_user(trajectory):
        yield from prompt(row, trajectory, _USED)
    else:
        yield Drop("roles_do_not_alternate")


def comparisons(row: Row) -> Iterator[Item]:
    """Two next answers to one trajectory."""
    trajectory = _trajectory(row)
    if _from_user_to_user(trajectory):
        chosen, rejected = (Message(role="assistant", text=text(row, side)) for side in ("chosen", "rejected"))
        yield from comparison(row, trajectory, (chosen,), (rejected,), _USED)
    else:
        yield Drop("roles_do_not_alternate")


def _trajectory(row: Row) -> tuple[Message, ...]:
    if "trajectory" not in row.fields:
        raise missing(row, [_USED])
    return read_messages(row, "trajectory")


def _from_user_to_user(trajectory: tuple[Message, ...]) -> bool:
    return disorder(trajectory) is None and trajectory[-1].role == "user"
