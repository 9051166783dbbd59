"""Which models may have their rows joined: judged by kind, then proved on a few tokens, once per model."""

import inspect
import logging
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rewarden.models.attention import CannotPack, configs_of, has_kernel, is_flash, run_trunk
from rewarden.models.layout import Layout
from rewarden.models.trunk import final_hidden

log = logging.getLogger(__name__)

_verdicts: WeakKeyDictionary[nn.Module, dict[object, str | None]] = WeakKeyDictionary()


def packs(trunk: PreTrainedModel) -> bool:
    """Whether rows may be joined for this model: decided once per model by its kind and by a trial on a few tokens."""
    weight: Any = next(trunk.parameters())
    case = (weight.device, weight.dtype, trunk.config._attn_implementation)
    known = _verdicts.setdefault(trunk, {})
    if case not in known:
        known[case] = reason = _obstacle(trunk, weight) or _failed_trial(trunk)
        if reason is not None:
            log.info("%s: rows are padded, not joined: %s", type(trunk).__name__, reason)
    return known[case] is None


def _obstacle(trunk: PreTrainedModel, weight: Tensor) -> str | None:
    """Why the kind of model rules it out, or None."""
    kinds = set(getattr(trunk.config.get_text_config(), "layer_types", None) or ())
    if not trunk._supports_attention_backend:
        return "its attention function cannot be exchanged"
    if "position_ids" not in inspect.signature(trunk.forward).parameters:
        return "it takes no positions"
    if kinds - {"full_attention", "sliding_attention"} or any(isinstance(m, nn.Conv1d | nn.RNNBase) for m in trunk.modules()):
        return "it has layers that mix tokens by other means than attention"
    if not all(hasattr(config, "_attn_implementation_internal") for config in configs_of(trunk)):
        return "its config does not name an attention function"
    if weight.device.type != "cpu" and not is_flash(trunk) and not has_kernel(weight.device, weight.dtype):
        # A loop over sequences is one small kernel each, which a GPU spends its time starting.
        return f"{weight.device.type} has no kernel for sequences of unequal length in {weight.dtype}"
    return None


@torch.no_grad()
def _failed_trial(trunk: PreTrainedModel) -> str | None:
    """Four short sequences in one row against each alone; None when every token agrees."""
    lengths = (7, 4, 4, 1)
    embeddings: Any = trunk.get_input_embeddings()
    device, size = embeddings.weight.device, embeddings.num_embeddings
    ids_BT = (torch.arange(28, device=device) * 5 + 1).view(4, 7) % size
    layout = Layout.of(range(4), lengths, device, packed=True)
    training = [module for module in trunk.modules() if module.training]
    try:
        for module in training:
            module.training = False
        joined_TD = run_trunk(trunk, layout, layout.arrange(ids_BT))[0]
        alone_TD = torch.cat([final_hidden(trunk, row[None, :n])[0] for row, n in zip(ids_BT, lengths, strict=True)])
    # Whatever a model does with a row it was not written for, padding is right for it; memory is the one other cause.
    except torch.OutOfMemoryError:
        raise
    except (CannotPack, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        for module in training:
            module.training = True
    gap_T = (joined_TD.float() - alone_TD.float()).norm(dim=-1) / alone_TD.float().norm(dim=-1).clamp(min=1e-30)
    tolerance = 0.1 if joined_TD.dtype in (torch.bfloat16, torch.float16) else 1e-3
    return (
        None if bool((gap_T <= tolerance).all()) else f"a token in a joined row is off by {float(gap_T.max()):.2g} of its size"
    )
