"""Tiny random models and a small tokenizer, built here; nothing is downloaded."""

from collections.abc import Sequence

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from rewarden.types import TokenBatch

VOCABULARY = 61
WORDS = ["<unk>", "<s>", "</s>", *(f"w{index}" for index in range(VOCABULARY - 4)), "<|endoftext|>"]
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
KINDS = ["llama", "llama_tied", "gpt2", "qwen2", "mistral"]


def build_model(kind: str, seed: int = 0, **changes: object) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if kind == "gpt2":
            config = GPT2Config(
                vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_positions=128, initializer_range=0.3, **changes
            )
            return GPT2LMHeadModel(config).eval()
        if kind == "qwen2":
            return Qwen2ForCausalLM(Qwen2Config(**{**SHAPE, **changes})).eval()
        if kind == "mistral":
            return MistralForCausalLM(MistralConfig(**{**SHAPE, "sliding_window": 4, **changes})).eval()
        tied = {"tie_word_embeddings": kind == "llama_tied"}
        return LlamaForCausalLM(LlamaConfig(**{**SHAPE, **tied, **changes})).eval()


def build_tokenizer(words: Sequence[str] = WORDS) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def batch_of(rows: Sequence[Sequence[int]], filler: int = 0, extra: int = 0) -> TokenBatch:
    """Right-padded with any filler and any amount of padding."""
    width = max(len(row) for row in rows) + extra
    length_B = torch.tensor([len(row) for row in rows])
    return TokenBatch(
        ids_BT=torch.tensor([[*row, *[filler] * (width - len(row))] for row in rows]),
        mask_BT=torch.arange(width)[None] < length_B[:, None],
        length_B=length_B,
    )


def random_rows(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
