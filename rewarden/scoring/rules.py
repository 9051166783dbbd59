"""Rewards that are rules: length and pattern of the last answer."""

import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Literal

from pydantic import Field, model_validator

from rewarden.models.load import Model, load_tokenizer
from rewarden.scoring.answer import ok, split_answer
from rewarden.spec import Spec
from rewarden.types import Conversation, Score

Unit = Literal["characters", "words", "tokens"]
Side = Literal["over", "under", "both"]


class LengthReward(Spec):
    """A penalty per unit of length beyond a target: -penalty * distance."""

    target: int = Field(ge=0)
    """The length that costs nothing."""
    penalty: float = Field(gt=0)
    """Reward lost per unit of distance from the target."""
    side: Side = "over"
    """Which answers lose: those over the target, under it, or both."""
    unit: Unit = "characters"
    """What is counted; words are separated by white space, tokens need `tokenizer`."""
    tokenizer: str | None = None
    """Folder or hub id of the model whose tokenizer counts; special tokens do not count."""

    @model_validator(mode="after")
    def _tokens_need_a_tokenizer(self) -> "LengthReward":
        if (self.unit == "tokens") != (self.tokenizer is not None):
            raise ValueError("unit: tokens and tokenizer: FOLDER go together; give both or neither")
        return self

    def build(self) -> "LengthScorer":
        """Load the tokenizer when tokens are counted."""
        return LengthScorer(target=self.target, penalty=self.penalty, side=self.side, count=self._counter())

    def _counter(self) -> Callable[[str], int]:
        if self.tokenizer is not None:
            tokenizer = load_tokenizer(Model.model_validate({"model_name_or_path": self.tokenizer}))
            return lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])
        return len if self.unit == "characters" else (lambda text: len(text.split()))


class LengthScorer:
    """-penalty * distance of the last answer's length from the target; `parts["length"]` is the length."""

    def __init__(self, *, target: int, penalty: float, side: Side = "over", count: Callable[[str], int] = len) -> None:
        self.target, self.penalty, self.side, self.count = target, penalty, side, count

    def score(self, conversations: Sequence[Conversation]) -> list[Score]:
        """One score per conversation, 0 at the target."""
        return [self._score(row) for row in conversations]

    def _score(self, row: Conversation) -> Score:
        length = self.count(split_answer(row)[1].text)
        over, under = max(length - self.target, 0), max(self.target - length, 0)
        distance = {"over": over, "under": under, "both": over + under}[self.side]
        return ok(-self.penalty * distance if distance else 0.0, row, "length", parts={"length": float(length)})


class RegexReward(Spec):
    """One reward when a pattern is found in the last answer, another when not."""

    pattern: str
    """A Python regular expression, searched for anywhere in the answer; a dot matches a line break."""
    reward: float = 1.0
    """Score of an answer that holds the pattern."""
    otherwise: float = 0.0
    """Score of an answer that does not."""
    ignore_case: bool = False
    """Whether capital and small letters are the same."""

    @model_validator(mode="after")
    def _pattern_compiles(self) -> "RegexReward":
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"pattern {self.pattern!r} is no regular expression: {error}") from None
        return self

    def build(self) -> "RegexScorer":
        """Compile the pattern."""
        return RegexScorer(self)


class RegexScorer:
    """`reward` where the pattern is found in the last answer, `otherwise` elsewhere."""

    def __init__(self, spec: RegexReward) -> None:
        self.spec = spec

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """The compiled pattern."""
        return re.compile(self.spec.pattern, re.DOTALL | (re.IGNORECASE if self.spec.ignore_case else 0))

    def score(self, conversations: Sequence[Conversation]) -> list[Score]:
        """One score per conversation."""
        return [self._score(row) for row in conversations]

    def _score(self, row: Conversation) -> Score:
        found = self.pattern.search(split_answer(row)[1].text) is not None
        return ok(self.spec.reward if found else self.spec.otherwise, row, "regex")
