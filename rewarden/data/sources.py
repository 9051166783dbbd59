"""From a path to records: the config of a data source, and one function for each kind of record.

load_conversations   dialogues that end with the assistant, to learn from
load_prompts         dialogues that end with the user, to answer
load_comparisons     pairs of answers to one prompt
load_unpaired        single answers with a thumb up or down
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field

from rewarden.data.formats import FORMATS, FormatName, Target, choose
from rewarden.data.formats.row import BadRow, Drop, Item, Notice
from rewarden.data.read import Row, Rows, read_rows
from rewarden.data.records import NAMED, Labeled, Loaded, Record, opening
from rewarden.data.split import split_by_fold, split_by_prompt
from rewarden.errors import ConfigError, DataError
from rewarden.spec import Spec
from rewarden.types import Comparison, Conversation, Message

__all__ = ["Data", "Labeled", "Loaded", "load_comparisons", "load_conversations", "load_prompts", "load_unpaired"]


class Data(Spec):
    """Where rows come from, and which of them are used."""

    path: str = Field(min_length=1)
    """A .jsonl, .json or .parquet file (also .gz), a folder of them, or a data set on the hub ("Anthropic/hh-rlhf")."""
    format: Literal["auto"] | FormatName = "auto"
    """How to read a row. auto: told from the first row; docs/data.md has the table."""
    split: str = "train"
    """Split of a hub data set; of a folder, the files whose name says so."""
    subset: str | None = None
    """Configuration of a hub data set, or its folder where it has no such configuration; subfolder of a folder."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Column names to read by, and what the file calls them: {prompt: question}."""
    skip_rows: int = Field(default=0, ge=0)
    """Leave out this many records, the first in file order, counted after dropping; the rest of what `max_rows` took."""
    max_rows: int | None = Field(default=None, ge=1)
    """At most this many records, the first in file order after those skipped, counted after dropping. null: all."""
    holdout_prompts: int = Field(default=0, ge=0)
    """Number of first prompts to hold out, with all their rows. 0: none."""
    folds: int = Field(default=0, ge=0)
    """Number of folds the first prompts are dealt into, each with all its rows, as in cross-validation. 0: none."""
    fold: int | None = Field(default=None, ge=0)
    """Which fold is held out, from 0; it takes the place of `holdout_prompts`."""
    part: Literal["all", "train", "heldout"] = "all"
    """Which side of the hold-out to use."""
    split_seed: int = 0
    """Chooses the first prompts that are held out, or how they are dealt into folds."""
    on_bad_row: Literal["error", "drop"] = "error"
    """What to do with a row that does not have the form of its format. Known irregularities are dropped and counted anyway."""
    drop_last_assistant: bool = False
    """For prompts: take the last assistant turn off a dialogue that ends with one, and count it. false: refuse the row."""


def load_conversations(data: Data) -> Loaded[Conversation]:
    """Dialogues that end with the assistant; of pairs, the chosen side.

    meta["prompt_messages"], where present, is the number of leading messages that are prompt and not learned. Assistant turns
    that would be learned are never empty.

    Errors: DataError naming file and line; ConfigError when the format holds no dialogues.
    """
    return _load(data, "conversations")


def load_prompts(data: Data) -> Loaded[Conversation]:
    """Dialogues that end with the user; columns that did not go into the prompt are in meta, for reward functions.

    Errors: DataError naming file and line, also for a dialogue that ends with the assistant unless `drop_last_assistant`.
    """
    return _load(data, "prompts")


def load_comparisons(data: Data) -> Loaded[Comparison]:
    """Pairs whose two sides continue the same prompt and differ.

    Errors: DataError naming file and line; ConfigError when the format holds no pairs.
    """
    return _load(data, "comparisons")


def load_unpaired(data: Data) -> Loaded[Labeled]:
    """Answers with a label (TRL's unpaired preference).

    Errors: DataError naming file and line; ConfigError when the format holds no labels.
    """
    return _load(data, "unpaired")


def _load(data: Data, target: Target) -> Loaded[Any]:
    _check_hold_out(data)
    rows = read_rows(data.path, split=data.split, subset=data.subset)
    items = _unique_ids(_items(data, rows, target))
    last = None if data.max_rows is None else data.skip_rows + data.max_rows
    records, dropped, noticed, places = _gather(items, last if data.part == "all" else None)
    noticed += rows.noticed
    total = len(records) + sum(dropped.values())
    if data.part != "all":
        wanted = _parts(data, records)[data.part == "heldout"]
        dropped["in_the_other_part"] += len(records) - len(wanted)
        records = list(wanted[:last])
        dropped["beyond_max_rows"] += len(wanted) - len(records)
    dropped["skipped_rows"] += min(data.skip_rows, len(records))
    records = records[data.skip_rows :]
    loaded = Loaded(rows=tuple(records), dropped=dict(+dropped), noticed=dict(+noticed), total=total, places=places)
    if not records:
        raise DataError(f"{data.path}: no {target} are left ({loaded.summary()}); check the file and `format`")
    return loaded


def _check_hold_out(data: Data) -> None:
    """Errors: ConfigError for a part of nothing, or of two hold-outs at once."""
    if data.folds and data.holdout_prompts:
        raise ConfigError(
            f"data: folds is {data.folds} and holdout_prompts is {data.holdout_prompts}; a fold is a hold-out: set one of them"
        )
    if data.fold is not None and data.fold >= data.folds:
        raise ConfigError(f"data: fold is {data.fold} and folds is {data.folds}; folds count from 0: use a fold below folds")
    if data.folds == 1:
        raise ConfigError("data: folds is 1, so one fold holds all rows; use 2 or more, or 0 for none")
    if data.part == "all":
        if data.fold is not None:
            raise ConfigError(f"data: fold is {data.fold} and part is 'all'; choose part: train (the others) or heldout (it)")
    elif data.folds and data.fold is None:
        raise ConfigError(f"data: part is {data.part!r} of {data.folds} folds, and fold is null; say which, from 0")
    elif not data.folds and not data.holdout_prompts:
        raise ConfigError(f"data: part is {data.part!r} but holdout_prompts is 0; hold out at least 1, or use part: all")


def _parts(data: Data, records: Sequence[Record]) -> tuple[tuple[Record, ...], tuple[Record, ...]]:
    """(train, held out)."""
    if data.fold is not None:
        return split_by_fold(records, fold=data.fold, folds=data.folds, seed=data.split_seed)
    try:
        return split_by_prompt(records, num_heldout=data.holdout_prompts, seed=data.split_seed)
    except DataError as error:
        raise DataError(f"{data.path}: holdout_prompts: {error}") from error


def _gather(
    items: Iterator[Item], max_rows: int | None
) -> tuple[list[Record], Counter[str], Counter[str], dict[str, tuple[str, ...]]]:
    """Records, dropped, noticed, and where the first dropped rows stand; reading stops at `max_rows` records."""
    records: list[Record] = []
    dropped: Counter[str] = Counter()
    noticed: Counter[str] = Counter()
    places: dict[str, tuple[str, ...]] = {}
    for item in items:
        if isinstance(item, Notice):
            noticed[item.what] += 1
        elif isinstance(item, Drop):
            dropped[item.reason] += 1
            if dropped[item.reason] <= NAMED and item.where:
                places[item.reason] = (*places.get(item.reason, ()), item.where)
        else:
            records.append(item)
            if len(records) == max_rows:
                break
    return records, dropped, noticed, places


def _items(data: Data, rows: Rows, target: Target) -> Iterator[Item]:
    """What the adapters make of all rows; bad rows become a Drop or an error, as the config says."""
    name, seen = "", set[Hashable]()
    for row in rows:
        row = renamed(row, data.columns)
        name = name or choose(data.format, row, target)
        format = FORMATS[name]
        try:
            items = row_items(row, name, target, drop_last_assistant=data.drop_last_assistant)
        except BadRow as error:
            if data.on_bad_row == "error":
                how = f"format {name!r}" + (", told from the first row" if data.format == "auto" else "")
                raise DataError(f"{error} [{how}; on_bad_row: drop leaves such rows out]") from error
            items = [Drop(error.reason)]
        if format.once and target in ("conversations", "prompts"):
            items = [first_time(item, format.once, seen) for item in items]
        yield from (replace(item, where=row.where) if isinstance(item, Drop) else item for item in items)


def row_items(row: Row, name: str, target: Target, *, drop_last_assistant: bool) -> list[Item]:
    """What the adapter of format `name` makes of one row. Errors: BadRow."""
    adapter = FORMATS[name].adapter(target)
    assert adapter is not None  # `choose` answers only with formats that have one
    items = list(adapter(row))
    if target == "prompts":
        return [new for item in items for new in _ending_with_user(item, row, drop_last_assistant)]
    return items


def renamed(row: Row, columns: Mapping[str, str]) -> Row:
    """The row under the names of `columns`; "where" must stay free, because meta["where"] says where the row stands."""
    if "where" in row.fields and "where" not in columns.values():
        raise DataError(f"{row.where}: a column is named 'where', which Rewarden fills itself; set columns: {{place: where}}")
    if not columns:
        return row
    absent = [old for old in columns.values() if old not in row.fields]
    if absent:
        raise DataError(f"{row.where}: columns names {absent[0]!r}, which the row lacks; it has {', '.join(row.fields)}")
    new_name = {old: new for new, old in columns.items()}
    return replace(row, fields={new_name.get(key, key): value for key, value in row.fields.items()})


def _ending_with_user(item: Item, row: Row, drop_last: bool) -> list[Item]:
    """A prompt as it must be: one that ends with the assistant is refused, or loses that turn and is noticed."""
    if not isinstance(item, Conversation) or item.messages[-1].role == "user":
        return [item]
    if item.messages[-1].role == "system":
        raise BadRow(row.where, "ends_with_system", "the prompt is a system message alone; it must end with a user message")
    if not drop_last:
        raise BadRow(
            row.where,
            "ends_with_assistant",
            f"a prompt of {len(item.messages)} turns ends with the assistant; it must end with the user. "
            "Set drop_last_assistant: true to take the last turn off",
        )
    return [Notice("last_assistant_turn_dropped"), replace(item, messages=item.messages[:-1])]


def first_time(item: Item, key: Callable[[tuple[Message, ...]], Hashable], seen: set[Hashable]) -> Item:
    """The item, or a drop in its place when the `key` of its opening is among those `seen`, to which it is added."""
    if isinstance(item, Drop | Notice):
        return item
    value = key(opening(item))
    if value in seen:
        return Drop("repeated_user_turns")
    seen.add(value)
    return item


def _unique_ids(items: Iterator[Item]) -> Iterator[Item]:
    """The second record of an id gets the id ID~2, and so on: seeds are made from ids, and equal ids would share them."""
    times: Counter[str] = Counter()
    for item in items:
        if not isinstance(item, Drop | Notice):
            times[item.id] += 1
            if times[item.id] > 1:
                yield Notice("repeated_id")
                item = replace(item, id=f"{item.id}~{times[item.id]}")
        yield item
