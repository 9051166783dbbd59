"""Several sequences in one row, each attending only to itself: no padding is computed, and no mask as large as the row squared.

A transformers decoder looks its attention function up by name at every call. For the time of one forward pass `run_trunk`
puts the name of ours there; it cuts the row into its sequences. All else in a decoder works token by token, with positions
that restart in each sequence, so the result is that of each sequence alone. docs/decisions/packed_rows.md says why, what it
gains, and which models it is not for.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from rewarden.maths.precision import Real
from rewarden.models.layout import Layout
from rewarden.models.trunk import final_hidden

log = logging.getLogger(__name__)

NAME = "rewarden_packed"
"""Name of the attention function in the registries of transformers; set on a model only while `run_trunk` runs."""

WITHOUT_EFFECT = frozenset(
    {
        "sliding_window",
        "position_ids",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "cache_position",
    }
)
"""What models hand to every attention function and what changes nothing in ours: windows are read from the mask instead, which
is what transformers' own default functions obey."""


class CannotPack(Exception):
    """This row cannot be computed sequence by sequence here; the caller pads instead."""


@dataclass(frozen=True, slots=True)
class _Packing:
    """The sequences of the row that is being computed; `bounds` are their ends with a leading 0, for GPU kernels."""

    lengths: tuple[int, ...]
    bounds: Tensor


_current: ContextVar[_Packing | None] = ContextVar("packing", default=None)


def run_trunk(trunk: PreTrainedModel, layout: Layout, ids_RT: Int[Tensor, "R T"]) -> Float[Tensor, "R T D"]:
    """Final hidden states of ids in this layout, with neither mask nor cache.

    Errors: CannotPack for a packed layout that needs what the attention function does not know.
    """
    if not layout.packed:
        return final_hidden(trunk, ids_RT)
    positions_RT = layout.position_N[None]
    if is_flash(trunk):
        # These kernels of transformers find the sequences from restarting positions.
        return trunk(input_ids=ids_RT, position_ids=positions_RT, use_cache=False, return_dict=True).last_hidden_state
    packing = _Packing(layout.lengths, F.pad(torch.tensor(layout.lengths).cumsum(0), (1, 0)).to(ids_RT.device, torch.int32))
    with _attending(trunk, packing), _recomputing_alike(trunk, packing):
        return trunk(input_ids=ids_RT, position_ids=positions_RT, use_cache=False, return_dict=True).last_hidden_state


@contextmanager
def _attending(trunk: nn.Module, packing: _Packing) -> Iterator[None]:
    """Our attention function and these sequences inside; afterwards every config is as it was."""
    token = _current.set(packing)
    try:
        with attending_by(trunk, NAME):
            yield
    finally:
        _current.reset(token)


@contextmanager
def attending_by(model: nn.Module, name: str) -> Iterator[None]:
    """The registered attention function of this name inside; afterwards every config is as it was."""
    configs = configs_of(model)
    kept = [config._attn_implementation_internal for config in configs]
    try:
        for config in configs:
            config._attn_implementation_internal = name
        yield
    finally:
        for config, before in zip(configs, kept, strict=True):
            config._attn_implementation_internal = before


@contextmanager
def _recomputing_alike(trunk: nn.Module, packing: _Packing) -> Iterator[None]:
    """Layers under gradient checkpointing run again in backward, after `run_trunk`: let them attend as they did."""

    def within(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            def again(*inner: Any, **named: Any) -> Any:
                with _attending(trunk, packing):
                    return function(*inner, **named)

            return checkpoint(again, *args, **kwargs)

        return call

    kept = {}
    for module in trunk.modules():
        if type(module).__name__ == "CheckpointWrapper":
            raise CannotPack("layers are wrapped for recomputation in a way that cannot be followed")
        if getattr(module, "gradient_checkpointing", False):
            if "_gradient_checkpointing_func" not in vars(module):
                raise CannotPack("gradient checkpointing cannot be followed")
            kept[module] = vars(module)["_gradient_checkpointing_func"]
    try:
        for module, checkpoint in kept.items():
            vars(module)["_gradient_checkpointing_func"] = within(checkpoint)
        yield
    finally:
        for module, checkpoint in kept.items():
            vars(module)["_gradient_checkpointing_func"] = checkpoint


def configs_of(trunk: nn.Module) -> list[PreTrainedConfig]:
    """Every config object that a module of the trunk may look its attention up in."""
    found = (getattr(module, "config", None) for module in trunk.modules())
    return list({id(config): config for config in found if isinstance(config, PreTrainedConfig)}.values())


def is_flash(trunk: PreTrainedModel) -> bool:
    """Whether transformers' own flash attention was asked for."""
    return str(trunk.config._attn_implementation).startswith("flash_attention")


def attend(
    module: nn.Module,
    query: Float[Tensor, "1 H T D"],
    key: Float[Tensor, "1 G T D"],
    value: Float[Tensor, "1 G T E"],
    attention_mask: Tensor | None,
    scaling: Real | None = None,
    dropout: Real = 0.0,
    softcap: Real | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "1 T H E"], None]:
    """Causal attention within each sequence of the row; the signature is that of transformers' attention functions.

    attention_mask: the window as `describe_mask` gives it. softcap: scores s become softcap * tanh(s / softcap).

    Errors: CannotPack for anything else a model asks of its attention.
    """
    packing = _current.get()
    unknown = sorted(name for name, given in kwargs.items() if given is not None and name not in WITHOUT_EFFECT)
    if packing is None or query.shape[0] != 1 or not query.shape[2] == key.shape[2] == sum(packing.lengths):
        raise CannotPack(f"attention of {tuple(query.shape)} to {tuple(key.shape)} is not that of one packed row")
    if unknown or not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise CannotPack(f"attention is not causal, or has an argument that is not known here ({', '.join(unknown)})")
    window, scale = _window(attention_mask), query.shape[-1] ** -0.5 if scaling is None else scaling
    q_THD, k_TGD, v_TGE = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    if softcap is None and not dropout and _kernel_takes(q_THD, v_TGE):
        return _by_kernel(q_THD, k_TGD, v_TGE, packing, window, scale)[None], None
    # Sequences of one length stand side by side: each run of them is one call.
    runs = [(length, len(list(same))) for length, same in groupby(packing.lengths)]
    sizes = [length * num for length, num in runs]
    out = []
    for (length, num), *parts in zip(runs, q_THD.split(sizes), k_TGD.split(sizes), v_TGE.split(sizes), strict=True):
        q, k, v = (part.unflatten(0, (num, length)).transpose(1, 2) for part in parts)
        out.append(_causal(q, k, v, window, scale, dropout, softcap).transpose(1, 2).flatten(0, 1))
    return torch.cat(out)[None], None


def _causal(q: Tensor, k: Tensor, v: Tensor, window: int | None, scale: Real, dropout: Real, softcap: Real | None) -> Tensor:
    """Causal attention [B, H, T, E] of whole sequences to themselves, within the window."""
    length, grouped = q.shape[2], q.shape[1] != k.shape[1]
    banded = window is not None and window < length
    if softcap is None:
        allowed = _band(length, window, q.device) if banded else None
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=allowed, dropout_p=dropout, is_causal=allowed is None, scale=scale, enable_gqa=grouped
        )
    if grouped:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = softcap * torch.tanh((q @ k.mT) * scale / softcap)
    scores = scores.masked_fill(~_band(length, window, q.device), -torch.inf)
    weights = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return F.dropout(weights, dropout) @ v


def _band(length: int, window: int | None, device: torch.device) -> Bool[Tensor, "T T"]:
    """Who sees whom: token q the tokens q - window < k <= q."""
    ones = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return ones if window is None else ones.triu(1 - window)


def describe_mask(
    *,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Tensor],
    device: torch.device,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    **kwargs: Any,
) -> Int[Tensor, "1 1 1 1"] | None:
    """What the model's mask is within a sequence: None for causal, or the window of a sliding one; never the mask itself.

    Registered as transformers' mask function of our attention, so it is called once per kind of layer. It asks the model's own
    rule (which already keeps sequences apart) about a few tokens of the longest sequence, and accepts only a causal band.

    Errors: CannotPack for any other rule: chunks, blocks that look ahead, padding.
    """
    packing = _current.get()
    if packing is None or attention_mask is not None or use_vmap or not q_length == kv_length == sum(packing.lengths):
        raise CannotPack("the model masks in a way of its own")
    longest = max(packing.lengths)
    start = sum(packing.lengths[: packing.lengths.index(longest)])
    # The last two tokens tell a window from chunks; the others see that nobody looks ahead.
    q_M1 = torch.tensor(sorted({0, min(1, longest - 1), longest // 2, max(longest - 2, 0), longest - 1}), device=device)[
        :, None
    ]
    k_1T = torch.arange(longest, device=device)[None]
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=device)
    allowed_MT = mask_function(zero, zero, (q_M1 + start)[None, None], (k_1T + start)[None, None]).expand(1, 1, len(q_M1), -1)
    window = int(allowed_MT[0, 0, -1].sum())
    if not torch.equal(allowed_MT[0, 0], (k_1T <= q_M1) & (k_1T > q_M1 - window)):
        raise CannotPack("the model's mask is not a causal one, plain or with a window")
    return None if window == longest else torch.full((1, 1, 1, 1), window)


def _window(attention_mask: Tensor | None) -> int | None:
    if attention_mask is None:
        return None
    if attention_mask.shape != (1, 1, 1, 1) or attention_mask.dtype != torch.long:
        raise CannotPack("the model works on its mask before it attends")
    return int(attention_mask)


def _kernel_takes(q_THD: Tensor, v_TGE: Tensor) -> bool:
    width = q_THD.shape[-1]
    return has_kernel(q_THD.device, q_THD.dtype) and v_TGE.shape[-1] == width and width % 8 == 0 and width <= 256


def _by_kernel(q: Tensor, k: Tensor, v: Tensor, packing: _Packing, window: int | None, scale: Real) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # torch 2.9 has none

    longest = max(packing.lengths)
    left = -1 if window is None else window - 1
    grouped = q.shape[1] != k.shape[1]
    out: Any = varlen_attn(
        q.contiguous(), k.contiguous(), v.contiguous(), packing.bounds, packing.bounds, longest, longest,
        scale=scale, window_size=(left, 0), enable_gqa=grouped,
    )  # fmt: skip
    return cast(Tensor, out)


@lru_cache
def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's kernel for sequences of unequal length runs here and agrees with the plain formula."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    with torch.no_grad():
        x = torch.linspace(-2, 2, 9 * 4 * 64, device=device).sin_().mul_(3).view(9, 4, 64).to(dtype)
        q, k, v = x, x[:, :2].flip(0).contiguous(), x[:, 2:].contiguous()
        packing = _Packing((6, 3), torch.tensor([0, 6, 9], dtype=torch.int32, device=device))
        try:
            got = _by_kernel(q, k, v, packing, 4, 0.125)
        except (ImportError, RuntimeError, TypeError) as error:  # a build, a card or a version of torch without it
            log.info("no kernel for sequences of unequal length on %s: %s", device, error)
            return False
        parts = zip(q.split([6, 3]), k.split([6, 3]), v.split([6, 3]), strict=True)
        alone = []
        for part in parts:
            one_q, one_k, one_v = (p.transpose(0, 1)[None].float() for p in part)
            alone.append(_causal(one_q, one_k, one_v, 4, 0.125, 0.0, None))
        return bool((got.float() - torch.cat([p[0].transpose(0, 1) for p in alone])).abs().max() < 0.05)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, describe_mask)
