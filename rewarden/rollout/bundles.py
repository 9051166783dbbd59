"""Which rows share a prompt, and how the rows of several prompts are put into one product."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

MOST_WASTE = {"cpu": 1.25, "cuda": 4.0}
"""Prompts of unequal length or number of rows share a product while it computes at most this many times what they need. A GPU
spends more on starting a product than on what it computes in vain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How the rows of one batch hold their prompts.

    shared: each prompt that several rows have, with those rows. alone: all other rows.
    """

    shared: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    alone: tuple[int, ...]

    @property
    def order(self) -> tuple[int, ...]:
        """Row numbers: those of the first shared prompt, of the second, ..., then the others."""
        return (*(row for _, rows in self.shared for row in rows), *self.alone)


def plan(prompts: Sequence[tuple[int, ...]], at_least: int) -> Plan:
    """Rows of prompts that `at_least` rows have share them; prompts stand in the order in which they come first."""
    rows_of: dict[tuple[int, ...], list[int]] = {}
    for row, prompt in enumerate(prompts):
        rows_of.setdefault(prompt, []).append(row)
    shared = tuple((prompt, tuple(rows)) for prompt, rows in rows_of.items() if len(rows) >= at_least)
    alone = tuple(row for row, prompt in enumerate(prompts) if len(rows_of[prompt]) < at_least)
    return Plan(shared=shared, alone=alone)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Neighboring prompts whose rows meet them in one product, every prompt with the same number of slots for rows.

    prompts, rows: where they stand, among the prompts and among the rows that share. length: of the longest of these prompts.
    row_of_slot, slot_of_row: None when every slot has its row; else a slot without one repeats another row.
    hidden_G11P: padding in front of the shorter prompts, None when there is none.
    """

    prompts: slice
    rows: slice
    num_slots: int
    length: int
    row_of_slot: Tensor | None
    slot_of_row: Tensor | None
    hidden_G11P: Tensor | None


def bundles(lengths_G: Sequence[int], counts_G: Sequence[int], device: torch.device) -> tuple[Bundle, ...]:
    """Neighbors put together as long as no more than MOST_WASTE is computed in vain; prompts without rows are left out.

    lengths_G: tokens of each prompt; counts_G: rows that it has at present. Rows stand in the order of their prompts.
    """
    most, out, first = MOST_WASTE.get(device.type, 2.0), [], 0
    firsts = [0, *np.cumsum(counts_G).tolist()]
    while first < len(counts_G):
        last = first
        while last < len(counts_G) and _waste(lengths_G[first : last + 1], counts_G[first : last + 1]) <= most:
            last += 1
        if last > first:
            rows = slice(firsts[first], firsts[last])
            out.append(_bundle(slice(first, last), rows, lengths_G[first:last], counts_G[first:last], device))
        first = max(last, first + 1)
    return tuple(out)


def _waste(lengths: Sequence[int], counts: Sequence[int]) -> float:
    if not all(counts):
        return float("inf")
    needed = sum(length * count for length, count in zip(lengths, counts, strict=True))
    return len(counts) * max(lengths) * max(counts) / needed


def _bundle(prompts: slice, rows: slice, lengths: Sequence[int], counts: Sequence[int], device: torch.device) -> Bundle:
    num, length = max(counts), max(lengths)
    row_of_slot = slot_of_row = hidden = None
    if min(counts) < num:
        slot, firsts = np.arange(num), np.cumsum([0, *counts[:-1]])
        row_of_slot = torch.from_numpy(
            np.concatenate([first + np.minimum(slot, count - 1) for first, count in zip(firsts, counts, strict=True)])
        ).to(device)
        slot_of_row = torch.from_numpy(np.concatenate([i * num + slot[:count] for i, count in enumerate(counts)])).to(device)
    if min(lengths) < length:
        hidden = torch.arange(length, device=device) < length - torch.tensor(lengths, device=device)[:, None]
        hidden = hidden[:, None, None]
    return Bundle(
        prompts=prompts,
        rows=rows,
        num_slots=num,
        length=length,
        row_of_slot=row_of_slot,
        slot_of_row=slot_of_row,
        hidden_G11P=hidden,
    )
