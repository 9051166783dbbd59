"""What loading returns: the rows that are used, and the count of everything else."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from rewarden.types import Comparison, Conversation, Message

NAMED = 3
"""Places kept for each reason; the count says how many there are."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Labeled:
    """One answer to a prompt with a thumb: `label` True is good (TRL's unpaired preference)."""

    id: str
    prompt: tuple[Message, ...]
    completion: tuple[Message, ...]
    label: bool
    meta: Mapping[str, Any] = field(default_factory=dict)


Record = Conversation | Comparison | Labeled


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded(Generic[T]):
    """Rows in file order, and what happened to the others.

    rows: the usable records. dropped: reason -> count, one reason for each record that is not in `rows`.
    noticed: irregularity -> count of records that show it, kept or dropped; one record may show several.
    total: records looked at, so `total == len(rows) + sum(dropped.values())`. One row of a file is one record, except in
    formats where a row holds several (a ranked tree, a list of outputs). places: reason -> where the first few dropped rows
    stand.
    """

    rows: tuple[T, ...]
    dropped: Mapping[str, int]
    noticed: Mapping[str, int]
    total: int
    places: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def summary(self) -> str:
        """One line: "6168 of 6240 rows; dropped: 36 chosen_equals_rejected, ...; noticed: 76 inline_role_marker"."""
        parts = [f"{len(self.rows)} of {self.total} rows"]
        for title, counts in (("dropped", self.dropped), ("noticed", self.noticed)):
            if counts:
                parts.append(
                    f"{title}: " + ", ".join(f"{n} {why}" for why, n in sorted(counts.items(), key=lambda c: (-c[1], c[0])))
                )
        return "; ".join(parts)

    def where(self) -> str:
        """Where the first dropped rows of each reason stand: "prompts_differ: a.jsonl:3, a.jsonl:9"; "" without any."""
        return "; ".join(f"{why}: {', '.join(places)}" for why, places in sorted(self.places.items()))


def opening(record: Record) -> tuple[Message, ...]:
    """The messages a record begins with: a conversation's own, or the prompt of a pair or a labeled answer."""
    return record.messages if isinstance(record, Conversation) else record.prompt
