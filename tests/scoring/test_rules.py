"""Length and pattern rewards."""

import pytest

from rewarden.errors import ConfigError
from rewarden.scoring import LengthReward, RegexReward, build_scorer


def values(scores):
    return [score.value for score in scores]


@pytest.mark.parametrize(
    ("side", "expected"), [("over", [0.0, 0.0, -1.0]), ("under", [-1.0, 0.0, 0.0]), ("both", [-1.0, 0.0, -1.0])]
)
def test_length_costs_the_penalty_per_character_away_from_the_target(side, expected, talk):
    rows = [talk("q", "ab"), talk("q", "abcd"), talk("q", "abcdef")]
    scores = LengthReward(target=4, penalty=0.5, side=side).build().score(rows)
    assert values(scores) == expected
    assert [score.parts["length"] for score in scores] == [2.0, 4.0, 6.0]


def test_only_the_last_answer_counts(talk):
    assert values(LengthReward(target=0, penalty=1.0).build().score([talk("q", "long answer", "q", "ab")])) == [-2.0]


def test_words_are_separated_by_white_space(talk):
    scorer = LengthReward(target=1, penalty=1.0, unit="words").build()
    assert values(scorer.score([talk("q", " one  two\nthree "), talk("q", "")])) == [-2.0, 0.0]


def test_tokens_are_counted_by_the_named_tokenizer_without_special_tokens(reward_folder, talk):
    scorer = LengthReward(target=0, penalty=1.0, unit="tokens", tokenizer=str(reward_folder("bytes"))).build()
    assert values(scorer.score([talk("q", "naïve")])) == [-6.0]  # ï is two bytes, one token each
    scorer = LengthReward(target=0, penalty=1.0, unit="tokens", tokenizer=str(reward_folder("words"))).build()
    assert values(scorer.score([talk("q", "a trip to unknown")])) == [-4.0]


@pytest.mark.parametrize("fields", [{"unit": "tokens"}, {"tokenizer": "folder"}])
def test_tokens_and_tokenizer_go_together(fields):
    with pytest.raises(ConfigError, match="go together"):
        build_scorer({"kind": "length", "target": 1, "penalty": 1.0, **fields})


def test_regex_rewards_what_it_finds_in_the_last_answer(talk):
    scorer = RegexReward(pattern=r"answer is \d+", reward=2.0, otherwise=-1.0).build()
    rows = [talk("q", "The answer is 42."), talk("q", "the answer is 42", "q", "no idea"), talk("answer is 1", "Answer is 1")]
    assert values(scorer.score(rows)) == [2.0, -1.0, -1.0]


def test_regex_may_ignore_case_and_cross_lines(talk):
    scorer = RegexReward(pattern=r"^<think>.*</think>", ignore_case=True).build()
    assert values(scorer.score([talk("q", "<THINK>\nwell\n</think> yes"), talk("q", "x <think></think>")])) == [1.0, 0.0]


def test_a_pattern_that_does_not_compile_is_refused():
    with pytest.raises(ConfigError, match="is no regular expression"):
        build_scorer({"kind": "regex", "pattern": "("})
