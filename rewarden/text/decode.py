"""Ids of one turn back to its text, exactly."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rewarden.text.encode import Encoder
from rewarden.types import Conversation


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """Decodes a turn behind `anchor`, and takes off the whitespace that the template puts around a content.

    Decoders drop the blank of a text's first word, so a turn is decoded behind the end of its generation prompt, or behind some
    word, and the front is cut off again. A tokenizer that adds a blank after every special token needs no anchor.
    """

    tokenizer: Any
    anchor: tuple[int, ...] = ()
    before: str = ""
    behind: str = ""

    def content(self, ids: Sequence[int], *, ended: bool) -> str:
        """The text of a turn's ids without its end-of-turn token; `ended` says that it had one."""
        if not len(ids):
            return ""
        text = self.after_anchor(ids).removeprefix(self.before)
        return text.removesuffix(self.behind) if ended else text

    def after_anchor(self, ids: Sequence[int]) -> str:
        """What the ids add to the text of the anchor."""
        front = self._plain(self.anchor) if self.anchor else ""
        text = self._plain((*self.anchor, *ids))
        return text[len(front) :] if text.startswith(front) else self._plain(ids)

    def _plain(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def find_decoder(encoder: Encoder, probe: Conversation) -> Decoder:
    """The decoder that gives back the answer of a probe of one exchange.

    A vocabulary without the words of the probe cannot tell; then nothing is put in front and nothing taken off.
    """
    layout, tokens = encoder.tokens(replace(probe, messages=probe.messages[:2]), generation=False)
    region, content = layout.region(1), probe.messages[1].text
    spans = encoder.spans(tokens, layout, probe.messages[:2], probe.id).spans
    answer = next(span for span in spans if span.role == "assistant")
    control = [index for index in range(answer.start) if encoder.joint.is_control(layout.text, tokens, index)]
    header = tokens.ids[control[-1] + 1 if control else 0 : answer.start]
    word = encoder.joint.encode("Hello", (), probe.id).ids
    tail = layout.text[region.stop :]
    around = (layout.text[region.seam : region.start], tail[: len(tail) - len(tail.lstrip())])
    found = []
    for anchor in (header, word, ()):
        decoder = Decoder(tokenizer=encoder.tokenizer, anchor=anchor)
        before, middle, behind = decoder.after_anchor(tokens.ids[answer.start : answer.stop - 1]).partition(content)
        if middle and not (before + behind).strip():
            found.append(replace(decoder, before=before, behind=behind))
    exact = (decoder for decoder in found if (decoder.before, decoder.behind) == around)
    return next(exact, found[0] if found else Decoder(tokenizer=encoder.tokenizer))
