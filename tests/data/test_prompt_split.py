import hashlib
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewarden.data.sources import Data, load_comparisons
from rewarden.data.split import first_prompt, split_by_prompt
from rewarden.errors import DataError
from rewarden.types import Comparison, Conversation, Message


def opening(text: str, id: str = "x") -> Conversation:
    return Conversation(id=id, messages=(Message(role="user", text=text),))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("What's up?", "whats  UP", True),
        ("Hello,\nworld", "hello world!", True),
        ("Straße", "STRASSE", True),
        ("ｆｕｌｌ width", "Full-width", True),
        ("你好！", "你好", True),
        ("?!", "!?", False),
        ("?!", " ?! ", True),
        ("Question 1", "Question 2", False),
        ("कि", "की", False),
    ],
)
def test_case_punctuation_and_space_are_ignored(one: str, other: str, same: bool) -> None:
    assert (first_prompt(opening(one).messages) == first_prompt(opening(other).messages)) is same


def test_the_first_user_message_counts_and_nothing_else() -> None:
    system, answer = Message(role="system", text="Be kind."), Message(role="assistant", text="Yes.")
    messages = (system, Message(role="user", text="Hi there"), answer, Message(role="user", text="More"))
    assert first_prompt(messages) == "hithere"


def test_rows_of_plain_text_are_told_apart_by_their_text() -> None:
    empty = Message(role="user", text="")
    keys = {first_prompt((empty, Message(role="assistant", text=text))) for text in ("One text", "Another text", "one text!")}
    assert keys == {"onetext", "anothertext"}


@given(
    st.lists(st.sampled_from(["a", "A!", "b", "b?", "c", "d"]), min_size=1, max_size=20), st.integers(0, 3), st.integers(0, 9)
)
def test_no_first_prompt_is_on_both_sides_and_no_row_is_lost(texts: list[str], num_heldout: int, seed: int) -> None:
    rows = [opening(text, id=str(index)) for index, text in enumerate(texts)]
    groups = {re.sub(r"\W", "", text).lower() for text in texts}
    if num_heldout >= len(groups):
        with pytest.raises(DataError, match=f"{num_heldout} first prompts to hold out of {len(groups)}"):
            split_by_prompt(rows, num_heldout=num_heldout, seed=seed)
        return
    train, held = split_by_prompt(rows, num_heldout=num_heldout, seed=seed)
    sides = [{re.sub(r"\W", "", row.messages[0].text).lower() for row in side} for side in (train, held)]
    assert sides[0] & sides[1] == set()
    assert len(sides[1]) == num_heldout
    assert sorted((*train, *held), key=lambda row: int(row.id)) == rows
    assert [int(row.id) for row in train] == sorted(int(row.id) for row in train)


def test_which_prompts_are_held_out_follows_the_documented_hash() -> None:
    texts = [f"prompt {n}" for n in range(20)]
    ranked = sorted(texts, key=lambda text: hashlib.blake2b(f"5\n{text.replace(' ', '')}".encode(), digest_size=16).digest())
    _, held = split_by_prompt([opening(text) for text in reversed(texts)], num_heldout=4, seed=5)
    assert {row.messages[0].text for row in held} == set(ranked[:4])


def test_pairs_are_split_by_their_prompt() -> None:
    answers = {"chosen": (Message(role="assistant", text="a"),), "rejected": (Message(role="assistant", text="b"),)}
    rows = [Comparison(id=str(n), prompt=(Message(role="user", text=f"q{n % 3}"),), **answers) for n in range(9)]
    train, held = split_by_prompt(rows, num_heldout=1, seed=0)
    assert len(train) == 6
    assert len({row.prompt for row in held}) == 1


def test_holding_out_prompts_of_hh_leaves_none_on_both_sides(shared: Path) -> None:
    path = str(shared / "data" / "hh_rlhf_helpful" / "original" / "helpful-online.test.jsonl.gz")
    parts = [load_comparisons(Data(path=path, holdout_prompts=200, part=part)).rows for part in ("train", "heldout")]
    letters = [{re.sub(r"[\W_]", "", row.prompt[0].text).casefold() for row in rows} for rows in parts]
    assert len(letters[1]) == 200
    assert letters[0] & letters[1] == set()
