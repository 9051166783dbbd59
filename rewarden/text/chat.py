"""Chat templates: the string a template makes of a conversation, and where in it the contents lie.

A template is a program; it may trim, reorder, drop or add text. So the contents are found, not assumed: the conversation is
rendered once as it is and once with a pair of private-use characters around each content. Without these marks the second
string must equal the first, and then the marks show where each content went. A mark the template lost (it cut the thinking
off an answer, say) is replaced by the place where the generation prompt of that message ends.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from itertools import pairwise
from typing import Any

from jinja2 import TemplateError

from rewarden.errors import DataError
from rewarden.text.layout import Layout, Region, UnusableTemplate, place
from rewarden.types import Conversation, Message

# A template that prints today's date would give other ids tomorrow and break an exact resume. Llama 3.1 has this default.
TODAY = date(2024, 7, 26)
MARKS = (0xF0000, 0x100000)
PROBE = (
    Message(role="user", text="Hello"),
    Message(role="assistant", text="Yes"),
    Message(role="user", text="Why"),
    Message(role="assistant", text="Yes"),
)
Cut = tuple[int, int]


class ChatFormat:
    """The chat template of a tokenizer."""

    name = "chat"
    adds_bos = False
    many_turns = True

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise UnusableTemplate(
                "no_chat_template",
                f"the tokenizer {getattr(tokenizer, 'name_or_path', '')!r} has no chat_template; set `template` to one of the "
                "plain formats (moss_en, moss_zh, alpaca, hh), or give the tokenizer a chat template",
            )
        self._tokenizer = tokenizer
        try:
            self.source = str(tokenizer.get_chat_template())
        except ValueError as error:
            raise UnusableTemplate(
                "template_unusable", f"the tokenizer has several chat templates and none is named 'default': {error}"
            ) from error
        self._template = _without_clock(self.source)
        # Whitespace that stands between generation prompt and content, for answers inside and at the end of a conversation.
        self._leads = ("", "")
        probe = Conversation(id="probe", messages=PROBE)
        layout = self.lay_out(probe, generation=False)
        self._leads = (self._lead(layout, probe, 1), self._lead(layout, probe, 3))

    def lay_out(self, conversation: Conversation, *, generation: bool) -> Layout:
        """See `Format`. Errors: DataError with the template's own words, or when it hides where a content went."""
        messages, where = conversation.messages, place(conversation)
        text = self._string(messages, generation, where)
        regions = []
        for number, (start, stop) in self._find(messages, text, generation, where).items():
            if stop is None or (start is None and messages[number].role != "assistant"):
                raise DataError(
                    f"{where}: the chat template leaves out message {number} ({messages[number].role}) or part of it; "
                    "drop the message, or use a template that shows it"
                )
            if start is None:
                start = self._end_of_prompt(messages[:number], text, where)
            regions.append(Region(message=number, start=start, stop=stop, seam=self._seam(messages, number, text, start)))
        if any(a.stop > b.seam for a, b in pairwise(regions)) or any(region.start > region.stop for region in regions):
            raise DataError(f"{where}: the chat template puts the messages in another order; use a template that keeps it")
        return Layout(text=text, regions=tuple(regions))

    def _string(self, messages: Sequence[Message], generation: bool, where: str) -> str:
        rows = [{"role": message.role, "content": message.text} for message in messages]
        try:
            return self._tokenizer.apply_chat_template(
                rows, chat_template=self._template, tokenize=False, add_generation_prompt=generation
            )
        except (TemplateError, TypeError) as error:
            roles = ", ".join(message.role for message in messages)
            raise DataError(
                f"{where}: the chat template refuses this conversation: {error} (roles: {roles}). "
                "Change the conversation as the template asks, or use another template"
            ) from error

    def _find(
        self, messages: Sequence[Message], text: str, generation: bool, where: str
    ) -> dict[int, tuple[int | None, int | None]]:
        """Where each content opens and closes in `text`, by message; None where the template lost the mark."""
        base = next((code for code in MARKS if max(text, default="") < chr(code)), None)
        if base is None:
            raise DataError(f"{where}: the text holds characters beyond U+FFFFF (private use); remove them")
        size = 2 * len(messages)
        erase = dict.fromkeys(range(base, base + size))

        def marked(cuts: Sequence[Cut | None]) -> str | None:
            rows = [
                message if cut is None else replace(message, text=_with_marks(message.text, cut, base + 2 * number))
                for number, (message, cut) in enumerate(zip(messages, cuts, strict=True))
            ]
            string = self._string(rows, generation, where)
            return string if string.translate(erase) == text else None

        found = marked([(0, len(message.text)) for message in messages]) or _marked_inside(messages, marked)
        if found is None:
            raise DataError(
                f"{where}: the chat template rewrites message texts (or treats an empty text in a special way), so their place "
                "in its output cannot be told; use a template that prints them as they are"
            )
        positions: dict[int, int] = {}
        for seen, match in enumerate(re.finditer(f"[{chr(base)}-{chr(base + size - 1)}]", found)):
            mark = ord(match.group()) - base
            if mark in positions:
                raise DataError(f"{where}: the chat template prints message {mark // 2} twice; use one that prints it once")
            positions[mark] = match.start() - seen
        return {
            number: (positions.get(2 * number), positions.get(2 * number + 1))
            for number, message in enumerate(messages)
            if message.role == "assistant" or message.text.strip() or 2 * number in positions
        }

    def _end_of_prompt(self, messages: Sequence[Message], text: str, where: str) -> int:
        prompt = self._string(messages, True, where)
        if not text.startswith(prompt):
            raise DataError(
                f"{where}: the chat template cuts the text of message {len(messages)}, and its generation prompt is no prefix "
                f"of the conversation: {_differ(prompt, text)}. Use a template that keeps earlier turns as they are"
            )
        return len(prompt)

    def _seam(self, messages: Sequence[Message], number: int, text: str, start: int) -> int:
        lead = self._leads[number == len(messages) - 1] if messages[number].role == "assistant" else ""
        return start - len(lead) if lead and text.endswith(lead, 0, start) else start

    def _lead(self, layout: Layout, probe: Conversation, number: int) -> str:
        prompt = self._string(probe.messages[:number], True, place(probe))
        between = layout.text[len(prompt) : layout.region(number).start]
        return between if layout.text.startswith(prompt) and between.isspace() else ""


def _with_marks(text: str, cut: Cut, first: int) -> str:
    start, stop = cut
    return f"{text[:start]}{chr(first)}{text[start:stop]}{chr(first + 1)}{text[stop:]}"


def _marked_inside(messages: Sequence[Message], marked: Callable[[Sequence[Cut | None]], str | None]) -> str | None:
    """The marked string of a template that trims: marks inside the whitespace, then outside again where nothing is trimmed.

    A template may trim the text around an empty content too; a blank message that is not an answer then goes unmarked, as it
    has no tokens anyway.
    """
    cuts: list[Cut | None] = [_core(message.text) for message in messages]
    found = marked(cuts)
    if found is None:
        blank = [message.role != "assistant" and not message.text.strip() for message in messages]
        cuts = [None if skip else cut for skip, cut in zip(blank, cuts, strict=True)]
        found = marked(cuts) if any(blank) else None
    if found is None:
        return None
    for number, message in enumerate(messages):
        for side, outer in enumerate((0, len(message.text))):
            cut = cuts[number]
            if cut is None or cut[side] == outer:
                continue
            wider = [*cuts[:number], (outer, cut[1]) if side == 0 else (cut[0], outer), *cuts[number + 1 :]]
            if (better := marked(wider)) is not None:
                cuts, found = wider, better
    return found


def _core(text: str) -> Cut:
    start = len(text) - len(text.lstrip())
    return start, max(start, len(text.rstrip()))


def _differ(first: str, second: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
    return f"at character {at} it has {first[at : at + 20]!r}, the conversation {second[at : at + 20]!r}"


def _without_clock(template: str) -> str:
    """The template with `strftime_now` answering as on one fixed day.

    The function cannot be passed in (transformers hands templates plain data only), so a macro of that name hides it.
    """
    if "strftime_now" not in template:
        return template
    formats = set(re.findall(r"strftime_now\(\s*['\"](.*?)['\"]\s*\)", template))
    answers = {pattern: TODAY.strftime(pattern) for pattern in sorted(formats)}
    # transformers renders with trim_blocks, which eats one newline after a block.
    blank = "\n" if template.startswith("\n") else ""
    return f"{{% macro strftime_now(format) -%}}{{{{ {answers!r}[format] }}}}{{%- endmacro %}}{blank}{template}"
