"""Planted faults in a model's folder, and in rows as the model is given them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from doctor_desk import CHATML, Fault, assistant, at, edit_json, letters_tokenizer, said, save_model, user
from tokenizers import processors

from rewarden.worlds import TripDesk
from rewarden.worlds.tokenizer import build_tokenizer

NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHATML
# The last message of the user has another header, so earlier turns change when a later one is added.
UNSTABLE = (
    "{% set at = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set at.last = loop.index0 %}{% endif %}"
    "{% endfor %}" + CHATML.replace("m['role']", "m['role'] + ('!' if loop.index0 == at.last else '')")
)
# The first message of a conversation of more than two exchanges has another header.
LONG_TALK = CHATML.replace("m['role']", "m['role'] + ('!' if loop.first and messages | length > 4 else '')")


def model(template: str | None = CHATML, *, bos: bool = False, **config: Any) -> Callable[[Path], Path]:
    """A model's folder; bos: the tokenizer puts one in front of every text."""

    def make(folder: Path) -> Path:
        tokenizer = letters_tokenizer(template)
        if bos:
            tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
                single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
            )
        return save_model(folder, tokenizer, **config)

    return make


def spoiled(spoil: Callable[[Path], None]) -> Callable[[Path], Path]:
    """The usual folder, changed after it was saved."""

    def make(folder: Path) -> Path:
        save_model(folder, letters_tokenizer())
        spoil(folder)
        return folder

    return make


def more_words(folder: Path) -> Path:
    tokenizer = letters_tokenizer()
    size = len(tokenizer)
    tokenizer.add_tokens(["<one>", "<two>"], special_tokens=True)
    return save_model(folder, tokenizer, vocab_size=size)


def pad_beyond(folder: Path) -> Path:
    tokenizer = letters_tokenizer()
    size = len(tokenizer)
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    return save_model(folder, tokenizer, vocab_size=size)


def world(folder: Path) -> Path:
    return save_model(folder, build_tokenizer(TripDesk()))


def folder_fault(code: str, make: Callable[[Path], Path], severity: str = "error", **more: Any) -> Fault:
    return Fault(code, ("model",), model=make, needs_model=True, severity=severity, **more)


FOLDER = [
    folder_fault("vocabulary_beyond_embeddings", more_words, count=2, detail="ids up to 261 ('<two>')"),
    folder_fault("pad_without_id", pad_beyond, detail="'<pad>' has id 260"),
    folder_fault("pad_without_id", spoiled(lambda f: edit_json(f / "config.json", pad_token_id=-1)), name="pad_token_id -1"),
    folder_fault(
        "embedding_mismatch",
        spoiled(lambda f: edit_json(f / "config.json", vocab_size=300)),
        detail="model.embed_tokens.weight has 260 rows, config.json says 300",
    ),
    folder_fault("weights_unreadable", spoiled(lambda f: (f / "model.safetensors").unlink()), "warning"),
    folder_fault(
        "eos_is_not_end_of_turn",
        model(eos_token_id=0),
        "warning",
        detail="eos_token_id is 0; a turn ends with 2 ('<|im_end|>')",
    ),
    folder_fault("bos_missing", model(bos=True), "warning"),
    folder_fault("bos_twice_elsewhere", model("{{ bos_token }}" + CHATML, bos=True), "note"),
    folder_fault("no_chat_template", model(None)),
    folder_fault("no_end_of_turn", model(CHATML.replace("<|im_end|>", ""))),
    folder_fault("no_generation_prompt", model(CHATML.split("{% if add")[0])),
    folder_fault(
        "generation_prompt_ends_turn",
        model(CHATML.replace("m['role'] + '\n'", "m['role'] + '<|im_end|>'").replace("assistant\n", "assistant<|im_end|>")),
    ),
    folder_fault("generation_prompt_not_a_prefix", model(CHATML.replace("assistant\n'", "assistant:\n'"))),
    folder_fault("template_unusable", model("{{ raise_exception('only tools, please') }}"), detail="only tools, please"),
    folder_fault("unstable_history", model(UNSTABLE), "warning"),
]


def row_fault(code: str, at_lines: tuple[int, ...], spoil: Any, severity: str = "warning", **more: Any) -> Fault:
    return Fault(code, at_lines, spoil=spoil, needs_model=True, severity=severity, **more)


SYSTEM = {"role": "system", "content": "Be kind."}
THREE_TURNS = [user("Hi"), assistant("Hello."), user("And?"), assistant("Well."), user("So?"), assistant("Bye.")]
# A turn of the user is 8 tokens and its letters, one of the assistant 13 (11 of them before the text), a question here 18.

ROWS = [
    row_fault("double_bos", (1, 2, 3, 4, 5), None, "error", model=model("{{ bos_token + bos_token }}" + CHATML), count=6),
    row_fault(
        "refused_by_template",
        (4,),
        at(3, messages=[SYSTEM, user("Hi"), assistant("Yes.")]),
        "error",
        model=model(NO_SYSTEM),
        detail="System role not supported",
    ),
    row_fault(
        "prompt_not_a_prefix", (4,), at(3, messages=THREE_TURNS), model=model(LONG_TALK), detail="the prompt of message 1"
    ),
    row_fault("unknown_token", (2,), said(1, "Xylophones are fun."), kind="world", model=world, detail="'Xylophones'"),
    row_fault("merged_seam", (2,), said(1, "  Yes, it is.")),
    row_fault("special_token_in_text", (2,), said(1, "Use <|im_start|> here."), detail="'<|im_start|>'"),
    row_fault("prompt_ends_in_eos", (2,), said(1, "What is Oslo like?<|im_end|>", turn=0)),
    row_fault("answer_ends_in_eos", (2,), said(1, "It is nice.<|im_end|>\n")),
    row_fault(
        "longer_than_max_length", (2,), said(1, "a" * 300), options={"max_length": 300}, detail="339 tokens, at most 300"
    ),
    row_fault(
        "nothing_within_max_length", (2,), said(1, "a" * 300, turn=0), options={"max_length": 300}, detail="tokens, at most 300"
    ),
    row_fault("longer_than_the_model", (2,), said(1, "a" * 300), model=model(max_position_embeddings=300)),
    row_fault(
        "prompt_longer_than_max_prompt_length",
        (2,),
        said(1, "a" * 300, column="prompt"),
        kind="prompts",
        options={"max_prompt_length": 300},
        detail="319 tokens, at most 300",
    ),
]
