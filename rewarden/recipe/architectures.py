"""Models that a recipe needs and this machine lacks, described by the recipe so that their memory can be worked out.

    architectures:
      models/sft10k: {model_type: llama, hidden_size: 4096, ...}          what would stand in its config.json
      runs/reward/model: models/sft10k                                    as large as that one
      runs/models.yaml:lora: models/sft10k                                also for an entry of a registry

Only `rewarden show` reads them, and only where nothing is at that path. They change no run and no fingerprint.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rewarden.errors import ConfigError
from rewarden.recipe.references import strings
from rewarden.recipe.registries import uses
from rewarden.spec import nearest

Architecture = Mapping[str, Any] | str


def check_architectures(raw: Any, where: str) -> dict[str, Architecture]:
    """The key `architectures` of a recipe. Errors: ConfigError for what is no description, or leads to none."""
    if raw is None:
        return {}
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{where}: architectures is {raw!r}; write {{PATH: {{model_type: llama, ...}}}}")
    for path, value in raw.items():
        if isinstance(value, str):
            if not isinstance(raw.get(value), Mapping):
                hint = nearest(value, [key for key, found in raw.items() if isinstance(found, Mapping)])
                raise ConfigError(f"{where}: architectures.{path} is {value!r}, which is not described there; {hint}")
        elif not isinstance(value, Mapping) or not isinstance(value.get("model_type"), str):
            raise ConfigError(
                f"{where}: architectures.{path} is {value!r}; write what stands in its config.json, with model_type, or the "
                "path of another model that is described"
            )
    return dict(raw)


def is_here(path: str) -> bool:
    """Whether there is something at a path, or the registry of "models.yaml:NAME"."""
    file, colon, _ = path.rpartition(":")
    return Path(path).exists() or bool(colon and Path(file).exists())


@contextmanager
def described(architectures: Mapping[str, Architecture]) -> Iterator[dict[str, str]]:
    """A folder with a config.json, and nothing else, for each described model that is not on this machine, by its path."""
    with TemporaryDirectory() as root:
        folders: dict[str, str] = {}
        for number, (path, value) in enumerate(architectures.items()):
            config = architectures[value] if isinstance(value, str) else value
            if is_here(path):
                continue
            folder = Path(root) / str(number)
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
            folders[path] = str(folder)
        yield folders


def absence_lines(architectures: Mapping[str, Architecture], stages: Sequence[Any]) -> list[str]:
    """Which models that the stages name are counted without being here, and as what."""
    named = set(strings(stages))
    named |= {f"{use.registry}:{name}" for use in uses(stages) for name in use.names or ()}
    named |= {value for path, value in architectures.items() if path in named and isinstance(value, str)}
    lines = []
    for path, value in architectures.items():
        if is_here(path) or path not in named:
            continue
        if isinstance(value, str):
            lines.append(f"{path} is not here: counted as one model like {value}")
            continue
        shape = ", ".join(f"{key} {number}" for key, number in value.items() if key != "model_type")
        lines.append(f"{path} is not here: counted by its architecture as this recipe gives it: {value['model_type']}, {shape}")
    return lines
