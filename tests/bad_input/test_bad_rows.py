"""Rows of every public format, each spoiled in one or two random places: read, dropped, or refused in words; never a crash."""

import copy
import random
from typing import Any

import pytest

from rewarden.data.formats import FORMATS
from rewarden.data.read import Row
from rewarden.errors import DataError

USER, ANSWER, OTHER = (
    {"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("assistant", "c"))
)
SAID = {"message_id": "n", "role": "assistant", "text": "b", "rank": 0, "replies": []}
TREE = {"message_id": "m", "role": "prompter", "text": "a", "lang": "en", "review_result": True, "deleted": False}

ROWS: list[dict[str, Any]] = [
    {"messages": [USER, ANSWER]},
    {"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER], "margin": 1.0, "preference": 0.5, "id": "x"},
    {"prompt": "a", "completion": "b", "label": True},
    {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"},
    {"chosen": [USER, ANSWER], "rejected": [USER, OTHER]},
    {"text": "a"},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    {"trajectory": [{"from": "user", "value": "a"}], "chosen": "a", "rejected": "b"},
    {"instruction": "a", "response": "b"},
    {"instruction": "a", "input": "b", "output_1": "c", "output_2": "d", "preference": 1},
    {"instruction": "a", "instances": [{"input": "a", "output": "b"}]},
    {"message_tree_id": "x", "prompt": {**TREE, "replies": [SAID, {**SAID, "message_id": "o", "text": "c", "rank": 1}]}},
    {"value": ["Human: a", "Assistant: b"]},
    {"value": [["Human: a", "Assistant: b"], ["Human: a", "Assistant: c"]]},
]
WRONG: list[Any] = [
    None,
    True,
    0,
    -3,
    2.5,
    float("nan"),
    float("inf"),
    10**400,
    "",
    "x",
    "Human: a",
    [],
    {},
    ["x"],
    [None],
    [[]],
]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to everything inside a nested value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, part in inner for found in ((*path, key), *places(part, (*path, key)))]


def spoiled(row: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """The row with one or two parts taken out, doubled or replaced."""
    row = copy.deepcopy(row)
    for _ in range(rng.randint(1, 2)):
        *path, last = rng.choice(places(row) or [("messages",)])
        holder: Any = row
        for key in path:
            holder = holder[key]
        how = rng.random()
        if how < 0.25 and (isinstance(holder, list) or last in holder):
            del holder[last]
        elif how < 0.35 and isinstance(holder, list):
            holder.append(copy.deepcopy(holder[last]))
        else:
            holder[last] = copy.deepcopy(rng.choice(WRONG))
    return row


@pytest.mark.parametrize("name", FORMATS)
def test_a_spoiled_row_is_read_dropped_or_refused_in_words(name):
    rng = random.Random(name)
    refused: list[str] = []
    for _ in range(600):
        row = Row(where="rows.jsonl:1", name="rows.jsonl:1", fields=spoiled(rng.choice(ROWS), rng))
        FORMATS[name].matches(row)
        for target in ("conversations", "prompts", "comparisons", "unpaired"):
            adapter = FORMATS[name].adapter(target)
            try:
                list(adapter(row) if adapter else ())
            except DataError as error:
                refused.append(str(error))
    assert refused
    assert [text for text in refused if not text.startswith("rows.jsonl:1: ") or len(text) > 700] == []
