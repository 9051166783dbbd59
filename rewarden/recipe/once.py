"""Commands that need no run folder: sample from a model, score a file, look at the worlds."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table

from rewarden.data.formats import choose
from rewarden.data.read import read_rows
from rewarden.data.records import Loaded
from rewarden.data.sources import Data, load_comparisons, load_conversations, load_prompts
from rewarden.data.write import write_jsonl
from rewarden.errors import ConfigError, DataError
from rewarden.models.load import Model, load_policy, load_tokenizer, template_of
from rewarden.protocols import Scorer
from rewarden.rollout.hf import HFSampler, Sampling
from rewarden.runtime.disk import writing
from rewarden.runtime.seed import seed_of
from rewarden.scoring import build_scorer
from rewarden.spec import check
from rewarden.text.render import load_template
from rewarden.types import Comparison, Conversation, Message
from rewarden.worlds import WORLDS, TripDesk


def sample_once(
    model: str,
    prompt: str,
    *,
    n: int,
    max_completion_length: int,
    temperature: float,
    top_p: float,
    seed: int,
    template: str | None,
    output: Path | None,
) -> None:
    """Print or write n answers to one prompt, or to every prompt of a file."""
    if n < 1:
        raise ConfigError(f"n is {n}; at least 1 answer per prompt")
    _check_output(output)
    named = {"model_name_or_path": model} | ({} if template is None else {"template": template})
    spec = cast(Model, check(Model, named, "sample"))
    fields = {"max_completion_length": max_completion_length, "temperature": temperature, "top_p": top_p}
    sampling = cast(Sampling, check(Sampling, fields, "sample"))
    conversations = read_prompts(prompt)
    text_template = load_template(load_tokenizer(spec), template_of(spec))
    policy = load_policy(spec).to("cuda" if torch.cuda.is_available() else "cpu").eval()
    opened = [text_template.start(conversation) for conversation in conversations for _ in range(n)]
    seeds = [seed_of(seed, "sample", row, index) for row in range(len(conversations)) for index in range(n)]
    rows = [
        {
            "id": rollout.conversation.id,
            "prompt": _messages(rollout.conversation.messages[:-1]),
            "completion": rollout.conversation.messages[-1].text,
            "stop": rollout.stop,
            "num_tokens": len(rollout.logp_sampler),
            "logp": sum(rollout.logp_sampler),
        }
        for rollout in HFSampler(policy, text_template, sampling).sample(opened, seeds=seeds)
    ]
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if output is not None:
        with writing(output):
            write_jsonl(output, rows)
        console.print(f"{len(rows)} answers written to {output}")
        return
    for row in rows:
        cut = "" if row["stop"] == "eos" else f" [cut at {row['num_tokens']} tokens]"
        console.print(f"{row['completion']}{cut}")


DATA_FILES = (".jsonl", ".json", ".parquet", ".gz")


def read_prompts(prompt: str) -> tuple[Conversation, ...]:
    """The prompts of a file, or the text itself as the one prompt; a file name that leads nowhere is an error, no prompt."""
    try:
        is_file = Path(prompt).is_file()
    except (OSError, ValueError):  # a text too long for a path, or with a null byte
        is_file = False
    if is_file:
        return load_prompts(Data(path=prompt)).rows
    if prompt.endswith(DATA_FILES) and not any(letter.isspace() for letter in prompt):
        raise DataError(f"{prompt}: no such file of prompts; check the path, or write the prompt itself")
    return (Conversation(id="prompt", messages=(Message(role="user", text=prompt),)),)


def score_once(model: str, file: Path, *, data_format: str, output: Path | None) -> None:
    """Scores of conversations, or of both sides of pairs, as rows; a summary on standard error."""
    _check_output(output)
    data = cast(Data, check(Data, {"path": str(file), "format": data_format}, "score"))
    pairs = _has_pairs(file, data)
    loaded: Loaded[Any] = load_comparisons(data) if pairs else load_conversations(data)
    scorer = build_scorer({"kind": "reward_model", "path": model}, "score")
    rows = list(_pair_rows(scorer, loaded.rows) if pairs else _dialogue_rows(scorer, loaded.rows))
    notes = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    if output is not None:
        with writing(output):
            write_jsonl(output, rows)
        notes.print(f"{len(rows)} rows written to {output}")
    else:
        for row in rows:
            print(json.dumps(row, ensure_ascii=False))
    notes.print(f"data: {loaded.summary()}")
    for status, count in sorted(Counter(row["status"] for row in rows if row["status"] != "ok").items()):
        notes.print(f"{count} without a score: {status}")
    decided = [row["chosen_wins"] for row in rows if row.get("chosen_wins") is not None]
    if decided:
        notes.print(f"{len(decided)} pairs, chosen wins {sum(decided) / len(decided):.3f} (ties half)")


def _check_output(output: Path | None) -> None:
    """Before the work, not after it."""
    if output is not None and output.is_dir():
        raise ConfigError(f"output: {output} is a folder; give the path of a file, such as {output / 'rows.jsonl'}")


def _has_pairs(file: Path, data: Data) -> bool:
    """Whether the rows are pairs: the format says so, or else the first row does."""
    row = next(iter(read_rows(str(file))), None)
    if row is None:
        raise DataError(f"{file}: no rows")
    name = choose(data.format, row, "comparisons") if data.format in ("auto", *PAIR_FORMATS) else data.format
    return name in PAIR_FORMATS and (PAIR_FORMATS[name] or "") in {"", *row.fields}


PAIR_FORMATS = {
    "trl": "rejected",
    "hh": None,
    "moss_rm": None,
    "oasst": None,
    "ultrainteract": "rejected",
    "alpaca_farm": "output_1",
}
"""Formats that hold pairs, and the column that tells pairs from dialogues where they hold both."""


def _pair_rows(scorer: Scorer, pairs: Sequence[Comparison]) -> Iterator[dict[str, Any]]:
    chosen = scorer.score([_side(row, row.chosen) for row in pairs])
    rejected = scorer.score([_side(row, row.rejected) for row in pairs])
    for row, a, b in zip(pairs, chosen, rejected, strict=True):
        both = a.status == "ok" and b.status == "ok"
        wins = (1.0 if a.value > b.value else 0.5 if a.value == b.value else 0.0) if both else None
        yield {
            "id": row.id,
            "chosen_score": a.value if a.status == "ok" else None,
            "rejected_score": b.value if b.status == "ok" else None,
            "chosen_wins": wins,
            "status": a.status if a.status != "ok" else b.status,
        }


def _dialogue_rows(scorer: Scorer, dialogues: Sequence[Conversation]) -> Iterator[dict[str, Any]]:
    for row, score in zip(dialogues, scorer.score(dialogues), strict=True):
        yield {"id": row.id, "score": score.value if score.status == "ok" else None, "status": score.status}


def _side(row: Comparison, side: tuple[Message, ...]) -> Conversation:
    return Conversation(id=row.id, messages=(*row.prompt, *side), meta=row.meta)


def _messages(messages: Iterable[Message]) -> list[Mapping[str, str]]:
    return [{"role": message.role, "content": message.text} for message in messages]


def show_worlds(seed: int) -> None:
    """Each world with a scripted dialogue and its gold reward."""
    console = Console()
    for kind in WORLDS:
        for trap in (False, True):
            world = TripDesk(trap=trap)
            console.print(f"\n{kind}{' with trap: true' if trap else ''}: {len(world.sentences())} sentences", style="bold")
            dialogue = world.scripted("good", seed)
            facts = iter(world.turn_facts(dialogue.messages))
            table = Table("who", "says", "gold so far")
            for message in dialogue.messages:
                gold = f"{next(facts).gold:+.3f}" if message.role == "assistant" else ""
                table.add_row(message.role, message.text, gold)
            console.print(table)
