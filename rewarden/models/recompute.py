"""Decoder layers that forget their activations and compute them again in the backward pass (gradient checkpointing).

Chen et al. 2016 (arXiv:1604.06174): memory of one layer instead of all, for one more forward pass; gradients are the same.
transformers' own switch acts in training mode only, in which dropout acts too. Models here stay in evaluation mode, so the
layers get the same treatment there, under the names that transformers gives it.
"""

from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from rewarden.models.trunk import decoder_layers


def recompute_layers(model: nn.Module) -> nn.Module:
    """The same model; a forward pass with gradients keeps only what enters each decoder layer."""
    for layer in decoder_layers(model):
        vars(layer)["gradient_checkpointing"] = True
        vars(layer)["_gradient_checkpointing_func"] = partial(checkpoint, use_reentrant=False)
        # A bound method, not a closure: a deep copy of the model (a frozen reference) must call its own layers.
        vars(layer)["forward"] = MethodType(_recomputed, layer)
    return model


def _recomputed(layer: Any, *args: Any, **kwargs: Any) -> Any:
    forward = type(layer).forward
    done_by_transformers = layer.training and isinstance(layer, GradientCheckpointingLayer)
    if done_by_transformers or not torch.is_grad_enabled():
        return forward(layer, *args, **kwargs)
    return layer._gradient_checkpointing_func(partial(forward, layer), *args, **kwargs)
