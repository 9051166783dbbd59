"""An endless, seeded, resumable order of rows."""

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

from rewarden.errors import DataError, ResumeError


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """A place in a stream: `index` rows of epoch `epoch` are already taken. Two integers, so any format can save it."""

    epoch: int = 0
    index: int = 0


class Stream:
    """Row numbers 0..num_rows-1 in a new order each epoch.

    The order of an epoch depends on (seed, epoch, num_rows) alone, so a saved cursor continues exactly where it stood, and
    how many rows are taken at a time does not matter. Every row comes once an epoch; a take that reaches the end of an epoch
    goes on in the next, so no row is ever dropped.

    Errors: DataError for no rows; ResumeError for a cursor outside the rows (the data changed since it was saved).
    """

    def __init__(self, num_rows: int, *, seed: int) -> None:
        if num_rows < 1:
            raise DataError(
                f"a stream over {num_rows} rows; it needs at least one, so check the data and what was dropped from it"
            )
        self.num_rows = num_rows
        self.seed = seed
        self._epoch: int | None = None
        self._order: list[int] = []

    def take(self, cursor: Cursor, n: int) -> tuple[list[int], Cursor]:
        """The next `n` row numbers from `cursor` on, and the cursor after them."""
        if n < 0:
            raise DataError(f"cannot take {n} rows; take 0 or more")
        if cursor.epoch < 0 or not 0 <= cursor.index <= self.num_rows:
            raise ResumeError(
                f"cursor (epoch {cursor.epoch}, index {cursor.index}) does not lie in {self.num_rows} rows; "
                "the data changed since it was saved: restore them, or start a new run"
            )
        epoch, index = cursor.epoch, cursor.index
        rows: list[int] = []
        while len(rows) < n:
            if index == self.num_rows:
                epoch, index = epoch + 1, 0
            part = self._ordered(epoch)[index : index + n - len(rows)]
            rows += part
            index += len(part)
        return rows, Cursor(epoch=epoch, index=index)

    def order(self, epoch: int) -> list[int]:
        """The row numbers of one epoch in the order they come."""
        return list(self._ordered(epoch))

    def _ordered(self, epoch: int) -> list[int]:
        if epoch != self._epoch:
            digest = hashlib.blake2b(f"{self.seed}/{epoch}".encode(), digest_size=8).digest()
            order = list(range(self.num_rows))
            random.Random(int.from_bytes(digest, "big")).shuffle(order)
            self._epoch, self._order = epoch, order
        return self._order

    def epoch_batches(self, epoch: int, size: int) -> Iterator[list[int]]:
        """One epoch in batches of `size`; the last may be smaller."""
        if size < 1:
            raise DataError(f"batches of {size} rows; use 1 or more")
        order = self._ordered(epoch)
        for start in range(0, len(order), size):
            yield order[start : start + size]
