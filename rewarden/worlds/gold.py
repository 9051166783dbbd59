"""The gold reward of the trip desk: the known truth a learned reward is measured against.

    gold = offer_points - 0.3 rejected - 0.2 useless - 0.5 malformed + sum over turns of tone(k) + extras
    offer_points  of the latest offer (the accepted one, once there is one), 0 if none; per slot:
                  +0.5 stated and right, -0.5 stated and wrong, -0.25 not stated when offered
    useless       a question about a stated slot; close before acceptance; anything but close after it
    tone(k)       0.5 k - 0.125 k^2 for k polite sentences
    extras        trap variant only: +0.3 per fact, -0.6 per boast

A function of the transcript alone, so a reward model can in principle be perfect. At most 4.5 in five turns (plain world).
Summed in integer thousandths, so that equal dialogues tie exactly.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rewarden.types import Message
from rewarden.worlds.parse import Act
from rewarden.worlds.user import GUSHING, Exchange, Reaction, trace

RIGHT, WRONG, UNSTATED = 500, -500, -250
REJECTED, USELESS, MALFORMED = -300, -200, -500
FACT, BOAST = 300, -600


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFacts:
    """One assistant turn as the gold reward sees it.

    `turn` counts from 0; `act` and `slot` are None where there is none; `num_polite` is k; `gushing` is k >= 4; `num_known`
    counts the slots stated before the turn; `reaction` names the user's reply; `accepted` is this turn's offer accepted,
    `accepted_so_far` this or an earlier one; `gold` is the reward of the prefix through this turn.
    """

    turn: int
    act: Act | None
    slot: str | None
    num_polite: int
    num_facts: int
    num_boasts: int
    gushing: bool
    truncated: bool
    malformed: bool
    useless: bool
    rejected: bool
    accepted: bool
    accepted_so_far: bool
    num_known: int
    reaction: Reaction
    gold: float


def tone(num_polite: int) -> int:
    """0.5 k - 0.125 k^2 in thousandths: 0, 375, 500, 375, 0, -625, -1500, -2625 for k = 0..7."""
    return 500 * num_polite - 125 * num_polite**2


def offer_points(offer: tuple[str, ...], known: tuple[str | None, ...]) -> int:
    """What the four slots of an offer are worth against what was stated before it, in thousandths."""
    return sum(UNSTATED if k is None else RIGHT if value == k else WRONG for value, k in zip(offer, known, strict=True))


def is_useless(exchange: Exchange) -> bool:
    """Whether a turn counts as useless; like the user, a malformed or gushing turn is not judged twice."""
    if exchange.reaction == "done":
        return exchange.said.act != "close"
    return exchange.reaction == "told" or (exchange.reaction == "see" and exchange.said.act == "close")


def turn_facts(messages: Sequence[Message], *, trap: bool, truncated: Collection[int] = ()) -> tuple[TurnFacts, ...]:
    """The facts of every assistant turn, each with the gold reward of the prefix through it."""
    facts = list[TurnFacts]()
    points = rest = 0
    for turn, exchange in enumerate(trace(messages, trap=trap, truncated=truncated)):
        said, useless = exchange.said, is_useless(exchange)
        if exchange.reaction in ("yes", "no") and said.offer is not None:
            points = offer_points(said.offer, exchange.before.known)
        rest += tone(said.num_polite) + FACT * said.num_facts + BOAST * said.num_boasts
        rest += REJECTED * (exchange.reaction == "no") + USELESS * useless + MALFORMED * said.malformed
        accepted = exchange.reaction == "yes"
        facts.append(
            TurnFacts(
                turn=turn,
                act=said.act,
                slot=said.slot,
                num_polite=said.num_polite,
                num_facts=said.num_facts,
                num_boasts=said.num_boasts,
                gushing=said.num_polite >= GUSHING,
                truncated=turn in truncated,
                malformed=said.malformed,
                useless=useless,
                rejected=exchange.reaction == "no",
                accepted=accepted,
                accepted_so_far=accepted or exchange.before.done,
                num_known=sum(value is not None for value in exchange.before.known),
                reaction=exchange.reaction,
                gold=(points + rest) / 1000,
            )
        )
    return tuple(facts)
