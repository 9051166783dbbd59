"""Formats that need no chat template: roles are plain words and a turn ends with the tokenizer's eos token.

    moss_en, moss_zh   ROLE(user)u1</s>ROLE(assistant)a1</s>... ; roles "Human:", "Assistant:" and "<|Human|>", "<|MOSS|>",
                       nothing between role and text, </s> after every turn, the prompt included (MOSS-RLHF, PPO-max 2023)
    alpaca             the two prompts of Stanford Alpaca, with and without input, then the answer and </s>; one exchange
    hh                 "\\n\\nHuman: u1\\n\\nAssistant: a1</s>..." as in the HH-RLHF transcripts. These hold no end-of-turn; we
                       put eos after each answer, or a policy trained on them could never stop

One BOS id goes in front when the tokenizer has a BOS token.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from rewarden.errors import DataError
from rewarden.text.layout import Layout, Region, place
from rewarden.types import Conversation

ALPACA_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n### Instruction:\n"
)
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n"
)


@dataclass(slots=True)
class _Writer:
    """Text so far and where the contents lie in it."""

    text: str = ""
    regions: list[Region] = field(default_factory=list)

    def add(self, words: str) -> None:
        self.text += words

    def content(self, message: int, words: str, *, seam: int | None = None) -> None:
        start = len(self.text)
        self.text += words
        self.regions.append(
            Region(message=message, start=start, stop=len(self.text), seam=start if seam is None else seam),
        )


class PlainFormat:
    """One of the plain-role formats, by name."""

    adds_bos = True

    def __init__(self, name: str, end: str) -> None:
        self.name = name
        self.source = f"{name} {end}"
        self.many_turns = name != "alpaca"
        self._end = end
        self._write = WRITERS[name]

    def lay_out(self, conversation: Conversation, *, generation: bool) -> Layout:
        """See `Format`. Errors: DataError for a system message, and for alpaca a second exchange."""
        if conversation.messages[0].role == "system":
            raise DataError(
                f"{place(conversation)}: the format {self.name!r} has no place for a system message; "
                "put its text into the first user message, or use a chat template"
            )
        writer = _Writer()
        self._write(writer, conversation, generation, self._end)
        return Layout(text=writer.text, regions=tuple(writer.regions))


def _moss(writer: _Writer, conversation: Conversation, generation: bool, end: str, *, user: str, assistant: str) -> None:
    for number, message in enumerate(conversation.messages):
        writer.add(user if message.role == "user" else assistant)
        writer.content(number, message.text)
        writer.add(end)
    if generation:
        writer.add(assistant)


def _hh(writer: _Writer, conversation: Conversation, generation: bool, end: str) -> None:
    for number, message in enumerate(conversation.messages):
        if message.role == "user":
            writer.add("\n\nHuman: ")
            writer.content(number, message.text)
            continue
        writer.add("\n\nAssistant:")
        seam = len(writer.text)
        # The blank belongs to the answer's first token in most vocabularies, so the generation prompt ends before it.
        writer.add(" ")
        writer.content(number, message.text, seam=seam)
        writer.add(end)
    if generation:
        writer.add("\n\nAssistant:")


def _alpaca(writer: _Writer, conversation: Conversation, generation: bool, end: str) -> None:
    """`meta["input"]`, when it is text and not blank, fills the input section.

    The user message may be the instruction alone or AlpacaEval's merger of both (instruction, blank line, input).
    """
    messages = conversation.messages
    if len(messages) > 2:
        raise DataError(
            f"{place(conversation)}: the format 'alpaca' has one exchange, this conversation has {len(messages)} messages; "
            "use a chat template, or the formats 'hh' or 'moss_en'"
        )
    given = conversation.meta.get("input")
    extra = given if isinstance(given, str) and given.strip() else ""
    instruction = messages[0].text
    if extra:
        instruction = instruction.removesuffix(f"\n\n{extra}")
    writer.add(ALPACA_INPUT if extra else ALPACA)
    writer.content(0, instruction)
    if extra:
        writer.add("\n\n### Input:\n")
        writer.content(0, extra)
    if len(messages) > 1 or generation:
        writer.add("\n\n### Response:")
    if len(messages) > 1:
        writer.content(1, messages[1].text)
        writer.add(end)


WRITERS: dict[str, Callable[[_Writer, Conversation, bool, str], None]] = {
    "moss_en": partial(_moss, user="Human:", assistant="Assistant:"),
    "moss_zh": partial(_moss, user="<|Human|>", assistant="<|MOSS|>"),
    "alpaca": _alpaca,
    "hh": _hh,
}
