"""Our side's models and data: the peers' toy shapes (`toy.py` beside the peer scripts) written as ordinary folders."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from toy import V, config, tokenizer
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from rewarden.text.render import Template
from rewarden.types import Conversation, Message, Rollout

TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% if message['role'] == 'assistant' %} <eos>{% endif %} {% endfor %}"
)
"""Words are tokens and nothing stands around them, so a prompt of 32 words is 32 tokens, and an answer adds only its <eos>."""

NUM_WORDS = V - 4
CONSTANT = 1.0
AWAY = -10.0


def write_model(model: Any, folder: Path) -> str:
    """Model and tokenizer as a folder; returns its path."""
    model.save_pretrained(folder)
    words = tokenizer("right")
    words.chat_template = TEMPLATE
    words.save_pretrained(folder)
    return str(folder)


def write_policy(folder: Path, *, never_ends: bool) -> str:
    """The toy language model; `never_ends` makes the four special tokens impossible to sample, so that no answer ends early.

    The peers switch the end of turn off; our sampler always has one. So the first embedding dimension is the same constant for
    all words (which shifts their logits alike) and lies far on the other side for the special tokens, whose logits are then
    more than 50 nats below every word's. Shapes and operations stay as they are.
    """
    torch.manual_seed(0)
    model = LlamaForCausalLM(config(tie_word_embeddings=True))
    if never_ends:
        with torch.no_grad():
            embedding_VD = model.model.embed_tokens.weight
            embedding_VD[:, 0] = CONSTANT
            embedding_VD[NUM_WORDS:, 0] = AWAY
    return write_model(model, folder)


def write_scalar(folder: Path, *, seed: int) -> str:
    """The toy model with a scalar head: a reward model or a critic."""
    torch.manual_seed(seed)
    return write_model(LlamaForSequenceClassification(config(num_labels=1)), folder)


def text_of(ids: Iterable[int]) -> str:
    """The words of these ids, which encode back to them."""
    return " ".join(f"w{i}" for i in ids)


def opened(template: Template, prompts: Sequence[Sequence[int]]) -> list[Rollout]:
    """Prompts ready to be answered."""
    texts = (Message(role="user", text=text_of(ids)) for ids in prompts)
    return [template.start(Conversation(id=str(row), messages=(text,))) for row, text in enumerate(texts)]


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> str:
    """JSON lines; returns the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def random_prompts(num: int, length: int, *, seed: int) -> list[list[int]]:
    """Prompts drawn as the peers draw theirs."""
    return torch.randint(0, 2000, (num, length), generator=torch.Generator().manual_seed(seed)).tolist()
