"""Python functions as rewards: TRL's signature, None, NaN, lengths, coroutines, any callable."""

import asyncio
import functools
import math

import numpy as np
import pytest
import torch

from rewarden.errors import ConfigError, ScoreError
from rewarden.scoring import FunctionScorer, build_scorer


def statuses(scores):
    return [score.status for score in scores]


def values(scores):
    return [score.value for score in scores]


def test_conversational_rows_arrive_as_lists_of_message_dicts(talk):
    seen = {}

    def reward(prompts, completions, **columns):
        seen.update(prompts=prompts, completions=completions, **columns)
        return [1.0, 2.0]

    rows = [talk("hi", "hello", answer="42", where="a.jsonl:1"), talk("a", "b", "c", "d", answer="7", where="a.jsonl:2")]
    assert values(FunctionScorer(reward).score(rows)) == [1.0, 2.0]
    assert seen == {
        "prompts": [
            [{"role": "user", "content": "hi"}],
            [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b"},
                {"role": "user", "content": "c"},
            ],
        ],
        "completions": [[{"role": "assistant", "content": "hello"}], [{"role": "assistant", "content": "d"}]],
        "answer": ["42", "7"],
        "where": ["a.jsonl:1", "a.jsonl:2"],
    }


def test_plain_rows_arrive_as_strings(talk):
    def reward(prompts, completions, **columns):
        assert (prompts, completions) == (["2+2="], ["4"])
        return [0.5]

    assert values(FunctionScorer(reward, format="plain").score([talk("2+2=", "4")])) == [0.5]


def test_a_row_that_was_plain_arrives_as_strings_beside_one_that_was_not(talk):
    def reward(prompts, completions, **columns):
        assert completions == ["4", [{"role": "assistant", "content": "5"}]]
        assert prompts == ["2+2=", [{"role": "user", "content": "2+3="}]]
        assert columns == {"level": [1, 2]}
        return [1.0, 0.0]

    rows = [talk("2+2=", "4", plain=True, level=1), talk("2+3=", "5", level=2)]
    assert values(FunctionScorer(reward).score(rows)) == [1.0, 0.0]


def test_plain_strings_need_one_message_before_the_answer(talk):
    with pytest.raises(ScoreError, match="3 messages before the answer"):
        FunctionScorer(lambda prompts, completions: [0.0], format="plain").score([talk("a", "b", "c", "d")])


def test_a_column_that_some_rows_lack_is_none_there(talk):
    got = []

    def reward(completions, answer, **columns):
        got.extend(answer)
        return [0.0] * len(completions)

    FunctionScorer(reward).score([talk("a", "b", answer="x"), talk("a", "c")])
    assert got == ["x", None]


def test_a_function_without_kwargs_gets_the_columns_it_names(talk):
    def reward(completions, answer):
        return [float(c[0]["content"] == a) for c, a in zip(completions, answer, strict=True)]

    rows = [talk("q", "yes", answer="yes", level=3), talk("q", "no", answer="yes", level=4)]
    assert values(FunctionScorer(reward).score(rows)) == [1.0, 0.0]


def test_a_column_the_function_needs_and_no_row_has_is_an_error(talk):
    def reward(completions, answer, **columns):
        return [0.0] * len(completions)

    with pytest.raises(ScoreError, match=r"reward needs answer; there is completions, level, prompts"):
        FunctionScorer(reward).score([talk("q", "yes", level=3)])


def test_a_column_named_like_an_argument_is_an_error(talk):
    with pytest.raises(ScoreError, match="column 'completions'"):
        FunctionScorer(lambda **columns: [0.0]).score([talk("q", "yes", completions="x")])


def test_none_means_does_not_apply(talk):
    scores = FunctionScorer(lambda prompts, completions: [None, 1]).score([talk("a", "b"), talk("c", "d")])
    assert statuses(scores) == ["not_applicable", "ok"]
    assert math.isnan(scores[0].value)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, np.float32("nan")])
def test_a_number_that_is_not_finite_stops_with_the_row_shown(bad, talk):
    rows = [talk("fine", "ok"), talk("the question", "the answer", id="r2", where="d.jsonl:2", level="hard")]
    with pytest.raises(ScoreError) as caught:
        FunctionScorer(lambda prompts, completions: [0.0, bad]).score(rows)
    message = str(caught.value)
    assert all(word in message for word in ("d.jsonl:2", "r2", "the question", "the answer", "hard", "return None"))
    assert "fine" not in message


@pytest.mark.parametrize("result", [[1.0], [1.0, 2.0, 3.0], []])
def test_a_list_of_another_length_is_an_error(result, talk):
    with pytest.raises(ScoreError, match=f"returned {len(result)} values for 2 rows"):
        FunctionScorer(lambda prompts, completions: result).score([talk("a", "b"), talk("c", "d")])


@pytest.mark.parametrize("result", [1.0, None, "ab", {"a": 1.0, "b": 2.0}, iter([1.0, 2.0])])
def test_a_result_that_is_no_list_is_an_error(result, talk):
    with pytest.raises(ScoreError, match="return a list"):
        FunctionScorer(lambda prompts, completions: result).score([talk("a", "b"), talk("c", "d")])


@pytest.mark.parametrize("bad", ["1.0", [1.0], object(), 1j])
def test_an_entry_that_is_no_number_is_an_error(bad, talk):
    with pytest.raises(ScoreError, match="return a number or None"):
        FunctionScorer(lambda prompts, completions: [bad]).score([talk("a", "b")])


@pytest.mark.parametrize(
    "result", [[1, True], (1.0, 1.0), np.array([1.0, 1.0]), torch.tensor([1.0, 1.0]), [np.float32(1), torch.tensor(1.0)]]
)
def test_numbers_of_other_libraries_are_numbers(result, talk):
    assert values(FunctionScorer(lambda prompts, completions: result).score([talk("a", "b"), talk("c", "d")])) == [1.0, 1.0]


def test_partials_callable_objects_and_builtins_without_a_signature_work(talk):
    def scaled(completions, scale, **columns):
        return [scale * len(c[0]["content"]) for c in completions]

    class Constant:
        def __call__(self, prompts, completions, **columns):
            return [4.0] * len(completions)

    rows = [talk("a", "bcd")]
    assert values(FunctionScorer(functools.partial(scaled, scale=2.0)).score(rows)) == [6.0]
    assert values(FunctionScorer(Constant()).score(rows)) == [4.0]
    assert FunctionScorer(functools.partial(functools.partial(scaled, scale=2.0))).name == "scaled"
    assert FunctionScorer(Constant()).name == "Constant"


async def slow_reward(completions, **columns):
    await asyncio.sleep(0.001)
    return [2.0] * len(completions)


class AsyncReward:
    async def __call__(self, completions, **columns):
        await asyncio.sleep(0)
        return [3.0] * len(completions)


@pytest.mark.parametrize(
    ("function", "expected"), [(slow_reward, 2.0), (functools.partial(slow_reward), 2.0), (AsyncReward(), 3.0)]
)
def test_coroutine_functions_are_awaited_with_and_without_a_running_loop(function, expected, talk):
    scorer = FunctionScorer(function)
    assert values(scorer.score([talk("a", "b")])) == [expected]

    async def notebook():
        return scorer.score([talk("a", "b")])

    assert values(asyncio.run(notebook())) == [expected]


def test_an_error_inside_a_function_or_a_coroutine_is_one_sentence_with_its_place(talk):
    async def broken(completions, **columns):
        raise ZeroDivisionError("oops")

    async def notebook():
        return FunctionScorer(broken).score([talk("a", "b")])

    for call in (lambda: FunctionScorer(broken).score([talk("a", "b")]), lambda: asyncio.run(notebook())):
        with pytest.raises(
            ScoreError, match=r"reward function broken raised ZeroDivisionError: oops \(.*, line \d+\) on 1"
        ) as caught:
            call()
        assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_no_rows_call_no_function():
    assert FunctionScorer(lambda prompts, completions: 1 / 0).score([]) == []


def test_a_row_that_ends_with_the_user_is_refused(talk):
    with pytest.raises(ScoreError, match="ends with 'user'"):
        FunctionScorer(lambda prompts, completions: [0.0]).score([talk("a")])


SOURCE = """
def short(completions, **columns):
    return [-float(len(c[0]["content"])) for c in completions]

number = 3
"""


def test_a_recipe_names_a_file_and_a_function(tmp_path, talk):
    file = tmp_path / "reward_of_mine.py"
    file.write_text(SOURCE)
    scorer = build_scorer({"kind": "function", "path": f"{file}:short"})
    assert values(scorer.score([talk("a", "bcd")])) == [-3.0]


def test_a_name_that_is_missing_or_no_function_is_an_error(tmp_path):
    file = tmp_path / "reward_of_mine_2.py"
    file.write_text(SOURCE)
    with pytest.raises(ConfigError, match="has no 'long'"):
        build_scorer({"kind": "function", "path": f"{file}:long"})
    with pytest.raises(ConfigError, match="is int; name something that can be called"):
        build_scorer({"kind": "function", "path": f"{file}:number"})
    with pytest.raises(ConfigError, match="path is 'short'"):
        build_scorer({"kind": "function", "path": "short"})


def test_an_int_beyond_every_float_is_no_score(talk):
    with pytest.raises(ScoreError, match=r"got inf .*a score is a finite number"):
        FunctionScorer(lambda prompts, completions: [10**400]).score([talk("a", "b")])
