"""An ensemble on disk: one folder for all members, which can be moved as a whole.

    single, linear   an ordinary Hugging Face or PEFT folder; score.weight is [K, D]
    independent      ensemble.json, member_0/, member_1/, ...          ordinary Hugging Face folders
    lora             ensemble.json, trunk/, member_0/, member_1/, ...  a Hugging Face folder, and PEFT folders on ../trunk

Beside ensemble.json lies rewarden.json, as in every checkpoint: role, template, calibration, evaluation. Every inner folder is
loaded by transformers or peft alone.
"""

import copy
import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from peft import PeftModel, get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerBase

from rewarden.errors import ConfigError
from rewarden.models.folder import ADAPTER, ENSEMBLE, quiet, read_object, tensor_shapes, weight_files
from rewarden.models.members import add_tensor, member_name
from rewarden.models.save import drafted, origin_of, refuse_spoilt, without_adapter, write_card
from rewarden.models.trunk import unwrap

TRUNK = "trunk"
FORMAT = 1

Family = Literal["single", "linear", "independent", "lora"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnsembleFile:
    """What ensemble.json says: the folders of the members, their seeds, and the hash of the shared trunk (LoRA only)."""

    folder: Path
    family: Family
    members: tuple[str, ...]
    seeds: tuple[int, ...]
    trunk: str | None

    def member(self, index: int) -> Path:
        """The folder of a member."""
        return self.folder / self.members[index]


def is_ensemble(path: str | Path) -> bool:
    """Whether `path` is a folder with an ensemble.json."""
    return (Path(path) / ENSEMBLE).is_file()


def write_ensemble_file(folder: Path, family: Family, members: Sequence[str], seeds: Sequence[int], trunk: str | None) -> None:
    """Write ensemble.json."""
    body = {"format": FORMAT, "family": family, "members": list(members), "seeds": list(seeds), "trunk": trunk}
    (folder / ENSEMBLE).write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")


def read_ensemble_file(path: str | Path) -> EnsembleFile:
    """What ensemble.json of a folder says, with every folder it names in its place.

    Errors: ConfigError for a damaged file, another format, and a member or trunk that is not there.
    """
    folder = Path(path)
    file = folder / ENSEMBLE
    body = read_object(file)
    if body.get("format") != FORMAT:
        raise ConfigError(f"{file} has format {body.get('format')!r}, this version reads {FORMAT}; train or copy it again")
    family, members, trunk = body.get("family"), body.get("members"), body.get("trunk")
    if family not in ("independent", "lora"):
        raise ConfigError(f"{file}: family is {family!r}; allowed: independent, lora (one folder holds the other families)")
    if not isinstance(members, list) or not members or not all(isinstance(name, str) and name for name in members):
        raise ConfigError(f"{file}: members is {members!r}; list the folder of each member, such as [member_0, member_1]")
    if repeated := sorted({name for name in members if members.count(name) > 1}):
        raise ConfigError(f"{file}: members lists {', '.join(repeated)} more than once; list each member once")
    seeds = body.get("seeds") or [0] * len(members)
    if not isinstance(seeds, list) or len(seeds) != len(members) or not all(isinstance(seed, int) for seed in seeds):
        raise ConfigError(f"{file}: seeds is {seeds!r}, for {len(members)} members; give one whole number for each, or null")
    for name in [*members, *([TRUNK] if family == "lora" and trunk is not None else [])]:
        if not (folder / name).is_dir():
            raise ConfigError(f"{file} names {name}, and {folder / name} is not there; copy the whole folder again")
    kind = cast(Family, family)
    return EnsembleFile(folder=folder, family=kind, members=tuple(members), seeds=tuple(seeds), trunk=trunk)


def files_hash(folder: str | Path) -> str:
    """The `trunk_hash` of the model in a folder, from its files."""
    files = weight_files(str(folder))
    where = {key: file for file in files for key in tensor_shapes([file])}
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(where):
        if not name.startswith("score."):
            with safe_open(where[name], "pt") as opened:
                add_tensor(digest, name, opened.get_tensor(name))
    return digest.hexdigest()


def check_trunk(ensemble: EnsembleFile) -> None:
    """ConfigError when the trunk of a LoRA ensemble is not the one that its members were trained on."""
    if ensemble.trunk is None:
        return
    found = files_hash(ensemble.folder / TRUNK)
    if found != ensemble.trunk:
        raise ConfigError(
            f"{ensemble.folder / TRUNK} has other weights than the members were trained on (hash {found}, ensemble.json says "
            f"{ensemble.trunk}); copy the whole folder again"
        )


def save_adapted_members(
    model: PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    *,
    seeds: Sequence[int],
    extra: Mapping[str, Any],
    member_extra: Sequence[Mapping[str, Any]],
) -> Path:
    """Write the folder of a LoRA ensemble whose adapters are `load_adapted_members`'; `member_extra[k]` goes to card k.

    Errors: ConfigError for weights that are not finite.
    """
    folder = Path(folder)
    refuse_spoilt(model, folder)
    base, template = unwrap(model), origin_of(model).template
    card = {"role": "reward", "template": template}
    with drafted(folder) as draft, quiet():
        base.save_pretrained(draft / TRUNK, state_dict=without_adapter(base))
        tokenizer.save_pretrained(draft / TRUNK)
        write_card(draft / TRUNK, {**card, "num_heads": 1})
        for member, more in enumerate(member_extra):
            place = draft / member_name(member)
            place.mkdir()
            save_adapter(model, place, member_name(member), f"../{TRUNK}")
            tokenizer.save_pretrained(place)
            write_card(place, {**card, "num_heads": 1, **more})
        tokenizer.save_pretrained(draft)
        write_card(draft, {**card, "num_members": len(member_extra), **extra})
        names = [member_name(member) for member in range(len(member_extra))]
        write_ensemble_file(draft, "lora", names, seeds, files_hash(draft / TRUNK))
    return folder


def link_tree(source: Path, target: Path) -> None:
    """A copy of a folder whose files are hard links where the disk allows it: weights are not written twice."""

    def link(file: str, place: str) -> None:
        try:
            os.link(file, place)
        except OSError:  # another disk, or one without links
            shutil.copy2(file, place)

    shutil.copytree(source, target, copy_function=link)


def save_adapter(model: PeftModel, folder: Path, name: str, base: str) -> None:
    """Write one adapter as an ordinary PEFT folder that names its base as `base`."""
    tensors = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / ADAPTER, metadata={"format": "pt"})
    config = copy.deepcopy(model.peft_config[name])
    config.base_model_name_or_path, config.inference_mode = base, True
    config.save_pretrained(str(folder))


def save_independent(
    members: Sequence[Path],
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    *,
    seeds: Sequence[int],
    extra: Mapping[str, Any],
) -> Path:
    """Gather finished members, each an ordinary folder, into the folder of an independent ensemble.

    Their files are linked where the disk can do that, else copied; `extra` goes into the card beside ensemble.json.
    """
    folder = Path(folder)
    with drafted(folder) as draft:
        for member, source in enumerate(members):
            link_tree(source, draft / member_name(member))
        with quiet():
            tokenizer.save_pretrained(draft)
        write_card(draft, {"role": "reward", "num_members": len(members), **extra})
        write_ensemble_file(draft, "independent", [member_name(k) for k in range(len(members))], seeds, None)
    return folder
