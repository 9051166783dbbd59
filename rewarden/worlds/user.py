"""The traveller: a hidden wish drawn from a seed, and a reply that is a function of the transcript.

The state (what was stated, whether a rejected offer hurt, whether the trip is accepted) is read off the transcript at every
call, so replaying a prefix gives the same user and a dialogue can branch anywhere. First match wins:

1. malformed turn -> huh                        5. ask while hurt -> hurt, which heals
2. trip accepted -> done                        6. ask for an unknown slot -> the answer
3. 4 or more polite sentences, no offer -> point   7. offer: all four slots stated and right -> yes; else no, which hurts
4. ask for a known slot -> told                 8. chat or close -> see

An offer is judged against what was said, never against the hidden wish: a lucky guess does not count.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from operator import index
from typing import Literal, SupportsIndex

from rewarden.errors import DataError
from rewarden.types import Conversation, Message
from rewarden.worlds.parse import Turn, parse_saying, parse_turn
from rewarden.worlds.sentences import ANSWERS, OPENINGS, REMARKS, SLOT_NAMES, SLOTS

Reaction = Literal["huh", "done", "point", "told", "hurt", "answer", "yes", "no", "see"]

GUSHING = 4
"""From this many polite sentences a turn that is not an offer is wasted."""


@dataclass(frozen=True, slots=True)
class State:
    """What the traveller remembers: stated values in slot order (None: not stated), hurt by an offer, trip accepted."""

    known: tuple[str | None, ...] = (None,) * len(SLOT_NAMES)
    hurt: bool = False
    done: bool = False


@dataclass(frozen=True, slots=True)
class Exchange:
    """One assistant turn in context: the state it met, what it did and how the traveller takes it."""

    before: State
    said: Turn
    reaction: Reaction


def draw(options: int, *parts: SupportsIndex | str) -> int:
    """An integer in [0, options) that depends on `parts` alone: blake2b, the same on every machine and in every process."""
    # index() makes a numpy integer a plain one: their reprs differ, and the same seed must be the same user
    plain = tuple(part if isinstance(part, str) else index(part) for part in parts)
    digest = blake2b(repr(plain).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % options


def goal(seed: int) -> tuple[str, ...]:
    """The hidden wish of this user, in slot order; uniform over the 256."""
    return tuple(SLOTS[slot][draw(len(SLOTS[slot]), seed, "goal", slot)] for slot in SLOT_NAMES)


def opening(seed: int) -> Message:
    """The first message of this user; it reveals one slot, drawn uniformly."""
    revealed = draw(len(SLOT_NAMES), seed, "opening")
    forms = OPENINGS[SLOT_NAMES[revealed]]
    form = forms[draw(len(forms), seed, "opening form")]
    return Message(role="user", text=form.format(v=goal(seed)[revealed]))


def react(state: State, turn: Turn) -> tuple[Reaction, State]:
    """How the traveller takes a turn, and the state after it (what an answer states is heard from the answer itself)."""
    if turn.malformed:
        return "huh", state
    if state.done:
        return "done", state
    if turn.num_polite >= GUSHING and turn.act != "offer":
        return "point", state
    if turn.act == "ask":
        if state.known[SLOT_NAMES.index(str(turn.slot))] is not None:
            return "told", state
        return ("hurt", replace(state, hurt=False)) if state.hurt else ("answer", state)
    if turn.act == "offer":
        # `known` holds None where nothing was stated, which no offered value equals
        return ("yes", replace(state, done=True)) if turn.offer == state.known else ("no", replace(state, hurt=True))
    return "see", state


def hear(state: State, text: str, where: str = "the first message") -> State:
    """The state once the traveller has said `text`; raises DataError on a sentence the trip desk does not have there."""
    saying = parse_saying(text)
    is_first = state == State()
    if saying is None or is_first != (saying.kind == "opening"):
        allowed = "an opening such as 'Hello, I want a cheap trip.'" if is_first else "an answer or a remark"
        raise DataError(
            f"{where}: the user says {text!r}, which is not {allowed}; TripDesk().sentences() lists every sentence, "
            "and only the trip desk's own dialogues can be read"
        )
    if saying.slot is None:
        return state
    index = SLOT_NAMES.index(saying.slot)
    return replace(state, known=(*state.known[:index], saying.value, *state.known[index + 1 :]))


def words(reaction: Reaction, turn: Turn, seed: int, position: int) -> str:
    """What the traveller of this seed says with a reaction to assistant turn `position`.

    The form of an answer is drawn from (seed, turn, slot), so it does not depend on what was said before.
    """
    if reaction != "answer":
        return REMARKS[reaction]
    slot = str(turn.slot)
    form = ANSWERS[slot][draw(len(ANSWERS[slot]), seed, position, slot)]
    return form.format(v=goal(seed)[SLOT_NAMES.index(slot)])


def trace(messages: Sequence[Message], *, trap: bool, truncated: Collection[int] = ()) -> list[Exchange]:
    """Every assistant turn of a transcript in context.

    An optional system message comes first and is skipped. `truncated` holds the turns (counted from 0) that ended at the
    token limit instead of an end-of-turn; they are malformed whatever their text. Raises DataError on a message order or a
    traveller's sentence that the trip desk does not have.
    """
    skipped = int(bool(messages) and messages[0].role == "system")
    state, exchanges = State(), list[Exchange]()
    for position, message in enumerate(messages[skipped:]):
        where = f"message {position + skipped}"
        expected = "user" if position % 2 == 0 else "assistant"
        if message.role != expected:
            raise DataError(
                f"{where} has role {message.role!r}; a trip-desk dialogue is an optional system message, then user and "
                f"assistant in turn, the user first, so it must be {expected!r}"
            )
        if expected == "user":
            state = hear(state, message.text, where)
            continue
        said = parse_turn(message.text, trap=trap)
        if position // 2 in truncated:
            said = said.cut()
        reaction, after = react(state, said)
        exchanges.append(Exchange(state, said, reaction))
        state = after
    return exchanges


def reply(dialogue: Conversation, seed: int, *, trap: bool) -> Message:
    """What the traveller of this seed says to a dialogue that ends with the assistant.

    `dialogue.meta["truncated"]`, if there, holds the turns that ended at the token limit. Raises DataError if the dialogue was
    opened by another seed's user.
    """
    messages = dialogue.messages
    exchanges = trace(messages, trap=trap, truncated=dialogue.meta.get("truncated", ()))
    if not exchanges or messages[-1].role != "assistant":
        raise DataError(f"dialogue {dialogue.id!r} does not end with the assistant; there is nothing to reply to")
    first, own = next(message for message in messages if message.role == "user"), opening(seed)
    if first != own:
        raise DataError(
            f"dialogue {dialogue.id!r} opens with {first.text!r}, but the user of seed {seed} opens with {own.text!r}; "
            "pass the seed it was opened with (meta['user_seed'])"
        )
    last = exchanges[-1]
    return Message(role="user", text=words(last.reaction, last.said, seed, len(exchanges) - 1))
