"""Whether a stage is what it was: its config, its inputs and the stages it reads."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rewarden.recipe.references import below
from rewarden.recipe.registries import uses, without_registries
from rewarden.runtime.inputs import content, named_files
from rewarden.spec import Spec


def resolved(kind: str, spec: Spec) -> dict[str, Any]:
    """Every key of a stage with the value it has, as plain JSON values; what recipe.yaml of a run folder holds."""
    return {"kind": kind, **spec.model_dump(mode="json")}


def fingerprint(kind: str, spec: Spec, upstream: Mapping[Path, str]) -> str:
    """Hash of a stage: what its config asks for beyond the defaults, what it reads on disk, and the stages it reads.

    upstream: fingerprint by folder of the earlier stages it reads; a path below such a folder counts through that fingerprint.
    """
    config = {"kind": kind, **spec.model_dump(mode="json", exclude_defaults=True)}
    text = json.dumps(
        {"config": config, "upstream": sorted(upstream.values()), "inputs": inputs(config, upstream)},
        sort_keys=True,
        default=str,
    )
    return hashlib.sha256(text.encode()).hexdigest()


def inputs(config: Mapping[str, Any], upstream: Mapping[Path, str]) -> dict[str, str]:
    """Hash of the content of every file and folder that a config names, also of the code in "my_file.py:MyReward".

    Of a registry the entries that are asked for count, each with what it names: others may come and go.
    """
    entries = registered_entries(config, upstream)
    files = [*named_files(without_registries(config))]
    # An entry's paths are absolute; a folder that is moved with its registry is the same.
    files += [Path(os.path.relpath(path)) for path in named_files(entries)]
    found = {str(path): content(path) for path in files if not any(below(str(path), folder) for folder in upstream)}
    here = os.getcwd() + os.sep
    texts = {name: json.dumps(entry, sort_keys=True).replace(json.dumps(here)[1:-1], "") for name, entry in entries.items()}
    return found | {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}


def registered_entries(config: Mapping[str, Any], upstream: Mapping[Path, str]) -> dict[str, dict[str, Any]]:
    """ "REGISTRY: NAME" -> entry, of those that a config asks for and that are there.

    Without those that an upstream stage has written: before it runs there are none, and afterwards nothing is new.
    """
    from rewarden.scoring.registry import read_registry  # not needed to read a recipe, and heavy

    found: dict[str, dict[str, Any]] = {}
    for use in uses(config):
        table = read_registry(use.registry) if use.registry.is_file() else {}
        found |= {f"{use.registry}: {name}": entry for name, entry in table.items() if use.names is None or name in use.names}
    return {name: entry for name, entry in found.items() if not _written_by(entry, upstream)}


def _written_by(entry: Mapping[str, Any], upstream: Mapping[Path, str]) -> bool:
    written = set(entry) == {"kind", "path"} and entry["kind"] == "reward_model"
    return written and any(below(str(entry["path"]), folder) for folder in upstream)


def move_aside(folder: Path) -> Path:
    """Give a folder up without losing it: NAME becomes NAME.1, NAME.2, ..."""
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(aside)
    return aside
