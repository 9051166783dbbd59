"""The forward pass of a causal language model with a cache, and the filling of that cache with prompts."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from peft import PeftModel
from torch import Tensor, nn
from transformers import Cache

from rewarden.errors import ConfigError
from rewarden.models.source import num_positions
from rewarden.rollout.cache import open_cache, pads_safely, prompt_cache
from rewarden.rollout.rows import Rows

PREFILL_POSITIONS = {"cpu": 1024, "cuda": 16384}
"""Most positions of one prefill, by device: parts have little padding, small masks, and activations that fit a CPU's caches."""


class Decoder:
    """The forward pass of a causal LM, called by the names its own signature uses."""

    def __init__(self, model: nn.Module) -> None:
        for config in getattr(model, "peft_config", {}).values():
            if getattr(config, "is_prompt_learning", False):
                raise ConfigError(
                    f"policy has a {config.peft_type} adapter, which adds virtual tokens; sampling takes adapters inside "
                    "layers (LoRA and the like): train one of those"
                )
        # The layers of a PEFT model are inside the base model, whose signature, unlike the wrapper's, says what it takes.
        base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
        names = inspect.signature(base.forward).parameters
        cache_name = next((name for name in ("cache", "past_key_values") if name in names), None)
        if cache_name is None or base.config.is_encoder_decoder:
            raise ConfigError(
                f"{type(base).__name__} cannot be sampled: it is no decoder-only language model with a cache; load a causal LM"
            )
        self.base = base
        self.config = base.config
        self.device = next(base.parameters()).device
        self._cache_name = cache_name
        self.takes_positions = "position_ids" in names
        self._keep_last = {"logits_to_keep": 1} if "logits_to_keep" in names else {}
        cache, self.cache_kind = open_cache(base.config, most=1)
        self.pads_safely = self.takes_positions and pads_safely(cache)
        self.num_positions = num_positions(base.config)

    def last_logits(
        self, ids_BT: Int[Tensor, "B T"], mask_BS: Bool[Tensor, "B S"] | None, position_BT: Int[Tensor, "B T"], cache: Cache
    ) -> Float[Tensor, "B V"]:
        """Logits of the token after the last; the cache takes in all T. A mask is needed only where there is padding."""
        mask = None if mask_BS is None else mask_BS.long()
        inputs: dict[str, Any] = {"input_ids": ids_BT, "attention_mask": mask, self._cache_name: cache}
        if self.takes_positions:
            inputs["position_ids"] = position_BT
        return self.base(**inputs, **self._keep_last, use_cache=True).logits[:, -1].float()

    def next_logits(self, rows: Rows, cache: Cache) -> Float[Tensor, "B V"]:
        """Logits of the token after those that each row has yet to feed, where the cache holds each row on its own."""
        mask_BS = rows.mask_BS[:, : rows.width] if rows.padded else None
        return self.last_logits(rows.ids_BT, mask_BS, rows.position_BT, cache)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout off inside; afterwards every module is in the mode it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """A cache of prompts, the logits of the first new token of each, and how many positions were computed for it."""

    cache: Cache
    logits_BV: Tensor
    processed: int


def prefill(decoder: Decoder, prompts: Sequence[tuple[int, ...]], most_new: int) -> Filled:
    """Each prompt through the model once. `most_new`: tokens that the cache will have to take in afterwards."""
    width, num_rows = max(map(len, prompts)), len(prompts)
    cache, kind = open_cache(decoder.config, most=width + most_new)
    logits, processed, first_row = [], 0, 0
    # Only block caches can be filled part by part.
    for part in _parts(prompts, decoder.device) if kind == "block" else [prompts]:
        rows = Rows(part, [most_new] * len(part), decoder.device)
        filled = prompt_cache(cache, first_row=first_row, num_rows=num_rows, width=width) if kind == "block" else cache
        logits.append(decoder.next_logits(rows, filled))
        processed += len(rows) * rows.width
        first_row += len(rows)
    return Filled(cache=cache, logits_BV=torch.cat(logits), processed=processed)


def _parts(prompts: Sequence[tuple[int, ...]], device: torch.device) -> Iterator[Sequence[tuple[int, ...]]]:
    """Runs of neighbors of at most PREFILL_POSITIONS padded positions, but at least one prompt."""
    start, widest, bound = 0, 0, PREFILL_POSITIONS.get(device.type, 4096)
    for stop, prompt in enumerate(prompts):
        widest = max(widest, len(prompt))
        if stop > start and widest * (stop + 1 - start) > bound:
            yield prompts[start:stop]
            start, widest = stop, len(prompt)
    yield prompts[start:]
