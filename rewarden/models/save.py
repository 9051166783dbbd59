"""Checkpoints as ordinary Hugging Face or PEFT folders, written so that a reader sees all of one or nothing."""

import copy
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rewarden.errors import ConfigError
from rewarden.models.folder import ADAPTER, CARD, head_key, quiet, read_tensor, refuse_not_finite, tensor_shapes, weight_files
from rewarden.models.trunk import has_score, score_head, unwrap


@dataclass(frozen=True)
class Origin:
    """Where loaded weights lie: the folder or hub id that holds them, or None when they exist in memory only."""

    path: str | None
    template: str = "chat"


def remember(model: PreTrainedModel, origin: Origin) -> None:
    """Note on a model where it came from, for the adapter and the card that are saved later."""
    vars(model)["rewarden_origin"] = origin


def origin_of(model: nn.Module) -> Origin:
    """What `remember` noted; weights built in memory have no origin."""
    return getattr(unwrap(model), "rewarden_origin", Origin(path=None))


def save_model(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    *,
    extra: Mapping[str, Any] | None = None,
    merge: bool = False,
) -> Path:
    """Write model, tokenizer and card (`rewarden.json`); `transformers` or `peft` load the folder alone.

    A LoRA model becomes a PEFT folder that names its base. When that base exists in memory only (it was merged, or came from
    a GGUF file) it is written to `folder/base`. `merge` writes one full model with the adapter folded in. The card holds
    "role" and "template", then the entries of `extra`, which win. Written beside `folder`, synced, renamed into place. Where
    several ranks call it, rank 0 writes: transformers leaves the weights out on the others.

    Errors: ConfigError for weights that are not finite, or when a head or another tensor did not reach the files.
    """
    folder = Path(folder)
    refuse_spoilt(model, folder)
    if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_rank() > 0:
        return folder
    if merge and isinstance(model, PeftModel):
        template = origin_of(model).template
        merged: Any = copy.deepcopy(model).merge_and_unload()
        remember(merged, Origin(path=None, template=template))
        model = merged
    with drafted(folder) as draft:
        with quiet():
            if isinstance(model, PeftModel):
                _write_adapter(model, draft, folder)
            else:
                unwrap(model).save_pretrained(draft)
                _check_complete(model, weight_files(str(draft)), draft)
            tokenizer.save_pretrained(draft)
        role = "reward" if has_score(model) else "policy"
        write_card(draft, {"role": role, "template": origin_of(model).template, **(extra or {})})
    return folder


def refuse_spoilt(model: nn.Module, folder: Path) -> None:
    """ConfigError when a weight that is to be saved is not finite."""
    if bad := [name for name, weight in model.named_parameters() if not bool(weight.isfinite().all())]:
        raise ConfigError(
            f"{folder}: {len(bad)} weights hold NaN or inf, first {bad[0]!r}, so the model is not saved. Start again with a "
            "lower learning_rate or with max_grad_norm, and look whether the model that the run started from is whole"
        )


@contextmanager
def drafted(folder: Path) -> Iterator[Path]:
    """A folder to write into, which is put in the place of `folder` when the block ends well, all at once."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = folder.parent / f".{folder.name}.writing-{os.getpid()}"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        yield draft
        publish(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write_card(folder: Path, card: Mapping[str, Any]) -> None:
    """Write `rewarden.json`."""
    (folder / CARD).write_text(json.dumps(card, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_adapter(model: PeftModel, draft: Path, folder: Path) -> None:
    """Adapter weights and config, and the base when it lies nowhere else."""
    base = origin_of(model).path
    config = model.peft_config[model.active_adapter]
    named = config.base_model_name_or_path
    config.base_model_name_or_path = base or str(folder.resolve() / "base")
    try:
        # "auto" would ask the hub for the base's config to find out whether the vocabulary was resized; it never is.
        model.save_pretrained(str(draft), save_embedding_layers=False)
    finally:
        config.base_model_name_or_path = named
    shapes = tensor_shapes([draft / ADAPTER])
    if has_score(model) and head_key(shapes) is None:
        raise ConfigError(f"{folder}: the scalar head did not reach {ADAPTER}; add 'score' to modules_to_save")
    if base is None:
        inner = unwrap(model)
        inner.save_pretrained(draft / "base", state_dict=without_adapter(inner))


def without_adapter(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The base model's tensors under their own names, with PEFT's wrappers taken off."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if ".lora_" in name or ".modules_to_save." in name:
            continue
        tensors[name.replace(".base_layer.", ".").replace(".original_module.", ".")] = tensor
    return tensors


def _check_complete(model: nn.Module, files: list[Path], folder: Path) -> None:
    shapes = tensor_shapes(files)
    if has_score(model) and head_key(shapes) is None:
        raise ConfigError(f"{folder}: the scalar head did not reach the files; this architecture cannot be saved as it is")
    if not shapes:
        raise ConfigError(f"{folder}: no tensor was written")


def publish(draft: Path, folder: Path) -> None:
    """Sync everything and rename; an older folder moves aside first and is removed last."""
    for path in [*sorted(draft.rglob("*")), draft]:
        _sync(path)
    aside = folder.parent / f".{folder.name}.replaced-{os.getpid()}"
    if folder.exists():
        os.rename(folder, aside)
    os.rename(draft, folder)
    _sync(folder.parent)
    for leftover in [*folder.parent.glob(f".{folder.name}.replaced-*"), *folder.parent.glob(f".{folder.name}.writing-*")]:
        shutil.rmtree(leftover, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def restore(model: nn.Module, folder: str | Path) -> None:
    """Copy the weights of a folder written by `save_model` into `model`, in place and bit for bit (LoRA and head included).

    Errors: ConfigError when the folder holds other tensors than the model.
    """
    if isinstance(model, PeftModel):
        files = weight_files(str(folder), ADAPTER)
        load_adapter_tensors(model, files)
        return
    inner = unwrap(model)
    files = weight_files(str(folder))
    shapes = tensor_shapes(files)
    if has_score(model) and head_key(shapes) is None:
        raise ConfigError(f"{folder} has no scalar head (score.weight); it is not a saved reward model or critic")
    with quiet():
        kind: Any = type(inner)
        loaded, info = kind.from_pretrained(
            str(folder), dtype=inner.dtype, use_safetensors=True, output_loading_info=True, config=copy.deepcopy(inner.config)
        )
    if wrong := sorted({*info["missing_keys"], *info["unexpected_keys"]}):
        raise ConfigError(f"{folder} and the model differ in {', '.join(wrong[:5])}; it was saved from another architecture")
    with torch.no_grad():
        for (name, target), source in zip(inner.state_dict().items(), loaded.state_dict().values(), strict=True):
            if target.shape != source.shape:
                raise ConfigError(f"{folder}: {name} is {tuple(source.shape)}, the model's is {tuple(target.shape)}")
            target.copy_(source)
        if has_score(model):
            score_head(model).weight.copy_(read_tensor(files, head_key(shapes) or ""))


def load_adapter_tensors(model: PeftModel, files: list[Path], *, name: str = "default") -> None:
    """Copy an adapter's tensors into the adapter `name` of `model`; every one must be there and none may be left over.

    Errors: ConfigError naming the difference.
    """
    tensors = {key: value for file in files for key, value in load_file(file).items()}
    expected = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    if missing := sorted(set(expected) - set(tensors)):
        raise ConfigError(
            f"{files[0]} lacks {len(missing)} of the adapter's tensors, first {missing[0]!r}; it belongs to another model, "
            "or was saved without its head"
        )
    if left := sorted(set(tensors) - set(expected)):
        raise ConfigError(f"{files[0]} holds {len(left)} tensors the model has no place for, first {left[0]!r}")
    refuse_not_finite(str(files[0]), tensors.items())
    for key, tensor in tensors.items():
        if tensor.shape != expected[key].shape:
            raise ConfigError(f"{files[0]}: {key} is {tuple(tensor.shape)}, the model's is {tuple(expected[key].shape)}")
    set_peft_model_state_dict(model, tensors, adapter_name=name)
