"""Commands that need no run folder: sample from a model, look at the worlds."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import cast

import torch
from rich.console import Console
from rich.table import Table

from rewarden.data.sources import Data, load_prompts
from rewarden.data.write import write_jsonl
from rewarden.errors import ConfigError, DataError
from rewarden.models.load import Model, load_policy, load_tokenizer, template_of
from rewarden.recipe.score import check_output
from rewarden.rollout.hf import HFSampler, Sampling
from rewarden.runtime.disk import writing
from rewarden.runtime.seed import seed_of
from rewarden.spec import check
from rewarden.text.render import load_template
from rewarden.types import Conversation, Message
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
    check_output(output)
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
    for place, row in enumerate(rows):
        if len(rows) > 1:
            number, answer = divmod(place, n)
            of_prompt = f"prompt {number + 1} of {len(conversations)}, " if len(conversations) > 1 else ""
            console.print(f"--- {of_prompt}answer {answer + 1} of {n}")
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
    if not prompt.strip():
        raise DataError("the prompt is empty; write what the user says, or give a file of prompts")
    if any("\ud800" <= letter <= "\udfff" for letter in prompt):
        raise DataError("the prompt is not UTF-8; write it anew, or put it into a file of prompts")
    return (Conversation(id="prompt", messages=(Message(role="user", text=prompt),)),)


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
