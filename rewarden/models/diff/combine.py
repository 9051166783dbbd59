"""The arithmetic of one tensor, a few rows at a time, with hashes of everything that passes."""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rewarden.models.diff.read import Checkpoint
from rewarden.models.diff.rules import Step

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes per entry -> the integer type that holds its bits."""


@dataclass(slots=True)
class Trace:
    """What was seen of one tensor: SHA-256 of tuned, diff and base values (row-major, little-endian), and counts.

    `total` is the sum of the tuned tensor's finite entries in float64; `inexact` counts entries that the rule does not give
    back bit for bit; `overflow` counts finite entries that the output type cannot hold; `not_finite` counts NaN and inf.
    """

    tuned: Any = field(default_factory=hashlib.sha256)
    diff: Any = field(default_factory=hashlib.sha256)
    base: Any = field(default_factory=hashlib.sha256)
    total: float = 0.0
    inexact: int = 0
    overflow: int = 0
    not_finite: int = 0

    def see(self, tuned: Tensor, diff: Tensor) -> None:
        """Add some rows."""
        self.tuned.update(raw_bytes(tuned))
        self.diff.update(raw_bytes(diff))
        values = tuned.double()
        total = float(values.sum())
        if not math.isfinite(total):
            finite = values.isfinite()
            self.not_finite += int((~finite).sum())
            total = float(values.where(finite, 0.0).sum())
        self.total += total


def raw_bytes(tensor: Tensor) -> memoryview:
    """A tensor's bytes, row-major, without a copy where it is contiguous."""
    values: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(values)


def diff_dtype(step: Step, tuned: torch.dtype, base: torch.dtype | None) -> torch.dtype:
    """The type in which a diff stores a tensor: bits as integers, so that nobody takes them for weights; deltas in float32."""
    if step.mode == "xor":
        return BITS[tuned.itemsize]
    return wide(tuned, base) if step.mode == "delta" and base is not None else tuned


def wide(tuned: torch.dtype, base: torch.dtype) -> torch.dtype:
    """The type in which deltas are computed: float32, or float64 where one side is."""
    return torch.promote_types(torch.promote_types(tuned, base), torch.float32)


def make_rows(step: Step, tuned: Checkpoint, base: Checkpoint, trace: Trace) -> Iterator[Tensor]:
    """The rows of the diff's tensor."""
    entry = tuned.entries[step.key]
    extra = added(step, base)
    for start, stop in entry.ranges():
        own = tuned.rows(step.key, start, stop)
        diff, back = own, own
        if step.mode != "full":
            other = _base_rows(step, base, start, stop, extra, trace)
            bits = BITS[own.dtype.itemsize]
            if step.mode == "xor":
                diff = own.view(bits) ^ other.to(own.dtype).view(bits)
            else:
                kind = wide(own.dtype, other.dtype)
                diff = own.to(kind) - other.to(kind)
                back = (diff + other.to(kind)).to(own.dtype)
                trace.inexact += int((back.view(bits) != own.view(bits)).sum())
        trace.see(back, diff)
        yield diff


def recover_rows(
    step: Step, diff: Checkpoint, base: Checkpoint, *, tuned: torch.dtype | None, output: torch.dtype, trace: Trace
) -> Iterator[Tensor]:
    """The rows of the tuned tensor as `output`. `tuned` is its own type by the manifest; None leaves a delta unrounded."""
    entry = diff.entries[step.key]
    extra = added(step, base)
    for start, stop in entry.ranges():
        own = diff.rows(step.key, start, stop)
        back = own
        if step.mode != "full":
            other = _base_rows(step, base, start, stop, extra, trace)
            if step.mode == "xor":
                assert tuned is not None
                back = (own ^ other.to(tuned).view(own.dtype)).view(tuned)
            else:
                kind = wide(own.dtype, other.dtype)
                back = own.to(kind) + other.to(kind)
                back = back if tuned is None else back.to(tuned)
        trace.see(back, own)
        result = back.to(output)
        if output != back.dtype and output.is_floating_point:
            trace.overflow += int((back.isfinite() & ~result.isfinite()).sum())
        yield result


def added(step: Step, base: Checkpoint) -> Tensor | None:
    """The row by which AlpacaFarm's rule extends a base: the mean of its rows (taken in float64, rounded to float32)."""
    if not step.added_rows or step.base_key is None:
        return None
    entry = base.entries[step.base_key]
    total = sum(base.rows(step.base_key, start, stop).double().sum(0) for start, stop in entry.ranges())
    assert isinstance(total, Tensor)
    return (total / entry.rows).float()[None]


def _base_rows(step: Step, base: Checkpoint, start: int, stop: int, extra: Tensor | None, trace: Trace) -> Tensor:
    assert step.base_key is not None
    there = base.entries[step.base_key].rows
    own = base.rows(step.base_key, start, min(stop, there))
    trace.base.update(raw_bytes(own))
    if extra is None or stop <= there:
        return own
    new = extra.expand(stop - max(start, there), *extra.shape[1:])
    return torch.cat([own.to(torch.promote_types(own.dtype, torch.float32)), new])
