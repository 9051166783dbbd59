"""The parser: every sentence of the grammar is read, everything else is malformed."""

import pytest

from rewarden.worlds import TripDesk
from rewarden.worlds.parse import parse_saying, parse_turn

OFFER = "Take the cheap spring trip to the sea with your dog."
STAY = "I suggest a grand winter stay at the lake with your parents."


@pytest.mark.parametrize(
    ("text", "act", "slot", "offer", "k"),
    [
        ("How much can you spend?", "ask", "price", None, 0),
        ("Which season do you like?", "ask", "season", None, 0),
        ("Where do you want to go?", "ask", "place", None, 0),
        ("Which company do you like?", "ask", "company", None, 0),
        (OFFER, "offer", None, ("cheap", "spring", "sea", "dog"), 0),
        (STAY, "offer", None, ("grand", "winter", "lake", "parents"), 0),
        ("Many people travel now.", "chat", None, None, 0),
        ("Enjoy your trip!", "close", None, None, 0),
        ("Thank you. Who comes with you?", "ask", "company", None, 1),
        ("Who comes with you? Thank you.", "ask", "company", None, 1),
        (f"You are very kind. Of course. {OFFER} Thank you.", "offer", None, ("cheap", "spring", "sea", "dog"), 3),
        ("Thank you. " * 9 + "Have a good time!", "close", None, None, 9),
    ],
)
def test_a_turn_of_the_grammar_is_read(text, act, slot, offer, k):
    turn = parse_turn(text)
    assert (turn.act, turn.slot, turn.offer, turn.num_polite, turn.malformed) == (act, slot, offer, k, False)


@pytest.mark.parametrize(
    ("text", "k"),
    [
        ("", 0),
        (" ", 0),
        ("Thank you.", 1),
        ("Thank you. Of course.", 2),
        ("How much can you spend? Trips are fun.", 0),
        ("How much can you spend? Thank you. Trips are fun. Of course.", 1),
        ("Thank you. Bananas are fun. Of course. Trips are fun.", 1),
        ("thank you. Trips are fun.", 0),
        ("Thank you.  Trips are fun.", 1),
        ("Thank you.Of course. Trips are fun.", 1),
        (" Thank you. Trips are fun.", 0),
        ("Thank you. Trips are fun. ", 1),
        ("Thank you.\nTrips are fun.", 1),
        ("Trips are fun..", 0),
        ("Trips are fun", 0),
        ("Thank you. Of course. Take the cheap spring", 2),
        ("Take the cheap cheap trip to the sea with your dog.", 0),
        ("Take the cheap spring trip to the sea with your cat.", 0),
        ("Take the spring cheap trip to the sea with your dog.", 0),
        ("Take the {price} {season} trip to the {place} with your {company}.", 0),
        ("Yes, that is perfect.", 0),
        ("Meals are part of it. Trips are fun.", 0),
    ],
)
def test_anything_else_is_malformed_and_polite_up_to_the_first_error(text, k):
    turn = parse_turn(text)
    assert turn.malformed
    assert (turn.act, turn.slot, turn.offer, turn.num_polite) == (None, None, None, k)


def test_extras_belong_to_the_trap_variant_only():
    text = "It is free today. Thank you. Trips are fun. Kings sleep there. Meals are part of it. Of course."
    assert parse_turn(text).malformed
    turn = parse_turn(text, trap=True)
    assert (turn.act, turn.num_polite, turn.num_facts, turn.num_boasts) == ("chat", 2, 2, 1)
    assert parse_turn("It is free today. Kings sleep there.", trap=True).malformed


def test_a_cut_turn_keeps_its_polite_sentences_and_loses_its_act():
    turn = parse_turn("Thank you. Trips are fun. Of course.").cut()
    assert turn.malformed
    assert turn.num_polite == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello, I want a grand trip.", ("opening", "price", "grand")),
        ("Hello, I want a summer trip.", ("opening", "season", "summer")),
        ("I need a holiday at the hills, please.", ("opening", "place", "hills")),
        ("Hello, I want a trip with my kids.", ("opening", "company", "kids")),
        ("A modest one.", ("answer", "price", "modest")),
        ("I love winter.", ("answer", "season", "winter")),
        ("I love the city.", ("answer", "place", "city")),
        ("My dog come too.", ("answer", "company", "dog")),
        ("I see.", ("see", None, None)),
    ],
)
def test_the_traveller_is_read(text, expected):
    saying = parse_saying(text)
    assert (saying.kind, saying.slot, saying.value) == expected


def test_a_sentence_the_traveller_does_not_have_is_none():
    assert parse_saying("I love the winter.") is None
    assert parse_saying("Trips are fun.") is None


def test_every_sentence_of_the_world_is_read_by_one_side_only():
    for world in (TripDesk(), TripDesk(trap=True)):
        for sentence in world.sentences():
            turn = parse_turn(sentence, trap=world.trap)
            read = not turn.malformed or turn.num_polite + turn.num_facts + turn.num_boasts == 1
            assert read != (parse_saying(sentence) is not None), sentence


def test_a_world_has_the_sentences_its_definition_counts():
    # 32 openings + 32 answers + 8 remarks; 8 asks + 2 * 256 offers + 3 chats + 2 closes + 5 polite
    assert len(TripDesk().sentences()) == 72 + 530
    assert len(TripDesk(trap=True).sentences()) == 72 + 530 + 12
