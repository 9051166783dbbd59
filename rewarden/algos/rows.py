"""Conversations as token rows of bounded length; what is dropped or cut is counted."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rewarden.data.records import Loaded
from rewarden.errors import DataError
from rewarden.models.load import Model
from rewarden.text.render import Template
from rewarden.text.targets import target_spans
from rewarden.types import Conversation, Span

Overlength = Literal["drop", "truncate", "error"]
OnEmpty = Literal["drop", "error"]

NO_TARGET = "without a target token dropped"
SHOWN = 10
"""Rows named in a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRow:
    """One conversation as ids; assistant spans are the targets of a loss."""

    id: str
    token_ids: tuple[int, ...]
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRows:
    """Rows that fit, and why others did not (reason -> count); `without_target` says where rows without a target stand."""

    rows: tuple[EncodedRow, ...]
    dropped: Mapping[str, int]
    total: int
    without_target: tuple[str, ...] = ()

    def summary(self) -> str:
        """One line: rows kept, dropped and cut by reason, tokens."""
        tokens = sum(len(row.token_ids) for row in self.rows)
        why = "".join(f", {count} {reason}" for reason, count in sorted(self.dropped.items()))
        where = f" (without a target: {listed(self.without_target)})" if self.without_target else ""
        return f"{len(self.rows)} of {self.total} rows, {tokens} tokens{why}{where}"


def within(limit: int | None, positions: int | None) -> int | None:
    """The smaller of a length limit and the positions a model has: a row beyond them would stop the run half-way."""
    return min((number for number in (limit, positions) if number is not None), default=None)


def check_dropout(model: Model, *, disable_dropout: bool) -> None:
    """Refuse a dropout that would never act.

    Errors: ValueError, for use in a config's validator.
    """
    if model.lora_dropout and disable_dropout:
        raise ValueError(
            f"lora_dropout is {model.lora_dropout}, but dropout is off in this training, so it would do nothing; set it to 0"
            " (sft and reward: or set disable_dropout: false)"
        )


def listed(places: Sequence[str]) -> str:
    """The first places, and how many more there are."""
    more = f" and {len(places) - SHOWN} more" if len(places) > SHOWN else ""
    return ", ".join(places[:SHOWN]) + more


def data_notes(loaded: Loaded[Any]) -> list[str]:
    """What became of the rows of a source, and where the first dropped ones stand."""
    places = loaded.where()
    return [f"data: {loaded.summary()}", *([f"dropped rows, the first of each reason: {places}"] if places else [])]


def template_notes(template: Template) -> list[str]:
    """One line on what the template met in the rows rendered so far that needs a second look; none when there was nothing."""
    found = [f"{count} {MEANING[name]}" for name, count in sorted(template.facts.items()) if count]
    return [f"template: {', '.join(found)}"] if found else []


MEANING = {
    "merged_seam": "answers whose first token also holds the end of the generation prompt, so it is not learned",
    "spelled_special": "special tokens spelled in texts, kept as text",
    "empty_assistant": "empty answers",
}
"""What `Template.facts` counts, in words."""


def encode_rows(
    conversations: Sequence[Conversation],
    template: Template,
    max_length: int | None,
    overlength: Overlength,
    on_empty: OnEmpty = "drop",
) -> EncodedRows:
    """Render every conversation once; apply the length rule; drop rows without a target token, or refuse them.

    Errors: DataError naming the row when `overlength` is "error"; all rows without a target when `on_empty` is.
    """
    kept: list[EncodedRow] = []
    dropped: Counter[str] = Counter()
    empty: list[str] = []
    for conversation in conversations:
        rollout = template.render(conversation)
        ids, spans = rollout.token_ids, target_spans(conversation, rollout.spans)
        if max_length is not None and len(ids) > max_length:
            if overlength == "error":
                where = conversation.meta.get("where", conversation.id)
                raise DataError(
                    f"{where}: {len(ids)} tokens; at most max_length={max_length}. Raise it, or use overlength: drop"
                )
            if overlength == "drop":
                dropped[f"longer than {max_length} tokens dropped"] += 1
                continue
            dropped[f"cut at {max_length} tokens"] += 1
            ids = ids[:max_length]
            spans = tuple(_cut(span, max_length) for span in spans if span.start < max_length)
        if not any(span.role == "assistant" and span.stop > span.start for span in spans):
            dropped[NO_TARGET] += 1
            empty.append(str(conversation.meta.get("where", conversation.id)))
            continue
        kept.append(EncodedRow(id=conversation.id, token_ids=ids, spans=spans))
    if empty and on_empty == "error":
        raise DataError(
            f"{len(empty)} of {len(conversations)} rows have no token to learn: {listed(empty)}. An answer is empty, or was "
            "cut off by max_length; fix the rows, raise max_length, or use on_empty: drop"
        )
    return EncodedRows(rows=tuple(kept), dropped=dict(dropped), total=len(conversations), without_target=tuple(empty))


def _cut(span: Span, stop: int) -> Span:
    return Span(role=span.role, turn=span.turn, start=span.start, stop=min(span.stop, stop), ended=span.ended)
