"""Which rows of a round each rank holds, and minibatches that are the same rows for any number of ranks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from rewarden.runtime.ranks import Ranks
from rewarden.runtime.seed import generator


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Row i of this rank is row `numbers[i]` of the `total` rows that all ranks hold together."""

    numbers: tuple[int, ...]
    total: int


def held(places: Sequence[int], ranks: Ranks) -> Held:
    """Number the rows of all ranks by their `places`, which are distinct but may have gaps (rows that were left out)."""
    everywhere = sorted(place for part in ranks.gather_objects(list(places)) for place in part)
    number = {place: index for index, place in enumerate(everywhere)}
    return Held(numbers=tuple(number[place] for place in places), total=len(everywhere))


def shuffled_parts(rows: Held, count: int, seed: int) -> Iterator[Int[Tensor, " b"]]:
    """A fresh shuffle of the rows of all ranks, cut into `count` near-equal parts; of each, this rank's rows by index.

    A rank may hold none of a part: `update` sums over ranks, so the step is the same.
    """
    mine = {number: index for index, number in enumerate(rows.numbers)}
    for part in torch.randperm(rows.total, generator=generator(seed)).tensor_split(count):
        yield torch.tensor([mine[number] for number in part.tolist() if number in mine], dtype=torch.long)
