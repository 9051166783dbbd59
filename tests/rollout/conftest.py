import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rewarden.text.render import load_template
from rewarden.types import Conversation, Message, Rollout, Span

SPECIAL = ["<|pad|>", "<|unk|>", "<|end|>", "<|user|>", "<|assistant|>"]
NUM_TOKENS = 60
PAD, UNK, END, USER, ASSISTANT = range(5)


def chat_tokenizer():
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *(f"w{i}" for i in range(len(SPECIAL), NUM_TOKENS))])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<|pad|>", unk_token="<|unk|>", eos_token="<|end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|' + m.role + '|> ' + m.content + ' <|end|> ' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|> ' }}{% endif %}"
    )
    return tokenizer


def prompt(name, ids, **meta):
    """An open rollout with these very ids."""
    return Rollout(
        conversation=Conversation(id=name, messages=(Message(role="user", text="?"),), meta=meta),
        token_ids=tuple(ids),
        spans=(Span(role="template", turn=0, start=0, stop=len(ids)),),
    )


def prompts(num, *, shortest=3, longest=17, seed=0):
    """Open rollouts of mixed length, in no order."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (num,), generator=draw).tolist()
    return [
        prompt(f"row{i}", torch.randint(len(SPECIAL), NUM_TOKENS, (n,), generator=draw).tolist()) for i, n in enumerate(lengths)
    ]


def llama(**fields):
    torch.manual_seed(0)
    config = {
        "vocab_size": NUM_TOKENS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "tie_word_embeddings": True, "initializer_range": 0.2, "pad_token_id": PAD, "bos_token_id": None, "eos_token_id": END,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**config, **fields}))


@pytest.fixture
def template():
    return load_template(chat_tokenizer())


@pytest.fixture
def model():
    return llama()
