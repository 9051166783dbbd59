"""Which tokens belong to which message."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rewarden.errors import DataError
from rewarden.text.joint import Tokens
from rewarden.text.layout import Region, turns_of
from rewarden.types import Message, Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Spans over all tokens; `merged` counts answers whose first token also holds the end of their generation prompt."""

    spans: tuple[Span, ...]
    merged: int


def find_spans(
    tokens: Tokens,
    regions: Sequence[Region],
    messages: Sequence[Message],
    *,
    end_of_turn_id: int,
    is_control: Callable[[int], bool],
    place: str,
) -> Spans:
    """Spans that cover the tokens once, in order.

    An assistant span runs from the end of its generation prompt through its end-of-turn token. A token that reaches across the
    end of the generation prompt cannot be sampled; it is "template", and counted as merged. A user or system span holds every
    token with a character of the content. All else is "template", with the turn of the message it leads to.

    Errors: DataError when no end-of-turn token follows an answer.
    """
    owner: list[int | None] = [None] * len(tokens.ids)
    merged = 0
    for region in regions:
        if messages[region.message].role == "assistant":
            first, stop, straddles = _answer(tokens, region, end_of_turn_id, is_control, place)
            merged += straddles
        else:
            first, stop = _given(tokens, region, is_control)
        for index in range(first, stop):
            if owner[index] is None and (messages[region.message].role == "assistant" or not is_control(index)):
                owner[index] = region.message
    return Spans(spans=_grouped(owner, messages), merged=merged)


def _answer(
    tokens: Tokens, region: Region, end_of_turn_id: int, is_control: Callable[[int], bool], place: str
) -> tuple[int, int, bool]:
    first = bisect_left(tokens.starts, region.seam)
    straddles = first > 0 and tokens.stops[first - 1] > region.seam and not is_control(first - 1)
    end = bisect_left(tokens.starts, region.stop)
    # An end-of-turn token that swallows the whitespace before it starts inside the content.
    while end > first and tokens.ids[end - 1] == end_of_turn_id and tokens.stops[end - 1] > region.stop:
        end -= 1
    while end < len(tokens.ids) and tokens.ids[end] != end_of_turn_id:
        end += 1
    if end == len(tokens.ids):
        raise DataError(
            f"{place}: no end-of-turn token (id {end_of_turn_id}) follows message {region.message}; "
            "use a template that ends every answer in the same way"
        )
    return first, end + 1, straddles


def _given(tokens: Tokens, region: Region, is_control: Callable[[int], bool]) -> tuple[int, int]:
    if region.start == region.stop:
        return 0, 0
    first = bisect_left(tokens.starts, region.start)
    while first > 0 and tokens.stops[first - 1] > region.start and not is_control(first - 1):
        first -= 1
    return first, bisect_left(tokens.starts, region.stop)


def _grouped(owner: Sequence[int | None], messages: Sequence[Message]) -> tuple[Span, ...]:
    turns = turns_of(messages)
    spans: list[Span] = []
    start = 0
    for index in range(1, len(owner) + 1):
        if index < len(owner) and owner[index] == owner[start]:
            continue
        message = owner[start]
        if message is None:
            following = owner[index] if index < len(owner) else None
            turn = turns[-1] if following is None else turns[following]
            spans.append(Span(role="template", turn=turn, start=start, stop=index))
        else:
            spans.append(Span(role=messages[message].role, turn=turns[message], start=start, stop=index))
        start = index
    return tuple(spans) if owner else ()
