"""The traveller: each rule of the reply, replay, branching, and users drawn evenly."""

import random
from collections import Counter
from hashlib import blake2b
from itertools import pairwise

import numpy as np
import pytest
from trip_desk_talk import dialogue

from rewarden.errors import ConfigError, DataError
from rewarden.protocols import User
from rewarden.types import Conversation, Message, Rollout, Span
from rewarden.worlds import WORLDS, TripDesk, seed_range, truncated_turns
from rewarden.worlds.seeds import PURPOSES
from rewarden.worlds.user import draw, goal

WORLD = TripDesk()
ASKS = {
    "price": "How much can you spend?",
    "season": "When do you want to go?",
    "place": "Where do you want to go?",
    "company": "Who comes with you?",
}


@pytest.fixture(scope="module")
def price_opener():
    """A seed whose user opens with the price."""
    return next(seed for seed in range(100) if WORLD.opening(seed).text.split()[4] in ("cheap", "modest", "fancy", "grand"))


def heard(seed, *turns, truncated=()):
    """The user's replies to these assistant turns."""
    texts = [WORLD.opening(seed).text]
    for turn in turns:
        texts.append(turn)
        texts.append(WORLD.reply(dialogue(*texts, truncated=truncated), seed).text)
    return texts[2::2]


def offer(values):
    return "Take the {} {} trip to the {} with your {}.".format(*values)


def test_a_whole_dialogue_follows_the_rules(price_opener):
    seed = price_opener
    wish = goal(seed)
    replies = heard(
        seed,
        "Bananas.",
        ASKS["price"],
        "Trips are fun.",
        "Enjoy your trip!",
        "Thank you. " * 4 + ASKS["season"],
        offer(wish),
        ASKS["price"],
        ASKS["season"],
        ASKS["season"],
        ASKS["place"],
        ASKS["company"],
        offer((*wish[:3], next(c for c in ("kids", "dog") if c != wish[3]))),
        offer(wish),
        offer(wish),
        "Thank you. " * 4 + "Trips are fun.",
        "Enjoy your trip!",
        "Bananas.",
    )
    answers = {i: replies[i] for i in (8, 9, 10)}
    assert [text for i, text in enumerate(replies) if i not in answers] == [
        "I do not follow you.",
        "I told you already.",
        "I see.",
        "I see.",
        "Please get to the point.",
        "No, that is not what I want.",  # right by luck, but three slots were not stated
        "I told you already.",
        "I am not sure you listen.",
        "No, that is not what I want.",
        "Yes, that is perfect.",
        "We are done, thanks.",
        "We are done, thanks.",
        "We are done, thanks.",
        "I do not follow you.",
    ]
    assert answers[8] in (f"In {wish[1]}.", f"I love {wish[1]}.")
    assert answers[9] in (f"To the {wish[2]}.", f"I love the {wish[2]}.")
    assert answers[10] in (f"My {wish[3]} come too.", f"I go with my {wish[3]}.")


def test_a_truncated_turn_is_not_followed(price_opener):
    assert heard(price_opener, "Trips are fun.", truncated=(0,)) == ["I do not follow you."]
    assert heard(price_opener, "Trips are fun.", "Trips are fun.", truncated={0}) == ["I do not follow you.", "I see."]


def test_replaying_any_prefix_gives_the_same_user():
    for seed in range(60):
        for name in ("good", "hasty", "rambler", "random"):
            messages = WORLD.scripted(name, seed).messages
            for turn in range(1, 5):
                prefix = Conversation(id="prefix", messages=messages[: 2 * turn])
                assert TripDesk().reply(prefix, seed) == messages[2 * turn]


def test_replies_do_not_depend_on_what_was_asked_before_or_after_a_branch(price_opener):
    start = [WORLD.opening(price_opener).text, ASKS["season"]]
    start.append(WORLD.reply(dialogue(*start), price_opener).text)
    asked = WORLD.reply(dialogue(*start, ASKS["place"]), price_opener)
    WORLD.reply(dialogue(*start, "Trips are fun."), price_opener)
    assert WORLD.reply(dialogue(*start, ASKS["place"]), price_opener) == asked


def test_a_system_message_comes_first_and_is_skipped():
    seed = 3
    texts = (WORLD.opening(seed).text, "Trips are fun.")
    plain = dialogue(*texts)
    with_system = Conversation(id="s", messages=(Message(role="system", text="You sell trips."), *plain.messages))
    assert WORLD.reply(with_system, seed) == WORLD.reply(plain, seed)


def test_the_wrong_user_or_an_unfinished_dialogue_is_refused():
    other = next(seed for seed in range(1, 50) if WORLD.opening(seed) != WORLD.opening(0))
    with pytest.raises(DataError, match=f"opens with .* but the user of seed {other} opens with"):
        WORLD.reply(dialogue(WORLD.opening(0).text, "Trips are fun."), other)
    with pytest.raises(DataError, match="does not end with the assistant"):
        WORLD.reply(dialogue(WORLD.opening(0).text), 0)
    with pytest.raises(DataError, match="does not end with the assistant"):
        WORLD.reply(dialogue(WORLD.opening(0).text, "Trips are fun.", "I see."), 0)


def test_draws_are_a_stable_hash():
    digest = blake2b(b"(7, 'goal', 'price')", digest_size=8).hexdigest()
    assert draw(4, 7, "goal", "price") == int(digest, 16) % 4
    assert draw(1000, np.int64(7), "goal") == draw(1000, 7, "goal")


def test_users_are_drawn_evenly():
    num_users = 12_800
    goals = Counter(goal(seed) for seed in range(num_users))
    assert len(goals) == 256
    # chi-square with 255 degrees of freedom: mean 255, sd sqrt(510) = 22.6
    assert abs(sum((n - 50) ** 2 / 50 for n in goals.values()) - 255) < 4 * 22.6
    openings = Counter(WORLD.opening(seed).text for seed in range(num_users))
    # 32 equally likely sentences, 400 of each expected, sd 20
    assert len(openings) == 32
    assert all(abs(n - 400) < 4.5 * 20 for n in openings.values())


def test_both_forms_of_an_answer_occur_equally_often():
    forms = Counter()
    for seed in range(2000):
        if WORLD.opening(seed).text.startswith("Hello, I want a trip with my"):
            forms[WORLD.reply(dialogue(WORLD.opening(seed).text, ASKS["season"]), seed).text.split()[0]] += 1
    assert set(forms) == {"In", "I"}
    assert abs(forms["In"] - forms["I"]) < 4 * (forms["In"] + forms["I"]) ** 0.5


def test_dialogues_do_not_depend_on_the_global_random_state():
    random.seed(1)
    first = WORLD.sft_dialogues(5, 0)
    random.seed(2)
    assert WORLD.sft_dialogues(5, 0) == first


def test_seed_ranges_never_meet():
    ranges = [seed_range(purpose, index) for purpose in PURPOSES for index in (0, 1, 2, 3, 17)]
    edges = sorted((r.start, r.stop) for r in ranges)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(edges))
    assert all(len(r) == 1_000_000 for r in ranges)
    assert {"sft", "pairs", "pairs_test", "candidates", "rl", "evaluation"} <= set(PURPOSES)


def test_an_unknown_purpose_or_a_negative_index_is_refused():
    with pytest.raises(ConfigError, match="did you mean 'pairs'"):
        seed_range("pair")
    with pytest.raises(ConfigError, match="index of the seed range 'rl' is -1"):
        seed_range("rl", -1)


def test_the_world_is_a_user_and_is_found_by_kind():
    assert isinstance(WORLD, User)
    assert WORLDS["trip_desk"](trap=True) == TripDesk(trap=True)


def test_truncated_turns_are_read_off_a_rollout():
    spans = (
        Span(role="user", turn=0, start=0, stop=1),
        Span(role="assistant", turn=0, start=1, stop=2, ended="length"),
        Span(role="user", turn=1, start=2, stop=3),
        Span(role="assistant", turn=1, start=3, stop=4, ended="eos"),
        Span(role="user", turn=2, start=4, stop=5),
        Span(role="assistant", turn=2, start=5, stop=6, ended="length"),
    )
    rollout = Rollout(conversation=dialogue("x"), token_ids=tuple(range(6)), spans=spans)
    assert truncated_turns(rollout) == {0, 2}
