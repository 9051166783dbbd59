import re

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from rewarden.data.formats.shared_prompt import cuts_word, extract_prompt, extract_prompt_messages
from rewarden.types import Message

WORDS = st.lists(st.sampled_from(["a", "ab", "abc", "abcd", "b", "xyz"]), min_size=1, max_size=6)
PLAIN = st.text(alphabet="ab \n.", max_size=14)
ANY = st.text(max_size=30)


def inside_word(text: str, cut: int) -> bool:
    """Independent of the code: is `cut` strictly inside a run of letters?"""
    return any(word.start() < cut < word.end() for word in re.finditer(r"[A-Za-z]+", text))


def longest_by_search(chosen: str, rejected: str) -> str:
    """Every common beginning is tried, from the longest."""
    for cut in range(min(len(chosen), len(rejected)), -1, -1):
        common = chosen[:cut] == rejected[:cut]
        both_say_something = chosen[cut:].strip() and rejected[cut:].strip()
        if cut == 0 or (common and both_say_something and not inside_word(chosen, cut) and not inside_word(rejected, cut)):
            return chosen[: cut - 1] if cut and chosen[cut - 1] == " " else chosen[:cut]
    raise AssertionError


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("The sky is blue.", "The sky is green.", "The sky is"),  # TRL's own example
        ("The sky is blue", "The sky is blueish", "The sky is"),  # one answer begins the other, inside a word
        ("The sky is blue", "The sky is blue today", "The sky is"),  # one answer begins the other, at a word
        ("The sky is blue today", "The sky is blue", "The sky is"),
        ("The sky is", "The sky is blue", "The sky"),
        ("Yes.", "No.", ""),  # the difference is at index 0
        ("yes", "yesterday", ""),  # only a cut word would be common
        ("", "anything", ""),
        ("", "", ""),
        ("Q\n\nAssistant: Yes", "Q\n\nAssistant: No", "Q\n\nAssistant:"),
        ("Q\nYes", "Q\nNo", "Q\n"),
        ("Human:Q</s>Assistant:Yes", "Human:Q</s>Assistant:No", "Human:Q</s>Assistant:"),
        ("I don't know", "I don know", "I"),  # an apostrophe stays in its word
        ("costs 3.14 euro", "costs 3.15 euro", "costs"),  # a number is one word
        ("costs 1,080", "costs 1,090", "costs"),
        ("tastes cafe\u0301", "tastes cafe", "tastes"),  # an accent is not cut off its letter
        ("hi \U0001f44d\U0001f3fd", "hi \U0001f44d\U0001f3fe", "hi"),  # a skin tone is not cut off
        ("hi \U0001f468\u200d\U0001f469", "hi \U0001f468\u200d\U0001f467", "hi"),  # joined emoji
        ("go \U0001f1e9\U0001f1ea", "go \U0001f1e9\U0001f1f0", "go"),  # flags of two letters
        ("天空是蓝色", "天空是绿色", "天空是"),  # characters written without spaces
        ("a\r\nb", "a\r\rb", "a"),
    ],
)
def test_worked_cases(chosen: str, rejected: str, prompt: str) -> None:
    found = extract_prompt(chosen, rejected)
    assert found[0] == prompt
    assert (found[0] + found[1], found[0] + found[2]) == (chosen, rejected)


@given(WORDS, WORDS, WORDS)
@example(["a"], ["b"], ["b", "a"])
@example(["abc"], ["ab"], ["abcd"])
def test_random_sentences_keep_every_word_whole(start: list[str], good: list[str], bad: list[str]) -> None:
    chosen, rejected = " ".join(start + good), " ".join(start + bad)
    prompt, rest_chosen, rest_rejected = extract_prompt(chosen, rejected)
    assert prompt + rest_chosen == chosen
    assert prompt + rest_rejected == rejected
    assert prompt.split() + rest_chosen.split() == chosen.split()
    assert prompt.split() + rest_rejected.split() == rejected.split()
    assert rest_chosen.strip()
    assert rest_rejected.strip()


@given(PLAIN, PLAIN, PLAIN)
def test_the_prompt_is_the_longest_a_search_finds(start: str, good: str, bad: str) -> None:
    chosen, rejected = start + good, start + bad
    assert extract_prompt(chosen, rejected)[0] == longest_by_search(chosen, rejected)


@given(ANY, ANY, ANY)
def test_any_two_texts_are_joined_again_and_never_cut_inside_a_word(start: str, good: str, bad: str) -> None:
    chosen, rejected = start + good, start + bad
    prompt, rest_chosen, rest_rejected = extract_prompt(chosen, rejected)
    assert (prompt + rest_chosen, prompt + rest_rejected) == (chosen, rejected)
    for text in (chosen, rejected):
        assert not cuts_word(text, len(prompt))
        assert not inside_word(text, len(prompt))


@given(ANY, ANY)
def test_sides_can_be_swapped(chosen: str, rejected: str) -> None:
    prompt, good, bad = extract_prompt(chosen, rejected)
    assert extract_prompt(rejected, chosen) == (prompt, bad, good)


def dialogue(*texts: str) -> tuple[Message, ...]:
    return tuple(Message(role="assistant" if index % 2 else "user", text=text) for index, text in enumerate(texts))


def test_a_conversational_prompt_is_whole_messages() -> None:
    chosen, rejected = dialogue("u", "a", "v", "same start, good"), dialogue("u", "a", "v", "same start, bad")
    assert extract_prompt_messages(chosen, rejected) == (chosen[:3], chosen[3:], rejected[3:])


def test_a_conversational_answer_that_begins_the_other_keeps_its_prompt() -> None:
    short, long = dialogue("u", "a"), dialogue("u", "a", "v", "b")
    assert extract_prompt_messages(short, long) == (short[:1], short[1:], long[1:])
    assert extract_prompt_messages(long, short) == (short[:1], long[1:], short[1:])
    assert extract_prompt_messages(short, short) == (short[:1], short[1:], short[1:])


def test_sides_whose_user_says_different_things_share_no_prompt() -> None:
    assert extract_prompt_messages(dialogue("u", "a"), dialogue("v", "a")) is None
    assert extract_prompt_messages(dialogue("u", "a", "v", "b"), dialogue("u", "a", "w", "b")) is None
    assert extract_prompt_messages(dialogue("u", "a"), dialogue("u")) is None


@given(WORDS, WORDS, WORDS)
def test_random_dialogues_give_back_the_prompt_they_were_made_from(start: list[str], good: list[str], bad: list[str]) -> None:
    assume(good[0] != bad[0])
    prompt = dialogue(*start[: len(start) - 1 + len(start) % 2])
    assume(len(prompt) % 2 == 1)
    chosen, rejected = (dialogue(*(m.text for m in prompt), *rest) for rest in (good, bad))
    assert extract_prompt_messages(chosen, rejected) == (prompt, chosen[len(prompt) :], rejected[len(prompt) :])
