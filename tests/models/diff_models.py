"""Bases, tuned models and published diffs in miniature, made with torch and transformers alone."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny_models import build_model, build_tokenizer
from torch import Tensor

INV_FREQ = "model.layers.{}.self_attn.rotary_emb.inv_freq"


def state(folder: Path) -> dict[str, Tensor]:
    """All tensors of the safetensors files of a folder."""
    return {key: value for file in sorted(folder.glob("*.safetensors")) for key, value in load_file(file).items()}


def same_bits(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Whether two sets of tensors are equal, NaN and signed zeros included."""
    return set(a) == set(b) and all(same_tensor(a[key], b[key]) for key in a)


def same_tensor(a: Tensor, b: Tensor) -> bool:
    bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)


def save_model(folder: Path, seed: int, *, dtype: torch.dtype = torch.float32, shard: str = "30KB", **changes: object) -> Path:
    """A tiny Llama with tokenizer, in shards."""
    build_model("llama", seed, **changes).to(dtype).save_pretrained(folder, max_shard_size=shard)
    build_tokenizer().save_pretrained(folder)
    return folder


def save_state(
    folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, object] | None = None, shards: int = 1
) -> Path:
    """Tensors as safetensors files."""
    folder.mkdir(parents=True, exist_ok=True)
    keys = sorted(tensors)
    parts = [keys[index::shards] for index in range(shards)]
    names = [f"model-{index + 1:05d}-of-{shards:05d}.safetensors" for index in range(shards)]
    if shards == 1:
        names = ["model.safetensors"]
    for name, part in zip(names, parts, strict=True):
        save_file({key: tensors[key].contiguous() for key in part}, folder / name, metadata={"format": "pt"})
    if shards > 1:
        index = {key: name for name, part in zip(names, parts, strict=True) for key in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def save_pickles(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, object], shards: int = 2) -> Path:
    """Tensors as pickled .bin shards with an index, as transformers wrote them in 2023."""
    folder.mkdir(parents=True, exist_ok=True)
    keys, index = sorted(tensors), {}
    for number in range(shards):
        name = f"pytorch_model-{number + 1:05d}-of-{shards:05d}.bin"
        part = keys[number::shards]
        torch.save({key: tensors[key] for key in part}, folder / name)
        index |= dict.fromkeys(part, name)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def inv_freq(config: Mapping[str, int]) -> Tensor:
    """The rotary table by its definition."""
    half = config["hidden_size"] // config["num_attention_heads"] // 2
    return torch.tensor([10000.0 ** (-index / half) for index in range(half)])


def with_tables(tensors: Mapping[str, Tensor], config: Mapping[str, int]) -> dict[str, Tensor]:
    """As old versions of transformers stored a Llama."""
    tables = {INV_FREQ.format(layer): inv_freq(config) for layer in range(config["num_hidden_layers"])}
    return {**tensors, **tables}


def flip(file: Path, offset: int) -> None:
    """Change one byte; a negative offset counts from the end."""
    data = bytearray(file.read_bytes())
    data[offset] ^= 1
    file.write_bytes(bytes(data))
