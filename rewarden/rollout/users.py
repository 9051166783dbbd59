"""Users that answer the assistant without a model: the scripted one of a world, and the recorded one of a data set."""

from typing import Protocol, runtime_checkable

from rewarden.errors import DataError
from rewarden.types import Conversation, Message


@runtime_checkable
class Replies(Protocol):
    """What a world offers its user."""

    def reply(self, dialogue: Conversation, seed: int) -> Message:
        """The user's next message: a pure function of the user's seed and the transcript."""
        ...


class WorldUser:
    """The scripted user of a world; satisfies `protocols.User`.

    Who the user is comes from `meta["user_seed"]` of the conversation, not from the seed of the play: two plays that branch
    from one dialogue meet the same person.
    """

    def __init__(self, world: Replies) -> None:
        self.world = world

    def reply(self, dialogue: Conversation, seed: int) -> Message | None:
        """The world's answer; DataError when the conversation does not say which user it has."""
        user_seed = dialogue.meta.get("user_seed")
        if not isinstance(user_seed, int):
            raise DataError(
                f"conversation {dialogue.id!r}: meta['user_seed'] is {user_seed!r}; a world's user needs the integer seed that "
                "its opening was made with"
            )
        return self.world.reply(dialogue, user_seed)


class RecordedUser:
    """Says what the user of the data set said next, whatever the assistant wrote (open loop; REFUEL's setting two).

    `meta["user_turns"]` holds the texts of all user turns of the recorded dialogue in order, those already in the prompt
    included. The user leaves after the last one.
    """

    def reply(self, dialogue: Conversation, seed: int) -> Message | None:
        """The next recorded turn, or None; DataError when the dialogue and its record disagree."""
        turns = dialogue.meta.get("user_turns")
        if turns is None or isinstance(turns, str):
            raise DataError(
                f"conversation {dialogue.id!r}: meta['user_turns'] is {turns!r}; give the list of all user texts of the "
                "recorded dialogue"
            )
        said = [message.text for message in dialogue.messages if message.role == "user"]
        if list(turns[: len(said)]) != said:
            raise DataError(
                f"conversation {dialogue.id!r}: its user turns are not the first {len(said)} of meta['user_turns']; the list "
                "must begin with the turns already in the prompt, word for word"
            )
        return Message(role="user", text=turns[len(said)]) if len(said) < len(turns) else None
