"""The `model:` part of a recipe, and how a tokenizer and a policy are loaded from it."""

import importlib.util
import json
from pathlib import Path
from typing import Any, Literal

import torch
from peft import PeftModel
from pydantic import Field
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

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
    tensor_shapes,
    weight_files,
)
from rewarden.models.save import Origin, load_adapter_tensors, origin_of, remember, restore, save_model
from rewarden.models.trunk import check_forward
from rewarden.spec import Spec

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
    "save_model",
    "template_of",
    "trainable",
]


class Model(Spec):
    """A causal language model: where it lies, in which precision it runs, which of its parameters train."""

    model_name_or_path: str = Field(min_length=1)
    """A folder that save_pretrained, save_model or peft wrote, a hub id, or a .gguf file."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    gguf_file: str | None = None
    """Name of a GGUF file inside the folder or hub id; it is de-quantised when loaded."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the weights; auto is bfloat16 on GPUs that have it, else float32."""
    attn_implementation: str | None = None
    """Attention kernel by its transformers name (sdpa, eager, flash_attention_2); None is transformers' choice."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model; read it first."""
    template: str = "chat"
    """How conversations become text; see rewarden.text. Where it is not given, the folder's card decides."""
    lora_r: int = Field(0, ge=0)
    """Rank of a new LoRA adapter; 0 trains the weights themselves."""
    lora_alpha: int = Field(32, ge=1)
    """LoRA scale: the update is lora_alpha / lora_r * B A."""
    lora_dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout before A, active only where an algorithm trains with dropout."""
    lora_target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """Names of the linear layers to adapt, such as [q_proj, v_proj]."""
    lora_layers: int | None = Field(None, ge=1)
    """Adapt only the top N decoder layers."""
    trainable_layers: int | None = Field(None, ge=0)
    """Without LoRA, train only the top N decoder layers, the final norm and the head; 0 trains the head alone, None everything.

    An LM head tied to the input embeddings stays frozen with them.
    """


def template_of(model: Model) -> str:
    """The template kind: the recipe's if it names one, else the folder's card's, else "chat".

    Errors: ConfigError when both name one and differ; a model trained in one template misreads another.
    """
    saved = read_card(model.model_name_or_path).get("template")
    if saved is None or saved == model.template:
        return model.template
    if "template" in model.model_fields_set:
        raise ConfigError(
            f"template is {model.template!r}, but {model.model_name_or_path} was trained with {saved!r}; remove the key, or "
            f"set {saved!r}"
        )
    return str(saved)


def load_tokenizer(model: Model) -> PreTrainedTokenizerBase:
    """The tokenizer, as it is: a missing pad token stays missing, since masks here never look at pad ids.

    An adapter folder without a tokenizer uses its base's.

    Errors: ConfigError when there is none, or when it knows ids for which the model has no embedding.
    """
    path, gguf_file = locate(model)
    if is_adapter(path, model.revision) and find(path, "tokenizer_config.json", model.revision) is None:
        return load_tokenizer(base_model(model))
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(
                path, revision=model.revision, trust_remote_code=model.trust_remote_code, **_gguf(gguf_file)
            )
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise refused(model, error, "tokenizer") from error
    vocabulary = load_config(model).get_text_config().vocab_size
    largest = max(tokenizer.get_vocab().values())
    if largest >= vocabulary:
        token = tokenizer.convert_ids_to_tokens(largest)
        raise ConfigError(
            f"{path}: the tokenizer has ids up to {largest} ({token!r}), the model embeds only {vocabulary}; remove the added "
            "tokens from the tokenizer (padding needs none), or resize the embeddings with transformers and save again"
        )
    return tokenizer


def load_policy(model: Model, *, device: torch.device | str | None = None, seed: int = 0) -> nn.Module:
    """A causal LM in evaluation mode on the CPU (so without dropout), with what the recipe wants trained unfrozen.

    A PEFT folder loads its base and merges the adapter; `lora_r` then adds a new one, drawn from `seed`. `device` is where the
    model will run and decides what dtype "auto" is; None means the GPU if there is one.

    Errors: ConfigError for anything that would otherwise load wrongly: missing tensors, pickles, damage, a reward model.
    """
    check_choice(model)
    policy = load_causal(model, device)
    check_forward(policy)
    return prepare_training(policy, model, seed=seed)


def check_choice(model: Model) -> None:
    """Refuse keys that contradict each other."""
    if model.lora_r and model.trainable_layers is not None:
        raise ConfigError(
            "lora_r and trainable_layers are both set; LoRA trains adapters only: use lora_layers to choose layers"
        )
    if model.lora_layers is not None and not model.lora_r:
        raise ConfigError("lora_layers is set but lora_r is 0; set lora_r, or use trainable_layers to train layers in full")


def prepare_training(loaded: PreTrainedModel, model: Model, *, seed: int) -> nn.Module:
    """Unfreeze what the recipe wants trained, adding LoRA if asked; evaluation mode."""
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
        return adapted.eval()
    if model.trainable_layers is not None:
        train_top_layers(loaded, model.trainable_layers)
    return loaded.eval()


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
    except (OSError, ValueError, RuntimeError) as error:
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
    except (OSError, ValueError, RuntimeError, ImportError, KeyError) as error:
        raise refused(model, error, "model") from error
    missing = sorted(key for key in info["missing_keys"] if key not in allowed_missing)
    if missing:
        raise ConfigError(
            f"{path} lacks {len(missing)} tensors of a {type(loaded).__name__}, first {missing[0]!r}; transformers would fill "
            "them with random numbers. The checkpoint is incomplete, or of another kind of model"
        )
    return loaded


def resolve_dtype(dtype: str, device: torch.device | str | None) -> torch.dtype:
    """The torch dtype for a device: "auto" is bfloat16 on a GPU that has it, else float32.

    Errors: ConfigError where the device would have to emulate it (bfloat16 without its instructions is 15 times slower).
    """
    kind = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")).type
    native_bf16 = torch.cuda.is_bf16_supported(including_emulation=False) if kind == "cuda" else False
    if dtype == "auto":
        return torch.bfloat16 if native_bf16 else torch.float32
    if dtype == "bfloat16" and kind == "cpu":
        native_bf16 = bool(torch.cpu.get_capabilities().get("avx512_bf16") or torch.cpu.get_capabilities().get("amx_bf16"))
    if (dtype == "bfloat16" and kind in ("cpu", "cuda") and not native_bf16) or (dtype == "float16" and kind == "cpu"):
        raise ConfigError(f"dtype is {dtype}, which this {kind} has no instructions for; use float32, or auto")
    return getattr(torch, dtype)


def locate(model: Model) -> tuple[str, str | None]:
    """Folder or hub id, and the GGUF file in it, if any."""
    path = model.model_name_or_path
    if model.gguf_file is None and path.endswith(".gguf"):
        if not Path(path).is_file():
            raise ConfigError(f"{path} does not exist; give the path of a GGUF file, or a hub id and gguf_file")
        return str(Path(path).parent), Path(path).name
    if model.gguf_file is not None and Path(path).is_dir() and not (Path(path) / model.gguf_file).is_file():
        there = ", ".join(sorted(file.name for file in Path(path).glob("*.gguf"))) or "none"
        raise ConfigError(f"{path} has no {model.gguf_file}; its GGUF files: {there}")
    return path, model.gguf_file


def load_config(model: Model) -> PreTrainedConfig:
    """The model's config; an adapter's is its base's."""
    path, gguf_file = locate(model)
    if gguf_file is None and is_adapter(path, model.revision):
        return load_config(base_model(model))
    try:
        with quiet():
            return AutoConfig.from_pretrained(
                path, revision=model.revision, trust_remote_code=model.trust_remote_code, **_gguf(gguf_file)
            )
    except (OSError, ValueError, KeyError) as error:
        raise refused(model, error, "config") from error


def base_model(model: Model) -> Model:
    """The spec of an adapter's base."""
    # The base may have been trained in another template; only the adapter's own counts.
    kept = model.model_dump(exclude={"model_name_or_path", "revision", "template"}, exclude_unset=True)
    return Model(model_name_or_path=base_of(model.model_name_or_path, model.revision), **kept)


def base_of(path: str, revision: str | None = None) -> str:
    """Where an adapter's base lies: `base/` inside the folder, else what its config names, also relative to the folder.

    Errors: ConfigError when nothing is there.
    """
    config = find(path, "adapter_config.json", revision)
    named = json.loads(config.read_text(encoding="utf-8")).get("base_model_name_or_path") if config else None
    for place in (Path(path) / "base", Path(path) / str(named)):
        if (place / "config.json").exists() or (place / "adapter_config.json").exists():
            return str(place)
    if not named:
        raise ConfigError(f"{path}: adapter_config.json names no base model; set base_model_name_or_path in it")
    if Path(named).is_absolute() and not Path(named).exists():
        raise ConfigError(
            f"{path}: its base model {named} does not exist; put the base into {Path(path) / 'base'}, or correct "
            "base_model_name_or_path in adapter_config.json"
        )
    return str(named)


def refused(model: Model, error: BaseException, what: str) -> ConfigError:
    """A loading failure in words."""
    path = model.model_name_or_path
    if "trust_remote_code" in str(error):
        return ConfigError(
            f"{path} brings its own Python code, which would run on this machine; read it, then set trust_remote_code: true"
        )
    return ConfigError(f"{path}: cannot load the {what}: {first_line(error)}")


def named(path: str) -> str:
    """What an adapter calls its base: an absolute path for a folder, so it is found from elsewhere; a hub id as it is."""
    return str(Path(path).resolve()) if Path(path).is_dir() else path


def _gguf(gguf_file: str | None) -> dict[str, str]:
    if gguf_file is None:
        return {}
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(f"{gguf_file} needs the gguf package: pip install 'rewarden[gguf]'")
    return {"gguf_file": gguf_file}


def _load_gguf(model: Model, path: str, gguf_file: str, device: torch.device | str | None) -> PreTrainedModel:
    """De-quantise a GGUF file into an ordinary model that can be trained and saved."""
    dtype = resolve_dtype(model.dtype, device)
    keys = _gguf(gguf_file)
    try:
        with quiet():
            loaded = AutoModelForCausalLM.from_pretrained(path, revision=model.revision, dtype=dtype, **keys)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise refused(model, error, "GGUF file") from error
    # The model still calls itself quantised and would refuse to be saved; a new shell with its weights does not.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    extra = {} if model.attn_implementation is None else {"attn_implementation": model.attn_implementation}
    shell = AutoModelForCausalLM.from_config(config, dtype=dtype, **extra)
    shell.load_state_dict(loaded.state_dict())
    return shell
