"""Where the messages of a conversation lie in the one string that is tokenised, and which conversations can be laid out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from rewarden.errors import ConfigError, DataError
from rewarden.types import Conversation, Message


class UnusableTemplate(ConfigError):
    """A template in which nothing can be trained or sampled; `reason` is one word for why."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Characters [start, stop) of a layout's text hold the content of message number `message`.

    `seam` is where the generation prompt of an assistant message ends. It lies before `start` when the template puts
    whitespace between the two that the policy has to write itself (" Hello" after "[/INST]"); elsewhere it equals `start`.
    """

    message: int
    start: int
    stop: int
    seam: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The whole text of a conversation and the regions of its contents, in order and apart from each other."""

    text: str
    regions: tuple[Region, ...]

    def region(self, message: int) -> Region:
        """The (last) region of a message."""
        return next(region for region in reversed(self.regions) if region.message == message)


@runtime_checkable
class Format(Protocol):
    """A way to write a conversation as one string. `source` is what defines it; `adds_bos` asks for one BOS id in front."""

    name: str
    source: str
    adds_bos: bool
    many_turns: bool

    def lay_out(self, conversation: Conversation, *, generation: bool) -> Layout:
        """The text of the conversation, with the generation prompt at the end or not. Errors: DataError."""
        ...


def place(conversation: Conversation) -> str:
    """What an error calls this conversation: its file and line when known, else its id."""
    return str(conversation.meta.get("where", f"conversation {conversation.id!r}"))


def check_roles(conversation: Conversation) -> None:
    """Refuse anything but an optional system message, then user and assistant in turn, the user first.

    Errors: DataError naming the message that breaks the order.
    """
    messages = conversation.messages
    if not messages:
        raise DataError(f"{place(conversation)}: the conversation has no messages; it needs at least one")
    offset = 1 if messages[0].role == "system" else 0
    for number, message in enumerate(messages[offset:]):
        expected = "assistant" if number % 2 else "user"
        if message.role != expected:
            raise DataError(
                f"{place(conversation)}: message {number + offset} has role {message.role!r} where {expected!r} is due; "
                "allowed is an optional system message, then user and assistant in turn. Join or drop messages of the same role"
            )


def turns_of(messages: Sequence[Message]) -> list[int]:
    """The exchange each message belongs to, from 0; a system message belongs to the first."""
    turns, users = [], 0
    for message in messages:
        users += message.role == "user"
        turns.append(max(users - 1, 0))
    return turns
