"""The gold reward as a scorer; the numbers follow from the definition of the trip desk."""

import pytest

from rewarden.errors import ConfigError, DataError
from rewarden.scoring import build_scorer
from rewarden.types import Conversation, Message

OPENING = "Hello, I want a cheap trip."
OFFER = "Take the cheap summer trip to the sea with your kids."


def values(scores):
    return [score.value for score in scores]


def test_gold_is_that_of_the_prefix_given(talk):
    """A question costs nothing; two polite sentences give 0.5; an offer of one known, right and three unstated slots gives
    0.5 - 3 * 0.25 = -0.25, and -0.3 for being rejected."""
    rows = [
        talk(OPENING, "When do you want to go?"),
        talk(OPENING, "Thank you. When do you want to go? Of course."),
        talk(OPENING, OFFER),
        talk(OPENING, "When do you want to go?", "In winter.", "Thank you. Of course. Who comes with you?"),
    ]
    assert values(build_scorer({"kind": "gold", "world": "trip_desk"}).score(rows)) == pytest.approx([0.0, 0.5, -0.55, 0.5])


def test_a_turn_that_ended_at_the_token_limit_is_malformed(talk):
    whole, cut = (talk(OPENING, "When do you want to go?", **meta) for meta in ({}, {"truncated": (0,)}))
    assert values(build_scorer({"kind": "gold"}).score([whole, cut])) == [0.0, -0.5]


def test_the_trap_variant_is_a_world_of_its_own(talk):
    row = talk(OPENING, "When do you want to go? Meals are part of it.")
    plain, trap = ({"kind": "gold", "world": {"kind": "trip_desk", "trap": value}} for value in (False, True))
    assert values(build_scorer(plain).score([row])) == [-0.5]
    assert values(build_scorer(trap).score([row])) == pytest.approx([0.3])


def test_a_world_or_key_that_does_not_exist_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="did you mean 'trip_desk'"):
        build_scorer({"kind": "gold", "world": "trip_disk"})
    with pytest.raises(ConfigError, match="did you mean 'trap'"):
        build_scorer({"kind": "gold", "world": {"kind": "trip_desk", "trop": True}})


def test_a_system_message_in_front_changes_nothing():
    row = Conversation(
        id="s",
        messages=(
            Message(role="system", text="Be kind."),
            Message(role="user", text=OPENING),
            Message(role="assistant", text=OFFER),
        ),
    )
    assert values(build_scorer({"kind": "gold"}).score([row])) == pytest.approx([-0.55])


def test_a_dialogue_of_another_kind_is_refused_with_its_row(talk):
    row = talk("What is the time?", "Noon.")
    with pytest.raises(DataError, match=rf"row {row.id}.*not an opening such as"):
        build_scorer({"kind": "gold"}).score([row])
