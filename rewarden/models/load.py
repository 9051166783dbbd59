"""How a tokenizer and a policy are loaded; also the one place to import the public names of rewarden.models from."""

import logging
import re
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from rewarden.errors import ConfigError
from rewarden.models.adapters import adapter_off, add_lora, copy_frozen, freeze, train_top_layers, trainable
from rewarden.models.folder import (
    ADAPTER,
    find,
    first_line,
    head_key,
    is_adapter,
    quiet,
    read_card,
    refuse_not_finite,
    tensor_shapes,
    weight_files,
)
from rewarden.models.recompute import recompute_layers
from rewarden.models.save import Origin, load_adapter_tensors, origin_of, remember, restore, save_model
from rewarden.models.source import (
    UNLOADABLE,
    Model,
    base_model,
    check_choice,
    gguf_keys,
    load_config,
    locate,
    named,
    refused,
    resolve_dtype,
    template_of,
)
from rewarden.models.trunk import check_forward

log = logging.getLogger(__name__)

__all__ = [
    "Model",
    "adapter_off",
    "copy_frozen",
    "freeze",
    "load_policy",
    "load_tokenizer",
    "origin_of",
    "read_card",
    "restore",
    "same_ids",
    "save_model",
    "template_of",
    "trainable",
]


def load_tokenizer(model: Model) -> PreTrainedTokenizerBase:
    """The tokenizer, as it is: a missing pad token stays missing, since masks here never look at pad ids.

    An adapter folder without a tokenizer uses its base's.

    Errors: ConfigError when there is none, or when it knows ids for which the model has no embedding.
    """
    vocabulary = load_config(model).get_text_config().vocab_size
    tokenizer = open_tokenizer(model)
    if beyond := tokens_beyond(tokenizer, vocabulary):
        path, (largest, token) = locate(model)[0], max(beyond.items())
        raise ConfigError(
            f"{path}: the tokenizer has ids up to {largest} ({token!r}), the model embeds only {vocabulary}; remove the added "
            "tokens from the tokenizer (padding needs none), or resize the embeddings with transformers and save again"
        )
    return tokenizer


def open_tokenizer(model: Model) -> PreTrainedTokenizerBase:
    """`load_tokenizer` without asking whether it fits the model. Errors: ConfigError when there is none."""
    path, gguf_file = locate(model)
    if is_adapter(path, model.revision) and find(path, "tokenizer_config.json", model.revision) is None:
        return open_tokenizer(base_model(model))
    try:
        with quiet():
            return AutoTokenizer.from_pretrained(
                path, revision=model.revision, trust_remote_code=model.trust_remote_code, **gguf_keys(gguf_file)
            )
    except UNLOADABLE as error:
        raise refused(model, error, "tokenizer") from error


def tokens_beyond(tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> dict[int, str]:
    """The ids, and their tokens, for which a model of this vocabulary has no embedding."""
    return {index: token for token, index in tokenizer.get_vocab().items() if index >= vocabulary}


def load_policy(model: Model, *, device: torch.device | str | None = None, seed: int = 0) -> nn.Module:
    """A causal LM in evaluation mode on the CPU (so without dropout), with what the recipe wants trained unfrozen.

    A PEFT folder loads its base and merges the adapter; `lora_r` then adds a new one, drawn from `seed`. `device` is where the
    model will run and decides what dtype "auto" is; None means the GPU if there is one.

    Errors: ConfigError for anything that would otherwise load wrongly: missing tensors, pickles, damage, a reward model.
    """
    check_choice(model)
    policy = load_causal(model, device)
    proven(policy, model)
    return prepare_training(policy, model, seed=seed)


def proven(loaded: nn.Module, model: Model) -> None:
    """`check_forward`, with the folder named in its error."""
    try:
        check_forward(loaded)
    except ConfigError as error:
        raise ConfigError(f"{model.model_name_or_path}: {error}") from None


def prepare_training(loaded: PreTrainedModel, model: Model, *, seed: int) -> nn.Module:
    """Unfreeze what the recipe wants trained, adding LoRA and checkpointing of layers if asked; evaluation mode."""
    # An embedding with a padding_idx gives that id no gradient; where pad is eos too, eos would never learn.
    vars(loaded.get_input_embeddings())["padding_idx"] = None
    loaded.requires_grad_(True)
    if model.lora_r:
        adapted = add_lora(
            loaded,
            r=model.lora_r,
            alpha=model.lora_alpha,
            dropout=model.lora_dropout,
            target_modules=model.lora_target_modules,
            num_layers=model.lora_layers,
            seed=seed,
        )
        return _prepared(adapted, model)
    if model.trainable_layers is not None:
        train_top_layers(loaded, model.trainable_layers)
    return _prepared(loaded, model)


def _prepared(trained: nn.Module, model: Model) -> nn.Module:
    return (recompute_layers(trained) if model.gradient_checkpointing else trained).eval()


def load_causal(model: Model, device: torch.device | str | None) -> PreTrainedModel:
    """The full causal LM with any adapter merged; its origin noted."""
    path, gguf_file = locate(model)
    template = template_of(model)
    if gguf_file is not None:
        policy = _load_gguf(model, path, gguf_file, device)
        remember(policy, Origin(path=None, template=template))
        return policy
    if is_adapter(path, model.revision):
        files = weight_files(path, ADAPTER, model.revision)
        _refuse_reward(path, head_key(tensor_shapes(files)) is not None)
        base = load_causal(base_model(model), device)
        adapted = attach_adapter(base, path, files, model.revision)
        merged: PreTrainedModel = adapted.merge_and_unload()
        remember(merged, Origin(path=None, template=template))
        return merged
    shapes = tensor_shapes(weight_files(path, revision=model.revision))
    kinds = load_config(model).architectures or []
    _refuse_reward(path, head_key(shapes) is not None and not any(kind.endswith("ForCausalLM") for kind in kinds))
    policy = pretrained(AutoModelForCausalLM, model, device, allowed_missing=())
    remember(policy, Origin(path=named(path), template=template))
    return policy


def _refuse_reward(path: str, scalar: bool) -> None:
    if scalar:
        raise ConfigError(f"{path} holds a reward model (it has a scalar head), not a language model; give the policy's folder")


def attach_adapter(base: PreTrainedModel, path: str, files: list[Path], revision: str | None) -> PeftModel:
    """The adapter of a PEFT folder around its base, every tensor checked."""
    try:
        with quiet():
            adapted = PeftModel.from_pretrained(base, path, revision=revision, is_trainable=True, use_safetensors=True)
    except UNLOADABLE as error:
        raise ConfigError(f"{path}: the adapter does not fit its base: {first_line(error)}") from error
    load_adapter_tensors(adapted, files)
    return adapted.eval()


def pretrained(
    auto: Any, model: Model, device: torch.device | str | None, allowed_missing: tuple[str, ...], **extra: Any
) -> Any:
    """`auto.from_pretrained` with safetensors only; a tensor that is missing and not in `allowed_missing` is an error.

    transformers fills missing tensors with random numbers and goes on.
    """
    path = model.model_name_or_path
    if model.attn_implementation is not None:
        extra["attn_implementation"] = model.attn_implementation
    try:
        with quiet(), torch.random.fork_rng():
            loaded, info = auto.from_pretrained(
                path,
                revision=model.revision,
                dtype=resolve_dtype(model.dtype, device),
                trust_remote_code=model.trust_remote_code,
                use_safetensors=True,
                output_loading_info=True,
                **extra,
            )
    except UNLOADABLE as error:
        raise refused(model, error, "model") from error
    missing = sorted(key for key in info["missing_keys"] if key not in allowed_missing)
    if missing:
        raise ConfigError(
            f"{path} lacks {len(missing)} tensors of a {type(loaded).__name__}, first {missing[0]!r}; transformers would fill "
            "them with random numbers. The checkpoint is incomplete, or of another kind of model"
        )
    _check_left_over(path, sorted(info["unexpected_keys"]))
    refuse_not_finite(path, loaded.named_parameters())
    return loaded


LAYER = re.compile(r"\.(?:layers|h|blocks|block)\.\d+\.")
"""How the tensors of a decoder layer are named."""
HARMLESS = re.compile(r"(?:inv_freq|attn\.(?:masked_)?bias|attention\.(?:masked_)?bias)$|^(?:lm_head|embed_out|score)\.")
"""Tensors that a model makes itself, and the head that it does not have."""


def _check_left_over(path: str, names: list[str]) -> None:
    """Refuse a checkpoint with more layers than its config: transformers would leave them out without a word.

    Tensors elsewhere that the model has no place for (a value head of another library) are named in a warning.
    """
    left = [name for name in names if not HARMLESS.search(name)]
    if layers := [name for name in left if LAYER.search(name)]:
        raise ConfigError(
            f"{path} holds {len(layers)} tensors that its config.json has no place for, first {layers[0]!r}; copy config and "
            "weights together"
        )
    if left:
        log.warning("%s: %d tensors have no place in the model and are not used, first %r", path, len(left), left[0])


def same_ids(tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Whether every token of the first has the same id in the second, so that a model of the second reads its ids."""
    known = other.get_vocab()
    return all(known.get(token) == index for token, index in tokenizer.get_vocab().items())


def _load_gguf(model: Model, path: str, gguf_file: str, device: torch.device | str | None) -> PreTrainedModel:
    """De-quantise a GGUF file into an ordinary model that can be trained and saved."""
    dtype = resolve_dtype(model.dtype, device)
    keys = gguf_keys(gguf_file)
    try:
        with quiet():
            loaded = AutoModelForCausalLM.from_pretrained(path, revision=model.revision, dtype=dtype, **keys)
    except UNLOADABLE as error:
        raise refused(model, error, "GGUF file") from error
    # The model still calls itself quantised and would refuse to be saved; a new shell with its weights does not.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    extra = {} if model.attn_implementation is None else {"attn_implementation": model.attn_implementation}
    shell = AutoModelForCausalLM.from_config(config, dtype=dtype, **extra)
    shell.load_state_dict(loaded.state_dict())
    return shell
