"""The sampler's key-value cache: buffers allocated in blocks, from which rows can leave."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

BLOCK = 64


class BlockLayer(CacheLayerMixin):
    """Keys and values [B, heads, capacity, width] of one attention layer; the first `length` positions are in use.

    Concatenating anew for every token, as the dynamic cache does, copies the whole past each time; here a token is one write.
    Sliding-window layers keep all positions too: the window is in the attention mask, which counts cache positions.
    """

    def __init__(self, *, is_sliding: bool, most: int) -> None:
        super().__init__()
        self.is_sliding = is_sliding
        self.most = most
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate nothing yet, only remember shapes; `update` makes room."""
        self.keys = key_states.new_empty((*key_states.shape[:2], 0, key_states.shape[3]))
        self.values = value_states.new_empty((*value_states.shape[:2], 0, value_states.shape[3]))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the new positions; returns views of all positions in use."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        stop = self.length + key_states.shape[2]
        if stop > self.keys.shape[2]:
            capacity = max(stop, min(self.most, stop + max(BLOCK, stop // 2)))
            self.keys = _resized(self.keys[:, :, : self.length], capacity)
            self.values = _resized(self.values[:, :, : self.length], capacity)
        self.keys[:, :, self.length : stop] = key_states
        self.values[:, :, self.length : stop] = value_states
        self.length = stop
        return self.keys[:, :, :stop], self.values[:, :, :stop]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep these rows, in this order; a row may be left out or repeated."""
        assert self.keys is not None
        assert self.values is not None
        self.keys = _resized(self.keys[:, :, : self.length].index_select(0, beam_idx), self.keys.shape[2])
        self.values = _resized(self.values[:, :, : self.length].index_select(0, beam_idx), self.values.shape[2])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length of the keys the next forward sees, and the position of the first."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Positions in use."""
        return self.length

    def get_max_length(self) -> int:
        """-1: it grows."""
        return -1


def open_cache(config: PreTrainedConfig, *, most: int) -> tuple[Cache, str]:
    """A fresh cache for one batch and its kind, "block" or "dynamic". `most`: positions it will ever need.

    "block" is used when every layer is plain full or sliding-window attention. Any other layer (chunked, linear, convolution,
    shared keys) gets the cache that transformers itself builds for the model.
    """
    text = config.get_text_config(decoder=True)
    native = DynamicCache(config=text)
    plain = bool(native.layers) and all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in native.layers)
    chunked = getattr(text, "attention_chunk_size", None) or "chunked_attention" in (getattr(text, "layer_types", None) or ())
    if not plain or chunked:
        return native, "dynamic"
    return Cache(layers=[BlockLayer(is_sliding=sliding, most=most) for sliding in native.is_sliding]), "block"


def stack(caches: Sequence[Cache], *, most: int) -> Cache:
    """One block cache of all rows of several, in order; rows of shorter ones are padded on the left."""
    if len(caches) == 1:
        return caches[0]
    groups = zip(*(cache.layers for cache in caches), strict=True)
    return Cache(layers=[_stacked(group, most) for group in groups])


def select_rows(cache: Cache, index_B: Tensor) -> None:
    """Keep these rows of the cache, in this order; works for every kind of layer, unlike `batch_select_indices`."""
    cache.reorder_cache(cast(torch.LongTensor, index_B))


def pads_safely(cache: Cache) -> bool:
    """Whether every layer is attention, which a mask can keep from seeing padding; recurrent states may have read it."""
    return all(isinstance(layer, CacheLayerMixin) and not hasattr(layer, "conv_states") for layer in cache.layers)


def _stacked(parts: Sequence[Any], most: int) -> BlockLayer:
    out = BlockLayer(is_sliding=parts[0].is_sliding, most=most)
    out.length = max(part.length for part in parts)
    capacity = min(most, out.length + BLOCK)
    out.keys, out.values = (
        # Zeros, not garbage: a masked position has weight 0, and 0 * NaN would still be NaN.
        parts[0].keys.new_zeros((sum(len(part.keys) for part in parts), like.shape[1], capacity, like.shape[3]))
        for like in (parts[0].keys, parts[0].values)
    )
    row = 0
    for part in parts:
        rows = slice(row, row + len(part.keys))
        out.keys[rows, :, out.length - part.length : out.length] = part.keys[:, :, : part.length]
        out.values[rows, :, out.length - part.length : out.length] = part.values[:, :, : part.length]
        row = rows.stop
    out.is_initialized = True
    return out


def _resized(kept: Tensor, capacity: int) -> Tensor:
    """A buffer of `capacity` positions that begins with `kept`; the rest is never read before it is written."""
    out = torch.empty((*kept.shape[:2], capacity, kept.shape[3]), dtype=kept.dtype, device=kept.device)
    out[:, :, : kept.shape[2]] = kept
    return out
