import pytest

from rewarden.errors import DataError
from rewarden.protocols import User
from rewarden.rollout.users import RecordedUser, WorldUser
from rewarden.types import Conversation, Message
from rewarden.worlds import TripDesk


def dialogue(*texts, **meta):
    roles = ("user", "assistant")
    return Conversation(
        id="d", messages=tuple(Message(role=roles[i % 2], text=text) for i, text in enumerate(texts)), meta=meta
    )


def test_the_worlds_user_is_the_one_of_the_conversation_whatever_the_seed_of_the_play():
    world = TripDesk()
    talk = dialogue(world.opening(5).text, "Trips are fun.", user_seed=5)
    user = WorldUser(world)
    assert user.reply(talk, 1) == user.reply(talk, 2) == Message(role="user", text="I see.")
    assert isinstance(user, User)


def test_a_conversation_without_a_user_seed_is_refused():
    with pytest.raises(DataError, match=r"meta\['user_seed'\] is None"):
        WorldUser(TripDesk()).reply(dialogue("Hello.", "Hi."), 1)


def test_the_recorded_user_goes_on_where_the_dialogue_stands_and_then_leaves():
    user, turns = RecordedUser(), ["one", "two", "three"]
    assert user.reply(dialogue("one", "said by the policy", user_turns=turns), 0) == Message(role="user", text="two")
    assert user.reply(dialogue("one", "x", "two", "y", user_turns=turns), 9) == Message(role="user", text="three")
    assert user.reply(dialogue("one", "x", "two", "y", "three", "z", user_turns=turns), 9) is None
    assert isinstance(user, User)


def test_a_record_of_another_dialogue_is_refused():
    with pytest.raises(DataError, match="not the first 1 of"):
        RecordedUser().reply(dialogue("one", "x", user_turns=["two"]), 0)
    with pytest.raises(DataError, match=r"meta\['user_turns'\] is None"):
        RecordedUser().reply(dialogue("one", "x"), 0)
    with pytest.raises(DataError, match=r"meta\['user_turns'\] is 'one'"):
        RecordedUser().reply(dialogue("one", "x", user_turns="one"), 0)
