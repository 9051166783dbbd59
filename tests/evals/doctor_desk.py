"""Clean data of every type, a tiny model folder, and what a planted fault is."""

import copy
import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rewarden.data.write import conversation_row
from rewarden.worlds import TripDesk

Rows = list[Any]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
POSITIONS = 100_000
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def letters_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """One token a byte, but for a newline with a blank behind it, which is one token; 3 special tokens. So lengths can be
    counted by hand: a ChatML turn has the letters of its role and text, 2 newlines and 2 special tokens."""
    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĊĠ"]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[("Ċ", "Ġ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=template,
    )


def save_model(folder: Path, tokenizer: PreTrainedTokenizerFast, **config: Any) -> Path:
    """A random model of one small layer, whose config fits the tokenizer unless told otherwise."""
    tokenizer.save_pretrained(folder)
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "max_position_embeddings": POSITIONS,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": None,
        "tie_word_embeddings": True,
    }
    with torch.random.fork_rng():
        LlamaForCausalLM(LlamaConfig(**{**shape, **config})).save_pretrained(folder)
    return folder


def edit_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


PLACES = ("Rome", "Oslo", "Bern", "Riga", "Kyiv", "Bonn")
LONG = [f"{place} is a city that I can tell you a lot about." for place in PLACES]
SHORT = [f"{place} is nice." for place in PLACES]
QUESTIONS = [f"What is {place} like?" for place in PLACES]
# The longer answer is chosen in every second pair.
CHOSEN = [(LONG, SHORT)[i % 2][i] for i in range(6)]
REJECTED = [(SHORT, LONG)[i % 2][i] for i in range(6)]
HH = [
    {
        side: f"\n\nHuman: {question}\n\nAssistant: {answer}"
        for side, answer in zip(("chosen", "rejected"), answers, strict=True)
    }
    for question, *answers in zip(QUESTIONS, CHOSEN, REJECTED, strict=True)
]

CLEAN: dict[str, Rows] = {
    "messages": [{"messages": [user(q), assistant(a)]} for q, a in zip(QUESTIONS, CHOSEN, strict=True)],
    "prompts": [{"prompt": [user(q)]} for q in QUESTIONS],
    "completions": [{"prompt": q, "completion": a} for q, a in zip(QUESTIONS, CHOSEN, strict=True)],
    "pairs": [
        {"prompt": [user(q)], "chosen": [assistant(a)], "rejected": [assistant(b)]}
        for q, a, b in zip(QUESTIONS, CHOSEN, REJECTED, strict=True)
    ],
    "implicit": [
        {"chosen": [user(q), assistant(a)], "rejected": [user(q), assistant(b)]}
        for q, a, b in zip(QUESTIONS, CHOSEN, REJECTED, strict=True)
    ],
    "labels": [
        {"prompt": q, "completion": a, "label": i % 2 == 0} for i, (q, a) in enumerate(zip(QUESTIONS, CHOSEN, strict=True))
    ],
    "hh": HH,
    "alpaca": [
        {"instruction": q, "input": "", "output_1": a, "output_2": b, "preference": 1}
        for q, a, b in zip(QUESTIONS, CHOSEN, REJECTED, strict=True)
    ],
    "world": [{"messages": conversation_row(TripDesk().scripted("good", seed))["messages"]} for seed in range(6)],
    "moss": [{"chosen": [q, a], "rejected": [q, b]} for q, a, b in zip(QUESTIONS, CHOSEN, REJECTED, strict=True)],
}


def clean(kind: str) -> Rows:
    """A copy that may be spoiled."""
    return copy.deepcopy(CLEAN[kind])


def as_lines(rows: Rows) -> list[str]:
    return [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]


def put(file: Path, content: str | bytes) -> Path:
    raw = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(gzip.compress(raw) if file.name.endswith(".gz") and isinstance(content, str) else raw)
    return file


@dataclass(frozen=True)
class Fault:
    """One planted fault: what is spoiled in clean rows, and the one finding that must come of it.

    spoil: changes the rows in place. write: makes the file from the clean lines instead. model: makes the model's folder, for
    faults that need one. at: where the first examples stand, as lines of the data file, or other places in full.
    """

    code: str
    at: tuple[int | str, ...]
    kind: str = "messages"
    spoil: Callable[[Rows], None] | None = None
    write: Callable[[Path, list[str]], Path] | None = None
    model: Callable[[Path], Path] | None = None
    needs_model: bool = False
    template: str = "chat"
    count: int | None = None
    severity: str = "error"
    detail: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    eval_rows: Rows | None = None
    name: str = ""

    def __str__(self) -> str:
        return self.name or f"{self.code}-{self.kind}"


def at(index: int, **changes: Any) -> Callable[[Rows], None]:
    """Change columns of one row."""

    def spoil(rows: Rows) -> None:
        rows[index].update(changes)

    return spoil


def instead(index: int, row: Any) -> Callable[[Rows], None]:
    """Another row in the place of one."""

    def spoil(rows: Rows) -> None:
        rows[index] = row

    return spoil


def said(index: int, text: str, column: str = "messages", turn: int = -1) -> Callable[[Rows], None]:
    """Another text for one message."""

    def spoil(rows: Rows) -> None:
        rows[index][column][turn]["content"] = text

    return spoil


def every(**columns: Callable[[int], Any]) -> Callable[[Rows], None]:
    """A column for all rows, by a function of the row's number."""

    def spoil(rows: Rows) -> None:
        for index, row in enumerate(rows):
            row.update({name: value(index) for name, value in columns.items()})

    return spoil
