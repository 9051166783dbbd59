"""${NAME} in a recipe: what it may name, and what it stands for."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rewarden.errors import ConfigError
from rewarden.spec import nearest

REFERENCE = re.compile(r"(\$?)\$\{([^{}]*)\}")


@dataclass(slots=True)
class References:
    """What ${...} may name so far, and what was named; absent: names that stand for nothing here, and why."""

    known: dict[str, Any] = field(default_factory=dict)
    later: Collection[str] = ()
    stages: set[str] = field(default_factory=set)
    stages_read: set[str] = field(default_factory=set)
    absent: Mapping[str, str] = field(default_factory=dict)

    def look(self, name: str, where: str) -> Any:
        """The value of a name."""
        if name not in self.known:
            if name in self.absent:
                raise ConfigError(f"{where}: ${{{name}}} {self.absent[name]}")
            if name in self.later:
                raise ConfigError(f"{where}: ${{{name}}} comes later in the recipe; move it up")
            hint = nearest(name, self.known) if self.known else "there is nothing to refer to yet"
            raise ConfigError(f"{where}: ${{{name}}} is neither an earlier stage nor a value; {hint}")
        if name in self.stages:
            self.stages_read.add(name)
        return self.known[name]


def resolve(value: Any, references: References, where: str) -> Any:
    """`value` with every ${NAME} replaced; a text that is nothing but one keeps the value's type."""
    if isinstance(value, Mapping):
        return {key: resolve(inner, references, f"{where}.{key}") for key, inner in value.items()}
    if isinstance(value, list):
        return [resolve(inner, references, f"{where}[{place}]") for place, inner in enumerate(value)]
    if not isinstance(value, str):
        return value
    whole = REFERENCE.fullmatch(value)
    if whole and not whole[1]:
        return references.look(whole[2], where)
    return REFERENCE.sub(lambda m: f"${{{m[2]}}}" if m[1] else str(references.look(m[2], where)), value)


def strings(value: Any) -> list[str]:
    """Every text in a nested value, in order."""
    if isinstance(value, Mapping):
        return [text for inner in value.values() for text in strings(inner)]
    if isinstance(value, list | tuple):
        return [text for inner in value for text in strings(inner)]
    return [value] if isinstance(value, str) else []


def below(text: str, folder: Path) -> bool:
    """Whether a text, read as a path, is the folder or lies in it."""
    try:
        return Path(text).resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError):  # too long for a path, or with a null byte
        return False


def names(value: Any) -> set[str]:
    """What the references in a nested value name; $${NAME} is none."""
    return {match[2] for text in strings(value) for match in REFERENCE.finditer(text) if not match[1]}
