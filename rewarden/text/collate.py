"""Rows of ids as one right-padded batch, and masks from spans. Nothing here looks at a token's value: pad may equal eos."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool
from torch import Tensor

from rewarden.errors import DataError
from rewarden.types import Span, SpanRole, TokenBatch

# Filler beyond the end of a row. Any id would do, because the mask, not the id, says what is real.
FILLER_ID = 0


def collate(rows: Sequence[Sequence[int]]) -> TokenBatch:
    """Rows side by side, filled up on the right to the longest; `mask_BT` is True on real tokens. No rows: shape [0, 0]."""
    lengths = [len(row) for row in rows]
    ids_BT = torch.full((len(rows), max(lengths, default=0)), FILLER_ID, dtype=torch.long)
    for index, row in enumerate(rows):
        ids_BT[index, : len(row)] = torch.as_tensor(row, dtype=torch.long)
    length_B = torch.tensor(lengths, dtype=torch.long)
    mask_BT = torch.arange(ids_BT.shape[1]).unsqueeze(0) < length_B.unsqueeze(1)
    return TokenBatch(ids_BT=ids_BT, mask_BT=mask_BT, length_B=length_B)


def role_mask(
    spans: Sequence[Sequence[Span]],
    length: int,
    *,
    role: SpanRole = "assistant",
    turn: int | None = None,
    sampled: bool | None = None,
) -> Bool[Tensor, "B T"]:
    """True on the tokens of spans of this role.

    `turn` keeps one exchange only. `sampled` True keeps what a policy sampled (`ended` is known), False what was given.

    Errors: DataError for a span that reaches beyond `length`.
    """
    mask_BT = torch.zeros(len(spans), length, dtype=torch.bool)
    for index, row in enumerate(spans):
        for span in row:
            if span.stop > length:
                raise DataError(
                    f"row {index}: span [{span.start}, {span.stop}) reaches beyond the {length} tokens of the batch; "
                    "cut the spans where the ids were cut"
                )
            fits = turn is None or span.turn == turn
            wanted = sampled is None or sampled == (span.ended is not None)
            if span.role == role and fits and wanted:
                mask_BT[index, span.start : span.stop] = True
    return mask_BT
