"""How rows of unequal length share a forward pass: joined end to end in one row, or padded in groups of like length."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_TOKENS = {"cpu": 2048, "cuda": 16384}
"""Default bound on the tokens of one forward pass, by device; on a CPU 1024 to 4096 measured alike."""

FULL_ENOUGH = 512
"""A sub-batch of this many tokens keeps the processor busy; beyond it a row much shorter than the longest starts a new one."""


def token_chunks(lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Row numbers in groups of at most `max_tokens` tokens (a longer row goes alone), longest first; empty rows are left out.

    Rows of one length end up side by side, so that their attention is one product.
    """
    groups: list[list[int]] = []
    size = 0
    for row in _longest_first(lengths):
        if not groups or size + lengths[row] > max_tokens:
            groups.append([])
            size = 0
        groups[-1].append(row)
        size += lengths[row]
    return groups


def length_buckets(lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Row numbers in groups of at most `max_tokens` padded tokens (a longer row goes alone), longest first.

    Empty rows are left out. A group that keeps the processor busy takes no row shorter than 3/4 of its longest.
    """
    groups: list[list[int]] = []
    longest = 0
    for row in _longest_first(lengths):
        size = len(groups[-1]) * longest if groups else 0
        if not groups or size + longest > max_tokens or (size >= FULL_ENOUGH and 4 * lengths[row] < 3 * longest):
            groups.append([])
            longest = lengths[row]
        groups[-1].append(row)
    return groups


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted((row for row, length in enumerate(lengths) if length > 0), key=lambda row: (-lengths[row], row))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where the tokens of some rows of a batch stand in one forward pass [R, T].

    packed: R is 1, the rows follow one another; otherwise each has its own row, padded on the right. `row_b` are the rows,
    `lengths` how many of their tokens take part, `start_b` where each begins in the flattened pass. Token n of the N that
    take part is token `position_N[n]` of row `row_N[n]` of the batch, and stands at `flat_N[n]`.
    """

    packed: bool
    lengths: tuple[int, ...]
    row_b: Tensor
    start_b: Tensor
    row_N: Tensor
    position_N: Tensor
    flat_N: Tensor

    @classmethod
    def of(cls, rows: Sequence[int], lengths: Sequence[int], device: torch.device, *, packed: bool) -> "Layout":
        """The first `lengths[row]` tokens of each of these rows of a batch."""
        own = tuple(lengths[row] for row in rows)
        row_b, length_b = torch.tensor(rows), torch.tensor(own)
        ends_b = length_b.cumsum(0)
        start_b = ends_b - length_b if packed else torch.arange(len(rows)) * max(own)
        flat_N = torch.arange(sum(own))
        position_N = flat_N - (ends_b - length_b).repeat_interleave(length_b)
        if not packed:
            flat_N = position_N + start_b.repeat_interleave(length_b)
        row_N = row_b.repeat_interleave(length_b)
        tensors = {"row_b": row_b, "start_b": start_b, "row_N": row_N, "position_N": position_N, "flat_N": flat_N}
        return cls(packed=packed, lengths=own, **{name: tensor.to(device) for name, tensor in tensors.items()})

    def arrange(self, x_BT: Tensor) -> Tensor:
        """The entries of a batch tensor in the places of the pass: [R, T]."""
        return x_BT[self.row_N, self.position_N][None] if self.packed else x_BT[self.row_b, : max(self.lengths)]

    def join(self, rows: Sequence[Tensor]) -> Tensor:
        """One tensor [R, T, D] from a tensor [length, D] for each row."""
        return torch.cat(list(rows))[None] if self.packed else torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)

    @property
    def last_b(self) -> Tensor:
        """Where the last token of each row stands in the flattened pass."""
        return self.start_b + torch.tensor(self.lengths, device=self.start_b.device) - 1
