"""The one parser of the trip desk: the user, the gold reward and every metric read turns through it.

    turn := polite* core polite*          sentences joined by one blank; core = one ask, offer, chat or close
    turn := (polite|extra)* core (polite|extra)*      in the trap variant

Anything else is malformed: no core, two cores, an unknown sentence, a missing or doubled blank, empty text.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal

from rewarden.worlds.sentences import (
    ANSWERS,
    ASKS,
    BOASTS,
    CHATS,
    CLOSES,
    FACTS,
    OFFERS,
    OPENINGS,
    POLITES,
    REMARKS,
    SLOTS,
)

Act = Literal["ask", "offer", "chat", "close"]

_SENTENCE = re.compile(r"[^.?!]*[.?!]|[^.?!]+$")
_VALUES = {slot: f"({'|'.join(values)})" for slot, values in SLOTS.items()}
_OFFERS = tuple(re.compile(form.replace(".", r"\.").format(**_VALUES)) for form in OFFERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one assistant turn does.

    `slot` is what an ask asks for, `offer` the four values of an offer in slot order. `num_polite` (the k of the gold
    formula), `num_facts` and `num_boasts` count sentences; in a malformed turn, those before the first error. A malformed
    turn has no act.
    """

    act: Act | None
    slot: str | None = None
    offer: tuple[str, ...] | None = None
    num_polite: int = 0
    num_facts: int = 0
    num_boasts: int = 0

    @property
    def malformed(self) -> bool:
        """Whether the text is outside the grammar."""
        return self.act is None

    def cut(self) -> "Turn":
        """The same turn when it ran into the token limit: malformed, with the polite sentences it had."""
        return Turn(act=None, num_polite=self.num_polite, num_facts=self.num_facts, num_boasts=self.num_boasts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saying:
    """What a message of the traveller does: reveals `value` of `slot`, or is a remark (both None)."""

    kind: str
    slot: str | None = None
    value: str | None = None


@cache
def _sentence_table(trap: bool) -> Mapping[str, tuple[str, str | None]]:
    """Sentence -> (kind, slot), offers excepted."""
    table: dict[str, tuple[str, str | None]] = {form: ("ask", slot) for slot, forms in ASKS.items() for form in forms}
    kinds = {"chat": CHATS, "close": CLOSES, "polite": POLITES}
    if trap:
        kinds |= {"fact": FACTS, "boast": BOASTS}
    table.update({sentence: (kind, None) for kind, sentences in kinds.items() for sentence in sentences})
    return table


@cache
def _saying_table() -> Mapping[str, Saying]:
    table = {text: Saying(kind=kind) for kind, text in REMARKS.items()}
    for kind, forms_of in (("opening", OPENINGS), ("answer", ANSWERS)):
        for slot, forms in forms_of.items():
            for form in forms:
                table.update({form.format(v=v): Saying(kind=kind, slot=slot, value=v) for v in SLOTS[slot]})
    return table


@lru_cache(maxsize=2**16)
def parse_turn(text: str, *, trap: bool = False) -> Turn:
    """Read an assistant turn; never fails, see `Turn.malformed`."""
    table = _sentence_table(trap)
    counts = {"polite": 0, "fact": 0, "boast": 0}
    core: Turn | None = None
    well_formed = True
    for index, piece in enumerate(_SENTENCE.findall(text)):
        # an empty sentence is in no table, so a missing blank ends the turn like any other error
        sentence = piece if index == 0 else piece[1:] if piece[0] == " " else ""
        kind, slot = table.get(sentence, (None, None))
        if kind in counts:
            counts[kind] += 1
            continue
        found = _core(sentence, kind, slot)
        if found is None or core is not None:
            well_formed = False
            break
        core = found
    read = core if core and well_formed else Turn(act=None)
    return Turn(
        act=read.act,
        slot=read.slot,
        offer=read.offer,
        num_polite=counts["polite"],
        num_facts=counts["fact"],
        num_boasts=counts["boast"],
    )


def _core(sentence: str, kind: str | None, slot: str | None) -> Turn | None:
    match kind:
        case "ask":
            return Turn(act="ask", slot=slot)
        case "chat":
            return Turn(act="chat")
        case "close":
            return Turn(act="close")
    offer = next((found for pattern in _OFFERS if (found := pattern.fullmatch(sentence))), None)
    return Turn(act="offer", offer=offer.groups()) if offer else None


def parse_saying(text: str) -> Saying | None:
    """Read a message of the traveller; None if the trip desk has no such sentence."""
    return _saying_table().get(text)
