"""The model folder that `recover` and `import_reward` write around the weights."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rewarden.errors import ConfigError
from rewarden.models.diff.carry import card_text, carry, carry_tokenizer
from rewarden.models.diff.read import Checkpoint
from rewarden.models.diff.reward import (
    BIAS,
    SCORE,
    classifier_config,
    embedding_rows,
    with_dtype,
    with_vocabulary,
)
from rewarden.models.diff.write import Draft, Planned, shard_name, write_text
from rewarden.models.folder import CARD, FULL, find, read_card

CHOICES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Their name -> ours, their name -> type, and the config (None: carried over unchanged)."""

    names: dict[str, str]
    types: dict[str, torch.dtype]
    config: dict[str, Any] | None
    reward: bool
    bias: list[float] | None
    dtype: torch.dtype | None
    notes: list[str]


def choose_dtype(name: str) -> torch.dtype | None:
    """The torch type of an option, None for "auto". Errors: ConfigError for another word."""
    if name == "auto":
        return None
    if name not in CHOICES:
        raise ConfigError(f"dtype is {name!r}; use auto, {', '.join(CHOICES)}")
    return CHOICES[name]


def model_config(
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    types: Mapping[str, torch.dtype],
    names: Mapping[str, str],
    *,
    reward: bool,
    dtype: bool,
    where: str,
    notes: list[str],
) -> dict[str, Any]:
    """The config of what is written: a classifier's for a reward model, with the vocabulary and type of the tensors."""
    changed = classifier_config(config, where) if reward else dict(config)
    changed = with_vocabulary(changed, embedding_rows(shapes), notes)
    # The type of the largest tensor: the head of a bfloat16 model is float32.
    largest = max(names, key=lambda old: torch.Size(shapes[names[old]]).numel())
    return with_dtype(changed, types[largest]) if dtype or reward else changed


def head_bias(source: Checkpoint, notes: list[str]) -> list[float] | None:
    """The bias that is left out, since our heads have none; None where there is none."""
    if BIAS not in source.entries:
        return None
    bias = source.rows(BIAS, 0, 1).float().tolist()
    if any(bias):
        notes.append(
            f"the head's bias {bias[0]:.6g} is left out: every score is lower by it; differences of scores, and so pairs, "
            f"best-of-n and training, are the same. It is noted in {CARD}"
        )
    return bias


def write_shards(
    draft: Draft,
    source: Checkpoint,
    output: Output,
    rows: Callable[[str, torch.dtype, dict[str, Any]], Iterator[Tensor]],
    report: Callable[[str], None],
    *,
    order: Callable[[str], Any] | None = None,
) -> dict[str, Any]:
    """Write the tensors that have a name in `output`, in as many files as `source` has; returns what was seen of every tensor.

    `rows` (their name, type, what was seen) gives a tensor's rows and notes what it sees under that name. `order` is a sort
    key of the names in one file, which are sorted alphabetically without it.
    """
    facts: dict[str, Any] = {}
    index: dict[str, str] = {}
    for number, keys in enumerate(source.names().values()):
        name = shard_name(FULL, number, len(source.files))
        seen: dict[str, Any] = {}
        planned = [
            Planned(
                key=output.names[key],
                shape=source.entries[key].shape,
                dtype=output.types[key],
                rows=partial(rows, key, output.types[key], seen),
            )
            for key in sorted(keys, key=order)
            if key in output.names
        ]
        facts |= draft.shard(name, planned, partial(dict, seen), report)["facts"] if planned else {}
        index |= {tensor.key: name for tensor in planned}
    draft.index(FULL, index)
    return facts


def surround(
    folder: Path,
    output: Output,
    *,
    source: str,
    tokenizer: str | None,
    template: str | None,
    provenance: Mapping[str, Any],
) -> None:
    """Config, tokenizer, other small files and the card, beside the weights in `folder`."""
    _, left = carry(source, folder, without=(CARD,) if output.config is None else (CARD, "config.json"))
    if left:
        output.notes.append(f"not carried over: {', '.join(left)}")
    if output.config is not None:
        write_text(folder / "config.json", card_text(output.config))
    if tokenizer is not None:
        carry_tokenizer(tokenizer, folder)
    held = set(output.names.values())
    found = find(source, CARD)
    card: dict[str, Any] = {"role": "policy", **(read_card(found.parent) if found else {})}
    if SCORE in held:
        card["role"] = "reward"
    if template is not None:
        card["template"] = template
    if output.bias is not None:
        card["left_out_bias"] = output.bias
    extra = sorted(held & {"lm_head.weight", "lm_head.bias"}) if output.reward else []
    if extra:
        card["extra_tensors"] = extra
    write_text(folder / CARD, card_text({**card, **provenance}))
