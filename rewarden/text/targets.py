"""Which spans of a render a loss learns."""

from collections.abc import Sequence
from dataclasses import replace

from rewarden.types import Conversation, Span


def target_spans(conversation: Conversation, spans: Sequence[Span]) -> tuple[Span, ...]:
    """The spans, with the assistant's own left as "assistant" only where they are learned.

    The first `meta["prompt_messages"]` messages are prompt; assistant turns among them become "template".
    """
    given = int(conversation.meta.get("prompt_messages", 0))
    prompt_turns = sum(message.role == "assistant" for message in conversation.messages[:given])
    out, seen = [], 0
    for span in spans:
        if span.role == "assistant":
            seen += 1
            if seen <= prompt_turns:
                span = replace(span, role="template")
        out.append(span)
    return tuple(out)
