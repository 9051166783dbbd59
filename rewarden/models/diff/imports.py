"""Reward checkpoints of MOSS-RLHF and AlpacaFarm become Rewarden reward models."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from rewarden.errors import ConfigError
from rewarden.models.diff.carry import has_tokenizer, moss_template, read_config
from rewarden.models.diff.make import inputs, silent
from rewarden.models.diff.manifest import read_manifest
from rewarden.models.diff.output import Output, choose_dtype, head_bias, model_config, surround, write_shards
from rewarden.models.diff.read import Checkpoint
from rewarden.models.diff.reward import HEAD, SCORE, check_fits, is_reward, renamed
from rewarden.models.diff.rules import BACKBONE
from rewarden.models.diff.write import Draft, refuse_existing
from rewarden.models.folder import find

PATH_KEY = "backbone_model_name_or_path"
"""Where AlpacaFarm's config names the backbone, whose config and tokenizer are needed, not its weights."""


def import_reward(
    checkpoint: str | Path,
    out: str | Path,
    *,
    backbone: str | None = None,
    template: str | None = None,
    tokenizer: str | None = None,
    dtype: str = "auto",
    report: Callable[[str], None] = silent,
) -> tuple[str, ...]:
    """Write a reward checkpoint of MOSS-RLHF or AlpacaFarm as a Rewarden reward model; returns what is to be known about it.

    Every weight keeps its bits ("auto") or is rounded to `dtype`; the head keeps its type. AlpacaFarm's config holds only the
    path of the backbone: its config is read there, or in `backbone` where that path leads nowhere. `template` is how
    conversations become text: "alpaca" for AlpacaFarm, "moss_en" or "moss_zh" (by the tokenizer) for MOSS-RLHF, unless given.

    Errors: ConfigError for anything that is no such checkpoint, for tensors that do not fit the config, and as `recover`.
    """
    path, out = str(checkpoint), Path(out)
    refuse_existing(out)
    if read_manifest(path) is not None:
        raise ConfigError(f"{path} is a weight diff; recover it instead: rewarden diff recover RAW {path} OUT")
    asked = choose_dtype(dtype)
    with Checkpoint(path) as source:
        names = _names(source)
        wrapped = any(key.startswith(BACKBONE) for key in source.entries)
        place = _backbone(path, backbone) if wrapped else path
        output = _output(source, names, asked, place)
        tokens_from = tokenizer or (place if not has_tokenizer(path) and has_tokenizer(place) else None)
        if tokens_from is None and not has_tokenizer(path):
            raise ConfigError(f"{path} holds no tokenizer, nor does {place}; give the tokenizer's folder (--tokenizer)")
        with Draft(out, ["import", dtype, inputs(source)]) as draft:
            facts = write_shards(draft, source, output, partial(_rows, source), report)
            if lost := sum(facts.values()):
                raise ConfigError(f"dtype is {dtype}: {lost} entries are too large for it; use bfloat16 or float32")
            surround(
                draft.path,
                output,
                source=path,
                tokenizer=tokens_from,
                template=template or ("alpaca" if wrapped else moss_template(tokens_from or path)),
                provenance={"imported": {"from": "alpaca_farm" if wrapped else "moss", "name": Path(path).name}},
            )
            draft.publish()
    return (*output.notes,)


def _names(source: Checkpoint) -> dict[str, str]:
    if is_reward(source.entries):
        return renamed(source.entries)
    if SCORE in source.entries:
        raise ConfigError(f"{source.path} is a reward model with the head {SCORE} already; use it as it is")
    raise ConfigError(
        f"{source.path} holds no {HEAD}: it is no reward checkpoint of MOSS-RLHF or AlpacaFarm; give the reward model's folder"
    )


def _backbone(path: str, given: str | None) -> str:
    """The folder or hub id whose config describes the backbone."""
    named = str(read_config(path).get(PATH_KEY) or "")
    for place in (given,) if given else (named, str(Path(path) / named)):
        if place and Path(place).is_dir() and find(place, "config.json") is not None:
            return place
    if given or not named or Path(named).is_absolute() or named.startswith("."):
        said = f"backbone is {given!r}" if given else f"its config.json names the backbone {named!r}"
        raise ConfigError(f"{path}: {said}, where no config.json lies; give the backbone's folder (--backbone)")
    return named


def _output(source: Checkpoint, names: dict[str, str], asked: torch.dtype | None, place: str) -> Output:
    notes: list[str] = []
    shapes = {new: source.entries[old].shape for old, new in names.items()}
    types = {}
    for old, new in names.items():
        own = source.entries[old].dtype
        types[old] = asked if asked is not None and own.is_floating_point and new != SCORE else own
    config = model_config(read_config(place), shapes, types, names, reward=True, dtype=True, where=place, notes=notes)
    check_fits(config, shapes, source.path)
    bias = head_bias(source, notes)
    return Output(names=names, types=types, config=config, reward=True, bias=bias, dtype=asked, notes=notes)


def _rows(source: Checkpoint, key: str, dtype: torch.dtype, seen: dict[str, int]) -> Iterator[Tensor]:
    overflow = 0
    for start, stop in source.entries[key].ranges():
        own = source.rows(key, start, stop)
        rows = own.to(dtype)
        overflow += int((own.isfinite() & ~rows.isfinite()).sum()) if dtype.is_floating_point else 0
        yield rows
    seen[key] = overflow
