"""The parts of a Hugging Face decoder that the rest of Rewarden works with: trunk, layers, heads; through PEFT wrappers.

The trunk maps ids to final hidden states. A causal LM adds a vocabulary projection, a reward model or critic adds a scalar
head called `score`. `check_forward` proves on a few tokens that a model really is that simple, once, when it is loaded.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from peft import PeftModel
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from rewarden.errors import ConfigError
from rewarden.models.source import num_positions

FINAL_NORMS = frozenset({"norm", "ln_f", "final_layernorm", "final_layer_norm", "final_norm", "norm_f", "ln_out"})


def unwrap(model: nn.Module) -> PreTrainedModel:
    """The Hugging Face model inside PEFT wrappers; LoRA layers stay where they were put.

    Errors: ConfigError for anything that is not a Hugging Face model.
    """
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    if not isinstance(inner, PreTrainedModel):
        raise ConfigError(f"got a {type(inner).__name__}; a transformers model is needed, plain or inside a PeftModel")
    return inner


def trunk_of(model: nn.Module) -> PreTrainedModel:
    """The module that maps ids to final hidden states, without any head."""
    trunk: Any = unwrap(model).base_model
    return trunk


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The list of decoder layers, lowest first.

    Errors: ConfigError when the architecture has no such list.
    """
    trunk = trunk_of(model)
    depth = trunk.config.get_text_config().num_hidden_layers
    for _, module in sorted(trunk.named_modules(), key=lambda pair: pair[0].count(".")):
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return module
    raise ConfigError(f"{type(trunk).__name__}: found no list of {depth} decoder layers; choose a decoder-only model")


def final_norm(model: nn.Module) -> nn.Module:
    """The norm after the last layer.

    Errors: ConfigError when none of the usual names is there.
    """
    layers = decoder_layers(model)
    for parent in trunk_of(model).modules():
        children = dict(parent.named_children())
        if any(child is layers for child in children.values()):
            for name in sorted(FINAL_NORMS & set(children)):
                return children[name]
    raise ConfigError(f"{type(trunk_of(model)).__name__}: found no final norm (known names: {', '.join(sorted(FINAL_NORMS))})")


def active_module(module: nn.Module) -> nn.Module:
    """The module that acts now: PEFT keeps a trained copy beside the original, and adapter-off switches to the original."""
    if isinstance(module, ModulesToSaveWrapper):
        off = module.disable_adapters or not module.active_adapters
        return module.original_module if off else module.modules_to_save[module.active_adapters[0]]
    return module


def output_projection(model: nn.Module) -> tuple[Float[Tensor, "V D"], Float[Tensor, " V"] | None]:
    """Weight and bias of the vocabulary projection.

    Errors: ConfigError when the model has none, or one that is not a plain linear layer.
    """
    head = unwrap(model).get_output_embeddings()
    head = active_module(head) if head is not None else None
    if not isinstance(head, nn.Linear):
        got = "no vocabulary projection" if head is None else f"a {type(head).__name__} as vocabulary projection"
        raise ConfigError(f"{type(unwrap(model)).__name__} has {got}; a causal language model with a linear LM head is needed")
    return head.weight, head.bias


def has_score(model: nn.Module) -> bool:
    """Whether the model carries a scalar head, as reward models and critics do."""
    return hasattr(unwrap(model), "score")


def score_head(model: nn.Module) -> nn.Linear:
    """The scalar head in use.

    Errors: ConfigError when the model has no bias-free linear `score`.
    """
    head = active_module(getattr(unwrap(model), "score", nn.Identity()))
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise ConfigError(
            f"{type(unwrap(model)).__name__} has no bias-free linear head `score`; load it with load_reward_model, "
            "which puts one on a decoder"
        )
    return head


def apply_score(model: nn.Module, hidden_ND: Float[Tensor, "N D"]) -> Float[Tensor, "N K"]:
    """The scalar head in float32, whatever the model computes in: bf16 has about three digits, too few for a difference."""
    weight_KD = score_head(model).weight
    dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
    return F.linear(hidden_ND.to(dtype), weight_KD.to(dtype))


def final_hidden(trunk: nn.Module, ids_BT: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
    """Final hidden states of right-padded ids, with neither mask nor cache.

    A causal trunk never lets a token see what stands after it, so padding on the right changes no real token.
    """
    return trunk(input_ids=ids_BT, use_cache=False, return_dict=True).last_hidden_state


def position_limit(model: nn.Module) -> int | None:
    """The longest row the model has positions for, if it says so."""
    return num_positions(trunk_of(model).config)


@torch.no_grad()
def check_forward(model: nn.Module) -> None:
    """Prove on five tokens that right padding needs no mask and, for a language model, that logits = head(trunk(ids)).

    Errors: ConfigError for encoders, for models that scale or cap their logits, and the like: their log-probs would be wrong.
    """
    inner, trunk = unwrap(model), trunk_of(model)
    embeddings: Any = inner.get_input_embeddings()
    vocabulary, device = embeddings.num_embeddings, embeddings.weight.device
    ids_BT = torch.tensor([[1, 2, 3]], device=device) % vocabulary
    padded_BT = torch.cat([ids_BT, torch.zeros_like(ids_BT[:, :2])], dim=1)
    hidden_BTD = final_hidden(trunk, ids_BT)
    # Real models have a few huge activations, so rounding is judged against the whole vector; another formula is far off.
    tolerance = 0.1 if hidden_BTD.dtype in (torch.bfloat16, torch.float16) else 1e-3
    name = type(inner).__name__
    if distance(final_hidden(trunk, padded_BT)[:, :3], hidden_BTD) > tolerance:
        raise ConfigError(f"{name}: padding on the right changes real tokens, so it is not causal; use a decoder-only model")
    if has_score(model):
        score_head(model)
        return
    weight_VD, bias_V = output_projection(model)
    # A cap of 30 hardly bends small logits, so it might pass the comparison below.
    capped = getattr(inner.config.get_text_config(), "final_logit_softcapping", None) is not None
    logits_BTV = inner(input_ids=ids_BT, use_cache=False).logits
    if capped or distance(F.linear(hidden_BTD, weight_VD, bias_V), logits_BTV) > tolerance:
        raise ConfigError(
            f"{name}: its logits are not its LM head applied to its hidden states (scaled or capped logits); "
            "such models are not supported"
        )


def distance(got: Tensor, expected: Tensor) -> float:
    """|got - expected| / |expected|, over all entries."""
    return float((got.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-30))
