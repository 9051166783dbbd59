"""Conversations as token ids and spans, and back.

template = load_template(tokenizer)           # the tokenizer's chat template, or kind="hh", "alpaca", "moss_en", "moss_zh"
template.render(conversation)                 # all of it, for training and scoring
template.start(conversation)                  # ends in the generation prompt: the policy writes next
template.extend(rollout, message)             # the user's answer to a sampled turn, without touching the ids so far
"""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rewarden.errors import ConfigError, DataError
from rewarden.text.chat import PROBE, ChatFormat
from rewarden.text.decode import find_decoder
from rewarden.text.encode import Encoder, extend
from rewarden.text.joint import JointTokenizer
from rewarden.text.layout import Format, UnusableTemplate, check_roles, place
from rewarden.text.plain import WRITERS, PlainFormat
from rewarden.text.probe import check_generation, first_difference, resolve_end_of_turn
from rewarden.text.trace import Traced, trace
from rewarden.types import Conversation, Message, Rollout

KINDS = ("chat", *WRITERS)
# Part of every fingerprint; raise it when the same input would render to other ids or spans.
RENDER_VERSION = 1


def load_template(tokenizer: Any, kind: str = "chat", *, generates: bool = True) -> "Template":
    """The template of a tokenizer, or a plain-role format written with its eos and bos tokens.

    `generates=False` is for scorers, which never continue a conversation: it leaves out the check that the generation prompt
    is a prefix of the training render.

    Errors: ConfigError for an unknown kind or a tokenizer without a fast backend; UnusableTemplate (a ConfigError) for a
    tokenizer without what the kind needs, or a template that cannot be used, with the first token that differs.
    """
    if kind not in KINDS:
        raise ConfigError(f"template {kind!r} is unknown; use one of {', '.join(KINDS)}")
    joint = JointTokenizer(tokenizer)
    form: Format
    try:
        if kind == "chat":
            form = ChatFormat(tokenizer)
        elif tokenizer.eos_token is None:
            raise UnusableTemplate(
                "no_eos_token",
                f"the format {kind!r} ends a turn with the eos token, and this tokenizer has none; set eos_token",
            )
        else:
            form = PlainFormat(kind, tokenizer.eos_token)
        return Template(Encoder(tokenizer=tokenizer, joint=joint, form=form), generates=generates)
    except DataError as error:
        raise UnusableTemplate(
            "template_unusable", f"the template {kind!r} cannot render a plain conversation: {error}"
        ) from error


class Template:
    """Turns conversations into ids and spans in one way. Make it with `load_template`.

    `end_of_turn_id` closes an assistant turn, as the template does it; `stop_ids` are all ids that end sampling (that one and
    the tokenizer's eos). `fingerprint` changes with anything that can change ids or spans. `notes` says in sentences what is
    unusual about the template. `facts` counts, over the life of this object, rows that need a second look: "merged_seam"
    (answers whose first token holds the end of the generation prompt too; that token is in no assistant span),
    "spelled_special" (special tokens in contents, kept as text), "empty_assistant" (answers without text).
    """

    def __init__(self, encoder: Encoder, *, generates: bool) -> None:
        tokenizer, joint, form = encoder.tokenizer, encoder.joint, encoder.form
        probe = Conversation(id="probe", messages=PROBE if form.many_turns else PROBE[:2])
        encoder.end_of_turn_id = resolve_end_of_turn(encoder, probe)
        joint.control_ids |= {encoder.end_of_turn_id}
        eos = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        encoder.stop_ids = frozenset((encoder.end_of_turn_id, *eos))
        self.tokenizer = tokenizer
        self.name = form.name
        self.end_of_turn_id = encoder.end_of_turn_id
        self.stop_ids = encoder.stop_ids
        self.notes = check_generation(encoder, probe) if generates else ()
        self.facts: Counter[str] = Counter()
        self.fingerprint = _fingerprint(encoder)
        self._encoder = encoder
        self._decoder = find_decoder(encoder, probe)

    def render(self, conversation: Conversation) -> Rollout:
        """The whole conversation, without a generation prompt; spans cover all tokens.

        Errors: DataError when roles do not alternate or the template refuses the conversation.
        """
        rollout = self._rollout(conversation, generation=False)
        self.facts["empty_assistant"] += sum(m.role == "assistant" and not m.text for m in conversation.messages)
        return rollout

    def trace(self, conversation: Conversation, *, generation: bool = False) -> Traced:
        """`render`, or with `generation` `start`, with the exact string behind it and every token's piece. Errors: as these."""
        return trace(self._encoder, self.start(conversation) if generation else self.render(conversation))

    def start(self, conversation: Conversation) -> Rollout:
        """The conversation and the generation prompt; the policy writes next.

        Errors: as `render`, and DataError when the last message is the assistant's.
        """
        if conversation.messages and conversation.messages[-1].role == "assistant":
            raise DataError(
                f"{place(conversation)}: the conversation ends with the assistant, so there is nothing to answer; "
                "leave its last message out, or render it"
            )
        return self._rollout(conversation, generation=True)

    def extend(self, rollout: Rollout, message: Message) -> Rollout:
        """The rollout with the user's answer and the next generation prompt appended; the ids so far stay as they are.

        A turn that was cut off by length first gets its missing end-of-turn token, as "template": it was not sampled.

        Errors: DataError when the rollout does not end with the assistant or the message is not the user's.
        """
        grown, spelled = extend(self._encoder, rollout, message)
        self.facts["spelled_special"] += spelled
        return grown

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a sampled turn: no end of turn, no special tokens, blanks as they are.

        Whitespace that the template itself puts around a content (the blank of " Hello" after "[/INST]") is taken off once.
        """
        ended = len(ids) > 0 and ids[-1] in self.stop_ids
        return self._decoder.content(ids[:-1] if ended else ids, ended=ended)

    def check_prefix(self, conversation: Conversation) -> None:
        """Compare, token by token, the generation prompt of every answer with the whole conversation.

        Errors: DataError with the first token that differs.
        """
        check_roles(conversation)
        _, whole = self._encoder.tokens(conversation, generation=False)
        for number, message in enumerate(conversation.messages):
            if message.role != "assistant":
                continue
            before = replace(conversation, messages=conversation.messages[:number])
            _, prompt = self._encoder.tokens(before, generation=True)
            if difference := first_difference(self._encoder, prompt.ids, whole.ids):
                raise DataError(
                    f"{place(conversation)}: the prompt of message {number} is no prefix of the conversation: {difference}. "
                    "Drop the row, or use a template that keeps earlier turns as they are"
                )

    def _rollout(self, conversation: Conversation, *, generation: bool) -> Rollout:
        check_roles(conversation)
        layout, tokens = self._encoder.tokens(conversation, generation=generation)
        found = self._encoder.spans(tokens, layout, conversation.messages, place(conversation))
        self.facts["merged_seam"] += found.merged
        self.facts["spelled_special"] += tokens.spelled
        return Rollout(
            conversation=conversation, token_ids=tokens.ids, spans=found.spans, stop="open" if generation else "turns"
        )


def _fingerprint(encoder: Encoder) -> str:
    parts = [
        RENDER_VERSION,
        encoder.form.name,
        encoder.form.source,
        encoder.end_of_turn_id,
        sorted(encoder.stop_ids),
        sorted(encoder.joint.control_ids),
        encoder.bos_ids,
        encoder.joint.definition,
    ]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
