"""Users: whoever answers the assistant, built from a config of `USERS` or of your own.

scripted  the user of a built-in world
recorded  the user turns of a data set, whatever the assistant said
model     a language model on this machine, with REFUEL's prompt
endpoint  a language model behind an OpenAI-compatible chat endpoint, with the same prompt
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from pydantic import model_validator

from rewarden.errors import ConfigError, DataError
from rewarden.protocols import User
from rewarden.rollout.endpoint_user import EndpointSimulator
from rewarden.rollout.hf import HFSampler
from rewarden.rollout.model_user import ModelSimulator
from rewarden.spec import Spec, parse
from rewarden.types import Conversation, Message
from rewarden.worlds import WORLDS


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


class ScriptedUser(Spec):
    """The scripted user of a built-in world."""

    world: str | dict[str, Any] = "trip_desk"
    """The world: its kind, or a mapping such as {kind: trip_desk, trap: true}."""

    @model_validator(mode="after")
    def _world_is_known(self) -> "ScriptedUser":
        self.parsed()
        return self

    def parsed(self) -> Spec:
        """The world's own config."""
        raw: Mapping[str, Any] = {"kind": self.world} if isinstance(self.world, str) else self.world
        return parse(WORLDS, raw, "user: world")

    def build(self, *, policy: HFSampler | None = None, folder: Path | None = None) -> WorldUser:
        """The user of this world."""
        return WorldUser(self.parsed())  # type: ignore[arg-type]


class RecordedTurns(Spec):
    """The user turns of the data set, in their order (open loop)."""

    def build(self, *, policy: HFSampler | None = None, folder: Path | None = None) -> RecordedUser:
        """The user."""
        return RecordedUser()


USERS: Mapping[str, type[Spec]] = {
    "scripted": ScriptedUser,
    "recorded": RecordedTurns,
    "model": ModelSimulator,
    "endpoint": EndpointSimulator,
}
"""The users by kind; `kind: "my_file.py:MyUser"` names a Spec of your own with `build(policy=..., folder=...)`."""


@runtime_checkable
class UserSpec(Protocol):
    """A config that builds a user."""

    def build(self, *, policy: HFSampler | None = None, folder: Path | None = None) -> User:
        """The user. `policy` is the sampler it will talk to, `folder` the place for files it wants to keep."""
        ...


def parse_user(raw: Mapping[str, Any] | Spec, where: str = "user") -> UserSpec:
    """The config that {kind: ..., **fields} describes; nothing is loaded or sent yet.

    Errors: ConfigError for an unknown kind or key, or for a Spec that builds nothing.
    """
    spec = parse(USERS, raw, where)
    if not isinstance(spec, UserSpec):
        raise ConfigError(f"{where}: {type(spec).__name__} builds no user; one of {', '.join(sorted(USERS))} does")
    return spec


def build_user(
    raw: Mapping[str, Any] | Spec, where: str = "user", *, policy: HFSampler | None = None, folder: Path | None = None
) -> User:
    """The user that {kind: ..., **fields} describes, ready to answer. Errors: as `parse_user` and the kind's own `build`."""
    user = parse_user(raw, where).build(policy=policy, folder=folder)
    if not isinstance(user, User):
        raise ConfigError(f"{where}: build() returned {type(user).__name__}; a user has reply(dialogue, seed)")
    return user
