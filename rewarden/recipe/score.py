"""`rewarden score`: the rewards of the conversations of a file."""

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from pydantic import field_validator
from rich.console import Console

from rewarden.data.formats import choose
from rewarden.data.read import read_rows
from rewarden.data.records import Labeled, Loaded
from rewarden.data.sources import Data, load_comparisons, load_conversations, load_unpaired
from rewarden.errors import ConfigError, DataError
from rewarden.recipe.part import Part
from rewarden.recipe.score_text import Table, summary_lines
from rewarden.recipe.stages import fingerprint
from rewarden.recipe.told import every
from rewarden.scoring import build_scorer, notes_of, parse_scorer
from rewarden.scoring.answer import scores_of
from rewarden.scoring.registry import entry_of, named, read_registry
from rewarden.spec import Spec, check
from rewarden.types import Comparison, Conversation, Message, Score

WINDOW = 64
"""Rows scored and written together. A window is the same rows whatever was done before, so a resumed file has equal bits."""


class Scoring(Spec):
    """What is scored, and by what."""

    rewards: dict[str, dict[str, Any]]
    """Scorers by name; "" for one that was named on the command line."""
    data: Data
    """Conversations, pairs or labeled answers."""
    rows: str | None = None
    """Which rows: numbers from 0 and ranges, such as 0,4-6. All when not given."""

    @field_validator("rewards")
    @classmethod
    def _are_scorers(cls, rewards: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        for name, raw in rewards.items():
            parse_scorer(raw, name or "reward")
        return rewards


def read_scoring(raw: Mapping[str, Any]) -> Scoring:
    """The config of a command; `raw["reward"]` is {path: what --reward says, ...options}.

    Errors: ConfigError.
    """
    rewards = rewards_of(str(raw["reward"]["path"]), {key: value for key, value in raw["reward"].items() if key != "path"})
    rest = {key: value for key, value in raw.items() if key != "reward"}
    return cast(Scoring, check(Scoring, {"rewards": rewards, **rest}, "score"))


def rewards_of(text: str, options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The scorers that --reward names: a reward model, an entry "models.yaml:NAME", or every entry of "models.yaml" by name.

    options: keys of a reward model that replace those of an entry, such as template. Errors: ConfigError.
    """
    registry = named(text)
    if registry is None:
        return {"": {"kind": "reward_model", "path": text, **options}}
    path, entry = registry
    names = list(read_registry(path)) if entry is None else [entry]
    if not names:
        raise ConfigError(f"{path}: no entries; train a reward model, or add {{kind: reward_model, path: FOLDER}} under a name")
    found = {name: entry_of(path, name) for name in names}
    for name, raw in found.items():
        if options and raw["kind"] != "reward_model":
            raise ConfigError(
                f"{path}: entry {name!r} is a {raw['kind']}, which has no {' and no '.join(options)}; leave it out"
            )
        found[name] = {**raw, **options}
    return found if entry is None else {"": found[entry]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One row of the file: its conversations by side ("" for the only one), and the columns that its result keeps."""

    id: str
    sides: Mapping[str, Conversation]
    keeps: Mapping[str, Any] = field(default_factory=dict)


def score_once(raw: Mapping[str, Any], *, output: Path | None, as_json: bool) -> None:
    """Scores as a table, as JSON lines, or into a file; a summary on standard error.

    Rows go to OUTPUT.part window by window, and to OUTPUT once all are there, so that a run that was stopped goes on.
    """
    check_output(output)
    spec = read_scoring(raw)
    items, summary = load_items(spec)
    notes = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    notes.print(f"data: {summary}")
    part = None if output is None else Part(output, fingerprint("score", spec, {}))
    done = [] if part is None else part.open(notes)
    total = len(items) * len(spec.rewards)
    if done:
        notes.print(f"resuming after {len(done)} of {total} {'rows' if len(spec.rewards) == 1 else 'scores'}")
    results = list(done)
    # The rows of one scorer are printed as they come, those of several side by side once all are there.
    shown = _Printed(items, as_json) if output is None else None
    for place, (name, reward) in enumerate(spec.rewards.items()):
        mine = items[max(0, len(results) - place * len(items)) :]
        for window in scored_windows(name, reward, mine, notes):
            results += window
            if part is not None:
                part.add(window)
            if shown is not None and len(spec.rewards) == 1:
                shown.add(window)
    rows = side_by_side(results, list(spec.rewards), len(items))
    if shown is not None and len(spec.rewards) > 1:
        shown.add(rows)
    if part is not None:
        part.finish(rows)
        notes.print(f"{len(rows)} rows written to {output}")
    for place, name in enumerate(spec.rewards):
        for line in summary_lines(results[place * len(items) : (place + 1) * len(items)]):
            notes.print(f"{name}: {line}" if name else line)


class _Printed:
    """Rows on standard output, as JSON lines or as a table."""

    def __init__(self, items: Sequence["Item"], as_json: bool) -> None:
        self.table = None if as_json else Table([item.id for item in items])

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Print rows at once."""
        for row in rows:
            print(self.table.line(row) if self.table else json.dumps(row, ensure_ascii=False), flush=True)


def side_by_side(results: Sequence[Mapping[str, Any]], names: Sequence[str], count: int) -> list[dict[str, Any]]:
    """The results of several scorers, `count` rows each, one after the other, as one row per item.

    Columns are "NAME/score" and so on. What the data say (`label`, `preference`) stands once. A scorer named ""
    has columns without a name.
    """
    rows: list[dict[str, Any]] = []
    for index in range(count):
        row: dict[str, Any] = {"id": results[index]["id"]}
        kept: dict[str, Any] = {}
        for place, name in enumerate(names):
            found = results[place * count + index]
            kept |= {key: found[key] for key in KEPT if key in found}
            row |= {f"{name}/{key}" if name else key: value for key, value in found.items() if key not in ("id", *KEPT)}
        rows.append({**row, **kept})
    return rows


KEPT = ("preference", "label")
"""Columns of the data that a result keeps."""


def load_items(spec: Scoring) -> tuple[list[Item], str]:
    """The rows to score, and the reader's summary."""
    kind = kind_of(spec.data)
    loaded: Loaded[Any]
    if kind == "pairs":
        loaded = load_comparisons(spec.data)
        items = [_pair(row) for row in loaded.rows]
    elif kind == "labeled":
        loaded = load_unpaired(spec.data)
        items = [_labeled(row) for row in loaded.rows]
    else:
        loaded = load_conversations(spec.data)
        items = [Item(id=row.id, sides={"": row}) for row in loaded.rows]
    chosen = range(len(items)) if spec.rows is None else parse_rows(spec.rows, len(items))
    return [items[index] for index in chosen], loaded.summary()


def parse_rows(text: str, count: int) -> list[int]:
    """Row numbers from "0,4-6"; ascending, each once.

    Errors: ConfigError for anything else, and for a number beyond the file.
    """
    chosen: set[int] = set()
    for part in text.split(","):
        first, dash, last = (word.strip() for word in part.partition("-"))
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise ConfigError(f"rows: got {text!r}; write numbers from 0 and ranges, such as 0,4-6")
        chosen |= set(range(int(first), int(last if dash else first) + 1))
        if max(chosen) >= count:
            raise ConfigError(f"rows: {text!r} asks for row {max(chosen)}; the file has rows 0 to {count - 1}")
    return sorted(chosen)


PAIR_FORMATS = {
    "trl": "rejected",
    "hh": None,
    "moss_rm": None,
    "oasst": None,
    "ultrainteract": "rejected",
    "alpaca_farm": "output_1",
}
"""Formats that hold pairs, and the column that tells pairs from dialogues where they hold both."""


def kind_of(data: Data) -> str:
    """ "pairs", "labeled" or "dialogues": the format says it, or else the first row does."""
    row = next(iter(read_rows(data.path, split=data.split, subset=data.subset)), None)
    if row is None:
        raise DataError(f"{data.path}: no rows")
    there = {*row.fields, *data.columns}
    name = choose(data.format, row, "comparisons") if data.format in ("auto", *PAIR_FORMATS) else data.format
    if name in PAIR_FORMATS and (PAIR_FORMATS[name] or "") in {"", *there}:
        return "pairs"
    return "labeled" if name == "trl" and {"prompt", "completion", "label"} <= there else "dialogues"


def _pair(row: Comparison) -> Item:
    sides = {side: _whole(row, getattr(row, side)) for side in ("chosen", "rejected")}
    return Item(id=row.id, sides=sides, keeps={} if row.preference == 1.0 else {"preference": row.preference})


def _labeled(row: Labeled) -> Item:
    return Item(id=row.id, sides={"": _whole(row, row.completion)}, keeps={"label": row.label})


def _whole(row: Comparison | Labeled, answer: tuple[Message, ...]) -> Conversation:
    return Conversation(id=row.id, messages=(*row.prompt, *answer), meta=row.meta)


def scored_windows(
    name: str, reward: Mapping[str, Any], items: Sequence[Item], notes: Console
) -> Iterator[list[dict[str, Any]]]:
    """The results of the items by one scorer, window by window; it is loaded when there is something to score."""
    if not items:
        return
    before = f"{name}: " if name else ""
    scorer = build_scorer(reward, name or "reward")
    for note in notes_of(scorer):
        notes.print(f"{before}{note}")
    began, due = time.monotonic(), every()
    for start in range(0, len(items), WINDOW):
        window = items[start : start + WINDOW]
        flat = [side for item in window for side in item.sides.values()]
        scores = iter(scores_of(scorer, flat, repr(name) if name else "the reward"))
        yield [result(item, {side: next(scores) for side in item.sides}) for item in window]
        count = start + len(window)
        if count < len(items) and due():
            notes.print(f"{before}{count} of {len(items)} rows, {count / (time.monotonic() - began):.1f} rows/s")


def result(item: Item, scores: Mapping[str, Score]) -> dict[str, Any]:
    """One row of the output: a score is null where there is none, and `status` says why."""
    row: dict[str, Any] = {"id": item.id}
    for side, score in scores.items():
        prefix = f"{side}_" if side else ""
        row[f"{prefix}score"] = score.value if score.status == "ok" else None
        if len(score.members) > 1:
            row[f"{prefix}members"] = list(score.members)
        if "std" in score.parts:
            row[f"{prefix}std"] = score.parts["std"]
    if "chosen" in scores:
        a, b = row["chosen_score"], row["rejected_score"]
        row["chosen_wins"] = None if a is None or b is None else 1.0 if a > b else 0.5 if a == b else 0.0
    failed = [score.status for score in scores.values() if score.status != "ok"]
    return {**row, "status": failed[0] if failed else "ok", **item.keeps}


def check_output(output: Path | None) -> None:
    """Before the work, not after it. Errors: ConfigError."""
    if output is not None and output.is_dir():
        raise ConfigError(f"output: {output} is a folder; give the path of a file, such as {output / 'rows.jsonl'}")
    if output is not None and not output.name.endswith((".jsonl", ".jsonl.gz")):
        raise ConfigError(f"output: {output}: rows are written as JSON lines; give a name that ends in .jsonl or .jsonl.gz")
    if output is not None and output.exists():
        raise ConfigError(f"output: {output} exists, and would be lost; remove it, or give another name")
