"""What a stage reads of a registry: the entries it names, not the file, to which every training adds a line. No torch here."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

REGISTRY_FILE = "models.yaml"
"""What reward training writes beside its run folder; the name of a stage's folder is its entry."""


WRITERS = ("reward", "average")
"""Kinds of stages that write an entry."""


class Use(NamedTuple):
    """A registry that a config names, and the entries it asks for; None: all of them."""

    registry: Path
    names: tuple[str, ...] | None


def uses(config: Any) -> Iterator[Use]:
    """Every registry that a config names: {registry: FILE}, with `name: NAME` or `entries: [NAME, ...]` for some of it."""
    if isinstance(config, Mapping):
        if isinstance(config.get("registry"), str):
            name, entries = config.get("name"), config.get("entries")
            names = (name,) if isinstance(name, str) else tuple(entries) if entries else None
            yield Use(Path(config["registry"]).expanduser(), names)
        for inner in config.values():
            yield from uses(inner)
    elif isinstance(config, list | tuple):
        for inner in config:
            yield from uses(inner)


def without_registries(config: Any) -> Any:
    """The config without the files of registries."""
    if isinstance(config, Mapping):
        return {
            key: without_registries(inner)
            for key, inner in config.items()
            if not (key == "registry" and isinstance(inner, str))
        }
    return [without_registries(inner) for inner in config] if isinstance(config, list | tuple) else config


def writers(config: Any, folder: Path, stages: Mapping[str, Any]) -> set[str]:
    """The earlier stages of a chain in `folder` that write the entries a stage asks for.

    stages: `kind` by name, of those above. Without names every one of WRITERS among them counts.
    """
    found: set[str] = set()
    for use in uses(config):
        if use.registry.resolve() == (folder / REGISTRY_FILE).resolve():
            asked: Collection[str] = stages if use.names is None else use.names
            found |= {name for name in asked if name in stages and (use.names is not None or stages[name] in WRITERS)}
    return found
