"""Checks of the rows as a model is given them: rendered, tokenised, measured against the length limits."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rewarden.data.records import Record
from rewarden.errors import DataError
from rewarden.evals.doctor_findings import Findings
from rewarden.evals.doctor_model import Opened
from rewarden.evals.doctor_read import Entry, Source
from rewarden.evals.doctor_rows import prompt, sides
from rewarden.text.render import Template
from rewarden.text.targets import target_spans
from rewarden.types import Conversation, Rollout, Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Length limits in tokens; None is no limit. `positions` is the model's own."""

    max_length: int | None
    max_prompt_length: int | None
    positions: int | None


@dataclass(slots=True, kw_only=True)
class TokenFacts:
    """Counts over all rendered texts of a source; a pair is two texts.

    `num_learned` tokens are learned: those of answers, each with its end of turn. `num_complete` of `num_answers` answers keep
    their end of turn within the limits. `num_bos` texts begin with the tokenizer's BOS.
    """

    num_texts: int = 0
    num_tokens: int = 0
    num_learned: int = 0
    num_answers: int = 0
    num_complete: int = 0
    num_bos: int = 0
    lengths: list[int] = field(default_factory=list)
    prompt_lengths: list[int] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class _Row:
    """What was met while the texts of one row were rendered: code -> detail, the first of each."""

    found: dict[str, str] = field(default_factory=dict)

    def add(self, code: str, detail: str = "") -> None:
        self.found.setdefault(code, detail)


def views(entry: Entry) -> Iterator[tuple[str, Conversation]]:
    """What is rendered of a record, by side; a prompt is a conversation that ends with the user."""
    record = entry.record
    if isinstance(record, Conversation):
        yield "", record
        return
    given = prompt(record)
    for side, answer in sides(record).items():
        # Columns such as AlpacaFarm's `input` change what a template writes, so meta goes along.
        meta = {**record.meta, "prompt_messages": len(given)}
        yield side, Conversation(id=record.id, messages=(*given, *answer), meta=meta)


def render(template: Template, conversation: Conversation) -> Rollout:
    """The whole conversation, or up to the generation prompt when the user spoke last."""
    waits = conversation.messages[-1].role != "assistant"
    return template.start(conversation) if waits else template.render(conversation)


def check_tokens(
    source: Source, opened: Opened, limits: Limits, findings: Findings, told: Callable[[int, int], None]
) -> TokenFacts | None:
    """Render every usable row. `told(done, all)` is called now and then. None when there is no template to render with."""
    template = opened.template
    if template is None:
        return None
    facts = TokenFacts()
    for number, entry in enumerate(source.entries):
        told(number, len(source.entries))
        row = _Row()
        for side, conversation in views(entry):
            try:
                _text(row, side, conversation, opened, template, limits, facts)
            except DataError as error:
                row.add("refused_by_template", str(error).removeprefix(f"{entry.where}: "))
        if "refused_by_template" not in row.found:
            _prompt_length(row, entry.record, opened, template, limits, facts)
        for code, detail in row.found.items():
            findings.add(source.name, code, entry.where, detail)
    return facts


def _text(
    row: _Row, side: str, conversation: Conversation, opened: Opened, template: Template, limits: Limits, facts: TokenFacts
) -> None:
    before = dict(template.facts)
    rollout = render(template, conversation)
    ids, spans = rollout.token_ids, target_spans(conversation, rollout.spans)
    answers = [span for span in spans if span.role == "assistant"]
    if template.facts["spelled_special"] > before.get("spelled_special", 0):
        _spelled(row, side, conversation, opened)
    merged = template.facts["merged_seam"] > before.get("merged_seam", 0)
    if merged:
        row.add("merged_seam", side)
    bos = opened.tokenizer.bos_token_id
    if bos is not None and ids[:2] == (bos, bos):
        row.add("double_bos", f"{opened.name(bos)!r} twice")
    _unknown(row, side, conversation, rollout, opened, template)
    # The two sides of a pair share their prompt, so the history is checked once.
    if opened.generates and not merged and side != "rejected":
        try:
            template.check_prefix(conversation)
        except DataError as error:
            row.add("prompt_not_a_prefix", str(error).removeprefix(f"{conversation.meta.get('where')}: "))
    limit = _limits(row, side, len(ids), answers, limits)
    facts.num_texts += 1
    facts.num_tokens += len(ids)
    facts.num_learned += sum(span.stop - span.start for span in answers)
    facts.num_answers += len(answers)
    facts.num_complete += sum(
        ids[span.stop - 1] == template.end_of_turn_id and (limit is None or span.stop <= limit) for span in answers
    )
    facts.num_bos += bos is not None and ids[0] == bos
    facts.lengths.append(len(ids))


def _limits(row: _Row, side: str, length: int, answers: list[Span], limits: Limits) -> int | None:
    """Report a text beyond the limits; return the limit that binds."""
    limit, name = limits.max_length, "max_length"
    if limits.positions is not None and (limit is None or limits.positions < limit):
        limit, name = limits.positions, "the_model"
    if limit is None or length <= limit:
        return limit
    said = f"{side + ': ' if side else ''}{length} tokens, at most {limit}"
    if answers and answers[0].start >= limit:
        row.add("nothing_within_max_length", said)
    else:
        row.add(f"longer_than_{name}", said)
    return limit


def _spelled(row: _Row, side: str, conversation: Conversation, opened: Opened) -> None:
    """Where a special token is spelled: at the end of a user's message, of an answer, or elsewhere."""
    stops = opened.stop_tokens()
    ended = [message for message in conversation.messages if message.text.rstrip().endswith(stops)]
    for message in ended:
        code = "answer_ends_in_eos" if message.role == "assistant" else "prompt_ends_in_eos"
        row.add(code, f"{side + ': ' if side else ''}{message.text.rstrip()[-40:]!r}")
    if not ended:
        text = "\n".join(message.text for message in conversation.messages)
        named = sorted(token for token in opened.special_tokens() if token and token in text)
        row.add("special_token_in_text", ", ".join(map(repr, named)))


def _unknown(row: _Row, side: str, conversation: Conversation, rollout: Rollout, opened: Opened, template: Template) -> None:
    unknown = opened.tokenizer.unk_token_id
    if unknown is None or unknown not in rollout.token_ids:
        return
    written = [False] * len(rollout.token_ids)
    for span in rollout.spans:
        written[span.start : span.stop] = [span.role != "template"] * (span.stop - span.start)
    pieces = template.trace(conversation, generation=rollout.stop == "open").pieces
    words = {
        piece.text.strip()
        for piece, inside in zip(pieces, written, strict=True)
        if inside and piece.id == unknown and not piece.special
    }
    if words:
        row.add("unknown_token", ", ".join(map(repr, sorted(words)[:5])))


def _prompt_length(row: _Row, record: Record, opened: Opened, template: Template, limits: Limits, facts: TokenFacts) -> None:
    """The prompt with its generation prompt, where a limit asks for it or the rows are prompts."""
    is_prompt = isinstance(record, Conversation) and record.messages[-1].role == "user"
    if not opened.generates or (limits.max_prompt_length is None and not is_prompt):
        return
    given = prompt(record)
    if not given or given[-1].role == "assistant":
        return
    opening = Conversation(id=record.id, messages=given, meta=record.meta)
    length = len(template.start(opening).token_ids)
    facts.prompt_lengths.append(length)
    if limits.max_prompt_length is not None and length > limits.max_prompt_length:
        row.add("prompt_longer_than_max_prompt_length", f"{length} tokens, at most {limits.max_prompt_length}")
