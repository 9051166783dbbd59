"""The members of an ensemble before training: their heads, and K adapters with K heads around one frozen trunk."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float
from peft import PeftModel
from torch import Tensor, nn

from rewarden.errors import ConfigError
from rewarden.models.adapters import add_another, add_lora, freeze, select_adapter
from rewarden.models.folder import ADAPTER, first_line, quiet, weight_files
from rewarden.models.heads import fresh_head, refuse_equal_heads, set_head
from rewarden.models.recompute import recompute_layers
from rewarden.models.reward import RewardModel, load_reward_model, stored_head
from rewarden.models.save import load_adapter_tensors, without_adapter
from rewarden.models.source import UNLOADABLE, Model, load_config
from rewarden.models.trunk import score_head, unwrap

Head = Literal["fresh", "saved"]

WITHOUT_LORA = {"lora_r": 0, "lora_layers": None, "lora_dropout": 0.0, "gradient_checkpointing": False}
"""What is taken out of a `model:` part to load the trunk that adapters are put on."""


def member_name(member: int) -> str:
    """How a member's folder and its adapter are called."""
    return f"member_{member}"


def start_heads(model: Model, *, head: Head, seeds: Sequence[int]) -> Float[Tensor, "K D"]:
    """One head for each member: drawn from the member's seed, or head k of the saved linear ensemble for member k.

    Errors: ConfigError for a checkpoint without heads or with another number of them, and for two equal heads.
    """
    path = model.model_name_or_path
    if head == "fresh":
        width = load_config(model).get_text_config().hidden_size
        weight_KD = torch.cat([fresh_head(1, width, seed=seed, std=None) for seed in seeds])
    else:
        weight_KD = _saved_heads(path, stored_head(model), len(seeds))
    refuse_equal_heads(weight_KD, path)
    return weight_KD


def _saved_heads(path: str, stored_KD: Tensor | None, num_members: int) -> Tensor:
    if stored_KD is None:
        raise ConfigError(
            f"{path} has no scalar heads (no tensor score.weight), and head is saved; give the folder of a linear ensemble "
            f"of {num_members} heads, or use head: fresh"
        )
    if len(stored_KD) != num_members:
        raise ConfigError(
            f"{path} has {len(stored_KD)} heads, and head is saved: each of the {num_members} member(s) goes on with one of "
            f"them. Set num_members (or num_heads, to train them together) to {len(stored_KD)}, or use head: fresh"
        )
    return stored_KD


def load_adapted_members(
    model: Model, *, heads_KD: Float[Tensor, "K D"], seeds: Sequence[int], device: torch.device | str | None
) -> RewardModel:
    """K LoRA adapters, each with its own scalar head, on one frozen trunk; evaluation mode, on the CPU, member 0 in use.

    Adapter k is named `member_k`, drawn from `seeds[k]`, and has head `heads_KD[k]`. B is 0 at the start, so member k scores
    exactly as head k on the trunk alone. The trunk's own head is the mean of the heads: what it gives alone is their mean.
    """
    plain = load_reward_model(
        model.model_copy(update=WITHOUT_LORA), num_heads=1, head="fresh", head_std=0.0, device=device
    )  # a PEFT folder is merged here
    trunk = unwrap(plain.model)
    set_head(trunk, heads_KD.mean(0, keepdim=True))
    adapted = add_lora(
        trunk,
        r=model.lora_r,
        alpha=model.lora_alpha,
        dropout=model.lora_dropout,
        target_modules=model.lora_target_modules,
        num_layers=model.lora_layers,
        seed=seeds[0],
        name=member_name(0),
    )
    for member, seed in enumerate(seeds[1:], start=1):
        add_another(adapted, seed=seed, name=member_name(member))
    for member, weight_D in reversed(list(enumerate(heads_KD))):
        select_adapter(adapted, member_name(member), trains=True)
        with torch.no_grad():
            score_head(adapted).weight.copy_(weight_D)
    if model.gradient_checkpointing:
        recompute_layers(adapted)
    return RewardModel(model=adapted.eval(), tokenizer=plain.tokenizer, template_kind=plain.template_kind)


def attach_member(model: nn.Module, folder: str | Path, name: str) -> None:
    """Put the adapter of a PEFT folder beside those of `model`, every tensor checked.

    Errors: ConfigError when it does not fit the trunk, or lacks its head.
    """
    if not isinstance(model, PeftModel):
        raise ConfigError(f"{folder} is an adapter, the first member of its ensemble is a full model; use members of one kind")
    path = str(folder)
    files = weight_files(path, ADAPTER)
    try:
        with quiet(), torch.random.fork_rng():
            model.load_adapter(path, adapter_name=name, is_trainable=False, use_safetensors=True)
    except UNLOADABLE as error:
        raise ConfigError(f"{path}: the adapter does not fit its base: {first_line(error)}") from error
    load_adapter_tensors(model, files, name=name)
    freeze(model)


def trunk_hash(model: nn.Module) -> str:
    """A hash of a model's weights without its adapters and its scalar head: names, types, shapes and values."""
    tensors = without_adapter(unwrap(model))
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        if not name.startswith("score."):
            add_tensor(digest, name, tensors[name])
    return digest.hexdigest()


def add_tensor(digest: "hashlib.blake2b", name: str, tensor: Tensor) -> None:
    """Add a tensor to a hash."""
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
