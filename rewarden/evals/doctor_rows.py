"""Checks that need no model: what the texts hold, what repeats, what the labels say, what two splits share."""

import math
import re
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from rewarden.data.records import Labeled, Record, opening
from rewarden.data.split import first_prompt
from rewarden.evals.doctor_findings import Findings
from rewarden.evals.doctor_read import Entry, Source
from rewarden.maths import wilson_interval
from rewarden.types import Comparison, Conversation, Message

CONFIDENCE = 0.95
BIASED = 0.6
"""A length bias is reported when the whole interval of the share lies beyond this, or below its mirror image."""
LONG_CHARACTERS = 20_000
LONG_TIMES = 20
"""A row is very long when it has more characters than the one, and than the other times the median."""

ODD_TEXT = {
    "nul_character": re.compile("\0"),
    "control_character": re.compile("[\x01-\x08\x0b\x0c\x0e-\x1f\x7f]"),
    "replacement_char": re.compile("\ufffd"),
    "byte_order_mark_in_text": re.compile("\ufeff"),
    "mojibake": re.compile("Ã[\x80-\xbf]|Â[\xa0-\xbf]|â€[\x80-\xbf\u0153\u02dc\u2018-\u203a\u20ac\u2122]"),
}
"""What a text should not hold, by the code it is reported under."""

TEMPLATE_TEXT = re.compile(
    r"<\|(?:im_start|im_end|im_sep|endoftext|eot_id|start_header_id|end_header_id|begin_of_text|end_of_text|user|assistant|system"
    r"|end)\|>|\[/?INST\]|<</?SYS>>|<(?:start|end)_of_turn>|</s>(?=\s*\Z)"
)
"""Special tokens of widely used chat templates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairFacts:
    """Labels of pairs and the length of their answers, in characters.

    `num_decided` pairs have a preferred side and answers of unlike length; in `num_longer` of these the longer is preferred.
    """

    num_pairs: int
    num_ties: int
    num_equal_length: int
    num_decided: int
    num_longer: int

    def share(self) -> float | None:
        """The share in which the longer answer is preferred, or None without a decided pair."""
        return self.num_longer / self.num_decided if self.num_decided else None

    def interval(self) -> tuple[float, float] | None:
        """Its 95 % interval (Wilson)."""
        return wilson_interval(self.num_longer, self.num_decided, confidence=CONFIDENCE) if self.num_decided else None


def sides(record: Record) -> dict[str, tuple[Message, ...]]:
    """The answers of a record by side: chosen and rejected, or "" for the only one."""
    if isinstance(record, Comparison):
        return {"chosen": record.chosen, "rejected": record.rejected}
    if isinstance(record, Labeled):
        return {"": record.completion}
    given = record.meta.get("prompt_messages")
    if given is None:
        given = len(record.messages) - (record.messages[-1].role == "assistant")
    return {"": record.messages[given:]}


def prompt(record: Record) -> tuple[Message, ...]:
    """The messages before the answers."""
    if isinstance(record, Conversation):
        return record.messages[: len(record.messages) - len(sides(record)[""])]
    return opening(record)


def texts(record: Record) -> Iterator[tuple[str, Message]]:
    """Every message once, with what to call its place."""
    yield from (("prompt", message) for message in prompt(record))
    for side, answer in sides(record).items():
        yield from ((side or "answer", message) for message in answer)


def check_texts(source: Source, own_tokens: frozenset[str], findings: Findings) -> None:
    """Odd characters, tokens of a chat template, copies of the prompt, rows out of all proportion.

    own_tokens: special tokens of the model at hand, whose spelling is looked for where the rows are tokenised.
    """
    sizes = []
    for entry in source.entries:
        found: dict[str, str] = {}
        size = 0
        for place, message in texts(entry.record):
            size += len(message.text)
            for code, match in _odd(message.text, own_tokens):
                found.setdefault(code, f"{place}: {_around(message.text, match)}")
        for code, detail in found.items():
            if code not in entry.noticed:
                findings.add(source.name, code, entry.where, detail)
        _copies(source.name, entry, findings)
        sizes.append(size)
    usual = median(sizes) if sizes else 0
    for entry, size in zip(source.entries, sizes, strict=True):
        if size > max(LONG_CHARACTERS, LONG_TIMES * usual):
            findings.add(source.name, "very_long_row", entry.where, f"{size:,} characters; the median is {usual:,.0f}")


def _odd(text: str, own_tokens: frozenset[str]) -> Iterator[tuple[str, re.Match[str]]]:
    for code, pattern in ODD_TEXT.items():
        if match := pattern.search(text):
            yield code, match
    foreign = (match for match in TEMPLATE_TEXT.finditer(text) if match.group() not in own_tokens)
    if match := next(foreign, None):
        yield "template_text", match


def _around(text: str, match: re.Match[str]) -> str:
    return repr(text[max(0, match.start() - 20) : match.end() + 20])


def _copies(source: str, entry: Entry, findings: Findings) -> None:
    asked = next((message.text.strip() for message in reversed(prompt(entry.record)) if message.role == "user"), "")
    for side, answer in sides(entry.record).items():
        if asked and answer and answer[-1].text.strip() == asked:
            findings.add(source, "answer_repeats_prompt", entry.where, side or "answer")


def check_repeats(source: Source, findings: Findings) -> None:
    """Rows that say the same as an earlier one, and pairs and labels that contradict one."""
    first: dict[Hashable, str] = {}
    judged: dict[Hashable, tuple[Hashable, str]] = {}
    for entry in source.entries:
        said = _said(entry.record)
        if said in first:
            findings.add(source.name, "duplicate_row", entry.where, f"the same as {first[said]}")
            continue
        first[said] = entry.where
        question, verdict = _judged(entry.record)
        if verdict is None:
            continue
        before, where = judged.setdefault(question, (verdict, entry.where))
        if before != verdict:
            findings.add(source.name, "opposite_labels", entry.where, f"the other way round at {where}")


def _said(record: Record) -> Hashable:
    if isinstance(record, Comparison):
        return record.prompt, record.chosen, record.rejected, record.preference
    if isinstance(record, Labeled):
        return record.prompt, record.completion, record.label
    return record.messages, record.meta.get("prompt_messages")


def _judged(record: Record) -> tuple[Hashable, Hashable]:
    """What was asked, and which answer was called better; None where nothing was."""
    if isinstance(record, Labeled):
        return (record.prompt, record.completion), record.label
    if isinstance(record, Comparison) and record.preference != 0.5:
        return (record.prompt, frozenset((record.chosen, record.rejected))), preferred(record)
    return None, None


def preferred(pair: Comparison) -> tuple[Message, ...]:
    """The better answer of a pair that is no tie."""
    return pair.chosen if pair.preference > 0.5 else pair.rejected


def check_labels(source: Source, findings: Findings) -> PairFacts | None:
    """Ties, margins, and whether the labels only follow length. None without pairs."""
    pairs = [(entry, entry.record) for entry in source.entries if isinstance(entry.record, Comparison)]
    labels = [(entry, entry.record.label) for entry in source.entries if isinstance(entry.record, Labeled)]
    if len(labels) > 1 and len({label for _, label in labels}) == 1:
        findings.add(source.name, "one_label_only", labels[0][0].where, f"{labels[0][1]} on {len(labels)} rows")
    if not pairs:
        return None
    without = [entry for entry, pair in pairs if pair.margin is None]
    for entry in without if len(without) < len(pairs) else ():
        findings.add(source.name, "margin_on_some_rows", entry.where)
    ties = longer = decided = equal = 0
    for entry, pair in pairs:
        if pair.preference == 0.5:
            ties += 1
            if "tie" not in entry.noticed:
                findings.add(source.name, "tie", entry.where)
            continue
        if pair.preference < 0.5:
            findings.add(source.name, "preference_below_half", entry.where, f"preference {pair.preference:g}")
        better, worse = _size(preferred(pair)), _size(pair.rejected if pair.preference > 0.5 else pair.chosen)
        equal += better == worse
        decided += better != worse
        longer += better > worse
    facts = PairFacts(num_pairs=len(pairs), num_ties=ties, num_equal_length=equal, num_decided=decided, num_longer=longer)
    _length_bias(source, facts, findings)
    return facts


def _size(answer: Sequence[Message]) -> int:
    return sum(len(message.text) for message in answer)


def _length_bias(source: Source, facts: PairFacts, findings: Findings) -> None:
    low, high = facts.interval() or (0.0, 1.0)
    if low > BIASED or high < 1 - BIASED:
        share = facts.share() or 0.0
        said = f"the longer answer is chosen in {share:.1%} of {facts.num_decided} pairs ({low:.1%} to {high:.1%})"
        count = facts.num_longer if share > 0.5 else facts.num_decided - facts.num_longer
        findings.add(source.name, "length_bias", source.path, said, count=count)


def check_splits(train: Source, evaluation: Source, findings: Findings) -> None:
    """First prompts of the evaluation data that the training data hold."""
    first: dict[str, str] = {}
    for entry in train.entries:
        first.setdefault(first_prompt(opening(entry.record)), entry.where)
    for entry in evaluation.entries:
        where = first.get(first_prompt(opening(entry.record)))
        if where is not None:
            findings.add(evaluation.name, "prompt_in_both_splits", entry.where, f"also at {where}")


def spread(numbers: Sequence[int]) -> dict[str, int | float]:
    """Smallest, median, 95th percentile (nearest rank) and largest."""
    ranked = sorted(numbers)
    if not ranked:
        return {}
    rank = max(1, math.ceil(0.95 * len(ranked)))
    return {"min": ranked[0], "median": median(ranked), "p95": ranked[rank - 1], "max": ranked[-1]}
