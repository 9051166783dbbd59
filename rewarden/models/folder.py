"""What lies in a checkpoint: files, tensor names, the card; damage is found before anything is loaded."""

import json
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from transformers.utils import cached_file, logging

from rewarden.errors import ConfigError
from rewarden.hub import cannot_reach, means_folder, no_folder, unreachable

CARD = "rewarden.json"
ENSEMBLE = "ensemble.json"
FULL = "model.safetensors"
ADAPTER = "adapter_model.safetensors"
INPUT_EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings", "tok_embeddings")
"""How the table of input embeddings is called, of which `.weight` has a row per token."""
PICKLES = {FULL: ("pytorch_model.bin", "pytorch_model.bin.index.json"), ADAPTER: ("adapter_model.bin",)}


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' bars and load reports: what was missing or left over is checked here and raised.

    Also without the warning that peft asks transformers for an attribute under its old name.
    """
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def find(path: str, name: str, revision: str | None = None) -> Path | None:
    """The file `name` of a folder or hub id, or None if the checkpoint has none.

    Errors: ConfigError when `path` is neither a folder nor a hub id, or the hub is out of reach and its files are not here.
    """
    if Path(path).is_dir():
        file = Path(path) / name
        return file if file.exists() else None
    if Path(path).exists():
        raise ConfigError(f"{path} is a file; give a folder, a hub id, or a .gguf file")
    if means_folder(path):
        raise ConfigError(no_folder(path))
    found = _hub_file(path, name, revision)
    if found is None and not any(_hub_file(path, known, revision) for known in ("config.json", "adapter_config.json")):
        if why := unreachable():
            raise ConfigError(cannot_reach(path, why))
        raise ConfigError(f"{path!r} is not a folder, and the hub has no such model, or it is not in the local cache; check it")
    return found


def _hub_file(path: str, name: str, revision: str | None) -> Path | None:
    try:
        if unreachable():
            cached = try_to_load_from_cache(path, name, revision=revision)
            return Path(cached) if isinstance(cached, str) else None
        with quiet():
            found = cached_file(path, name, revision=revision, _raise_exceptions_for_missing_entries=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path!r} is not a folder, and the hub has no such model: {first_line(error)}") from error
    return Path(found) if found else None


def first_line(error: BaseException) -> str:
    """The first line of an error's text that says something, for quoting inside ours."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    said = next((place for place, line in enumerate(lines) if not line.endswith(":")), len(lines) - 1)
    return " ".join(lines[: said + 1])


def read_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint.

    Errors: ConfigError when the file is damaged or holds something else.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is damaged ({error}); copy it again") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} is damaged (it holds {type(found).__name__}, not an object); copy it again")
    return found


def is_adapter(path: str, revision: str | None = None) -> bool:
    """Whether `path` holds a PEFT adapter and no full model."""
    return find(path, "adapter_config.json", revision) is not None and find(path, "config.json", revision) is None


def refuse_ensemble(path: str) -> None:
    """ConfigError for the folder of several models: which of them is meant?"""
    if (Path(path) / ENSEMBLE).is_file():
        raise ConfigError(
            f"{path} is an ensemble of several models, and one is needed here; give one of its folders, such as "
            f"{Path(path) / 'member_0'}"
        )


def weight_files(path: str, name: str = FULL, revision: str | None = None) -> list[Path]:
    """The safetensors files of a checkpoint, all shards.

    Errors: ConfigError for a missing shard, pickles only, or no weights at all.
    """
    refuse_ensemble(path)
    if (Path(path) / "diff.json").is_file():
        raise ConfigError(f"{path} is a weight diff, not a model; recover it first: rewarden diff recover RAW {path} OUT")
    single = find(path, name, revision)
    if single is not None:
        return [single]
    index = find(path, f"{name}.index.json", revision)
    if index is not None:
        return indexed_files(path, index, revision)[1]
    for pickle in PICKLES[name]:
        if find(path, pickle, revision) is not None:
            raise ConfigError(
                f"{path} holds {pickle} only, a pickle, which can run code when it is opened; safetensors is needed. If you "
                "trust it, convert it once with transformers or peft: from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
            )
    raise ConfigError(f"{path} holds no {name}; give a folder that save_pretrained or save_model wrote")


def indexed_files(path: str, index: Path, revision: str | None = None) -> tuple[dict[str, str], list[Path]]:
    """What the index of a checkpoint in several files says: tensor name -> file name, and the files, sorted by name.

    Errors: ConfigError for a damaged index or a missing shard.
    """
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{index} has no weight_map; copy it again from where the shards came from")
    names = {key: str(shard) for key, shard in weight_map.items()}
    found = {shard: find(path, shard, revision) for shard in sorted(set(names.values()))}
    if missing := [shard for shard, file in found.items() if file is None]:
        raise ConfigError(f"{path}: {index.name} names {', '.join(missing)}, not there; copy the missing shards")
    return names, [file for file in found.values() if file is not None]


def tensor_shapes(files: list[Path]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor in safetensors files, from the headers.

    Errors: ConfigError for a truncated or damaged file.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with safe_open(file, "pt") as opened:
                shapes |= {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118
        except SafetensorError as error:
            size = file.stat().st_size
            raise ConfigError(f"{file} ({size} bytes) is truncated or damaged: {error}; copy or download it again") from error
    return shapes


def read_tensor(files: list[Path], key: str) -> torch.Tensor:
    """One tensor, bit for bit."""
    for file in files:
        with safe_open(file, "pt") as opened:
            if key in opened.keys():  # noqa: SIM118
                return opened.get_tensor(key)
    raise ConfigError(f"{', '.join(str(file) for file in files)}: no tensor {key!r}")


def refuse_not_finite(what: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """ConfigError when a weight is NaN or infinite: every number computed with it would be too."""
    for name, tensor in tensors:
        # A sum meets every entry without a mask as large as the tensor.
        suspicious = tensor.is_floating_point() and not bool(tensor.detach().sum(dtype=torch.float32).isfinite())
        if suspicious and not bool(tensor.isfinite().all()):
            raise ConfigError(f"{what}: the weight {name!r} holds NaN or inf; take another checkpoint, or copy it again")


def head_key(shapes: dict[str, tuple[int, ...]]) -> str | None:
    """The name under which the checkpoint stores the scalar head, plain or as a PEFT module_to_save; None if it has none."""
    names = [key for key in shapes if key == "score.weight" or key.endswith(".score.weight")]
    return min(names, key=len) if names else None


def read_card(folder: str | Path) -> dict[str, Any]:
    """`rewarden.json` of a folder (role, template kind, extras), or {} where there is none, as for hub ids.

    Errors: ConfigError when it is there and damaged.
    """
    file = Path(folder) / CARD
    if not file.is_file():
        return {}
    try:
        card = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is damaged ({error}); copy it again, or remove it and set `template` yourself") from error
    if not isinstance(card, dict):
        raise ConfigError(f"{file} holds {type(card).__name__}, not an object; copy it again, or remove it and set `template`")
    return card
