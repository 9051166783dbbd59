"""Small but real tokenizers, trained here, each with a chat template of a well-known family."""

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from rewarden.types import Conversation, Message

LINES = (
    "Hello there, how are you today? I am fine, thanks for asking.",
    "Yes, that is a good question. Why do you want to know?",
    "user assistant system human Please write a short answer: it is what it is.",
    "The weather is fine.\n\nMany people travel now; trips are fun!\nYes.",
    "[INST] Hello [/INST] Yes. <<SYS>> Be kind <</SYS>> 1 2 3 4 5",
)

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim "
    "+ '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0]['content'] %}"
    "{% else %}{% set rest = messages %}{% set system = false %}{% endif %}{% for m in rest %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if loop.index0 == 0 and system != false %}{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + m['content'] %}"
    "{% else %}{% set content = m['content'] %}{% endif %}"
    "{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + content | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + content | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHATML
WORLD = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# As Qwen3: thoughts of earlier turns are dropped, the last answer always shows a thought, be it empty.
THINKING = (
    "{% for m in messages %}{% set content = m.content %}{% set thought = '' %}"
    "{% if m.role == 'assistant' and '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and loop.last %}"
    "{{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}{% endif %}{{ content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _byte_level(special: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(LINES * 4, trainer)
    return tokenizer


def chatml_tokenizer(template: str = CHATML) -> PreTrainedTokenizerFast:
    """Byte-level BPE; pad is eos, as in many models people fine-tune."""
    return PreTrainedTokenizerFast(
        tokenizer_object=_byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]),
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>", "<|endoftext|>"],
        chat_template=template,
    )


def llama3_tokenizer() -> PreTrainedTokenizerFast:
    """BOS by the template and by the tokenizer; the end of turn is not eos."""
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer = _byte_level(special)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", tokenizer.token_to_id("<|begin_of_text|>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|begin_of_text|>",
        eos_token="<|end_of_text|>",
        pad_token="<|end_of_text|>",
        additional_special_tokens=special[2:],
        chat_template=LLAMA3,
    )


def llama2_tokenizer(split: bool = True) -> PreTrainedTokenizerFast:
    """SentencePiece-like Unigram whose blank mark is put only at the start of a text; adds BOS itself.

    Without `split` pieces may hold a blank inside, so that "INST] " can be one token.
    """
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=split)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first", split=split)
    letters = sorted({letter for line in LINES for letter in line} - {" "})
    trainer = trainers.UnigramTrainer(
        vocab_size=220,
        special_tokens=["<unk>", "<s>", "</s>"],
        unk_token="<unk>",
        initial_alphabet=[*letters, "▁", "|", "_", "/", "ü", "é"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES * 4, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<unk>",
        chat_template=LLAMA2,
    )


def legacy_tokenizer() -> PreTrainedTokenizerFast:
    """Llama's older way: every piece of text, also after a special token, gets a blank mark; unknown characters become bytes."""
    letters = sorted({letter for line in LINES for letter in line} - {" "})
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *letters, "▁H", "▁Y", "▁Yes"]
    vocab = {word: index for index, word in enumerate(dict.fromkeys(words))}
    vocab |= {word: len(vocab) + index for index, word in enumerate(("es", "Yes")) if word not in vocab}
    merges = [("▁", "H"), ("e", "s"), ("Y", "es"), ("▁", "Yes")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=LLAMA2
    )


def world_tokenizer() -> PreTrainedTokenizerFast:
    """Whole words with their blank, punctuation without; the kind the built-in worlds use."""
    splitter = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(prepend_scheme="always"), pre_tokenizers.Punctuation()])
    pieces = (piece for line in LINES for piece, _ in splitter.pre_tokenize_str(line))
    special = ("<|pad|>", "<|unk|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
    words = dict.fromkeys((*special, *pieces))
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<|unk|>",
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=list(special[3:]),
        chat_template=WORLD,
    )


def toy_tokenizer(header: int) -> PreTrainedTokenizerFast:
    """One token a word; a header of `header` tokens before each message and one end-of-turn token after it."""
    names = ["<bos>", "<eot>", "<unk>", *(f"<{role}{i}>" for role in ("user", "assistant") for i in range(header))]
    words = [f"w{i}" for i in range(9)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*names, *words])}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    heads = "".join(f"<{{{{ m.role }}}}{i}>" for i in range(header))
    prompt = "".join(f"<assistant{i}>" for i in range(header))
    template = (
        "<bos>{% for m in messages %}"
        + heads
        + "{{ m.content }}<eot>{% endfor %}{% if add_generation_prompt %}"
        + prompt
        + "{% endif %}"
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eot>",
        unk_token="<unk>",
        additional_special_tokens=names[3:],
        chat_template=template,
    )


def added(tokenizer: PreTrainedTokenizerFast, *words: str) -> PreTrainedTokenizerFast:
    """The tokenizer with these words as added tokens that are not special, like Qwen's <think>."""
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in words])
    return tokenizer


FAMILIES: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "chatml": chatml_tokenizer,
    "llama3": llama3_tokenizer,
    "llama2": llama2_tokenizer,
    "legacy": legacy_tokenizer,
    "world": world_tokenizer,
    "thinking": lambda: added(chatml_tokenizer(THINKING), "<think>", "</think>"),
}


@pytest.fixture(scope="session")
def families() -> dict[str, PreTrainedTokenizerFast]:
    """The families by name, each trained once."""
    return {name: build() for name, build in FAMILIES.items()}


@pytest.fixture(scope="session")
def build() -> Any:
    """The builders of this file, for tests that change a tokenizer or its template."""

    class Builders:
        chatml = staticmethod(chatml_tokenizer)
        llama3 = staticmethod(llama3_tokenizer)
        llama2 = staticmethod(llama2_tokenizer)
        world = staticmethod(world_tokenizer)
        toy = staticmethod(toy_tokenizer)
        added = staticmethod(added)
        CHATML, NO_SYSTEM, THINKING, LLAMA2 = CHATML, NO_SYSTEM, THINKING, LLAMA2

    return Builders


@pytest.fixture(scope="session")
def talk() -> Callable[..., Conversation]:
    """A conversation from texts, the user first; `system` goes in front."""

    def make(*texts: str, system: str | None = None, **meta: Any) -> Conversation:
        messages = [Message(role="assistant" if i % 2 else "user", text=text) for i, text in enumerate(texts)]
        first = [] if system is None else [Message(role="system", text=system)]
        return Conversation(id="row", messages=(*first, *messages), meta=meta)

    return make
