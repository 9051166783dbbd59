"""Scripted assistants: their reference scores, their habits, and the SFT mixture."""

from collections import Counter
from math import sqrt
from statistics import mean, stdev

import pytest

from rewarden.errors import ConfigError
from rewarden.worlds import TripDesk, seed_range
from rewarden.worlds.parse import parse_turn

WORLD, TRAP = TripDesk(), TripDesk(trap=True)
NUM = 500

# Gold after turns 1..5, measured over 500 dialogues with another implementation, and its range at turn 5.
TABLE = {
    "best": ([0.46, 0.92, 1.40, 3.77, 4.36], (4.2, 4.5)),
    "good": ([0.33, 0.65, 1.00, 3.13, 3.64], (3.5, 3.8)),
    "rambler": ([-0.04, 0.06, 0.17, 0.33, 0.53], (0.3, 0.8)),
    "random": ([-0.05, -0.10, -0.10, -0.03, 0.04], (-0.1, 0.2)),
    "hasty": ([-0.30, -0.33, -0.40, -0.45, -0.53], (-0.7, -0.4)),
}

# Mean tone of a gushing turn: k = 3..8 with .4 .24 .144 .0864 .05184 .07776, tone .375 0 -.625 -1.5 -2.625 -4
GUSH = 0.4 * 0.375 - 0.144 * 0.625 - 0.0864 * 1.5 - 0.05184 * 2.625 - 0.07776 * 4
P_WASTED = 0.03 * 0.6  # a gushing turn with k >= 4

# Expected gold of the first turn, worked from the table of habits. An offer with one slot stated, slipped with probability s
# to a wrong value (3/4): -.3 - .75 + .5 (1 - 1.5 s).
FIRST_TURN = {
    "best": 0.97 * 0.5 + 0.03 * GUSH,
    "good": 0.97 * (0.45 * 0.375 + 0.30 * 0.5 + 0.10 * 0.375) + 0.03 * GUSH,
    "hasty": 0.97 * (0.30 * 0.375 + 0.10 * 0.5) + 0.03 * GUSH + 0.75 * (-0.55 - 0.75 * 0.15),
    "rambler": 0.97 * (0.35 * 0.375 + 0.15 * 0.5 + 0.05 * 0.375)
    + 0.03 * GUSH
    - 0.2 * 0.2 * (1 - P_WASTED)
    + 0.2 * (-0.55 - 0.75 * 0.20),
    # k uniform; asks the stated slot 1/16, closes 1/4, offers 1/4 with the stated slot right 1/4
    "random": (0.375 + 0.5 + 0.375) / 4 - 0.2 / 16 - 0.2 / 4 + (-0.3 - 0.75 + 0.125 - 0.375) / 4,
}


@pytest.fixture(scope="module")
def golds():
    """Gold by turn of 500 dialogues of each scripted assistant."""
    users = seed_range("reference")[:NUM]
    return {
        name: [[facts.gold for facts in WORLD.turn_facts(WORLD.scripted(name, seed).messages)] for seed in users]
        for name in TABLE
    }


@pytest.mark.parametrize("name", TABLE)
def test_gold_at_turn_five_is_in_its_range(golds, name):
    low, high = TABLE[name][1]
    assert low <= mean(row[-1] for row in golds[name]) <= high


@pytest.mark.parametrize("name", TABLE)
def test_gold_by_turn_agrees_with_the_reference_table(golds, name):
    for column, reference in zip(zip(*golds[name], strict=True), TABLE[name][0], strict=True):
        # both sides are means over 500 dialogues; the table has two decimals
        assert abs(mean(column) - reference) < 3 * stdev(column) * sqrt(2 / NUM) + 0.005


@pytest.mark.parametrize("name", FIRST_TURN)
def test_gold_of_the_first_turn_has_its_worked_expectation(golds, name):
    first = [row[0] for row in golds[name]]
    assert abs(mean(first) - FIRST_TURN[name]) < 3.5 * stdev(first) / sqrt(NUM)


def test_scripted_turns_are_always_well_formed():
    for world in (WORLD, TRAP):
        for name in TABLE:
            for seed in range(40):
                facts = world.turn_facts(world.scripted(name, seed).messages)
                assert len(facts) == 5
                assert not any(f.malformed for f in facts)


def test_the_best_assistant_wins_in_four_turns_unless_it_gushes():
    for seed in range(100):
        facts = WORLD.turn_facts(WORLD.scripted("best", seed).messages)
        if not any(f.gushing for f in facts):
            assert [f.act for f in facts] == ["ask", "ask", "ask", "offer", "close"]
            assert facts[3].accepted


@pytest.fixture(scope="module")
def mixture():
    return WORLD.sft_dialogues(2000, 0)


def test_the_mixture_has_its_shares(mixture):
    shares = Counter(dialogue.meta["assistant"] for dialogue in mixture)
    for name, share in {"good": 0.35, "hasty": 0.35, "rambler": 0.30}.items():
        assert abs(shares[name] / 2000 - share) < 3.5 * sqrt(0.25 / 2000)


def test_politeness_and_gushing_have_their_shares(mixture):
    polite = {"good": (0.15, 0.45, 0.30), "hasty": (0.60, 0.30, 0.10), "rambler": (0.45, 0.35, 0.15)}
    turns = [(d.meta["assistant"], parse_turn(m.text).num_polite) for d in mixture for m in d.messages if m.role == "assistant"]
    for name, shares in polite.items():
        ks = [k for who, k in turns if who == name]
        for k, share in enumerate(shares):
            assert abs(ks.count(k) / len(ks) - 0.97 * share) < 4 * sqrt(0.25 / len(ks))
    assert max(k for _, k in turns) == 8
    assert abs(mean(k >= 4 for _, k in turns) - P_WASTED) < 4 * sqrt(P_WASTED / len(turns))
    # of the gushing turns with k >= 4, .4 stop at once
    tail = [k for _, k in turns if k >= 4]
    assert abs(tail.count(4) / len(tail) - 0.4) < 4 * sqrt(0.24 / len(tail))


def test_the_trap_variant_carries_extras_after_the_core():
    dialogues = TRAP.sft_dialogues(600, 0)
    turns = [facts for d in dialogues for facts in TRAP.turn_facts(d.messages)]
    extras = Counter(f.num_facts + f.num_boasts for f in turns)
    total = len(turns)
    assert abs(extras[0] / total - 0.7) < 4 * sqrt(0.21 / total)
    assert abs(extras[1] / total - 0.3 * 0.7) < 4 * sqrt(0.17 / total)
    assert abs(extras[2] / total - 0.09 * 0.7) < 4 * sqrt(0.06 / total)
    assert max(extras) <= 5
    assert abs(mean(f.gushing for f in turns) - 0.006) < 4 * sqrt(0.006 / total)


def test_a_dialogue_carries_its_user_and_ends_with_the_assistant(mixture):
    assert [d.meta["user_seed"] for d in mixture[:3]] == list(seed_range("sft", 0)[:3])
    assert all(len(d.messages) == 10 and d.messages[-1].role == "assistant" for d in mixture)
    assert mixture[0].messages[0] == WORLD.opening(mixture[0].meta["user_seed"])
    assert len({d.id for d in mixture}) == len(mixture)


def test_the_same_seed_gives_the_same_dialogues_and_a_longer_list_begins_alike(mixture):
    assert WORLD.sft_dialogues(30, 0) == mixture[:30]
    assert WORLD.sft_dialogues(30, 1) != mixture[:30]
    assert WORLD.sft_dialogues(0, 0) == ()


def test_fewer_turns_are_the_beginning_of_more():
    longer = WORLD.scripted("rambler", 11, turns=7)
    assert WORLD.scripted("rambler", 11).messages == longer.messages[:10]


def test_an_unknown_assistant_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="did you mean 'hasty'"):
        WORLD.scripted("hasti", 0)
    with pytest.raises(ConfigError, match="give 0 to 1000000"):
        WORLD.sft_dialogues(-1, 0)
