"""Writing completions with any Hugging Face decoder: prefill, then token by token with a cache from which rows leave."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from peft import PeftModel
from torch import Tensor, nn
from transformers import Cache

from rewarden.errors import ConfigError, RewardenError
from rewarden.rollout.cache import open_cache, pads_safely, prompt_cache, select_rows
from rewarden.rollout.choose import Choice, wide

KEEP_ROWS_ABOVE = 0.7
"""Finished rows leave when the share of live rows falls below this: copying the cache more often costs more than it saves."""

PREFILL_POSITIONS = {"cpu": 1024, "cuda": 16384}
"""Most positions of one prefill, by device: parts have little padding, small masks, and activations that fit a CPU's caches."""

Chooser = Callable[[Tensor, Tensor, Tensor], Choice]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What one row got: ids (the stop id included), log p under policy and behavior, and whether a stop id ended it."""

    token_ids: tuple[int, ...]
    logp: tuple[float, ...]
    behavior_logp: tuple[float, ...]
    stopped: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Token positions that went through the model in one batch, and how many of them served a row."""

    processed: int
    useful: int
    prompt_tokens: int
    cache_kind: str


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
        self._takes_positions = "position_ids" in names
        self._keep_last = {"logits_to_keep": 1} if "logits_to_keep" in names else {}
        self.pads_safely = self._takes_positions and pads_safely(open_cache(base.config, most=1)[0])
        text = base.config.get_text_config(decoder=True)
        self.num_positions: int | None = getattr(text, "max_position_embeddings", None)

    def last_logits(
        self, ids_BT: Int[Tensor, "B T"], mask_BS: Bool[Tensor, "B S"] | None, position_BT: Int[Tensor, "B T"], cache: Cache
    ) -> Float[Tensor, "B V"]:
        """Logits of the token after the last; the cache takes in all T. A mask is needed only where there is padding."""
        mask = None if mask_BS is None else mask_BS.long()
        inputs: dict[str, Any] = {"input_ids": ids_BT, "attention_mask": mask, self._cache_name: cache}
        if self._takes_positions:
            inputs["position_ids"] = position_BT
        return self.base(**inputs, **self._keep_last, use_cache=True).logits[:, -1].float()


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


class _Rows:
    """The rows still being decoded: which rows of the batch they are, and what the next forward of each needs."""

    def __init__(self, prompts: Sequence[tuple[int, ...]], limits: Sequence[int], device: torch.device) -> None:
        self.width, num = max(map(len, prompts)), len(prompts)
        self.padded = min(map(len, prompts)) < self.width
        ids_BT = np.zeros((num, self.width), dtype=np.int64)
        mask_BS = np.ones((num, self.width + max(limits)), dtype=bool)
        for row, prompt in enumerate(prompts):
            ids_BT[row, self.width - len(prompt) :] = prompt
            mask_BS[row, : self.width - len(prompt)] = False
        self.ids_BT, self.mask_BS = torch.from_numpy(ids_BT).to(device), torch.from_numpy(mask_BS).to(device)
        self.limit_B = torch.tensor(limits, device=device)
        self.row_B = torch.arange(num, device=device)
        self.live_B = torch.ones(num, dtype=torch.bool, device=device)
        self.position_BT = (self.mask_BS[:, : self.width].cumsum(-1) - 1).clamp(min=0)

    def select(self, index_b: Tensor) -> None:
        for name in ("ids_BT", "mask_BS", "limit_B", "row_B", "live_B", "position_BT"):
            setattr(self, name, getattr(self, name)[index_b])

    def feed(self, id_B: Tensor) -> None:
        self.ids_BT = id_B[:, None]
        # A finished row stays where it is: beyond the last position an absolute embedding has no row to look up.
        self.position_BT = self.position_BT[:, -1:] + self.live_B[:, None]
        self.width += 1

    def logits(self, decoder: Decoder, cache: Cache) -> Float[Tensor, "B V"]:
        return decoder.last_logits(self.ids_BT, self.mask_BS[:, : self.width] if self.padded else None, self.position_BT, cache)

    def __len__(self) -> int:
        return len(self.row_B)


def complete(
    decoder: Decoder,
    prompts: Sequence[tuple[int, ...]],
    uniform_BN: np.ndarray,
    limits: Sequence[int],
    stop_ids: Sequence[int],
    choose_next: Chooser,
    name_of: Callable[[int], str],
) -> tuple[list[Completion], Work]:
    """One completion per prompt of one batch.

    uniform_BN: the numbers that decide row b's tokens; limits: most tokens per row, >= 1; name_of: names a row in errors.
    Equal prompts go through the model once, then their cache rows are repeated. Runs under the caller's no_grad.
    """
    distinct = {prompt: index for index, prompt in enumerate(dict.fromkeys(prompts))}
    cache, kind, logits_BV, processed = _prefill(decoder, list(distinct), max(limits))
    prompt_tokens = useful = sum(map(len, distinct))
    if len(distinct) < len(prompts):
        source_B = torch.tensor([distinct[prompt] for prompt in prompts], device=decoder.device)
        select_rows(cache, source_B)
        logits_BV = logits_BV[source_B]
    rows = _Rows(prompts, limits, decoder.device)
    record = _Record(len(prompts), max(limits), decoder.device)
    numbers_BN = torch.from_numpy(uniform_BN).to(decoder.device, wide(decoder.device))
    stop_S = torch.tensor(sorted(stop_ids), device=decoder.device)
    for step in range(max(limits)):
        choice = choose_next(logits_BV, record.id_BN[rows.row_B, :step], numbers_BN[rows.row_B, step])
        bad_B = ~torch.isfinite(choice.logp_B)
        stopped_B = torch.isin(choice.id_B, stop_S)
        ends_B = rows.live_B & (stopped_B | (step + 1 >= rows.limit_B))
        record.write(rows.row_B, step, choice, ends_B, stopped_B)
        rows.live_B = rows.live_B & ~ends_B
        # One look at the device a token: each makes an accelerator wait.
        num_live, num_bad = torch.stack([rows.live_B.sum(), bad_B.sum()]).tolist()
        if num_bad:
            raise _not_finite(name_of(int(rows.row_B[bad_B][0])), step)
        if not num_live:
            break
        rows.feed(choice.id_B)
        if num_live < KEEP_ROWS_ABOVE * len(rows):
            live_b = rows.live_B.nonzero()[:, 0]
            select_rows(cache, live_b)
            rows.select(live_b)
        logits_BV = rows.logits(decoder, cache)
        processed += len(rows)
        useful += num_live
    work = Work(processed=processed, useful=useful, prompt_tokens=prompt_tokens, cache_kind=kind)
    return record.completions(), work


def _prefill(decoder: Decoder, prompts: Sequence[tuple[int, ...]], most_new: int) -> tuple[Cache, str, Tensor, int]:
    """The cache of all prompts, its kind, the logits of their first new token, and the positions that were processed."""
    width, num_rows = max(map(len, prompts)), len(prompts)
    cache, kind = open_cache(decoder.config, most=width + most_new)
    logits, processed, first_row = [], 0, 0
    # Only block caches can be filled part by part.
    for part in _parts(prompts, decoder.device) if kind == "block" else [prompts]:
        rows = _Rows(part, [most_new] * len(part), decoder.device)
        filled = prompt_cache(cache, first_row=first_row, num_rows=num_rows, width=width) if kind == "block" else cache
        logits.append(rows.logits(decoder, filled))
        processed += len(rows) * rows.width
        first_row += len(rows)
    return cache, kind, torch.cat(logits), processed


def _parts(prompts: Sequence[tuple[int, ...]], device: torch.device) -> Iterator[Sequence[tuple[int, ...]]]:
    """Runs of neighbors of at most PREFILL_POSITIONS padded positions, but at least one prompt."""
    start, widest, bound = 0, 0, PREFILL_POSITIONS.get(device.type, 4096)
    for stop, prompt in enumerate(prompts):
        widest = max(widest, len(prompt))
        if stop > start and widest * (stop + 1 - start) > bound:
            yield prompts[start:stop]
            start, widest = stop, len(prompt)
    yield prompts[start:]


class _Record:
    """What was chosen, by row of the batch. Rows that wait to leave write on past their end; `length_B` cuts that off."""

    def __init__(self, num: int, most: int, device: torch.device) -> None:
        self.id_BN = torch.zeros((num, most), dtype=torch.long, device=device)
        self.logp_BN = torch.zeros((num, most), device=device)
        self.behavior_BN = torch.zeros((num, most), device=device)
        self.length_B = torch.zeros(num, dtype=torch.long, device=device)
        self.stopped_B = torch.zeros(num, dtype=torch.bool, device=device)

    def write(self, row_b: Tensor, step: int, choice: Choice, ends_b: Tensor, stopped_b: Tensor) -> None:
        self.id_BN[row_b, step] = choice.id_B
        self.logp_BN[row_b, step] = choice.logp_B
        self.behavior_BN[row_b, step] = choice.behavior_logp_B
        self.length_B[row_b[ends_b]] = step + 1
        self.stopped_B[row_b[ends_b]] = stopped_b[ends_b]

    def completions(self) -> list[Completion]:
        kept = (self.id_BN, self.logp_BN, self.behavior_BN, self.length_B, self.stopped_B)
        columns = zip(*(tensor.tolist() for tensor in kept), strict=True)
        return [
            Completion(token_ids=tuple(ids[:num]), logp=tuple(logp[:num]), behavior_logp=tuple(behavior[:num]), stopped=stopped)
            for ids, logp, behavior, num, stopped in columns
        ]


def _not_finite(name: str, step: int) -> RewardenError:
    return RewardenError(
        f"{name}: the policy's logits are not finite at completion token {step}; its weights or activations hold NaN or inf. "
        "Go back to an earlier checkpoint and lower the learning rate"
    )
