"""What the rows of a batch have behind them: each its own keys and values, or prompts that several rows share."""

from collections.abc import Sequence
from typing import Protocol, cast, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache

from rewarden.rollout.bundles import Plan, bundles
from rewarden.rollout.cache import BlockLayer, select_rows
from rewarden.rollout.decoder import Decoder, prefill
from rewarden.rollout.rows import Rows
from rewarden.rollout.shared import SharedLayer, Step, attending


@runtime_checkable
class Past(Protocol):
    """The prompts of a batch after one pass through the model, and all that follows them.

    order: numbers of the rows of the batch, in the order in which they stand here. logits_BV: of the first new token, by that
    order. processed, prompt_tokens: positions computed for the prompts, and their tokens, both of each distinct prompt once.
    num_shared, num_copies: rows whose prompt lies in memory once for several; rows that hold a copy of another row's prompt.
    """

    order: Sequence[int]
    logits_BV: Tensor
    processed: int
    prompt_tokens: int
    num_shared: int
    num_copies: int

    def logits(self, rows: Rows) -> Float[Tensor, "B V"]:
        """Logits of the token after the one that each row feeds; takes that one in."""
        ...

    def select(self, index_b: Int[Tensor, " b"]) -> None:
        """Keep these rows, in rising order."""
        ...


class Separate:
    """Every row holds all of its past. Equal prompts are computed once, then copied."""

    def __init__(self, decoder: Decoder, prompts: Sequence[tuple[int, ...]], most_new: int) -> None:
        distinct = {prompt: index for index, prompt in enumerate(dict.fromkeys(prompts))}
        filled = prefill(decoder, list(distinct), most_new)
        self.order: Sequence[int] = range(len(prompts))
        self.logits_BV, self.processed = filled.logits_BV, filled.processed
        self.prompt_tokens = sum(map(len, distinct))
        self.num_shared, self.num_copies = 0, len(prompts) - len(distinct)
        self.cache = filled.cache
        self._decoder = decoder
        if self.num_copies:
            source_B = torch.tensor([distinct[prompt] for prompt in prompts], device=decoder.device)
            select_rows(self.cache, source_B)
            self.logits_BV = self.logits_BV[source_B]

    def logits(self, rows: Rows) -> Float[Tensor, "B V"]:
        """See `Past`."""
        return self._decoder.next_logits(rows, self.cache)

    def select(self, index_b: Int[Tensor, " b"]) -> None:
        """See `Past`."""
        select_rows(self.cache, index_b)


class Shared:
    """Rows with equal prompts share them; other rows of the batch hold all of their past, as in `Separate`."""

    def __init__(self, decoder: Decoder, prompts: Sequence[tuple[int, ...]], most_new: int, plan: Plan) -> None:
        shared = [prompt for prompt, _ in plan.shared]
        filled = prefill(decoder, shared, 0)
        alone = Separate(decoder, [prompts[row] for row in plan.alone], most_new) if plan.alone else None
        counts = [len(rows) for _, rows in plan.shared]
        first_BV = filled.logits_BV.repeat_interleave(torch.tensor(counts, device=decoder.device), dim=0)
        self.order: Sequence[int] = plan.order
        self.logits_BV = torch.cat([first_BV, alone.logits_BV]) if alone else first_BV
        self.processed = filled.processed + (alone.processed if alone else 0)
        self.prompt_tokens = sum(map(len, shared)) + (alone.prompt_tokens if alone else 0)
        self.num_shared, self.num_copies = sum(counts), alone.num_copies if alone else 0
        apart = alone.cache.layers if alone else [None] * len(filled.cache.layers)
        self._layers = [
            SharedLayer(cast(BlockLayer, layer), cast(BlockLayer | None, other), num_shared=self.num_shared, most_new=most_new)
            for layer, other in zip(filled.cache.layers, apart, strict=True)
        ]
        self._cache = Cache(layers=list(self._layers))
        self._decoder = decoder
        self._lengths_G = list(map(len, shared))
        self._prompt_S = np.repeat(np.arange(len(shared)), counts)
        self._bundles = bundles(self._lengths_G, counts, decoder.device)

    def logits(self, rows: Rows) -> Float[Tensor, "B V"]:
        """See `Past`."""
        layer = self._layers[0]
        allowed_BS = None
        if layer.alone is not None and rows.padded:
            allowed_BS = rows.mask_BS[layer.num_shared :, rows.width - layer.alone.length - 1 : rows.width]
        step = Step(layers=self._layers, bundles=self._bundles, allowed_BS=allowed_BS)
        with attending(self._decoder.base, step):
            return self._decoder.last_logits(rows.ids_BT, None, rows.position_BT, self._cache)

    def select(self, index_b: Int[Tensor, " b"]) -> None:
        """See `Past`."""
        num = len(self._prompt_S)
        kept = index_b.cpu().numpy()
        self._prompt_S = self._prompt_S[kept[kept < num]]
        shared_b, alone_b = index_b[: len(self._prompt_S)], index_b[len(self._prompt_S) :] - num
        for layer in self._layers:
            layer.select(shared_b, alone_b)
        counts = np.bincount(self._prompt_S, minlength=len(self._lengths_G)).tolist()
        self._bundles = bundles(self._lengths_G, counts, self._decoder.device)
