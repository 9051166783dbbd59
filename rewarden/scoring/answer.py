"""What every scorer does with a conversation: find the answer, show a row in an error, make a checked Score."""

import math
from collections.abc import Mapping, Sequence

from rewarden.errors import ScoreError
from rewarden.protocols import Scorer
from rewarden.types import Conversation, Message, Score

SHOWN = 200


def split_answer(conversation: Conversation) -> tuple[tuple[Message, ...], Message]:
    """The messages before the last one, and the last one, which must be the assistant's.

    Errors: ScoreError naming the row when the conversation is empty or ends with someone else.
    """
    messages = conversation.messages
    if not messages or messages[-1].role != "assistant":
        last = f"ends with {messages[-1].role!r}" if messages else "is empty"
        raise ScoreError(f"{where_of(conversation)}: the conversation {last}; a scorer needs one that ends with 'assistant'")
    return messages[:-1], messages[-1]


def scores_of(scorer: Scorer, conversations: Sequence[Conversation], name: str = "the scorer") -> list[Score]:
    """What a scorer gives, checked: a scorer may be anybody's code.

    Errors: ScoreError when it is not one `Score` per conversation.
    """
    scores = scorer.score(conversations)
    wrong = [scores] if not isinstance(scores, Sequence) else [score for score in scores if not isinstance(score, Score)]
    if wrong:
        raise ScoreError(f"{name} gave {wrong[0]!r}; it must give a list with one rewarden.types.Score per conversation")
    if len(scores) != len(conversations):
        raise ScoreError(f"{name} gave {len(scores)} scores for {len(conversations)} conversations; one each")
    return list(scores)


def where_of(conversation: Conversation) -> str:
    """File and line of the row when known, and its id."""
    where = conversation.meta.get("where")
    return f"{where} (row {conversation.id})" if where else f"row {conversation.id}"


def shown(conversation: Conversation) -> str:
    """The row for an error message: its last two messages, shortened, and its columns."""
    lines = [f"  {message.role}: {_short(message.text)}" for message in conversation.messages[-2:]]
    columns = {key: value for key, value in conversation.meta.items() if key != "where"}
    return "\n".join([*lines, *(f"  {key}: {_short(str(value))}" for key, value in columns.items())])


def ok(
    value: float,
    conversation: Conversation,
    scorer: str,
    *,
    members: Sequence[float] = (),
    parts: Mapping[str, float] | None = None,
    hint: str = "",
) -> Score:
    """A score with status "ok".

    Errors: ScoreError with the row shown when the value or a member is not finite; `hint` ends its first line.
    """
    refuse_not_finite([value], conversation, scorer, hint=hint)
    refuse_not_finite(members, conversation, scorer, hint=hint)
    return Score(value=value, members=tuple(members), parts=dict(parts or {}))


def refuse_not_finite(members: Sequence[float], conversation: Conversation, scorer: str, *, hint: str = "") -> None:
    """ScoreError with the row shown, and the member named where there are several, when a number is not finite."""
    bad = [place for place, number in enumerate(members) if not math.isfinite(number)]
    if bad:
        got = f"got {members[bad[0]]}"
        if len(members) > 1:
            got = f"member {bad[0]} (of members 0 to {len(members) - 1}) gave {members[bad[0]]}"
        raise ScoreError(
            f"{scorer}: {got} for {where_of(conversation)}; a score is a finite number{hint}\n{shown(conversation)}"
        )


def without_value(status: str) -> Score:
    """A score that says in a word why there is no value; the value itself is NaN, so it cannot be averaged unnoticed."""
    return Score(value=math.nan, status=status)


def _short(text: str) -> str:
    return repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)")
