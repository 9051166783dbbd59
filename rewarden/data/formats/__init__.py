"""The public formats we read, each one file: how to tell it from a row, and an adapter for each kind of record."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Literal

from rewarden.data.formats import alpaca_farm, hh, moss, oasst, trl, ultrainteract
from rewarden.data.formats.row import Adapter
from rewarden.data.read import Row
from rewarden.errors import ConfigError
from rewarden.types import Message

Target = Literal["conversations", "prompts", "comparisons", "unpaired"]
FormatName = Literal["trl", "hh", "ultrainteract", "alpaca_farm", "moss_rm", "moss_ppo", "moss_sft", "oasst"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format: `matches` a row, and the adapters it has.

    once: rows whose messages give an equal value are one dialogue; repeats are dropped from conversations and prompts.
    """

    matches: Callable[[Row], bool]
    conversations: Adapter | None = None
    prompts: Adapter | None = None
    comparisons: Adapter | None = None
    unpaired: Adapter | None = None
    once: Callable[[tuple[Message, ...]], Hashable] | None = None

    def adapter(self, target: Target) -> Adapter | None:
        """The adapter for a kind of record, or None."""
        return {
            "conversations": self.conversations,
            "prompts": self.prompts,
            "comparisons": self.comparisons,
            "unpaired": self.unpaired,
        }[target]


FORMATS: dict[str, Format] = {
    "hh": Format(matches=hh.matches, conversations=hh.conversations, prompts=hh.prompts, comparisons=hh.comparisons),
    "moss_rm": Format(
        matches=moss.matches_pair,
        conversations=moss.chosen_conversations,
        prompts=moss.chosen_prompts,
        comparisons=moss.comparisons,
    ),
    "moss_ppo": Format(matches=moss.matches_dialogue, prompts=moss.prompts),
    "moss_sft": Format(matches=moss.matches_dialogue, conversations=moss.conversations),
    "oasst": Format(
        matches=oasst.matches, conversations=oasst.conversations, prompts=oasst.prompts, comparisons=oasst.comparisons
    ),
    "ultrainteract": Format(
        matches=ultrainteract.matches,
        conversations=ultrainteract.conversations,
        prompts=ultrainteract.prompts,
        comparisons=ultrainteract.comparisons,
        once=ultrainteract.user_turns,
    ),
    "alpaca_farm": Format(
        matches=alpaca_farm.matches,
        conversations=alpaca_farm.conversations,
        prompts=alpaca_farm.prompts,
        comparisons=alpaca_farm.comparisons,
    ),
    "trl": Format(
        matches=lambda row: True,
        conversations=trl.conversations,
        prompts=trl.prompts,
        comparisons=trl.comparisons,
        unpaired=trl.unpaired,
    ),
}
"""In the order in which they are tried when the format is "auto"; TRL's, named by columns, comes last."""


def choose(name: str, row: Row, target: Target) -> str:
    """The name of the format to read `row` with: the one asked for, or for "auto" the first that matches and has `target`."""
    if name == "auto":
        return next(name for name, format in FORMATS.items() if format.adapter(target) and format.matches(row))
    if FORMATS[name].adapter(target) is None:
        having = ", ".join(name for name, format in FORMATS.items() if format.adapter(target))
        raise ConfigError(f"format is {name!r}, which holds no {target}; formats that do: {having}")
    return name
