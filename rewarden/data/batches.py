"""Which rows share an optimizer step: a function of row ids and lengths, never of where a run was stopped."""

import random
from collections.abc import Sequence


def length_batches(lengths: Sequence[int], *, batch_size: int, window: int, seed: int, epoch: int) -> list[list[int]]:
    """One epoch of row indices in batches of similar length.

    Rows are shuffled; inside windows of `window` batches they are sorted by length, cut into batches, and the batches of the
    window shuffled again. Every row appears once; the last batch may be smaller. window=1 is a plain shuffle.

    lengths: tokens per row. Deterministic in (seed, epoch, lengths).
    """
    rng = random.Random(f"{seed}/{epoch}")
    order = list(range(len(lengths)))
    rng.shuffle(order)
    batches: list[list[int]] = []
    for start in range(0, len(order), batch_size * window):
        part = order[start : start + batch_size * window]
        if window > 1:
            part.sort(key=lambda row: lengths[row])
        cut = [part[i : i + batch_size] for i in range(0, len(part), batch_size)]
        rng.shuffle(cut)
        batches += cut
    return batches
