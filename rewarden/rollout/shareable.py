"""Whether a model's rows can share their prompts: judged by kind, then proved on a few tokens, once per model."""

import logging
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rewarden.models.attention import configs_of
from rewarden.rollout.bundles import plan
from rewarden.rollout.decoder import Decoder
from rewarden.rollout.past import Past, Separate, Shared
from rewarden.rollout.rows import Rows
from rewarden.rollout.shared import CannotShare

log = logging.getLogger(__name__)

NUM_STEPS = 3
LENGTHS = (7, 7, 7, 4, 4, 5, 2)
"""Of the prompts of the trial: three rows share one, two another, and two rows are alone."""

_NOT_FINITE = "its logits are not finite"

_verdicts: WeakKeyDictionary[nn.Module, dict[object, str | None]] = WeakKeyDictionary()


def cannot_share(decoder: Decoder) -> str | None:
    """Why prompts cannot be shared in this model, or None; decided once per model, by its kind and a trial on a few tokens.

    Call it in eval mode and without gradients.
    """
    known, case = _verdicts.setdefault(decoder.base, {}), _case(decoder)
    if case not in known:
        reason = _obstacle(decoder) or _failed_trial(decoder)
        if reason == _NOT_FINITE:
            return reason  # of these weights, not of the model
        known[case] = None if reason is None else mark_unshareable(decoder, reason)
    return known[case]


def mark_unshareable(decoder: Decoder, reason: str) -> str:
    """From now on this model's rows hold their prompts each on their own; the reason is logged and returned."""
    log.warning("%s: equal prompts are copied, not shared: %s", type(decoder.base).__name__, reason)
    _verdicts.setdefault(decoder.base, {})[_case(decoder)] = reason
    return reason


def _case(decoder: Decoder) -> object:
    weight: Any = next(decoder.base.parameters())
    return weight.device, weight.dtype, decoder.config._attn_implementation


def _obstacle(decoder: Decoder) -> str | None:
    """Why the kind of model rules it out, or None."""
    if decoder.cache_kind != "block" or not decoder.pads_safely:
        return "it has layers other than plain attention, or takes no positions"
    if not getattr(decoder.base, "_supports_attention_backend", False):
        return "its attention function cannot be exchanged"
    if not all(hasattr(config, "_attn_implementation_internal") for config in configs_of(decoder.base)):
        return "its config does not name an attention function"
    if decoder.num_positions is not None and decoder.num_positions < max(LENGTHS) + NUM_STEPS:
        return "it has too few positions for a trial"
    return None


def _failed_trial(decoder: Decoder) -> str | None:
    """A few short rows with shared prompts against the same rows without; None when every logit agrees."""
    size = decoder.base.get_input_embeddings().num_embeddings
    prompts = [tuple((length + 5 * t) % size for t in range(length)) for length in LENGTHS]
    try:
        shared_RV = _trial(decoder, prompts, Shared(decoder, prompts, NUM_STEPS, plan(prompts, 2)), size)
    # Whatever a model does with keys it did not expect, copies are right for it; memory is the one other cause.
    except torch.OutOfMemoryError:
        raise
    except (CannotShare, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    separate_RV = _trial(decoder, prompts, Separate(decoder, prompts, NUM_STEPS), size)
    if not bool(separate_RV.isfinite().all()):
        return _NOT_FINITE
    gap_R = (shared_RV - separate_RV).norm(dim=-1) / separate_RV.norm(dim=-1).clamp(min=1e-30)
    half = next(decoder.base.parameters()).dtype in (torch.bfloat16, torch.float16)
    if bool((gap_R <= (0.1 if half else 1e-3)).all()):
        return None
    return f"logits of a shared prompt are off by {float(gap_R.max()):.2g} of their size"


def _trial(decoder: Decoder, prompts: list[tuple[int, ...]], past: Past, size: int) -> Tensor:
    """Logits after each of a few tokens that do not depend on them, by row; the middle rows leave on the way."""
    rows, out = Rows(prompts, [NUM_STEPS] * len(prompts), decoder.device, past.order), []
    for step in range(NUM_STEPS):
        rows.feed((rows.row_B * 3 + step * 11 + 1) % size)
        if step == NUM_STEPS - 1:
            kept_b = torch.tensor([0, 2, 4, 5, 6], device=decoder.device)
            past.select(kept_b)
            rows.select(kept_b)
        out.append(past.logits(rows)[rows.row_B.argsort()])
    return torch.cat(out)
