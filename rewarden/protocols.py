"""What the layers above may ask of the layers below, as Protocols: no base class to inherit."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from rewarden.types import Conversation, Message, Rollout, Score


@runtime_checkable
class Sampler(Protocol):
    """Writes the next assistant turn of conversations."""

    def sample(self, rollouts: Sequence[Rollout], *, seeds: Sequence[int], policy_version: int = 0) -> list[Rollout]:
        """Each open rollout with one more sampled assistant turn, in the order given."""
        ...


@runtime_checkable
class User(Protocol):
    """Answers the assistant, as a person would."""

    def reply(self, dialogue: Conversation, seed: int) -> Message | None:
        """The user's next message to a dialogue that ends with the assistant, or None to leave."""
        ...


@runtime_checkable
class Player(Protocol):
    """Plays whole conversations: a sampler as the assistant, a user as the user."""

    def play(self, rollouts: Sequence[Rollout], *, turns: Sequence[int], seeds: Sequence[int]) -> list[Rollout]:
        """From each open rollout through assistant turn `turns[i]` (0-based), in the order given."""
        ...


@runtime_checkable
class Scorer(Protocol):
    """Scores conversations that end with the assistant, each as given: the caller passes the prefix it wants scored."""

    def score(self, conversations: Sequence[Conversation]) -> list[Score]:
        """One score per conversation, in order."""
        ...


@runtime_checkable
class Judge(Protocol):
    """Compares two conversations that share a prompt."""

    def compare(self, first: Sequence[Conversation], second: Sequence[Conversation]) -> list[float]:
        """Probability that the first is better, per pair; 0.5 is a tie."""
        ...


@runtime_checkable
class Evaluator(Protocol):
    """Measures finished runs."""

    def evaluate(self, folder: Path) -> Mapping[str, Any]:
        """Numbers by name; tables and files go into `folder`."""
        ...


@runtime_checkable
class Part(Protocol):
    """Something a checkpoint holds: it writes itself into a folder of its own and restores itself in place."""

    def save(self, folder: Path) -> None:
        """Write everything needed; the folder exists and is empty."""
        ...

    def load(self, folder: Path) -> None:
        """Restore exactly what `save` wrote."""
        ...
