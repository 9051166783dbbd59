"""Short ways to write trip-desk transcripts in tests."""

from rewarden.types import Conversation, Message


def talk(*texts, system=None):
    """Messages from texts in turn, the user first."""
    head = () if system is None else (Message(role="system", text=system),)
    return (*head, *(Message(role=("user", "assistant")[i % 2], text=text) for i, text in enumerate(texts)))


def dialogue(*texts, **meta):
    return Conversation(id="test", messages=talk(*texts), meta=meta)
