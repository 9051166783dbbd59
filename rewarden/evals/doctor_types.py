"""What type a row is of, told from its columns: which format reads it, and what it is for."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rewarden.data.formats import FORMATS, Target, choose
from rewarden.data.formats.messages import ROLES
from rewarden.data.read import VALUE, Row


@dataclass(frozen=True, slots=True)
class RowType:
    """A type of row: its name, the format and target it is read with, and the columns it needs."""

    name: str
    format: str
    target: Target
    needs: frozenset[str]


def row_type(row: Row, format: str = "auto") -> RowType | None:
    """The type of one row, or None when no type has its columns. A format that is given is not questioned."""
    there = row.fields.keys()
    name = format if format != "auto" else next(name for name, form in FORMATS.items() if form.matches(row))
    if name in ("hh", "moss_rm"):
        return _type(f"{name.removesuffix('_rm')}_pair", name, "comparisons", "chosen", "rejected")
    if name in ("moss_ppo", "moss_sft"):
        turns = row.fields.get(VALUE)
        odd = isinstance(turns, list) and len(turns) % 2 == 1
        return _type("moss_dialogue", *(("moss_ppo", "prompts") if odd else ("moss_sft", "conversations")), VALUE)
    if name == "oasst":
        return _type("oasst_tree", name, "comparisons", "prompt")
    if name == "ultrainteract":
        if "trajectory" in there:
            return _type("ultrainteract_pair", name, "comparisons", "trajectory", "chosen", "rejected")
        return _type("ultrainteract_dialogue", name, "conversations", "instruction", "response")
    if name == "alpaca_farm":
        if {"output_1", "output_2"} <= there:
            return _type("alpaca_pair", name, "comparisons", "instruction", "output_1", "output_2", "preference")
        if "output" in there:
            return _type("alpaca_output", name, "conversations", "instruction", "output")
        return _type("alpaca_prompt", name, "prompts", "instruction")
    return _trl_type(row.fields)


def _type(name: str, format: str, target: Target, *needs: str) -> RowType:
    return RowType(name, format, target, frozenset(needs))


def _trl_type(fields: Mapping[str, Any]) -> RowType | None:
    there = fields.keys()
    if there & {"chosen", "rejected"}:
        if not {"chosen", "rejected"} <= there:
            return None
        explicit = ("prompt",) if "prompt" in there else ()
        name = "preference" if explicit else "preference_implicit_prompt"
        return _type(name, "trl", "comparisons", *explicit, "chosen", "rejected")
    if {"prompt", "completion", "label"} <= there:
        return _type("unpaired_preference", "trl", "unpaired", "prompt", "completion", "label")
    if {"prompt", "completion"} <= there:
        return _type("prompt_completion", "trl", "conversations", "prompt", "completion")
    for column in ("messages", "conversations"):
        if column in there:
            return _type("messages", "trl", "prompts" if _waits(fields[column]) else "conversations", column)
    if "prompt" in there:
        return _type("prompt_only", "trl", "prompts", "prompt")
    if "text" in there:
        return _type("text", "trl", "conversations", "text")
    return _type("prompt_only", "trl", "prompts", VALUE) if isinstance(fields.get(VALUE), str) else None


def _waits(messages: Any) -> bool:
    """Whether a list of messages ends with the user."""
    last = messages[-1] if isinstance(messages, list) and messages else None
    name = last.get("role", last.get("from")) if isinstance(last, Mapping) else None
    return isinstance(name, str) and ROLES.get(name) == "user"


def agreed(types: list[RowType | None]) -> list[RowType | None]:
    """The types with one format and target for each name: dialogues are prompts when more of them end with the user."""
    votes: dict[str, Counter[tuple[str, Target]]] = {}
    for kind in types:
        if kind is not None:
            votes.setdefault(kind.name, Counter())[kind.format, kind.target] += 1
    won = {name: count.most_common(1)[0][0] for name, count in votes.items()}
    return [kind and replace(kind, format=won[kind.name][0], target=won[kind.name][1]) for kind in types]


def for_target(row: Row, kind: RowType | None, format: str, target: Target) -> RowType:
    """The type with the target that was asked for. Errors: ConfigError when the format has no such records."""
    name = choose(format, row, target)
    return RowType(kind.name if kind else "unknown", name, target, kind.needs if kind else frozenset())
