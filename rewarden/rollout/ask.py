"""Asking the user: one answer per dialogue, whatever kind of user it is and whatever goes wrong with one of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from rewarden.errors import DataError, UserError
from rewarden.protocols import User
from rewarden.types import Conversation, Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a user did: said something (`message`), left (neither field), or could not answer (`failed` says why, in a word)."""

    message: Message | None = None
    failed: str = ""


@runtime_checkable
class ManyUsers(Protocol):
    """A user that answers many dialogues at once, because a server or a batch makes that faster."""

    def replies(self, dialogues: Sequence[Conversation], seeds: Sequence[int]) -> list[Answer]:
        """One answer per dialogue, in order; a failure is an answer too."""
        ...


def ask(user: User, dialogues: Sequence[Conversation], seeds: Sequence[int]) -> list[Answer]:
    """The user's answer to each dialogue, in order: by `replies` where the user has it, else by `reply`, one at a time.

    A UserError and a message without text (which says nothing to go on from) become answers that `failed`; any other error is
    nobody's to swallow. Errors: DataError for a message that is not the user's.
    """
    if isinstance(user, ManyUsers):
        answers = user.replies(dialogues, seeds)
    else:
        answers = [_one(user, dialogue, seed) for dialogue, seed in zip(dialogues, seeds, strict=True)]
    if len(answers) != len(dialogues):
        raise DataError(f"{type(user).__name__} gave {len(answers)} answers to {len(dialogues)} dialogues; give one for each")
    return [_checked(answer, dialogue, user) for answer, dialogue in zip(answers, dialogues, strict=True)]


def _one(user: User, dialogue: Conversation, seed: int) -> Answer:
    try:
        return Answer(message=user.reply(dialogue, seed))
    except UserError as error:
        return Answer(failed=error.status)


def _checked(answer: Answer, dialogue: Conversation, user: User) -> Answer:
    if answer.message is None:
        return answer
    if answer.message.role != "user":
        raise DataError(
            f"conversation {dialogue.id!r}: {type(user).__name__} answered with role {answer.message.role!r}; a user's message "
            "has role 'user'"
        )
    return answer if answer.message.text.strip() else Answer(failed="empty")
