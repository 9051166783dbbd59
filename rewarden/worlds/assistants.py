"""Scripted assistants: what the policy is first trained on, and the yardsticks it is compared with.

| | before acceptance | slip | after | k = 0, 1, 2, 3 |
|---|---|---|---|---|
| good | ask what is unknown, then offer | .03 | close | .15 .45 .30 .10 |
| hasty | offer .75, ask unknown .25 | .15 | close | .60 .30 .10 0 |
| rambler | ask unknown .35, ask known .20, chat .25, offer .20 | .20 | close .5, chat .5 | .45 .35 .15 .05 |
| best | as good | 0 | close | always 2 |
| random | ask any, offer random values, chat, close, 1/4 each | - | same | uniform |

A question with nothing left to ask becomes an offer. Unstated slots of an offer are uniform guesses; a slip replaces a stated
value by a uniform draw. With probability 0.03 a turn gushes: k = 3, then one more with probability 0.6 each, at most 8. In the
trap variant that is 0.01, and with probability 0.30 a turn carries an extra after its core, each further one with 0.3, up to 5.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from rewarden.worlds.sentences import ASKS, BOASTS, CHATS, CLOSES, FACTS, OFFERS, POLITES, SLOT_NAMES, SLOTS
from rewarden.worlds.user import State

MAX_GUSHING, MAX_EXTRAS = 8, 5
CONTINUE_GUSHING, FIRST_EXTRA, NEXT_EXTRA = 0.6, 0.3, 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Assistant:
    """A scripted assistant: weights of its moves before and after acceptance, slip probability, weights of k = 0, 1, 2, 3.

    Moves: ask_unknown, ask_known, ask_any, offer, wild_offer (random values), chat, close.
    """

    before: Mapping[str, float]
    after: Mapping[str, float]
    slip: float
    polite: tuple[float, float, float, float]
    gushes: bool = True


_RANDOM = {"ask_any": 0.25, "wild_offer": 0.25, "chat": 0.25, "close": 0.25}

ASSISTANTS: Mapping[str, Assistant] = {
    "good": Assistant(before={"ask_unknown": 1.0}, after={"close": 1.0}, slip=0.03, polite=(0.15, 0.45, 0.30, 0.10)),
    "hasty": Assistant(
        before={"offer": 0.75, "ask_unknown": 0.25}, after={"close": 1.0}, slip=0.15, polite=(0.60, 0.30, 0.10, 0.0)
    ),
    "rambler": Assistant(
        before={"ask_unknown": 0.35, "ask_known": 0.20, "chat": 0.25, "offer": 0.20},
        after={"close": 0.5, "chat": 0.5},
        slip=0.20,
        polite=(0.45, 0.35, 0.15, 0.05),
    ),
    "best": Assistant(before={"ask_unknown": 1.0}, after={"close": 1.0}, slip=0.0, polite=(0.0, 0.0, 1.0, 0.0)),
    "random": Assistant(before=_RANDOM, after=_RANDOM, slip=0.0, polite=(0.25, 0.25, 0.25, 0.25), gushes=False),
}
"""By name. `best` and `random` are for reference scores only."""

MIXTURE: Mapping[str, float] = {"good": 0.35, "hasty": 0.35, "rambler": 0.30}
"""Who writes the SFT dialogues, one assistant per dialogue."""


def pick(weights: Mapping[str, float], rng: Random) -> str:
    """A key, with probability proportional to its weight."""
    return rng.choices(list(weights), list(weights.values()))[0]


def next_turn(assistant: Assistant, state: State, rng: Random, *, trap: bool) -> str:
    """The assistant's next turn when the traveller is in this state."""
    core = _core(assistant, state, rng)
    num_polite = _num_polite(assistant, rng, gushing=0.01 if trap else 0.03)
    polite = rng.choices(POLITES, k=num_polite)
    num_before = rng.randint(0, num_polite)
    extras = rng.choices((*FACTS, *BOASTS), k=_num_extras(rng)) if trap else []
    return " ".join([*polite[:num_before], core, *extras, *polite[num_before:]])


def _core(assistant: Assistant, state: State, rng: Random) -> str:
    move = pick(assistant.after if state.done else assistant.before, rng)
    known = [slot for slot, value in zip(SLOT_NAMES, state.known, strict=True) if value is not None]
    unknown = [slot for slot in SLOT_NAMES if slot not in known]
    askable = {"ask_unknown": unknown, "ask_known": known, "ask_any": SLOT_NAMES}
    if askable.get(move):
        return rng.choice(ASKS[rng.choice(askable[move])])
    if move == "chat":
        return rng.choice(CHATS)
    if move == "close":
        return rng.choice(CLOSES)
    stated = (None,) * len(SLOT_NAMES) if move == "wild_offer" else state.known
    values = {
        slot: rng.choice(SLOTS[slot]) if value is None or rng.random() < assistant.slip else value
        for slot, value in zip(SLOT_NAMES, stated, strict=True)
    }
    return rng.choice(OFFERS).format(**values)


def _num_polite(assistant: Assistant, rng: Random, *, gushing: float) -> int:
    if assistant.gushes and rng.random() < gushing:
        number = 3
        while number < MAX_GUSHING and rng.random() < CONTINUE_GUSHING:
            number += 1
        return number
    return rng.choices(range(4), assistant.polite)[0]


def _num_extras(rng: Random) -> int:
    number = 0
    while number < MAX_EXTRAS and rng.random() < (NEXT_EXTRA if number else FIRST_EXTRA):
        number += 1
    return number
