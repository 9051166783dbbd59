"""Activations below the lowest trainable layer, computed once per row and kept on disk.

When only the top layers and the head train, every epoch repeats the same lower layers on the same rows. The cache stores
what enters the lowest trainable layer, or, when the head alone trains, the final hidden state of the last token.

An entry is found by a hash of the frozen weights (values, shapes, dtypes, model config, layer) and of the row's ids, and it
carries both, so an entry of other weights is never used: a moved, renamed or damaged one is refused.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import __version__ as transformers_version

from rewarden.errors import ConfigError, DataError
from rewarden.models.cut import above, below, can_cut, evaluating
from rewarden.models.forward import check_lengths
from rewarden.models.layout import MAX_TOKENS, Layout, length_buckets
from rewarden.models.trunk import decoder_layers, final_hidden, final_norm, trunk_of
from rewarden.types import TokenBatch

FORMAT = 1
"""Part of every key; raise it when the same weights and ids would give other activations here."""

# Keys of a config that change no activation.
_INERT = frozenset(
    {"_name_or_path", "architectures", "dtype", "id2label", "label2id", "pad_token_id", "problem_type", "transformers_version"}
)


class FeatureCache:
    """Frozen activations of token rows on disk under `folder`, for `sequence_scores(model, tokens, features=...)`.

    A folder may be shared by runs and models; None means `default_folder()`.

    level: index of the lowest trainable decoder layer; as many as there are layers if only what follows them trains.
    last_only: nothing in the trunk trains, so one final hidden state per row is kept.
    computed, read: rows so far that were computed, and that came from disk.

    Errors: ConfigError when the lowest layer or the embeddings train, or when the architecture cannot be cut between layers.
    """

    def __init__(self, folder: str | Path | None, model: nn.Module) -> None:
        self.model = model
        self.level, self.last_only = _lowest_trainable(model)
        self.computed = 0
        self.read = 0
        if self.level == 0:
            raise ConfigError(
                "cached features need frozen lower layers, but the lowest layer or the embeddings train; set lora_layers or "
                "trainable_layers"
            )
        self._stamp = self._versions()
        self.weights = self._fingerprint()
        self.folder = (default_folder() if folder is None else Path(folder)) / self.weights[:32]
        if not self.last_only and not can_cut(model, self.level):
            raise ConfigError(
                f"{type(trunk_of(model)).__name__} cannot be cut between two layers; turn cached features off for it"
            )

    def last_hidden(self, model: nn.Module, tokens: TokenBatch) -> Tensor:
        """The final hidden state [B, D] at each row's last token, when nothing in the trunk trains.

        Errors: DataError when the cache was made for another model, or the frozen weights or what trains have changed since.
        """
        self._check_unchanged(model)
        return torch.cat(self._entries(tokens)).to(tokens.ids_BT.device)

    def through(self, model: nn.Module, tokens: TokenBatch) -> Callable[[Layout], Tensor]:
        """Rows in a layout -> their final hidden states, through the trainable layers.

        Errors: DataError as `last_hidden`.
        """
        self._check_unchanged(model)
        entries = self._entries(tokens)
        ids_BT = tokens.ids_BT.masked_fill(~tokens.mask_BT, 0)

        def run(layout: Layout) -> Tensor:
            cached = [entries[row].to(ids_BT.device) for row in layout.row_b.tolist()]
            return above(self.model, self.level, layout, layout.arrange(ids_BT), layout.join(cached))

        return run

    def _check_unchanged(self, model: nn.Module) -> None:
        if model is not self.model:
            raise DataError("these cached features belong to another model object; make a FeatureCache for this one")
        if self._versions() != self._stamp or _lowest_trainable(model) != (self.level, self.last_only):
            raise DataError("frozen weights, or what trains, changed since the feature cache was made; make a new FeatureCache")

    @torch.no_grad()
    def _lower(self, ids_BT: Tensor) -> Tensor:
        """What leaves the highest frozen layer, or the final hidden states when the whole trunk is frozen."""
        trunk = trunk_of(self.model)
        with evaluating(self.model):
            if self.last_only:
                return final_hidden(trunk, ids_BT)
            return below(self.model, self.level, lambda: final_hidden(trunk, ids_BT))

    def _frozen(self) -> Iterator[tuple[str, Tensor]]:
        """Names and values of everything the cached activations depend on."""
        layers, trunk = decoder_layers(self.model), trunk_of(self.model)
        above = {id(parameter) for layer in layers[self.level :] for parameter in layer.parameters()}
        if not self.last_only:
            above |= {id(parameter) for parameter in final_norm(self.model).parameters()}
        return ((name, parameter) for name, parameter in trunk.named_parameters() if id(parameter) not in above)

    def _versions(self) -> tuple[int, ...]:
        # torch counts in-place writes to a tensor; a restored or trained weight shows here.
        return tuple(parameter._version for _, parameter in self._frozen())

    def _fingerprint(self) -> str:
        """Hash of frozen weights, model config and cut, and of the code that computes with them."""
        config = trunk_of(self.model).config
        facts = {key: value for key, value in config.to_dict().items() if key not in _INERT}
        cut = [self.level, self.last_only, getattr(config, "_attn_implementation", None)]
        code = [FORMAT, transformers_version]
        digest = hashlib.blake2b(json.dumps([code, facts, cut], sort_keys=True, default=str).encode(), digest_size=32)
        for name, parameter in self._frozen():
            digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
            digest.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def _entries(self, tokens: TokenBatch) -> list[Tensor]:
        """The cached activations of every row, computing and writing what is not there yet."""
        lengths = tokens.length_B.tolist()
        check_lengths(self.model, lengths)
        ids = [tuple(row[:length]) for row, length in zip(tokens.ids_BT.tolist(), lengths, strict=True)]
        files = [self._file(row) for row in ids]
        found = [self._read(file, row) if file.exists() else None for file, row in zip(files, ids, strict=True)]
        absent = [row for row, entry in enumerate(found) if entry is None]
        self.read += len(ids) - len(absent)
        self.computed += len(absent)
        for group in length_buckets([lengths[row] for row in absent], max_tokens=MAX_TOKENS["cpu"]):
            rows = [absent[index] for index in group]
            ids_bT = tokens.ids_BT[rows, : lengths[rows[0]]].masked_fill(~tokens.mask_BT[rows, : lengths[rows[0]]], 0)
            for row, hidden_TD in zip(rows, self._lower(ids_bT), strict=True):
                first = lengths[row] - 1 if self.last_only else 0
                entry = hidden_TD[first : lengths[row]].cpu().clone()
                self._write(files[row], ids[row], entry)
                found[row] = entry
        return [entry for entry in found if entry is not None]

    def _file(self, ids: tuple[int, ...]) -> Path:
        key = _ids_hash(ids)
        return self.folder / key[:2] / f"{key}.safetensors"

    def _read(self, file: Path, ids: tuple[int, ...]) -> Tensor:
        try:
            with safe_open(file, "pt") as opened:
                facts, entry = opened.metadata() or {}, opened.get_tensor("hidden")
        except SafetensorError as error:
            raise DataError(f"{file} is truncated or damaged ({error}); delete it, it is computed again") from error
        if facts.get("weights") != self.weights or facts.get("ids") != _ids_hash(ids):
            raise DataError(f"{file} holds activations of other weights or another row; delete it, it is computed again")
        return entry

    def _write(self, file: Path, ids: tuple[int, ...], entry: Tensor) -> None:
        draft = file.with_suffix(f".writing-{os.getpid()}")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            save_file({"hidden": entry}, draft, metadata={"weights": self.weights, "ids": _ids_hash(ids)})
            os.replace(draft, file)
        except (OSError, SafetensorError) as error:
            raise DataError(f"{file} cannot be written ({error}); free space, or choose another feature_cache_dir") from error


def default_folder() -> Path:
    """$REWARDEN_CACHE/features, by default ~/.cache/rewarden/features."""
    return Path(os.environ.get("REWARDEN_CACHE", Path.home() / ".cache" / "rewarden")) / "features"


def _ids_hash(ids: tuple[int, ...]) -> str:
    return hashlib.blake2b(json.dumps(ids).encode(), digest_size=20).hexdigest()


def _lowest_trainable(model: nn.Module) -> tuple[int, bool]:
    """(index of the lowest layer that trains, or the number of layers; whether nothing in the trunk trains)."""
    layers, trunk = decoder_layers(model), trunk_of(model)
    trained = {id(parameter) for parameter in trunk.parameters() if parameter.requires_grad}
    if not trained:
        return len(layers), True
    of_layer = [{id(parameter) for parameter in layer.parameters()} for layer in layers]
    of_norm = {id(parameter) for parameter in final_norm(model).parameters()}
    if trained - of_norm - set().union(*of_layer):
        return 0, False
    return next((index for index, own in enumerate(of_layer) if own & trained), len(layers)), False
