"""Conversations as token rows of bounded length; what is dropped or cut is counted."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rewarden.errors import DataError
from rewarden.models.load import Model
from rewarden.text.render import Template
from rewarden.types import Conversation, Span

Overlength = Literal["drop", "truncate", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRow:
    """One conversation as ids; assistant spans are the targets of a loss."""

    id: str
    token_ids: tuple[int, ...]
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRows:
    """Rows that fit, and why others did not (reason -> count)."""

    rows: tuple[EncodedRow, ...]
    dropped: Mapping[str, int]
    total: int

    def summary(self) -> str:
        """One line: rows kept, dropped and cut by reason, tokens."""
        tokens = sum(len(row.token_ids) for row in self.rows)
        why = "".join(f", {count} {reason}" for reason, count in sorted(self.dropped.items()))
        return f"{len(self.rows)} of {self.total} rows, {tokens} tokens{why}"


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


def encode_rows(
    conversations: Sequence[Conversation], template: Template, max_length: int | None, overlength: Overlength
) -> EncodedRows:
    """Render every conversation once; apply the length rule; drop rows without a target token.

    Errors: DataError naming the row when `overlength` is "error".
    """
    kept: list[EncodedRow] = []
    dropped: Counter[str] = Counter()
    for conversation in conversations:
        rollout = template.render(conversation)
        ids, spans = rollout.token_ids, _targets(conversation, rollout.spans)
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
            dropped["without a target token dropped"] += 1
            continue
        kept.append(EncodedRow(id=conversation.id, token_ids=ids, spans=spans))
    return EncodedRows(rows=tuple(kept), dropped=dict(dropped), total=len(conversations))


def _targets(conversation: Conversation, spans: Sequence[Span]) -> tuple[Span, ...]:
    """Assistant spans that belong to the prompt of a prompt-completion row become plain template tokens."""
    given = int(conversation.meta.get("prompt_messages", 0))
    prompt_turns = sum(message.role == "assistant" for message in conversation.messages[:given])
    out, seen = [], 0
    for span in spans:
        if span.role == "assistant":
            seen += 1
            if seen <= prompt_turns:
                span = Span(role="template", turn=span.turn, start=span.start, stop=span.stop)
        out.append(span)
    return tuple(out)


def _cut(span: Span, stop: int) -> Span:
    return Span(role=span.role, turn=span.turn, start=span.start, stop=min(span.stop, stop), ended=span.ended)
