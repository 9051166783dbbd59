"""Attention of rows that share their prompts: the prompt's keys and values lie in memory once, whatever the number of rows.

A row's query meets its prompt and its own tokens in two products, and the two results are joined by their normalizers:

    out = out_prompt + sigmoid(z_own - z_prompt) * (out_own - out_prompt),    z = logsumexp of a part's scores

which is softmax attention over both parts. The queries of all rows of a prompt meet it in one product, so the prompt is read
once a token, not once a row. A transformers decoder looks its attention function up by name at every call; for the time of
one forward `attending` puts the name of ours there.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import CacheLayerMixin

from rewarden.maths.precision import Real
from rewarden.models.attention import WITHOUT_EFFECT, attending_by
from rewarden.rollout.bundles import Bundle
from rewarden.rollout.cache import BlockLayer

NAME = "rewarden_shared"
"""Name of the attention function in the registries of transformers; set on a model only while `attending` lasts."""


class CannotShare(Exception):
    """This model asks something of its attention that is not known here; the caller lets every row hold its prompt."""


class SharedLayer(CacheLayerMixin):
    """Keys and values of one attention layer: of the shared prompts, of the own tokens of their rows, and of rows alone.

    The first `num_shared` rows share; `prompts` has [G, heads, P, width] of the prompts, right-aligned, and never grows.
    """

    def __init__(self, prompts: BlockLayer, alone: BlockLayer | None, *, num_shared: int, most_new: int) -> None:
        super().__init__()
        self.is_sliding = prompts.is_sliding
        self.is_initialized = True
        self.prompts, self.alone = prompts, alone
        self.own = BlockLayer(is_sliding=prompts.is_sliding, most=most_new)
        self.num_shared = num_shared
        self.width = max(prompts.length, alone.length if alone else 0)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append one token to each row; returns the own tokens of the rows that share."""
        num = self.num_shared
        if self.alone is not None:
            self.alone.update(key_states[num:], value_states[num:])
        return self.own.update(key_states[:num], value_states[:num])

    def select(self, shared_b: Tensor, alone_b: Tensor) -> None:
        """Keep these rows: numbers among those that share, and among those alone."""
        if self.own.length:
            self.own.reorder_cache(shared_b)
        self.num_shared = len(shared_b)
        if self.alone is not None:
            self.alone.reorder_cache(alone_b)
            self.alone = self.alone if len(alone_b) else None

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length of the longest row with the tokens to come, and the position of the first."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Positions in use by the longest row."""
        return self.width + self.own.length

    def get_max_length(self) -> int:
        """-1: it grows."""
        return -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one forward of one token a row attends to: the layers, who shares what, and the padding of rows alone."""

    layers: Sequence[SharedLayer]
    bundles: tuple[Bundle, ...]
    allowed_BS: Tensor | None


_current: ContextVar[Step | None] = ContextVar("step", default=None)


@contextmanager
def attending(model: nn.Module, step: Step) -> Iterator[None]:
    """Our attention function and this step inside; afterwards every config is as it was."""
    token = _current.set(step)
    try:
        with attending_by(model, NAME):
            yield
    finally:
        _current.reset(token)


def attend(
    module: nn.Module,
    query: Float[Tensor, "B H 1 D"],
    key: Float[Tensor, "S K T D"],
    value: Float[Tensor, "S K T E"],
    attention_mask: Tensor | None,
    scaling: Real | None = None,
    dropout: Real = 0.0,
    softcap: Real | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "B 1 H E"], None]:
    """Attention of one new token a row to all of its past; the signature is that of transformers' attention functions.

    key, value: the own tokens of the S rows that share, the new one included, as the cache returned them. attention_mask: the
    number of positions seen, as `describe_mask` gives it. softcap: scores s become softcap * tanh(s / softcap).

    Errors: CannotShare for anything else a model asks of its attention.
    """
    step = _current.get()
    unknown = sorted(name for name, given in kwargs.items() if given is not None and name not in WITHOUT_EFFECT)
    if step is None or unknown or dropout or not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise CannotShare(f"attention is not plain and causal, or has arguments not known here ({', '.join(unknown)})")
    index: Any = module.layer_idx
    layer = step.layers[index]
    num, scale = layer.num_shared, query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.shape[2] != 1 or key.shape[0] != num or key.shape[2] != layer.own.length:
        raise CannotShare(f"attention of {tuple(query.shape)} to {tuple(key.shape)} is not that of one token a row")
    seen, score = _seen(attention_mask), _Scores(scale, softcap)
    out = []
    if num:
        q_SKRD = query[:num, :, 0].unflatten(1, (key.shape[1], -1))
        out.append(_shared(q_SKRD, key, value, layer.prompts, step.bundles, seen, score))
    if layer.alone is not None:
        out.append(_alone(query[num:], layer.alone, step.allowed_BS, seen, score))
    return torch.cat(out).to(query.dtype)[:, None], None


@dataclass(frozen=True, slots=True)
class _Scores:
    scale: Real
    softcap: Real | None

    def __call__(self, q: Tensor, k: Tensor) -> Tensor:
        """Scores of queries [..., M, D] and keys [..., P, D] in at least float32."""
        scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)).mul_(self.scale)
        return scores if self.softcap is None else scores.div_(self.softcap).tanh_().mul_(self.softcap)


def _shared(
    q_SKRD: Tensor, k: Tensor, v: Tensor, prompts: BlockLayer, parts: Sequence[Bundle], seen: int | None, score: _Scores
) -> Float[Tensor, "S H E"]:
    """Attention of the rows that share to prompt and own tokens; R query heads a key head."""
    own = k.shape[2]
    first = 0 if seen is None else max(own - seen, 0)
    out_SKRE, z_SKR1 = _attention(score(q_SKRD, k[:, :, first:]), v[:, :, first:])
    before = prompts.length if seen is None else max(seen - own, 0)
    if before:
        met = [_to_prompts(q_SKRD, prompts, part, min(part.length, before), score) for part in parts]
        prompt_SKRE, prompt_z_SKR1 = met[0] if len(met) == 1 else map(torch.cat, zip(*met, strict=True))
        out_SKRE = torch.lerp(prompt_SKRE, out_SKRE, torch.sigmoid(z_SKR1 - prompt_z_SKR1))
    return out_SKRE.flatten(1, 2)


def _to_prompts(q_SKRD: Tensor, prompts: BlockLayer, part: Bundle, last: int, score: _Scores) -> tuple[Tensor, Tensor]:
    """Attention of a bundle's rows to the `last` tokens of their prompts, and its normalizers."""
    assert prompts.keys is not None
    assert prompts.values is not None
    where = (part.prompts, slice(None), slice(prompts.length - last, prompts.length))
    q = q_SKRD[part.rows]
    heads = q.shape[2]
    if part.row_of_slot is not None:
        q = q.index_select(0, part.row_of_slot)
    # All slots of a prompt, and all query heads of a key head, are the rows of one matrix.
    q_GKMD = q.unflatten(0, (-1, part.num_slots)).transpose(1, 2).flatten(2, 3)
    scores_GKMP = score(q_GKMD, prompts.keys[where])
    if part.hidden_G11P is not None:
        scores_GKMP.masked_fill_(part.hidden_G11P[..., part.length - last :], -torch.inf)
    out = []
    for x_GKMX in _attention(scores_GKMP, prompts.values[where]):
        x = x_GKMX.unflatten(2, (part.num_slots, heads)).transpose(1, 2).flatten(0, 1)
        out.append(x if part.slot_of_row is None else x.index_select(0, part.slot_of_row))
    return out[0], out[1]


def _attention(scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """softmax(scores) @ v and logsumexp(scores) over the last dimension, kept; overwrites the scores."""
    top = scores.amax(-1, keepdim=True)
    weights = scores.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    return (weights.to(v.dtype) @ v).to(total.dtype).div_(total), total.log().add_(top)


def _alone(
    query: Tensor, layer: BlockLayer, allowed_BS: Tensor | None, seen: int | None, score: _Scores
) -> Float[Tensor, "A H E"]:
    """Attention of rows that hold all of their past themselves, as transformers computes it."""
    assert layer.keys is not None
    assert layer.values is not None
    used = slice(0 if seen is None else max(layer.length - seen, 0), layer.length)
    k, v = layer.keys[:, :, used], layer.values[:, :, used]
    allowed = None if allowed_BS is None else allowed_BS[:, None, None, used]
    if score.softcap is None:
        grouped = query.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(query, k, v, attn_mask=allowed, scale=score.scale, enable_gqa=grouped)[:, :, 0]
    scores = score(query[:, :, 0].unflatten(1, (k.shape[1], -1)), k)
    if allowed is not None:
        scores.masked_fill_(~allowed, -torch.inf)
    return _attention(scores, v)[0].flatten(1, 2)


def describe_mask(
    *,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Tensor],
    q_offset: int = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    **kwargs: Any,
) -> Int[Tensor, "1 1 1 1"] | None:
    """How far back a new token sees, itself included: None for all the way, else a number; never the mask itself.

    Registered as transformers' mask function of our attention, so it is called once per kind of layer. It asks the model's own
    rule about the longest row; other rows end at the same place, so what holds from the end holds for them.

    Errors: CannotShare for any other rule than "the last W positions".
    """
    one_token = q_length == 1 and kv_offset == 0 and q_offset + 1 == kv_length
    if _current.get() is None or attention_mask is not None or use_vmap or not one_token:
        raise CannotShare("the model masks in a way of its own")
    zero, k_S = torch.zeros(1, 1, 1, 1, dtype=torch.long), torch.arange(kv_length)
    allowed_S = mask_function(zero, zero, zero + q_offset, k_S[None, None, None]).expand(1, 1, 1, kv_length).flatten()
    seen = int(allowed_S.sum())
    if not seen or not torch.equal(allowed_S, k_S >= kv_length - seen):
        raise CannotShare("the model's mask is not a causal one, plain or with a window")
    return None if seen == kv_length else torch.full((1, 1, 1, 1), seen)


def _seen(attention_mask: Tensor | None) -> int | None:
    if attention_mask is None:
        return None
    if attention_mask.shape != (1, 1, 1, 1) or attention_mask.dtype != torch.long:
        raise CannotShare("the model works on its mask before it attends")
    return int(attention_mask)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, describe_mask)
