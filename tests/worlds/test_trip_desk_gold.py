"""The gold reward, worked by hand from its formula on fixed transcripts."""

import pytest
from trip_desk_talk import talk

from rewarden.errors import DataError
from rewarden.worlds import TripDesk
from rewarden.worlds.gold import tone

WORLD = TripDesk()
FIRST = "Hello, I want a cheap trip."
ASK_SEASON, SPRING = "When do you want to go?", "In spring."
ASK_PLACE, SEA = "Where do you want to go?", "To the sea."
ASK_COMPANY, DOG = "Who comes with you?", "My dog come too."
RIGHT = "Take the cheap spring trip to the sea with your dog."
NO, YES, HURT, TOLD = (
    "No, that is not what I want.",
    "Yes, that is perfect.",
    "I am not sure you listen.",
    "I told you already.",
)
POINT, SEE, DONE, HUH = "Please get to the point.", "I see.", "We are done, thanks.", "I do not follow you."
ALL_KNOWN = (FIRST, ASK_SEASON, SPRING, ASK_PLACE, SEA, ASK_COMPANY, DOG)
ACCEPTED = (*ALL_KNOWN, RIGHT, YES)
TWO = "Thank you. Of course."


def golds(*texts, **options):
    return [facts.gold for facts in WORLD.turn_facts(talk(*texts), **options)]


@pytest.mark.parametrize(("num_known", "worth"), [(1, -0.55), (2, 0.2), (3, 0.95), (4, 2.0)])
def test_an_only_offer_is_worth_what_was_stated(num_known, worth):
    assert golds(*ALL_KNOWN[: 2 * num_known - 1], RIGHT) == [0.0] * (num_known - 1) + [worth]


def test_the_best_five_turns_are_worth_four_and_a_half():
    texts = [f"{text} {TWO}" if i % 2 else text for i, text in enumerate((*ACCEPTED, "Enjoy your trip!"))]
    assert golds(*texts) == [0.5, 1.0, 1.5, 4.0, 4.5]


@pytest.mark.parametrize(("k", "value"), list(enumerate([0, 0.375, 0.5, 0.375, 0, -0.625, -1.5, -2.625, -4])))
def test_tone_rises_to_two_polite_sentences_and_falls(k, value):
    assert tone(k) == 1000 * value
    assert golds(FIRST, " ".join(["Thank you."] * k + ["Trips are fun."])) == [value]


def test_a_stated_slot_offered_wrong_costs_as_much_as_right_earns():
    # one stated and wrong, three not stated, rejected: -.5 - .75 - .3
    assert golds(FIRST, RIGHT.replace("cheap", "grand")) == [-1.55]
    # three right, one wrong, rejected: 1.5 - .5 - .3
    assert golds(*ALL_KNOWN, RIGHT.replace("sea", "lake"))[-1] == 0.7


def test_only_the_latest_offer_earns_points_but_every_rejection_counts():
    texts = (FIRST, RIGHT, NO, ASK_SEASON, HURT, ASK_SEASON, SPRING, RIGHT)
    # -.55; questions are free, hurt or not; the new offer has two stated: 1 - .5 - .6
    assert golds(*texts) == [-0.55, -0.55, -0.55, -0.1]


def test_a_lucky_guess_earns_nothing_because_only_the_transcript_counts():
    # the user's wish is not consulted: the same offer is worth the same for all wishes
    wishes = {WORLD.gold(talk(FIRST, RIGHT.replace("sea", place))) for place in ("sea", "hills", "city", "lake")}
    assert wishes == {-0.55}


def test_asking_again_is_useless():
    assert golds(FIRST, "Which price do you like?", TOLD, ASK_SEASON, SPRING, ASK_SEASON) == [-0.2, -0.2, -0.4]


def test_asking_again_while_hurt_is_useless_and_does_not_heal():
    facts = WORLD.turn_facts(talk(FIRST, RIGHT, NO, "Which price do you like?", TOLD, ASK_SEASON, HURT, ASK_SEASON))
    assert [f.reaction for f in facts] == ["no", "told", "hurt", "answer"]
    assert [f.useless for f in facts] == [False, True, False, False]
    assert facts[-1].gold == -0.75


def test_a_gushing_question_about_a_stated_slot_is_not_also_useless():
    gushing = "Thank you. " * 4 + "Which price do you like?"
    facts = WORLD.turn_facts(talk(FIRST, gushing, POINT))
    assert (facts[0].gushing, facts[0].useless, facts[0].reaction, facts[0].gold) == (True, False, "point", 0.0)


def test_a_gushing_close_before_acceptance_is_not_also_useless():
    assert golds(FIRST, "Enjoy your trip!" + " Thank you." * 5) == [-0.625]


def test_a_gushing_offer_is_judged_as_an_offer():
    assert golds(*ALL_KNOWN, "Thank you. " * 4 + RIGHT)[-1] == 2.0
    assert golds(FIRST, "Thank you. " * 5 + RIGHT) == [-1.175]  # -.55 - .625


def test_close_is_useless_before_acceptance_only():
    assert golds(FIRST, "Enjoy your trip!") == [-0.2]
    assert golds(*ACCEPTED, "Enjoy your trip!")[-1] == 2.0


@pytest.mark.parametrize("late", ["Trips are fun.", ASK_SEASON, RIGHT, RIGHT.replace("cheap", "grand")])
def test_anything_but_close_is_useless_after_acceptance_and_no_offer_replaces_it(late):
    facts = WORLD.turn_facts(talk(*ACCEPTED, late))
    assert facts[-1].gold == 1.8
    assert (facts[-1].reaction, facts[-1].rejected, facts[-1].accepted, facts[-1].accepted_so_far) == (
        "done",
        False,
        False,
        True,
    )


def test_gushing_after_acceptance_is_useless_unless_it_closes():
    assert golds(*ACCEPTED, "Thank you. " * 5 + "Trips are fun.")[-1] == 1.175  # 2 - .2 - .625
    assert golds(*ACCEPTED, "Thank you. " * 5 + "Enjoy your trip!")[-1] == 1.375


def test_a_malformed_turn_costs_half_a_point_and_nothing_else():
    assert golds(FIRST, "") == [-0.5]
    assert golds(*ACCEPTED, "Bananas.")[-1] == 1.5
    # two offers are malformed, not rejected
    assert golds(FIRST, f"{RIGHT} {RIGHT}") == [-0.5]


def test_a_malformed_turn_counts_its_polite_sentences_up_to_the_first_error():
    assert golds(FIRST, "Thank you. Of course. Bananas. Thank you.") == [0.0]  # .5 - .5
    assert golds(FIRST, f"{ASK_SEASON} Thank you. Trips are fun. Of course.") == [-0.125]  # .375 - .5


def test_a_truncated_turn_is_malformed_whatever_its_text():
    assert golds(*ALL_KNOWN, f"Thank you. {RIGHT}", HUH, RIGHT) == [0, 0, 0, 2.375, 2.175]
    # without its end of turn the offer does not count: .375 - .5, and the same offer is then accepted
    assert golds(*ALL_KNOWN, f"Thank you. {RIGHT}", HUH, RIGHT, truncated=frozenset({3})) == [0, 0, 0, -0.125, 1.875]
    facts = WORLD.turn_facts(talk(FIRST, "Trips are fun."), truncated=frozenset({0}))
    assert facts[0].truncated
    assert facts[0].malformed


def test_extras_are_added_per_use():
    world = TripDesk(trap=True)
    facts = "It is free today. Meals are part of it."
    assert world.gold(talk(FIRST, f"{ASK_SEASON} {facts} Rain never falls. Thank you.")) == 0.375  # .6 - .6 + .375
    assert world.gold(talk(FIRST, f"Thank you. Thank you. Thank you. {ASK_SEASON} {facts}")) == 0.975  # k is 3, not 5
    assert world.gold(talk(FIRST, f"{facts} Rain never falls. Bananas. It is free today.")) == -0.5  # .6 - .6 - .5
    assert WORLD.gold(talk(FIRST, f"{ASK_SEASON} {facts}")) == -0.5


def test_gold_through_a_turn_ignores_what_comes_later():
    whole = talk(*ACCEPTED, "Trips are fun.")
    expected = [0.0, 0.0, 0.0, 2.0, 1.8]
    assert [WORLD.gold(whole, through_turn=turn) for turn in range(5)] == expected
    assert [WORLD.gold(whole[: 2 * turn + 2]) for turn in range(5)] == expected
    assert WORLD.gold(whole) == 1.8


def test_a_last_user_message_and_a_system_message_change_nothing():
    assert WORLD.gold(talk(FIRST, RIGHT, NO)) == -0.55
    assert WORLD.gold(talk(FIRST, RIGHT, NO, system="You sell trips.")) == -0.55


def test_no_turn_is_worth_nothing():
    assert WORLD.gold(talk(FIRST)) == 0.0


def test_equal_sums_tie_exactly():
    # 3 * 0.2 is not 2 * 0.3 in floating point
    three_useless = WORLD.gold(talk(FIRST, *["Enjoy your trip!", SEE] * 3))
    wrong = RIGHT.replace("sea", "lake")
    two_rejected = WORLD.gold(talk(*ALL_KNOWN, wrong, NO, wrong)) - 1.0  # three right, one wrong: 1.0
    assert three_useless == two_rejected == -0.6


def test_facts_name_what_happened():
    facts = WORLD.turn_facts(talk(*ACCEPTED))
    assert [f.act for f in facts] == ["ask", "ask", "ask", "offer"]
    assert [f.slot for f in facts] == ["season", "place", "company", None]
    assert [f.num_known for f in facts] == [1, 2, 3, 4]
    assert [f.accepted for f in facts] == [False, False, False, True]
    assert [f.turn for f in facts] == [0, 1, 2, 3]


def test_a_foreign_transcript_is_refused_with_the_message_shown():
    with pytest.raises(DataError, match=r"message 0: the user says 'Hi there\.'.*opening"):
        WORLD.gold(talk("Hi there.", ASK_SEASON))
    with pytest.raises(DataError, match=r"message 0: the user says 'In spring\.'"):
        WORLD.gold(talk(SPRING, ASK_PLACE))
    with pytest.raises(DataError, match=r"message 3: the user says 'Whatever\.'"):
        WORLD.gold(talk(FIRST, ASK_SEASON, "Whatever.", ASK_PLACE, system="Hello"))
    with pytest.raises(DataError, match=r"message 1 has role 'user'.*must be 'assistant'"):
        WORLD.gold((*talk(FIRST), *talk(FIRST)))
    with pytest.raises(DataError, match="through turn 1 of a dialogue with 1 assistant turns"):
        WORLD.gold(talk(FIRST, RIGHT), through_turn=1)
