"""Commands that need no run folder: sample from a model, score a file, look at the worlds."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rewarden.data.sources import Data, load_comparisons, load_prompts
from rewarden.data.sources import load_conversations as load_dialogues
from rewarden.data.write import write_jsonl
from rewarden.errors import ConfigError, DataError
from rewarden.models.load import Model, load_policy, load_tokenizer
from rewarden.rollout.hf import HFSampler, Sampling
from rewarden.runtime.seed import seed_of
from rewarden.scoring import build_scorer
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
    template: str,
    output: Path | None,
) -> None:
    """Print or write n answers to one prompt, or to every prompt of a file."""
    if n < 1:
        raise ConfigError(f"n is {n}; at least 1 answer per prompt")
    spec = Model(model_name_or_path=model, template=template)
    text_template = load_template(load_tokenizer(spec), template)
    sampling = Sampling(max_completion_length=max_completion_length, temperature=temperature, top_p=top_p)
    sampler = HFSampler(load_policy(spec).eval(), text_template, sampling)
    if Path(prompt).is_file():
        conversations = load_prompts(Data(path=prompt)).rows
    else:
        conversations = (Conversation(id="prompt", messages=(Message(role="user", text=prompt),)),)
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
        for rollout in sampler.sample(opened, seeds=seeds)
    ]
    if output is not None:
        write_jsonl(output, rows)
        Console().print(f"{len(rows)} answers written to {output}", highlight=False)
        return
    for row in rows:
        cut = "" if row["stop"] == "eos" else f" [cut at {row['num_tokens']} tokens]"
        Console().print(f"{row['completion']}{cut}", highlight=False, markup=False)


def score_once(model: str, file: Path, *, data_format: str, output: Path | None) -> None:
    """Scores of conversations, or of both sides of pairs, as rows; a summary at the end."""
    scorer = build_scorer({"kind": "reward_model", "path": model}, "score")
    data = Data(path=str(file), format=data_format)
    rows = list(_pair_rows(scorer, data) if _has_pairs(file, data) else _dialogue_rows(scorer, data))
    if output is not None:
        write_jsonl(output, rows)
        Console().print(f"{len(rows)} rows written to {output}", highlight=False)
    else:
        for row in rows:
            print(json.dumps(row, ensure_ascii=False))
    decided = [row["chosen_wins"] for row in rows if row.get("chosen_wins") is not None]
    if decided:
        Console(stderr=True).print(
            f"{len(rows)} pairs, chosen wins {sum(decided) / len(decided):.3f} (ties half)", highlight=False
        )


def _has_pairs(file: Path, data: Data) -> bool:
    from rewarden.data.read import read_rows

    if data.format in ("hh", "ultrainteract", "alpaca_farm", "moss_rm", "oasst"):
        return True
    for row in read_rows(str(file)):
        return "chosen" in row.fields and "rejected" in row.fields
    raise DataError(f"{file}: no rows")


def _pair_rows(scorer: Any, data: Data) -> Iterable[dict[str, Any]]:
    loaded = load_comparisons(data)
    chosen = scorer.score([_side(row, row.chosen) for row in loaded.rows])
    rejected = scorer.score([_side(row, row.rejected) for row in loaded.rows])
    for row, a, b in zip(loaded.rows, chosen, rejected, strict=True):
        both = a.status == "ok" and b.status == "ok"
        wins = (1.0 if a.value > b.value else 0.5 if a.value == b.value else 0.0) if both else None
        yield {
            "id": row.id,
            "chosen_score": a.value if a.status == "ok" else None,
            "rejected_score": b.value if b.status == "ok" else None,
            "chosen_wins": wins,
            "status": a.status if a.status != "ok" else b.status,
        }


def _dialogue_rows(scorer: Any, data: Data) -> Iterable[dict[str, Any]]:
    loaded = load_dialogues(data)
    for row, score in zip(loaded.rows, scorer.score(list(loaded.rows)), strict=True):
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
