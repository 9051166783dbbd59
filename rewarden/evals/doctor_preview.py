"""The loss mask on real rows: which characters of the exact text a model is given are learned."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from rewarden.errors import DataError
from rewarden.evals.doctor_model import Opened
from rewarden.evals.doctor_read import Source
from rewarden.evals.doctor_tokens import Limits, views
from rewarden.text.render import Template
from rewarden.text.targets import target_spans
from rewarden.text.trace import Traced
from rewarden.types import Conversation, Span, SpanRole


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Neighboring characters with one fate. `cut`: beyond the length limit, so never seen."""

    text: str
    role: SpanRole
    learned: bool
    special: bool
    cut: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """One rendered text of a row. `waits`: it is a prompt; the policy writes behind its end, and nothing in it is learned."""

    where: str
    side: str
    num_tokens: int
    num_learned: int
    waits: bool
    segments: tuple[Segment, ...]


def previews(source: Source, opened: Opened, limits: Limits, num_rows: int) -> Iterator[Preview]:
    """The first usable rows that the template can render, a pair as two."""
    template, shown = opened.template, 0
    for entry in source.entries:
        if template is None or shown == num_rows:
            return
        try:
            found = [_preview(entry.where, side, talk, template, limits) for side, talk in views(entry)]
        except DataError:  # counted as refused_by_template
            continue
        yield from found
        shown += 1


def _preview(where: str, side: str, conversation: Conversation, template: Template, limits: Limits) -> Preview:
    waits = conversation.messages[-1].role == "user"
    traced = template.trace(conversation, generation=waits)
    spans = target_spans(conversation, traced.rollout.spans)
    known = [limit for limit in (limits.max_length, limits.positions) if limit is not None]
    limit = min(known, default=len(traced.pieces))
    return Preview(
        where=where,
        side=side,
        num_tokens=len(traced.pieces),
        num_learned=sum(max(0, min(s.stop, limit) - s.start) for s in spans if s.role == "assistant"),
        waits=waits,
        segments=tuple(_segments(traced, spans, limit)),
    )


def _segments(traced: Traced, spans: tuple[Span, ...], limit: int) -> Iterator[Segment]:
    """Characters take the fate of the token that holds them; those that no token holds, of the one before."""
    fates: list[tuple[SpanRole, bool, bool, bool] | None] = [None] * len(traced.text)
    for span in spans:
        for index in range(span.start, span.stop):
            piece = traced.pieces[index]
            fate = (span.role, span.role == "assistant" and index < limit, piece.special, index >= limit)
            fates[piece.start : piece.stop] = [fate] * (piece.stop - piece.start)
            if piece.stop == 0:  # a BOS in front of the text
                yield Segment(text=piece.name, role=span.role, learned=fate[1], special=fate[2], cut=fate[3])
    usual: tuple[SpanRole, bool, bool, bool] = ("template", False, False, False)
    filled = []
    for held in fates:
        usual = held or usual
        filled.append(usual)
    for (role, learned, special, cut), run in groupby(enumerate(filled), key=lambda pair: pair[1]):
        places = [index for index, _ in run]
        text = traced.text[places[0] : places[-1] + 1]
        yield Segment(text=text, role=role, learned=learned, special=special, cut=cut)
