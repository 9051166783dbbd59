"""A render token by token, for people who want to see what a model is really given."""

from dataclasses import dataclass

from rewarden.text.encode import Encoder
from rewarden.types import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One token: its id, its name in the vocabulary, the characters [start, stop) of the text it came from, as `text` too.

    Several tokens of one character (bytes of a rare letter) all name that character. A BOS that a plain format puts in front
    comes from no character. special: a special token of the tokenizer or the template's end of turn.
    """

    id: int
    name: str
    text: str
    start: int
    stop: int
    special: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A render, the exact string that was tokenised, its pieces, and how many special tokens a message spells in its text."""

    rollout: Rollout
    text: str
    pieces: tuple[Piece, ...]
    spelled: int


def trace(encoder: Encoder, rollout: Rollout) -> Traced:
    """What stands behind the ids of a rendered conversation."""
    layout, tokens = encoder.tokens(rollout.conversation, generation=rollout.stop == "open")
    names = encoder.tokenizer.convert_ids_to_tokens(list(tokens.ids))
    first = len(encoder.bos_ids)
    pieces = tuple(
        Piece(
            id=token,
            name=str(name),
            text=layout.text[start:stop],
            start=start,
            stop=stop,
            special=index < first or encoder.joint.is_control(layout.text, tokens, index),
        )
        for index, (token, name, start, stop) in enumerate(zip(tokens.ids, names, tokens.starts, tokens.stops, strict=True))
    )
    return Traced(rollout=rollout, text=layout.text, pieces=pieces, spelled=tokens.spelled)
