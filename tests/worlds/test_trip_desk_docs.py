"""The page about the trip desk says what the trip desk does."""

import re
from pathlib import Path

import pytest

from rewarden.types import Conversation, Message
from rewarden.worlds import TripDesk
from rewarden.worlds.sentences import REMARKS, SLOTS

PAGE = (Path(__file__).parents[2] / "docs" / "world.md").read_text()
WORLD = TripDesk()


@pytest.mark.parametrize(("block", "seed"), list(enumerate(map(int, re.findall(r"\(user (\d+)\)", PAGE)))))
def test_the_dialogues_on_the_page_are_played_and_scored_as_shown(block, seed):
    lines = [line.split(": ", 1) for line in re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)[block].strip().splitlines()]
    roles = {"traveller": "user", "assistant": "assistant"}
    messages = tuple(Message(role=roles[who], text=text) for who, text in lines if who in roles)
    assert len(messages) == 10
    assert messages[0] == WORLD.opening(seed)
    for end in range(2, 10, 2):
        assert WORLD.reply(Conversation(id="page", messages=messages[:end]), seed) == messages[end]
    shown = [float(text) for who, text in lines if who == "gold"]
    assert [facts.gold for facts in WORLD.turn_facts(messages)] == shown


def test_the_example_on_the_page_runs():
    names = {}
    exec(re.search(r"```python\n(.*?)```", PAGE, re.DOTALL).group(1), names)
    assert names["facts"][0].gold == names["gold"]
    assert names["policy"].config.vocab_size == len(names["tokenizer"])


def test_the_page_lists_every_value_and_remark():
    assert all(value in PAGE for values in SLOTS.values() for value in values)
    assert all(f'"{text}"' in PAGE for text in REMARKS.values())
    assert f"all {len(WORLD.sentences())} sentences" in PAGE
