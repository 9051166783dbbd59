"""The sampler's key-value cache: buffers allocated in blocks, from which rows can leave."""

from collections.abc import Mapping
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
            capacity = self._capacity(stop)
            self.keys = _resized(self.keys[:, :, : self.length], capacity)
            self.values = _resized(self.values[:, :, : self.length], capacity)
        self.keys[:, :, self.length : stop] = key_states
        self.values[:, :, self.length : stop] = value_states
        self.length = stop
        return self.keys[:, :, :stop], self.values[:, :, :stop]

    def place(self, key_states: Tensor, value_states: Tensor, *, first_row: int, num_rows: int, width: int) -> None:
        """Write the prompts of some of `num_rows` rows, right-aligned in the first `width` positions."""
        if not self.is_initialized:
            shapes = ((num_rows, x.shape[1], self._capacity(width), x.shape[3]) for x in (key_states, value_states))
            self.keys, self.values = (key_states.new_empty(shape) for shape in shapes)
            self.is_initialized = True
            self.length = width
        rows, start = slice(first_row, first_row + len(key_states)), width - key_states.shape[2]
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            assert buffer is not None
            # Zeros, not garbage: a masked position has weight 0, and 0 * NaN would still be NaN.
            buffer[rows, :, :start] = 0
            buffer[rows, :, start:width] = states

    def _capacity(self, stop: int) -> int:
        return max(stop, min(self.most, stop + max(BLOCK, stop // 2)))

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


class _PromptLayer(CacheLayerMixin):
    """One layer during the prefill of some rows: their prompts attend to themselves and go straight to their place.

    Nothing is gathered afterwards, so the whole cache exists only once.
    """

    def __init__(self, layer: BlockLayer, place: Mapping[str, int]) -> None:
        super().__init__()
        self.is_sliding = layer.is_sliding
        self.layer = layer
        self.where = place

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare."""
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keep the prompts; returns them as they came."""
        self.layer.place(key_states, value_states, **self.where)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The prompts alone, from position 0."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Nothing came before."""
        return 0

    def get_max_length(self) -> int:
        """-1: no bound of its own."""
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


def prompt_cache(cache: Cache, *, first_row: int, num_rows: int, width: int) -> Cache:
    """What a forward over the prompts of some rows fills, of a block cache that will have `num_rows` rows.

    The rows begin at `first_row`; `width` is the longest prompt of all, and shorter ones are padded on the left.
    """
    place = {"first_row": first_row, "num_rows": num_rows, "width": width}
    return Cache(layers=[_PromptLayer(cast(BlockLayer, layer), place) for layer in cache.layers])


def select_rows(cache: Cache, index_B: Tensor) -> None:
    """Keep these rows of the cache, in this order; works for every kind of layer, unlike `batch_select_indices`."""
    cache.reorder_cache(cast(torch.LongTensor, index_B))


def pads_safely(cache: Cache) -> bool:
    """Whether every layer is attention, which a mask can keep from seeing padding; recurrent states may have read it."""
    return all(isinstance(layer, CacheLayerMixin) and not hasattr(layer, "conv_states") for layer in cache.layers)


def _resized(kept: Tensor, capacity: int) -> Tensor:
    """A buffer of `capacity` positions that begins with `kept`; the rest is never read before it is written."""
    out = torch.empty((*kept.shape[:2], capacity, kept.shape[3]), dtype=kept.dtype, device=kept.device)
    out[:, :, : kept.shape[2]] = kept
    return out
