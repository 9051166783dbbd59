"""How many bytes a model takes to hold, to train and to run: arithmetic on its config, before a weight is read.

The model is built without storage (torch's meta device) and its modules are counted, so parameters are exact for every
architecture. Activations follow from what autograd keeps of a dense decoder layer. With D the width, H heads and G key-value
heads of width E, I the width of the MLP, the numbers kept per token are

    each norm        D, its input; D more where the weight of an RMSNorm trains
    attention        D, input of the first projections; (2H + 2G) E + H of the attention itself; H E, input of the last one
    MLP              D, input; 3 I for act(gate) * up, or I where there is no gate; I, input of the last one;
                     3 I more where transformers writes the activation out in steps (GPT-2's GELU)
    LoRA             r for each adapted projection

The input of projections is kept only where one of them trains or is adapted; layers below the lowest one that trains keep
nothing. With gradient checkpointing each layer keeps D, and one at a time all of the above.
"""

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from rewarden.errors import ConfigError
from rewarden.models.adapters import trainable
from rewarden.models.folder import quiet
from rewarden.models.forward import LOGITS_AT_ONCE
from rewarden.models.load import prepare_training
from rewarden.models.source import Model, load_config, resolve_dtype
from rewarden.models.trunk import decoder_layers, trunk_of, unwrap

FLOAT32 = 4
"""Bytes."""

ADAM_NUMBERS = 2
"""What AdamW keeps per trained parameter, in float32."""

LOGITS_ALIVE = 3
"""A chunk of logits, its gradient, and what the C library has not given back of the chunk before."""

HOLES_ADAPTED = 1.35
"""Numbers lost per output of an adapted projection: an adapted one makes four tensors of that size and keeps one."""

HOLES = 0.1
"""Numbers lost per number kept, beside those."""


COMPOSED = ("NewGELUActivation", "FastGELUActivation")
"""Activations that transformers writes out in single steps; each keeps three more tensors than a kernel of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMemory:
    """Bytes of one model.

    weights: all parameters, adapters and heads included. trained: those that train. gradients, optimizer: what training adds
    for them. activations: per token, kept for the backward pass; recomputed: per token of a forward pass, what gradient
    checkpointing holds beside them. holes: per token, freed blocks between kept ones that the C library cannot use again.
    cache: keys and values of a token. passing: a token in a pass without gradients. logits: a token's. projection: the gradient
    of the vocabulary projection, if it trains. hidden: one hidden state. depth: decoder layers; kept: those with activations.
    """

    weights: int
    trained: int
    gradients: int
    optimizer: int
    activations: int
    recomputed: int
    holes: int
    cache: int
    passing: int
    logits: int
    projection: int
    hidden: int
    depth: int
    kept: int

    def logits_at_once(self, num_tokens: int) -> int:
        """The logits that exist at a time when this many positions are projected, with their gradients."""
        chunk = max(64 * self.logits, LOGITS_AT_ONCE * FLOAT32)
        return LOGITS_ALIVE * min(num_tokens * self.logits, chunk)


def skeleton(model: Model, *, num_heads: int | None = None) -> nn.Module:
    """The model as the recipe trains it, without storage: with scalar heads, or with its LM head where `num_heads` is None."""
    config = load_config(model)
    if num_heads is not None:
        config.num_labels = num_heads
    auto = AutoModelForCausalLM if num_heads is None else AutoModelForSequenceClassification
    dtype = resolve_dtype(model.dtype, None)
    with quiet(), torch.device("meta"):
        empty = auto.from_config(config, dtype=dtype, trust_remote_code=model.trust_remote_code)
    return prepare_training(empty, model.model_copy(update={"gradient_checkpointing": False}), seed=0)


def measure(model: Model, *, num_heads: int | None = None) -> ModelMemory:
    """The bytes of `skeleton(model)`.

    Errors: ConfigError where there is no config, or the layers are not dense ones of attention and MLP.
    """
    built = skeleton(model, num_heads=num_heads)
    config, layers = trunk_of(built).config.get_text_config(), decoder_layers(built)
    parameters = [parameter for _, parameter in trainable(built)]
    trained = sum(p.numel() * p.element_size() for p in parameters)
    # Below float32 the optimizer steps a float32 copy, which has a float32 gradient.
    narrow = FLOAT32 * sum(p.numel() for p in parameters if p.element_size() < FLOAT32)
    upper = [_layer(layer, config) for layer in layers[lowest_trained(built) :]]
    size, width = next(built.parameters()).element_size(), config.hidden_size
    held, lost = sum(layer.kept for layer in upper), sum(layer.lost for layer in upper)
    if model.gradient_checkpointing and upper:
        held, lost = len(upper) * width * size, max(layer.lost for layer in upper)
    num_heads_kv = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head = unwrap(built).get_output_embeddings()
    projection = head.weight if head is not None and head.weight.requires_grad else None
    return ModelMemory(
        weights=sum(p.numel() * p.element_size() for p in built.parameters()),
        trained=trained,
        gradients=trained + narrow,
        optimizer=FLOAT32 * ADAM_NUMBERS * sum(p.numel() for p in parameters) + narrow,
        activations=held,
        recomputed=max(layer.kept for layer in upper) if model.gradient_checkpointing and upper else 0,
        holes=lost if loses_blocks() else 0,
        cache=2 * len(layers) * num_heads_kv * _head_width(config) * size,
        passing=_layer(layers[0], config).passing,
        logits=config.vocab_size * FLOAT32,
        projection=0 if projection is None else projection.numel() * projection.element_size(),
        hidden=width * size,
        depth=len(layers),
        kept=len(upper),
    )


def lowest_trained(model: nn.Module) -> int:
    """The lowest decoder layer that a gradient reaches: 0 when the embeddings train, the depth when only the head does."""
    layers = decoder_layers(model)
    of_layer = [{id(p) for p in layer.parameters() if p.requires_grad} for layer in layers]
    first = next((index for index, own in enumerate(of_layer) if own), len(layers))
    embeddings: Any = unwrap(model).get_input_embeddings()
    return 0 if embeddings.weight.requires_grad else first


def loses_blocks() -> bool:
    """Whether freed activations leave holes: on a CPU under glibc, unless MALLOC_MMAP_THRESHOLD_ gives tensors their own pages.

    glibc asks for more than the aligned block that torch wants and hands the rest to small objects, so a freed block can never
    hold a tensor of the same size again; the next one is put behind it.
    """
    fixed = os.environ.get("MALLOC_MMAP_THRESHOLD_", "")
    pages = fixed.isdecimal() and int(fixed) <= 2**20
    return not torch.cuda.is_available() and platform.libc_ver()[0] == "glibc" and not pages


@dataclass(frozen=True, slots=True)
class _Layer:
    """Bytes per token of one decoder layer: kept for backward, lost as holes, alive in a pass without gradients."""

    kept: int
    lost: int
    passing: int


@dataclass(frozen=True, slots=True)
class _Projection:
    """A linear layer: its sizes, whether its input is kept, and its LoRA rank."""

    inputs: int
    outputs: int
    keeps_input: bool
    rank: int


def _layer(layer: nn.Module, config: PreTrainedConfig) -> _Layer:
    size = next(layer.parameters()).element_size()
    width, num_heads, head = config.hidden_size, config.num_attention_heads, _head_width(config)
    num_kv = getattr(config, "num_key_value_heads", None) or num_heads
    attention = next((module for module in layer.modules() if "Attention" in type(module).__name__), None)
    inside = _projections(attention) if attention is not None else []
    ids = {id(module) for module in attention.modules()} if attention is not None else set()
    mlp = [p for p in _projections(layer, skip=ids) if p.outputs > 1]
    if len(inside) < 2 or len(mlp) < 2:
        raise ConfigError(f"no estimate for {type(layer).__name__}: only dense layers of attention and MLP are known")
    wide = mlp[-1].inputs
    gated = sum(p.outputs for p in mlp[:-1]) >= 2 * wide
    kept = (2 * num_heads + 2 * num_kv) * head + inside[-1].inputs * inside[-1].keeps_input
    kept += width * any(p.keeps_input for p in inside[:-1]) + width * any(p.keeps_input for p in mlp[:-1])
    composed = any(type(module).__name__ in COMPOSED for module in layer.modules())
    kept += wide * (3 if gated else 1) + wide * 3 * composed + wide * mlp[-1].keeps_input
    kept += sum(p.rank for p in (*inside, *mlp))
    adapted = sum(p.outputs for p in (*inside, *mlp) if p.rank)
    in_float32 = num_heads + sum(_norm(module, width, num_heads * head) for module in layer.modules())
    held = kept * size + in_float32 * FLOAT32
    return _Layer(kept=held, lost=round(HOLES_ADAPTED * adapted * size + HOLES * held), passing=(3 * wide + 3 * width) * size)


def _norm(module: nn.Module, width: int, all_heads: int) -> int:
    """Numbers that a norm keeps per token, in float32; a norm of queries or keys counts as one over all heads."""
    weight = getattr(module, "weight", None)
    if "Norm" not in type(module).__name__ or weight is None:
        return 0
    size = width if weight.numel() == width else all_heads
    twice = "RMS" in type(module).__name__ and weight.requires_grad
    return size * (2 if twice else 1)


def _projections(module: nn.Module, skip: set[int] | frozenset[int] = frozenset()) -> list[_Projection]:
    """The linear layers of a module in order, an adapted one once."""
    found: list[_Projection] = []
    for child in module.children():
        if id(child) in skip:
            continue
        if isinstance(child, BaseTunerLayer):
            base: Any = child.get_base_layer()
            rank = next(iter(getattr(child, "r", {}).values()), 0)
            found.append(_Projection(*_sizes(base), keeps_input=True, rank=rank))
        elif isinstance(child, nn.Linear | Conv1D):
            found.append(_Projection(*_sizes(child), keeps_input=child.weight.requires_grad, rank=0))
        else:
            found += _projections(child, skip)
    return found


def _sizes(linear: Any) -> tuple[int, int]:
    rows, columns = linear.weight.shape
    return (rows, columns) if isinstance(linear, Conv1D) else (columns, rows)


def _head_width(config: PreTrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def frozen_bytes(shapes: Sequence[tuple[int, ...]], element_size: int = FLOAT32) -> int:
    """Bytes of tensors of these shapes, as the header of a safetensors file lists them."""
    return sum(element_size * torch.Size(shape).numel() for shape in shapes)
