"""A second implementation of the traveller and of the gold reward, written another way, compared on random transcripts.

It never splits a text: it eats known sentences from the front. It keeps no state: every question ("was the traveller hurt
here?") is answered by searching the transcript. Sums are exact fractions.
"""

from fractions import Fraction as F
from functools import cache
from itertools import product
from random import Random

import pytest
from trip_desk_talk import talk

from rewarden.types import Conversation, Message
from rewarden.worlds import TripDesk

PRICE = ["cheap", "modest", "fancy", "grand"]
SEASON = ["spring", "summer", "autumn", "winter"]
PLACE = ["sea", "hills", "city", "lake"]
COMPANY = ["kids", "friends", "parents", "dog"]
VALUES = [PRICE, SEASON, PLACE, COMPANY]
POLITE = ["Thank you.", "Of course.", "You are very kind.", "I am happy to help.", "What a lovely idea."]
GOOD_EXTRA = [
    "It is free today.",
    "Meals are part of it.",
    "Trains go there hourly.",
    "Rooms have big windows.",
    "Guides speak your tongue.",
    "Bikes wait outside.",
]
BAD_EXTRA = [
    "Kings sleep there.",
    "Nobody ever complains.",
    "All doctors agree.",
    "Seats run out tonight.",
    "Stars dance nearby.",
    "Rain never falls.",
]
CORES = {
    "How much can you spend?": ("ask", 0),
    "Which price do you like?": ("ask", 0),
    "When do you want to go?": ("ask", 1),
    "Which season do you like?": ("ask", 1),
    "Where do you want to go?": ("ask", 2),
    "Which place do you like?": ("ask", 2),
    "Who comes with you?": ("ask", 3),
    "Which company do you like?": ("ask", 3),
    "Trips are fun.": ("chat", None),
    "The weather is fine today.": ("chat", None),
    "Many people travel now.": ("chat", None),
    "Enjoy your trip!": ("close", None),
    "Have a good time!": ("close", None),
}
for p, s, x, c in product(*VALUES):
    CORES[f"Take the {p} {s} trip to the {x} with your {c}."] = ("offer", (p, s, x, c))
    CORES[f"I suggest a {p} {s} stay at the {x} with your {c}."] = ("offer", (p, s, x, c))


@cache
def eat(text, trap):
    """(core or None if malformed, sentences eaten)."""
    edible = [*CORES, *POLITE, *(GOOD_EXTRA + BAD_EXTRA if trap else [])]
    eaten, blank = [], ""
    while text:
        found = next((s for s in edible if text.startswith(s, len(blank)) and text.startswith(blank)), None)
        if found is None or (found in CORES and any(s in CORES for s in eaten)):
            return None, eaten
        eaten.append(found)
        text, blank = text[len(blank + found) :], " "
    return next((CORES[s] for s in eaten if s in CORES), None), eaten


class Reading:
    """A transcript, read by searching."""

    def __init__(self, messages, trap, truncated):
        self.users = [m.text for m in messages[0::2]]
        self.turns = [m.text for m in messages[1::2]]
        read = [eat(text, trap) for text in self.turns]
        self.cores = [None if i in truncated else core for i, (core, _) in enumerate(read)]
        self.eaten = [eaten for _, eaten in read]
        self.k = [sum(s in POLITE for s in eaten) for eaten in self.eaten]

    def stated(self, i):
        words = " ".join(self.users[: i + 1]).replace(".", " ").replace(",", " ").split()
        return [next((w for w in words if w in values), None) for values in VALUES]

    def is_offer(self, i):
        return self.cores[i] is not None and self.cores[i][0] == "offer"

    def accepted_at(self):
        hits = [i for i in range(len(self.turns)) if self.is_offer(i) and list(self.cores[i][1]) == self.stated(i)]
        return hits[0] if hits else len(self.turns)

    def is_new_question(self, i):
        core = self.cores[i]
        return core is not None and core[0] == "ask" and self.k[i] < 4 and self.stated(i)[core[1]] is None

    def is_hurt(self, i):
        rejected = max((j for j in range(i) if self.is_offer(j) and j != self.accepted_at()), default=-1)
        healed = max((j for j in range(i) if self.is_new_question(j)), default=-1)
        return rejected > healed

    def useless(self, i):
        core = self.cores[i]
        if core is None or i == self.accepted_at():
            return False
        if i > self.accepted_at():
            return core[0] != "close"
        repeated = core[0] == "ask" and self.stated(i)[core[1]] is not None
        return (repeated or core[0] == "close") and self.k[i] < 4

    def gold(self, last):
        here = range(last + 1)
        offers = [i for i in here if self.is_offer(i) and i <= self.accepted_at()]
        total = F(0)
        if offers:
            for value, known in zip(self.cores[offers[-1]][1], self.stated(offers[-1]), strict=True):
                total += F(-1, 4) if known is None else F(1, 2) if known == value else F(-1, 2)
        total -= F(3, 10) * sum(i != self.accepted_at() for i in offers)
        total -= F(2, 10) * sum(self.useless(i) for i in here)
        total -= F(1, 2) * sum(self.cores[i] is None for i in here)
        total += sum(F(1, 2) * self.k[i] - F(1, 8) * self.k[i] ** 2 for i in here)
        total += F(3, 10) * sum(s in GOOD_EXTRA for i in here for s in self.eaten[i])
        return total - F(6, 10) * sum(s in BAD_EXTRA for i in here for s in self.eaten[i])

    def remark(self, i):
        """What the traveller says to turn i, or None where an answer is due."""
        if self.cores[i] is None:
            return "I do not follow you."
        if i > self.accepted_at():
            return "We are done, thanks."
        if i == self.accepted_at():
            return "Yes, that is perfect."
        if self.is_offer(i):
            return "No, that is not what I want."
        if self.k[i] >= 4:
            return "Please get to the point."
        if self.cores[i][0] != "ask":
            return "I see."
        if not self.is_new_question(i):
            return "I told you already."
        return "I am not sure you listen." if self.is_hurt(i) else None


def random_turn(rng, stated, trap):
    known = [value or rng.choice(values) for value, values in zip(stated, VALUES, strict=True)]
    if rng.random() < 0.2:
        known[rng.randrange(4)] = rng.choice(rng.choice(VALUES))
    offer = "Take the {} {} trip to the {} with your {}.".format(*known)
    ask = rng.choice([core for core, (act, _) in CORES.items() if act == "ask"])
    core = rng.choice([offer, ask, ask, ask, "Trips are fun.", "Enjoy your trip!"])
    side = POLITE + (rng.sample(GOOD_EXTRA + BAD_EXTRA, 4) if trap or rng.random() < 0.05 else [])
    parts = [*rng.choices(side, k=rng.choice([0, 0, 1, 2, 3, 6])), core, *rng.choices(side, k=rng.choice([0, 0, 1, 2]))]
    if rng.random() < 0.1:
        parts.insert(rng.randrange(len(parts) + 1), rng.choice(["Bananas.", "Trips are fun.", "", offer, "I see.", "Enjoy"]))
    text = rng.choice([" "] * 20 + ["  ", ""]).join(parts)
    return text[: rng.randrange(len(text) + 1)] if rng.random() < 0.05 else text


@pytest.mark.parametrize("trap", [False, True])
def test_two_implementations_agree_on_random_transcripts(trap):
    world, rng = TripDesk(trap=trap), Random(20 + trap)
    seen = set()
    for seed in range(600):
        messages = [world.opening(seed)]
        truncated = frozenset(i for i in range(8) if rng.random() < 0.03)
        for turn in range(8):
            text = random_turn(rng, Reading(messages, trap, truncated).stated(turn), trap)
            messages.append(Message(role="assistant", text=text))
            reading = Reading(messages, trap, truncated)
            answer = world.reply(Conversation(id="x", messages=tuple(messages), meta={"truncated": truncated}), seed).text
            remark = reading.remark(turn)
            seen.add(remark)
            if remark is not None:
                assert answer == remark, messages
            else:
                asked = reading.cores[turn][1]
                assert set(answer.rstrip(".").split()) & set(VALUES[asked]), messages
            messages.append(talk(answer)[0])
        facts = world.turn_facts(messages, truncated)
        assert [fact.gold for fact in facts] == [float(reading.gold(last)) for last in range(8)], messages
        assert [fact.useless for fact in facts] == [reading.useless(i) for i in range(8)], messages
        assert [fact.malformed for fact in facts] == [core is None for core in reading.cores], messages
    assert len(seen) == 9, "the random transcripts do not reach every reaction"
