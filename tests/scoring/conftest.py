"""Tiny real Hugging Face reward models and tokenizers, and conversations to score."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

from rewarden.types import Conversation, Message

TEMPLATES = {
    "words": "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}",
    "bytes": "{% for m in messages %}[{{ m['role'] }}]\n{{ m['content'] }}[/]\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}",
}

WORDS = [
    "a",
    "trip",
    "to",
    "the",
    "sea",
    "hills",
    "please",
    "yes",
    "no",
    "thanks",
    "where",
    "do",
    "you",
    "want",
    "go",
    "I",
    "we",
    "hello",
    "one",
    "two",
    "three",
    "four",
    "five",
]


@pytest.fixture
def talk() -> Callable[..., Conversation]:
    """talk("hi", "hello") is a user and an assistant message; further texts alternate; keywords become columns."""

    def make(*texts: str, id: str = "row", **columns: object) -> Conversation:
        roles = ("user", "assistant")
        messages = tuple(Message(role=roles[i % 2], text=text) for i, text in enumerate(texts))
        return Conversation(id=id, messages=messages, meta=columns)

    return make


def word_tokenizer() -> PreTrainedTokenizerFast:
    specials = ["<pad>", "<unk>", "<end>", "<user>", "<assistant>", "<system>"]
    vocabulary = {token: i for i, token in enumerate([*specials, *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<end>",
        additional_special_tokens=specials[3:],
    )
    tokenizer.chat_template = TEMPLATES["words"]
    return tokenizer


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, other special tokens, and pad is the end of turn."""
    specials = ["[/]", "[user]", "[assistant]", "[system]"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate([*specials, *alphabet])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="[/]", pad_token="[/]", additional_special_tokens=specials[1:]
    )
    tokenizer.chat_template = TEMPLATES["bytes"]
    return tokenizer


TOKENIZERS = {"words": word_tokenizer, "bytes": byte_tokenizer}


@pytest.fixture(scope="session")
def tokenizers() -> dict[str, PreTrainedTokenizerFast]:
    return {kind: make() for kind, make in TOKENIZERS.items()}


@pytest.fixture(scope="session")
def reward_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A saved reward model: kind of tokenizer and number of heads -> its folder."""
    made: dict[tuple[str, int], Path] = {}

    def make(kind: str, *, num_heads: int = 1, positions: int = 512) -> Path:
        if (kind, num_heads, positions) not in made:
            tokenizer = TOKENIZERS[kind]()
            torch.manual_seed(len(kind) + num_heads)
            config = LlamaConfig(
                vocab_size=len(tokenizer),
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=positions,
                initializer_range=0.3,
                attention_dropout=0.1,
                num_labels=num_heads,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
                bos_token_id=None,
            )
            folder = tmp_path_factory.mktemp(f"reward_{kind}_{num_heads}")
            LlamaForSequenceClassification(config).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            made[kind, num_heads, positions] = folder
        return made[kind, num_heads, positions]

    return make
