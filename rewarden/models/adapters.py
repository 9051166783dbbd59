"""Which parameters train: LoRA on all or the top layers, the top layers themselves, or none; and the adapter switched off."""

import copy
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rewarden.errors import ConfigError
from rewarden.models.folder import quiet
from rewarden.models.trunk import decoder_layers, final_norm, has_score, score_head, unwrap
from rewarden.spec import nearest


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Names and parameters that train, in order; a tied parameter appears once."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def freeze(model: nn.Module) -> nn.Module:
    """The same model with nothing to train, in evaluation mode."""
    return model.requires_grad_(False).eval()


def copy_frozen(model: nn.Module) -> nn.Module:
    """A frozen deep copy, such as a reference policy. It shares no memory, so training the original cannot move it."""
    return freeze(copy.deepcopy(model))


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """The model as it was before its adapter: LoRA layers and trained copies (modules_to_save) are switched off inside.

    Which parameters train is the same after as before, also when the block raises.

    Errors: ConfigError when the model has no adapter, so that it can never be compared with itself by mistake.
    """
    if not isinstance(model, PeftModel):
        raise ConfigError(
            f"{type(model).__name__} has no adapter to switch off; set lora_r above 0, or take a frozen copy as the reference"
        )
    wrappers = [module for module in model.modules() if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper))]
    was_off = [module.disable_adapters for module in wrappers]
    # enable_adapters also flips requires_grad, which would thaw a frozen adapter on the way out.
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for module in wrappers:
            module.enable_adapters(False)
        yield
    finally:
        for module, off in zip(wrappers, was_off, strict=True):
            module.enable_adapters(not off)
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


def seeded(*parts: object) -> int:
    """A 63-bit seed from any values; the same values give the same seed on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1


def train_top_layers(model: nn.Module, num_layers: int) -> None:
    """Freeze all but the top `num_layers` decoder layers, the final norm and the head; 0 leaves the head alone.

    An LM head tied to the input embeddings stays frozen with them: training it would change the lowest layer's input.

    Errors: ConfigError for more layers than there are.
    """
    layers = decoder_layers(model)
    if num_layers > len(layers):
        raise ConfigError(
            f"trainable_layers is {num_layers}; the model has {len(layers)} layers: use 0 to {len(layers)}, or null"
        )
    norm = final_norm(model) if num_layers else None
    model.requires_grad_(False)
    for module in [*layers[len(layers) - num_layers :], *([norm] if norm is not None else [])]:
        module.requires_grad_(True)
    inner = unwrap(model)
    if has_score(model):
        score_head(model).requires_grad_(True)
    elif inner.get_output_embeddings().weight is not inner.get_input_embeddings().weight:
        inner.get_output_embeddings().requires_grad_(True)
    elif num_layers == 0:
        raise ConfigError(
            "trainable_layers is 0 and the LM head is tied to the frozen embeddings, so nothing would train; use 1 or more"
        )


def add_lora(
    model: PreTrainedModel,
    *,
    r: int,
    alpha: int,
    dropout: float,
    target_modules: Literal["all-linear"] | Sequence[str],
    num_layers: int | None,
    seed: int,
    name: str = "default",
) -> PeftModel:
    """LoRA around linear layers of the trunk; a scalar head trains in full and is saved with the adapter.

    Hu et al. 2021 (arXiv:2106.09685): W' = W + alpha/r * B A with B = 0, so the new model computes exactly what the old
    one did. `num_layers` restricts it to the top decoder layers. A is drawn from `seed`. `name` is PEFT's name for it.

    Errors: ConfigError for a target that names no linear layer of the trunk, or for more layers than there are.
    """
    targets = _targets(model, target_modules, num_layers)
    scalar = has_score(model)
    config = LoraConfig(
        r=r,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=targets,
        task_type="SEQ_CLS" if scalar else "CAUSAL_LM",
        modules_to_save=["score"] if scalar else None,
        fan_in_fan_out=any(isinstance(model.get_submodule(name), Conv1D) for name in targets),
    )
    with quiet(), torch.random.fork_rng():
        torch.manual_seed(seeded("lora", seed))
        return get_peft_model(model, config, adapter_name=name)


def add_another(model: PeftModel, *, seed: int, name: str) -> None:
    """One more adapter of the same kind beside those of `model`, drawn from `seed` as `add_lora` draws the first."""
    config = copy.deepcopy(next(iter(model.peft_config.values())))
    with quiet(), torch.random.fork_rng():
        torch.manual_seed(seeded("lora", seed))
        model.add_adapter(name, config)


def select_adapter(model: PeftModel, name: str, *, trains: bool) -> None:
    """Make `name` the adapter in use, with its own trained copies (the scalar head); it alone requires gradients, if any."""
    model.set_adapter(name, inference_mode=not trains)


def lowest_adapted(model: nn.Module) -> int:
    """The lowest decoder layer with an adapter; the depth when none has one."""
    layers = decoder_layers(model)
    adapted = [any(isinstance(module, BaseTunerLayer) for module in layer.modules()) for layer in layers]
    return adapted.index(True) if True in adapted else len(layers)


def _targets(
    model: PreTrainedModel, target_modules: Literal["all-linear"] | Sequence[str], num_layers: int | None
) -> list[str]:
    """Full names of the linear layers to adapt, those of the decoder layers only: heads and embeddings have other rules."""
    layers = decoder_layers(model)
    depth = len(layers)
    if num_layers is not None and num_layers > depth:
        raise ConfigError(f"lora_layers is {num_layers}; the model has {depth} layers: use 1 to {depth}, or null for all")
    prefix = next(name for name, module in model.named_modules() if module is layers)
    first = depth - (num_layers or depth)
    names = [
        f"{prefix}.{index}.{name}"
        for index in range(first, depth)
        for name, module in layers[index].named_modules()
        if isinstance(module, (nn.Linear, Conv1D))
    ]
    if target_modules == "all-linear":
        return names
    chosen: list[str] = []
    for target in target_modules:
        hits = [name for name in names if name.endswith(f".{target}")]
        if not hits:
            known = {name.rsplit(".", 1)[1] for name in names}
            raise ConfigError(
                f"lora_target_modules: no linear layer is called {target!r}; {nearest(target, known)}, or use 'all-linear'"
            )
        chosen += hits
    return sorted(set(chosen))
