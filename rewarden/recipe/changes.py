"""path=value: a change to a recipe, from the command line, from a size of the recipe, or from a cell of its grid."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rewarden.errors import ConfigError
from rewarden.recipe.yaml_text import read_value
from rewarden.spec import nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One value to set: where, to what, and how it was written, for messages."""

    parts: tuple[str, ...]
    value: Any
    text: str

    @property
    def key(self) -> str:
        """The path as it was written."""
        return ".".join(self.parts)


def read_change(text: str) -> Change:
    """`a.b=value`, the value in YAML; ConfigError for what is not of this form."""
    key, equals, value = text.partition("=")
    parts = tuple(part.strip() for part in key.split("."))
    if not equals or not all(parts):
        raise ConfigError(f"override {text!r}: write path=value, such as optim.learning_rate=1e-4")
    return Change(parts=parts, value=read_value(value, text), text=f"override {text!r}")


def changed(raw: Mapping[str, Any], changes: Iterable[Change], *, known: Collection[str] | None = None) -> dict[str, Any]:
    """`raw` with each change made.

    known: what the first key may be (None: anything); deeper keys are checked when the recipe is parsed.
    """
    out = dict(raw)
    for change in changes:
        if known is not None and change.parts[0] not in known:
            raise ConfigError(f"{change.text}: the recipe has no {change.parts[0]!r}; {nearest(change.parts[0], known)}")
        out = _with(out, change.parts, change, depth=0)
    return out


def _with(place: Mapping[str, Any], parts: Sequence[str], change: Change, depth: int) -> dict[str, Any]:
    """A copy of `place` in which the key that `parts[depth:]` leads to is the new value."""
    part = parts[depth]
    if depth + 1 == len(parts):
        return {**place, part: change.value}
    inner = place.get(part)
    if inner is not None and not isinstance(inner, Mapping):
        raise ConfigError(f"{change.text}: {'.'.join(parts[: depth + 1])} is {inner!r}, which has no keys; set it whole")
    return {**place, part: _with(inner or {}, parts, change, depth + 1)}


def size_changes(raw: Mapping[str, Any], overrides: Sequence[Change], where: str) -> list[Change]:
    """What the chosen size of a recipe changes: `sizes:` maps names to {path: value}, `size:` is the one that holds.

    Errors: ConfigError for a size that is not there, or sizes that are no such mapping.
    """
    if "sizes" not in raw:
        return []
    sizes = raw["sizes"]
    if not isinstance(sizes, Mapping) or not sizes or not all(isinstance(paths, Mapping) for paths in sizes.values()):
        raise ConfigError(f"{where}: sizes is {sizes!r}; write {{NAME: {{path: value, ...}}, ...}}")
    chosen = [raw.get("size"), *(change.value for change in overrides if change.parts == ("size",))][-1]
    if chosen not in sizes:
        hint = nearest(str(chosen), [str(name) for name in sizes])
        raise ConfigError(f"{where}: size is {chosen!r}; {hint}")
    return [
        Change(parts=tuple(path.split(".")), value=value, text=f"{where}: sizes.{chosen}: {path}")
        for path, value in sizes[chosen].items()
    ]
