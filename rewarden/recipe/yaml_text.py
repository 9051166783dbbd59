"""The YAML of a recipe file and of an override on the command line."""

from pathlib import Path
from typing import Any

from rewarden.data.yaml_text import load_yaml
from rewarden.errors import ConfigError
from rewarden.spec import nearest


def read_value(text: str, whole: str) -> Any:
    """The value of an override; `whole` is the override, for the message."""
    try:
        return load_yaml(text)
    except ValueError as error:
        raise ConfigError(f"override {whole!r}: the value is not YAML ({error}); quote it if it is text") from None


def read_mapping(path: Path) -> dict[str, Any]:
    """The mapping a recipe file holds.

    Errors: ConfigError when the file is not there (with the nearest name in its folder), not readable, not YAML, no mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = [p.name for p in path.parent.glob("*.yaml")] if path.parent.is_dir() else []
        hint = nearest(path.name, near) if near else "give the path of a YAML file"
        raise ConfigError(f"{path}: no such recipe; {hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); give the path of a YAML file") from None
    try:
        raw = load_yaml(text)
    except ValueError as error:
        raise ConfigError(f"{path}: not a valid recipe: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: holds {type(raw).__name__}; a recipe is a mapping with `kind:` or `stages:`")
    return raw
