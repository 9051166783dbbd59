"""One format with one tokenizer: conversation -> text with regions -> tokens -> spans."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rewarden.errors import DataError
from rewarden.text.joint import JointTokenizer, Tokens
from rewarden.text.layout import Format, Layout, Region, place
from rewarden.text.spans import Spans, find_spans
from rewarden.types import Conversation, Message, Rollout, Span


@dataclass(slots=True, kw_only=True)
class Encoder:
    """What rendering needs. `end_of_turn_id` is -1 until it is resolved."""

    tokenizer: Any
    joint: JointTokenizer
    form: Format
    end_of_turn_id: int = -1
    stop_ids: frozenset[int] = field(default_factory=frozenset)

    @property
    def bos_ids(self) -> tuple[int, ...]:
        """The BOS id that a plain format starts with, if the tokenizer has one."""
        return (self.tokenizer.bos_token_id,) if self.form.adds_bos and self.tokenizer.bos_token_id is not None else ()

    def tokens(self, conversation: Conversation, *, generation: bool) -> tuple[Layout, Tokens]:
        """The text of a conversation and its joint tokenisation."""
        layout = self.form.lay_out(conversation, generation=generation)
        tokens = self.joint.encode(layout.text, layout.regions, place(conversation))
        if bos := self.bos_ids:
            tokens = replace(tokens, ids=bos + tokens.ids, starts=(0, *tokens.starts), stops=(0, *tokens.stops))
        return layout, tokens

    def spans(self, tokens: Tokens, layout: Layout, messages: Sequence[Message], where: str) -> Spans:
        """Spans over these tokens."""
        return find_spans(
            tokens,
            layout.regions,
            messages,
            end_of_turn_id=self.end_of_turn_id,
            is_control=lambda index: self.joint.is_control(layout.text, tokens, index),
            place=where,
        )

    def tail(self, messages: Sequence[Message], where: str) -> tuple[Layout, Tokens]:
        """What follows the last answer's text: its end of turn, the last message, the generation prompt.

        The earlier messages are stood in for, since a template may cut or refuse what a policy wrote.
        """
        stand_ins = (*(replace(earlier, text="Hello") for earlier in messages[:-1]), messages[-1])
        layout = self.form.lay_out(Conversation(id="tail", messages=stand_ins, meta={"where": where}), generation=True)
        cut = layout.region(len(messages) - 2).stop
        regions = tuple(
            Region(message=region.message, start=region.start - cut, stop=region.stop - cut, seam=region.seam - cut)
            for region in layout.regions
            if region.message == len(messages) - 1
        )
        tail = Layout(text=layout.text[cut:], regions=regions)
        return tail, self.joint.encode(tail.text, regions, where)


def extend(encoder: Encoder, rollout: Rollout, message: Message) -> tuple[Rollout, int]:
    """See `Template.extend`; also the number of special tokens that the message spells."""
    where = place(rollout.conversation)
    messages = rollout.conversation.messages
    answer = next((span for span in reversed(rollout.spans) if span.role != "template"), None)
    if not messages or messages[-1].role != "assistant" or answer is None or answer.role != "assistant":
        raise DataError(f"{where}: only a rollout that ends with the assistant can be extended; sample a turn first")
    if message.role != "user":
        raise DataError(f"{where}: the assistant is answered by 'user', not {message.role!r}")
    longer = (*messages, message)
    layout, tokens = encoder.tail(longer, where)
    if encoder.end_of_turn_id not in tokens.ids:
        raise DataError(f"{where}: the template puts no end of turn after the answer before a user's message; use another one")
    ids, spans = list(rollout.token_ids), list(rollout.spans)
    if answer.start == answer.stop or ids[answer.stop - 1] not in encoder.stop_ids:
        spans.append(Span(role="template", turn=answer.turn, start=len(ids), stop=len(ids) + 1))
        ids.append(encoder.end_of_turn_id)
    # A rendered (not sampled) conversation already holds the separator that follows its last end of turn.
    end = tokens.ids.index(encoder.end_of_turn_id) + 1
    done = end + len(rollout.token_ids) - answer.stop
    if rollout.token_ids[answer.stop :] != tokens.ids[end:done]:
        raise DataError(f"{where}: the tokens after the last answer are not what the template puts there; render it again")
    shift = len(ids) - done
    for span in encoder.spans(tokens, layout, longer, where).spans:
        if span.stop > done:
            spans.append(replace(span, start=max(span.start, done) + shift, stop=span.stop + shift))
    grown = replace(
        rollout,
        conversation=replace(rollout.conversation, messages=longer),
        token_ids=(*ids, *tokens.ids[done:]),
        spans=tuple(spans),
        stop="open",
    )
    return grown, tokens.spelled
