"""The gold reward of a built-in world as a scorer: the known truth, for study and for upper bounds."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from pydantic import model_validator

from rewarden.errors import DataError
from rewarden.scoring.answer import ok, split_answer, where_of
from rewarden.spec import Spec, parse
from rewarden.types import Conversation, Message, Score
from rewarden.worlds import WORLDS


@runtime_checkable
class World(Protocol):
    """What the scorer asks of a world."""

    def gold(
        self, messages: Sequence[Message], through_turn: int | None = None, truncated: Collection[int] = frozenset()
    ) -> float:
        """The gold reward of the dialogue."""
        ...


class GoldReward(Spec):
    """The gold reward of a built-in world, computed from the transcript."""

    world: str | dict[str, Any] = "trip_desk"
    """The world: its kind, or a mapping such as {kind: trip_desk, trap: true}."""

    @model_validator(mode="after")
    def _world_is_known(self) -> "GoldReward":
        self.parsed()
        return self

    def parsed(self) -> Spec:
        """The world's own config."""
        raw: Mapping[str, Any] = {"kind": self.world} if isinstance(self.world, str) else self.world
        return parse(WORLDS, raw, "gold: world")

    def build(self) -> "GoldScorer":
        """A scorer with this world."""
        return GoldScorer(self.parsed())  # type: ignore[arg-type]


class GoldScorer:
    """Gold of each conversation as given.

    `conversation.meta["truncated"]` holds the assistant turns (from 0) that ended at the token limit.
    """

    def __init__(self, world: World) -> None:
        self.world = world

    def score(self, conversations: Sequence[Conversation]) -> list[Score]:
        """One score per conversation: the gold reward through its last assistant turn."""
        return [self._score(row) for row in conversations]

    def _score(self, row: Conversation) -> Score:
        split_answer(row)
        try:
            value = self.world.gold(row.messages, truncated=frozenset(row.meta.get("truncated", ())))
        except DataError as error:
            raise DataError(f"{where_of(row)}: {error}") from error
        return ok(value, row, "gold")
