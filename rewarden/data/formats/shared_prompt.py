"""The prompt of a pair that only gives two whole texts: what they begin with in common."""

import unicodedata
from collections.abc import Sequence

from rewarden.types import Message

_INSIDE_A_WORD = "_'’-‐‑"
_EACH_A_WORD = ((0x2E80, 0x2FDF), (0x3040, 0x30FF), (0x31F0, 0x31FF), (0x3400, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x3FFFF))
"""Han and kana: written without spaces, so every character may begin an answer."""


def extract_prompt(chosen: str, rejected: str) -> tuple[str, str, str]:
    """(prompt, rest of chosen, rest of rejected): the longest common beginning that cuts no word of either text.

    Prompt and rest always join to the text that was given. A space before the answer belongs to the answer, as in TRL. When
    one text begins the other, the prompt ends before the last word of the shorter one, so that neither answer is empty.
    Without a common whole word the prompt is empty. A word is a run of letters, digits, marks, apostrophes and hyphens; a
    number with a point or comma is one word; Han and kana characters are each one word; what is shown as one character
    (combining marks, joined emoji, carriage return and line feed) is never cut.
    """
    shorter = min(len(chosen), len(rejected))
    cut = next((index for index in range(shorter) if chosen[index] != rejected[index]), shorter)
    while cut and (cuts_word(chosen, cut) or cuts_word(rejected, cut) or not _says(chosen, cut) or not _says(rejected, cut)):
        cut -= 1
    if cut and chosen[cut - 1] == " ":
        cut -= 1
    return chosen[:cut], chosen[cut:], rejected[cut:]


def extract_prompt_messages(
    chosen: Sequence[Message], rejected: Sequence[Message]
) -> tuple[tuple[Message, ...], tuple[Message, ...], tuple[Message, ...]] | None:
    """(prompt, rest of chosen, rest of rejected) in whole messages, or None when the two sides differ in their prompt.

    The prompt is the longest common beginning that ends with the user and leaves both sides an answer. The sides differ in
    their prompt when the first message that is not common is one of the user: then no answer is given to the same question.
    """
    common = 0
    while common < min(len(chosen), len(rejected)) and chosen[common] == rejected[common]:
        common += 1
    first = {side[common].role for side in (chosen, rejected) if common < len(side)}
    if common == 0 or (len(chosen) > common and len(rejected) > common and first != {"assistant"}):
        return None
    common = min(common, len(chosen) - 1, len(rejected) - 1)
    while common and chosen[common - 1].role != "user":
        common -= 1
    if not common:
        return None
    return tuple(chosen[:common]), tuple(chosen[common:]), tuple(rejected[common:])


def cuts_word(text: str, cut: int) -> bool:
    """Whether a cut before text[cut] falls inside a word or a character as people see them."""
    if not 0 < cut < len(text):
        return False
    before, after = text[cut - 1], text[cut]
    if unicodedata.category(after)[0] == "M" or after == "\u200d" or "\U0001f3fb" <= after <= "\U0001f3ff":
        return True
    if before == "\u200d" or (before == "\r" and after == "\n") or (_flag(before) and _flag(after)):
        return True
    if _in_word(before) and _in_word(after):
        return not (_stands_alone(before) or _stands_alone(after))
    if after in ".,":
        return before.isdigit() and text[cut + 1 : cut + 2].isdigit()
    return before in ".," and after.isdigit() and text[cut - 2 : cut - 1].isdigit()


def _says(text: str, cut: int) -> bool:
    """Whether anything but space is left after the cut; an empty text has nothing to leave."""
    return bool(text[cut:].strip())


def _in_word(character: str) -> bool:
    return character.isalnum() or unicodedata.category(character)[0] == "M" or character in _INSIDE_A_WORD


def _stands_alone(character: str) -> bool:
    return any(first <= ord(character) <= last for first, last in _EACH_A_WORD)


def _flag(character: str) -> bool:
    return "\U0001f1e6" <= character <= "\U0001f1ff"
