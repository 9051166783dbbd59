"""Held-out prompts and folds: rows are divided by what the user first said, so that no opening is on both sides."""

import hashlib
import unicodedata
from collections.abc import Sequence
from typing import TypeVar

from rewarden.data.records import Record, opening
from rewarden.errors import DataError
from rewarden.types import Message

R = TypeVar("R", bound=Record)


def first_prompt(messages: Sequence[Message]) -> str:
    """The first user message as a key: letters, digits and marks of its compatibility form, case folded.

    Case, punctuation, symbols and all whitespace are ignored, so "What's up?" equals "whats  UP". A message of nothing but
    punctuation is its own key. Where the user says nothing (plain text rows), the key is made of all messages.
    """
    text = next((message.text for message in messages if message.role == "user"), "")
    if not text.strip():
        text = "".join(message.text for message in messages)
    folded = unicodedata.normalize("NFKC", text).casefold()
    return "".join(c for c in folded if unicodedata.category(c)[0] in "LNM") or folded.strip()


def split_by_prompt(rows: Sequence[R], *, num_heldout: int, seed: int) -> tuple[tuple[R, ...], tuple[R, ...]]:
    """(train, held out), both in the order given; `num_heldout` first prompts, with all their rows, are held out.

    Which ones is a function of the prompt and the seed, not of the order or number of rows: the prompts are ranked by
    blake2b(seed, prompt), and the lowest are held out.

    Errors: DataError when there are not more first prompts than are to be held out.
    """
    keys = [first_prompt(opening(row)) for row in rows]
    ranked = sorted(set(keys), key=lambda key: _rank(key, seed))
    if not 0 <= num_heldout < len(ranked):
        raise DataError(f"{num_heldout} first prompts to hold out of {len(ranked)}; hold out at least 0 and leave at least one")
    heldout = set(ranked[:num_heldout])
    return (
        tuple(row for row, key in zip(rows, keys, strict=True) if key not in heldout),
        tuple(row for row, key in zip(rows, keys, strict=True) if key in heldout),
    )


def fold_of(messages: Sequence[Message], *, folds: int, seed: int) -> int:
    """The fold of a dialogue, from 0: a function of its first prompt and the seed, whatever other rows there are."""
    return int.from_bytes(_rank(first_prompt(messages), seed), "big") % folds


def split_by_fold(rows: Sequence[R], *, fold: int, folds: int, seed: int) -> tuple[tuple[R, ...], tuple[R, ...]]:
    """(the other folds, this fold), both in the order given."""
    inside = [fold_of(opening(row), folds=folds, seed=seed) == fold for row in rows]
    return (
        tuple(row for row, held in zip(rows, inside, strict=True) if not held),
        tuple(row for row, held in zip(rows, inside, strict=True) if held),
    )


def _rank(key: str, seed: int) -> bytes:
    return hashlib.blake2b(f"{seed}\n{key}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
