"""Comparisons as two token rows each, of bounded length; what is dropped is counted."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rewarden.errors import DataError
from rewarden.text.collate import collate
from rewarden.text.render import Template
from rewarden.types import Comparison, Conversation, TokenBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPair:
    """One comparison as ids; lengths are of the last assistant message, in tokens.

    chosen_answer: where the assistant's turns after the prompt stand in `chosen_ids`, as [start, stop).
    """

    id: str
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]
    chosen_length: int
    rejected_length: int
    preference: float
    margin: float
    chosen_answer: tuple[tuple[int, int], ...] = ()


def encode_pairs(
    comparisons: Sequence[Comparison], template: Template, max_length: int | None, overlength: Literal["drop", "error"]
) -> tuple[tuple[EncodedPair, ...], dict[str, int]]:
    """Render both sides; a pair is kept when both fit. Returns the pairs and what was dropped, by reason."""
    pairs: list[EncodedPair] = []
    dropped: Counter[str] = Counter()
    for row in comparisons:
        ids: list[tuple[int, ...]] = []
        answer: list[int] = []
        spoken: list[tuple[tuple[int, int], ...]] = []
        for side in (row.chosen, row.rejected):
            rollout = template.render(Conversation(id=row.id, messages=(*row.prompt, *side), meta=row.meta))
            spans = [span for span in rollout.spans if span.role == "assistant"]
            ids.append(rollout.token_ids)
            answer.append(spans[-1].stop - spans[-1].start if spans else 0)
            turns = sum(message.role == "assistant" for message in side)
            spoken.append(tuple((span.start, span.stop) for span in spans[len(spans) - turns :]))
        if max_length is not None and max(len(side) for side in ids) > max_length:
            if overlength == "error":
                where = row.meta.get("where", row.id)
                raise DataError(
                    f"{where}: {max(map(len, ids))} tokens on one side; at most max_length={max_length}. Raise it, or use "
                    "overlength: drop"
                )
            dropped[f"longer than {max_length} tokens dropped"] += 1
            continue
        if ids[0] == ids[1]:
            dropped["same tokens on both sides dropped"] += 1
            continue
        pairs.append(
            EncodedPair(
                id=row.id,
                chosen_ids=ids[0],
                rejected_ids=ids[1],
                chosen_length=answer[0],
                rejected_length=answer[1],
                preference=row.preference,
                margin=row.margin or 0.0,
                chosen_answer=spoken[0],
            )
        )
    return tuple(pairs), dict(dropped)


def collate_pairs(pairs: Sequence[EncodedPair]) -> TokenBatch:
    """2B rows, the chosen sides first."""
    return collate([pair.chosen_ids for pair in pairs] + [pair.rejected_ids for pair in pairs])
