"""A Python function as a reward, with the signature TRL gives to reward functions.

    f(prompts=[...], completions=[...], **columns) -> list[float | None]

Plain rows give strings; conversational rows give, per row, the list of prompt messages and the list of completion messages,
each message a {"role": ..., "content": ...}. Every other column of the rows is passed as a list under its own name. A function
that takes no **kwargs gets the columns it names. None means "does not apply here"; NaN is an error, because TRL's own
reading of NaN as None lets a bug pass for a choice. `on_nan: mask` leaves such rows out instead, under a status of their own.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from rewarden.errors import ConfigError, ScoreError, in_words
from rewarden.runtime.asynchronous import finish
from rewarden.scoring.answer import ok, shown, split_answer, where_of, without_value
from rewarden.spec import Spec, outside
from rewarden.types import Conversation, Message, Score

RewardFunction = Callable[..., Any]
Format = Literal["auto", "conversational", "plain"]
OnNan = Literal["error", "mask"]

PLAIN = "plain"
"""The entry of `Conversation.meta` that is True where the row had strings, not messages; it is no column."""


class FunctionReward(Spec):
    """A Python function with TRL's reward-function signature."""

    path: str = Field(pattern=r".+:.+")
    """"my_file.py:my_reward" or "package.module:my_reward"."""
    format: Format = "auto"
    """What the function gets: strings (plain), message lists (conversational), or what the row was (auto: `meta["plain"]`)."""
    on_nan: OnNan = "error"
    """What happens when it returns a number that is not finite: stop with the row shown, or leave the row out (counted)."""

    @field_validator("path")
    @classmethod
    def _function_is_there(cls, path: str) -> str:
        file = path.rsplit(":", 1)[0]
        if file.endswith(".py") and not Path(file).is_file():
            raise ValueError(f"no file {file}; paths are relative to the working directory")
        # A file is looked into when the recipe is read, not when the stage that scores begins; it is imported once.
        if Path(file if file.endswith(".py") else f"{file}.py").is_file():
            function_at(path, "")
        return path

    def build(self) -> "FunctionScorer":
        """Import the function; it may be any callable or coroutine function."""
        return FunctionScorer(function_at(self.path, "reward"), format=self.format, on_nan=self.on_nan)


def function_at(path: str, where: str) -> RewardFunction:
    """The function that "my_file.py:my_reward" names; `where` begins its errors.

    Errors: ConfigError when it is not there, cannot be imported, or cannot be called.
    """
    function = outside(path, where)
    if not callable(function):
        raise ConfigError(f"reward function {path!r} is {type(function).__name__}; name something that can be called")
    return function


class FunctionScorer:
    """Scores conversations with a function, a functools.partial, a callable object or a coroutine function."""

    def __init__(self, function: RewardFunction, *, format: Format = "auto", on_nan: OnNan = "error") -> None:
        self.function = function
        self.format = format
        self.on_nan = on_nan
        self.name = name_of(function)

    def score(self, conversations: Sequence[Conversation]) -> list[Score]:
        """One score per conversation, from one call of the function.

        Errors: ScoreError for a result that is no list, has another length, or holds something that is no finite number; with
        `on_nan` "mask" a number that is not finite becomes the status "not_finite" instead.
        """
        if not conversations:
            return []
        arguments = self._accepted(self._arguments(conversations))
        try:
            result = self.function(**arguments)
            if inspect.isawaitable(result):
                result = finish(result)
        except (Exception, SystemExit) as error:
            words = in_words(error, self._file())
            raise ScoreError(
                f"reward function {self.name} raised {words} on {len(conversations)} rows; mend it, then run again to resume"
            ) from error
        return [self._score(value, row) for value, row in zip(self._listed(result, conversations), conversations, strict=True)]

    def _file(self) -> str | None:
        """Where the function is written, if it is written in Python."""
        function = self.function
        while hasattr(function, "func"):  # functools.partial
            function = function.func
        named = function if inspect.isroutine(function) else type(function)
        try:
            return inspect.getsourcefile(named)
        except TypeError:  # built in
            return None

    def _arguments(self, conversations: Sequence[Conversation]) -> dict[str, list[Any]]:
        pairs = [split_answer(row) for row in conversations]
        names = list(dict.fromkeys(name for row in conversations for name in row.meta if name != PLAIN))
        taken = sorted({"prompts", "completions"} & set(names))
        if taken:
            raise ScoreError(
                f"reward function {self.name}: the rows have a column {taken[0]!r}, which is an argument; rename it"
            )
        plain = [self._is_plain(row, prompt) for row, (prompt, _) in zip(conversations, pairs, strict=True)]
        return {
            "prompts": [p[-1].text if flat else _dicts(p) for flat, (p, _) in zip(plain, pairs, strict=True)],
            "completions": [a.text if flat else _dicts([a]) for flat, (_, a) in zip(plain, pairs, strict=True)],
            **{name: [row.meta.get(name) for row in conversations] for name in names},
        }

    def _is_plain(self, row: Conversation, prompt: Sequence[Message]) -> bool:
        plain = self.format == "plain" or (self.format == "auto" and row.meta.get(PLAIN) is True)
        if plain and len(prompt) != 1:
            raise ScoreError(
                f"reward function {self.name}: {where_of(row)} has {len(prompt)} messages before the answer; "
                "plain strings need exactly one; use format: conversational"
            )
        return plain

    def _accepted(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """What the signature can take; a required argument that is no column is an error before the call."""
        try:
            parameters = inspect.signature(self.function).parameters.values()
        except (TypeError, ValueError):  # a built-in without a signature: it gets everything
            return dict(arguments)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            arguments = {p.name: arguments[p.name] for p in parameters if p.name in arguments}
        required = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        missing = [p.name for p in required if p.name not in arguments]
        if missing:
            have = ", ".join(sorted(arguments))
            raise ScoreError(
                f"reward function {self.name} needs {', '.join(missing)}; there is {have}; add the column or a default"
            )
        return dict(arguments)

    def _listed(self, result: Any, conversations: Sequence[Conversation]) -> list[Any]:
        values = result.tolist() if hasattr(result, "tolist") else result
        if not isinstance(values, (list, tuple)):
            got = f"{type(result).__name__} {str(result)[:80]!r}"
            raise ScoreError(f"reward function {self.name} returned {got}; return a list with one number or None per row")
        if len(values) != len(conversations):
            raise ScoreError(
                f"reward function {self.name} returned {len(values)} values for {len(conversations)} rows; return one per row"
            )
        return list(values)

    def _score(self, value: Any, row: Conversation) -> Score:
        if value is None:
            return without_value("not_applicable")
        if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
            raise ScoreError(
                f"reward function {self.name}: got {value!r} for {where_of(row)}; return a number or None\n{shown(row)}"
            )
        hint = "; return None where the reward does not apply, or set on_nan: mask"
        try:
            number = float(value)
        except OverflowError:  # an int beyond every float
            number = math.inf
        if self.on_nan == "mask" and not math.isfinite(number):
            return without_value("not_finite")
        return ok(number, row, f"reward function {self.name}", hint=hint)


def name_of(function: RewardFunction) -> str:
    """A name for messages: of the function, of what a partial wraps, or of the object's class."""
    while hasattr(function, "func"):
        function = function.func
    return getattr(function, "__name__", None) or type(function).__name__


def _dicts(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.text} for message in messages]
