"""The `model:` part of a recipe, and what can be said of a model before its weights are read."""

import importlib.util
import struct
from pathlib import Path
from typing import Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from pydantic import Field
from transformers import AutoConfig, PreTrainedConfig

from rewarden.errors import ConfigError
from rewarden.models.folder import find, first_line, is_adapter, quiet, read_card, read_object, refuse_ensemble
from rewarden.spec import Spec

UNLOADABLE = (
    OSError,
    ValueError,
    RuntimeError,
    ImportError,
    LookupError,
    AttributeError,
    TypeError,
    AssertionError,
    struct.error,
    StrictDataclassError,
)
"""What transformers, tokenizers and gguf raise for a folder that they cannot make sense of."""


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
    gradient_checkpointing: bool = False
    """Compute each decoder layer again in the backward pass instead of keeping its activations: less memory, same gradients."""


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


def check_choice(model: Model) -> None:
    """Refuse keys that contradict each other."""
    if model.lora_r and model.trainable_layers is not None:
        raise ConfigError(
            "lora_r and trainable_layers are both set; LoRA trains adapters only: use lora_layers to choose layers"
        )
    if model.lora_layers is not None and not model.lora_r:
        raise ConfigError("lora_layers is set but lora_r is 0; set lora_r, or use trainable_layers to train layers in full")


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
    if gguf_file is None:
        file = find(path, "config.json", model.revision)
        refuse_ensemble(path)
        if file is None:
            raise ConfigError(f"{path} has no config.json; give a folder that save_pretrained or save_model wrote, or a hub id")
        read_object(file)
    try:
        with quiet():
            return AutoConfig.from_pretrained(
                path, revision=model.revision, trust_remote_code=model.trust_remote_code, **gguf_keys(gguf_file)
            )
    except UNLOADABLE as error:
        raise refused(model, error, "config") from error


def num_positions(config: PreTrainedConfig) -> int | None:
    """The longest row that a model has positions for, if its config says so."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


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
    named = read_object(config).get("base_model_name_or_path") if config else None
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
    if "ignore_mismatched_sizes" in str(error):
        return ConfigError(f"{path}: its tensors have other shapes than config.json says; copy config and weights together")
    if "instantiate the backend tokenizer" in str(error):
        return ConfigError(
            f"{path} has no tokenizer; copy tokenizer.json and tokenizer_config.json from the model it came from"
        )
    if isinstance(error, struct.error):
        return ConfigError(f"{path}: not a whole GGUF file ({first_line(error)}); copy or download it again")
    for name in ("tokenizer_config.json", "tokenizer.json") if what == "tokenizer" else ():
        if (file := find(path, name, model.revision)) is not None:
            read_object(file)  # the damaged one is named
    if "Padding_idx" in str(error):
        return ConfigError(f"{path}: pad_token_id in config.json is no id of its vocabulary; set it to null (no pad is needed)")
    return ConfigError(f"{path}: cannot load the {what}: {first_line(error)}")


def named(path: str) -> str:
    """What an adapter calls its base: an absolute path for a folder, so it is found from elsewhere; a hub id as it is."""
    return str(Path(path).resolve()) if Path(path).is_dir() else path


def gguf_keys(gguf_file: str | None) -> dict[str, str]:
    """Keywords that make transformers read a GGUF file.

    Errors: ConfigError with the install line when the gguf package is absent.
    """
    if gguf_file is None:
        return {}
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(f"{gguf_file} needs the gguf package: pip install 'rewarden[gguf]'")
    return {"gguf_file": gguf_file}
