"""The tokenizer and the tiny policy of a world: ordinary `transformers` objects that save and load like any other.

Words are single tokens with their blank (Metaspace), punctuation carries none, so `decode(encode(text)) == text` for every
sentence. Each message is `<|role|>` content `<|end|>`; the generation prompt is `<|assistant|>`. The policy is a Llama of
0.196 M parameters with tied embeddings. `initializer_range` 0.08 matters: at 0.02 it does not learn to copy values in time.
"""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rewarden.errors import ConfigError
from rewarden.worlds.trip_desk import TripDesk

PAD, UNKNOWN, END = "<|pad|>", "<|unk|>", "<|end|>"
ROLES: tuple[str, ...] = ("<|user|>", "<|assistant|>", "<|system|>")
MAX_POSITIONS = 320

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_tokenizer(world: TripDesk) -> PreTrainedTokenizerFast:
    """The word-level tokenizer of a world, with its chat template; eos is `<|end|>`, pad is a token of its own."""
    splitter = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(prepend_scheme="always"), pre_tokenizers.Punctuation()])
    pieces = (piece for sentence in world.sentences() for piece, _ in splitter.pre_tokenize_str(sentence))
    words = dict.fromkeys((PAD, UNKNOWN, END, *ROLES, *pieces))
    model = models.WordLevel(vocab={word: index for index, word in enumerate(words)}, unk_token=UNKNOWN)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=UNKNOWN,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=list(ROLES),
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def model_config(world: TripDesk, tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """The architecture of the world's policy: hidden 96, 2 layers, 4 heads, MLP 192, tied embeddings, 320 positions.

    The plain and the trap world differ in their vocabulary only.
    """
    expected = len(build_tokenizer(world))
    if len(tokenizer) != expected:
        raise ConfigError(
            f"the tokenizer has {len(tokenizer)} entries, {world!r} has {expected}; build it with build_tokenizer"
        )
    return LlamaConfig(
        vocab_size=expected,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        initializer_range=0.08,
        attention_dropout=0.0,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def build_policy(world: TripDesk, seed: int) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """A fresh, untrained policy (float32, CPU) and its tokenizer; weights depend on `seed` only, global RNG stays as it was."""
    tokenizer = build_tokenizer(world)
    config = model_config(world, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    return model, tokenizer
