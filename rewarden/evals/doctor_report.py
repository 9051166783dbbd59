"""A diagnosis in JSON, whose keys stay, and in words, for a terminal or plain text."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from rich.text import Text

from rewarden.evals.doctor import Diagnosis, Examined
from rewarden.evals.doctor_findings import Finding
from rewarden.evals.doctor_kinds import KINDS, Severity
from rewarden.evals.doctor_model import Opened
from rewarden.evals.doctor_preview import Preview, Segment
from rewarden.evals.doctor_rows import spread
from rewarden.evals.doctor_tokens import TokenFacts
from rewarden.text.printable import printable

SCHEMA = 1
"""Raised when a key of the JSON changes its meaning or goes; new keys may come without it."""
STYLES: dict[Severity, str] = {"error": "bold red", "warning": "yellow", "note": "cyan"}
CLIPPED = 600
"""Characters of one stretch of unlearned text that are shown."""


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """Plain JSON values. See docs/doctor.md for the keys."""
    return {
        "schema": SCHEMA,
        "exit_code": diagnosis.exit_code,
        "counts": {name: sum(f.severity == name for f in diagnosis.findings) for name in STYLES},
        "findings": [_finding(found) for found in diagnosis.findings],
        "sources": {one.source.name: _source(one) for one in diagnosis.examined},
        "model": _model(diagnosis.opened) if diagnosis.opened else None,
        "limits": {
            "max_length": diagnosis.limits.max_length,
            "max_prompt_length": diagnosis.limits.max_prompt_length,
            "positions": diagnosis.limits.positions,
        },
        "preview": [_preview(one) for one in diagnosis.previews],
    }


def _finding(found: Finding) -> dict[str, Any]:
    return {
        "code": found.code,
        "severity": found.severity,
        "source": found.source,
        "count": found.count,
        "examples": [{"where": one.where, "detail": one.detail} for one in found.examples],
        "means": KINDS[found.code].means,
        "do": KINDS[found.code].do,
    }


def _source(one: Examined) -> dict[str, Any]:
    source, pairs, tokens = one.source, one.pairs, one.tokens
    interval = pairs.interval() if pairs else None
    return {
        "path": source.path,
        "split": source.split,
        "num_rows": source.num_rows,
        "num_unreadable": source.num_unreadable,
        "target": source.target,
        "types": dict(source.types),
        "columns": dict(source.columns),
        "num_usable": len(source.entries),
        "left_out": dict(source.left_out),
        "refused": dict(source.refused),
        "pairs": pairs
        and {
            "num_pairs": pairs.num_pairs,
            "num_ties": pairs.num_ties,
            "num_equal_length": pairs.num_equal_length,
            "num_decided": pairs.num_decided,
            "longer_chosen_share": pairs.share(),
            "longer_chosen_interval": list(interval) if interval else None,
        },
        "tokens": tokens
        and {
            "num_texts": tokens.num_texts,
            "num_tokens": tokens.num_tokens,
            "num_learned": tokens.num_learned,
            "num_answers": tokens.num_answers,
            "num_complete": tokens.num_complete,
            "num_bos": tokens.num_bos,
            "length": spread(tokens.lengths),
            "prompt_length": spread(tokens.prompt_lengths),
        },
    }


def _model(opened: Opened) -> dict[str, Any]:
    tokenizer, template = opened.tokenizer, opened.template
    end = template.end_of_turn_id if template else None
    source = str(getattr(tokenizer, "chat_template", None) or "")
    return {
        "path": opened.path,
        "template": opened.kind,
        "usable": opened.generates,
        "end_of_turn": _token(opened, end),
        "bos": _token(opened, tokenizer.bos_token_id),
        "eos": _token(opened, tokenizer.eos_token_id),
        "pad": _token(opened, tokenizer.pad_token_id),
        "num_tokens": len(tokenizer),
        "vocab_size": opened.vocabulary,
        "embeddings": opened.embeddings,
        "positions": opened.positions,
        "generation_marker": "{% generation %}" in source or "{%- generation %}" in source,
    }


def _token(opened: Opened, index: int | None) -> dict[str, Any] | None:
    return None if index is None else {"id": index, "token": opened.name(index)}


def _preview(one: Preview) -> dict[str, Any]:
    return {
        "where": one.where,
        "side": one.side,
        "num_tokens": one.num_tokens,
        "num_learned": one.num_learned,
        "waits": one.waits,
        "segments": [
            {"text": s.text, "role": s.role, "learned": s.learned, "special": s.special, "cut": s.cut} for s in one.segments
        ],
    }


def report(diagnosis: Diagnosis, *, color: bool) -> Iterator[Text]:
    """Lines of the report. Without color, what is learned stands in {+ +} and what is cut off in {- -}."""
    for one in diagnosis.examined:
        yield from _source_lines(one)
    if diagnosis.opened:
        yield from _model_lines(diagnosis.opened)
    if diagnosis.previews:
        marks = "learned is green, cut off is red" if color else "learned is {+so+}, cut off is {-so-}"
        yield Text(f"loss mask ({marks}):", style="bold")
    for preview in diagnosis.previews:
        yield from _preview_lines(preview, color=color)
    yield from _finding_lines(diagnosis)


def _source_lines(one: Examined) -> Iterator[Text]:
    source = one.source
    yield Text(f"{source.name}: {source.path}" + ("" if source.split == "train" else f", split {source.split}"), style="bold")
    types = ", ".join(f"{count:,} {name}" for name, count in source.types.most_common()) or "none"
    unread = f", {source.num_unreadable:,} unreadable" if source.num_unreadable else ""
    yield Text(f"  rows by type: {types}{unread}")
    lost = {**source.left_out, **{f"{reason} (refused)": count for reason, count in source.refused.items()}}
    why = ", ".join(f"{count:,} {reason}" for reason, count in sorted(lost.items(), key=lambda pair: (-pair[1], pair[0])))
    yield Text(f"  usable: {len(source.entries):,} as {source.target or 'nothing'}" + (f"; not: {why}" if why else ""))
    pairs = one.pairs
    if pairs and (interval := pairs.interval()):
        ties = f"; {pairs.num_ties:,} ties" if pairs.num_ties else ""
        low, high = interval
        yield Text(
            f"  labels: the longer answer is chosen in {pairs.share():.1%} of {pairs.num_decided:,} pairs "
            f"(95 % interval {low:.1%} to {high:.1%}){ties}"
        )
    if one.tokens and one.tokens.num_texts:
        yield from _token_lines(one.tokens)


def _token_lines(tokens: TokenFacts) -> Iterator[Text]:
    for name, lengths in (("tokens a text", tokens.lengths), ("tokens a prompt", tokens.prompt_lengths)):
        if found := spread(lengths):
            yield Text(f"  {name}: " + ", ".join(f"{key} {number:,g}" for key, number in found.items()))
    yield Text(
        f"  learned: {tokens.num_learned:,} of {tokens.num_tokens:,} tokens; "
        f"{tokens.num_complete:,} of {tokens.num_answers:,} answers keep their end of turn within the limits; "
        f"{tokens.num_bos:,} of {tokens.num_texts:,} texts begin with BOS"
    )


def _model_lines(opened: Opened) -> Iterator[Text]:
    facts = _model(opened)
    yield Text(f"model: {opened.path}, template {opened.kind}", style="bold")
    tokens = ((name.replace("_", " "), facts[name]) for name in ("end_of_turn", "bos", "eos", "pad"))
    said = (f"{name} {token['token']} ({token['id']})" if token else f"no {name}" for name, token in tokens)
    yield Text("  " + ", ".join(said))
    rows = ", ".join(f"{name} {count:,}" for name, count in opened.embeddings.items())
    yield Text(
        f"  {facts['num_tokens']:,} tokens, vocab_size {opened.vocabulary:,}"
        + (f", rows: {rows}" if rows else "")
        + (f", {opened.positions:,} positions" if opened.positions else "")
    )


def _preview_lines(preview: Preview, *, color: bool) -> Iterator[Text]:
    side = f", {preview.side}" if preview.side else ""
    yield Text(f"{preview.where}{side}: {preview.num_learned:,} of {preview.num_tokens:,} tokens are learned", style="bold")
    line = Text()
    for (learned, cut), run in groupby(preview.segments, key=lambda segment: (segment.learned, segment.cut)):
        stretch = Text.assemble(*((printable(segment.text), _style(segment)) for segment in run))
        if not learned and len(stretch) > CLIPPED:
            left = f" [... {len(stretch) - CLIPPED:,} more characters ...] "
            stretch = Text.assemble(stretch[: CLIPPED // 2], left, stretch[-CLIPPED // 2 :])
        mark = "+" if learned else "-" if cut else ""
        line.append_text(stretch if color or not mark else Text(f"{{{mark}{stretch.plain}{mark}}}"))
    if preview.waits:
        line.append(" <- the policy writes here", style="italic")
    yield line


def _style(segment: Segment) -> str:
    shade = "red strike" if segment.cut else "green" if segment.learned else "dim"
    return f"bold {shade}" if segment.special and not segment.cut else shade


def _finding_lines(diagnosis: Diagnosis) -> Iterator[Text]:
    findings = diagnosis.findings
    if not findings:
        yield Text("nothing found", style="bold green")
        return
    counts = ((name, sum(found.severity == name for found in findings)) for name in STYLES)
    yield Text("findings: " + ", ".join(f"{count} {name}{'s' * (count != 1)}" for name, count in counts), style="bold")
    many = len({found.source for found in findings} - {"model"}) > 1
    for found in findings:
        kind, source = KINDS[found.code], f" in {found.source}" if many and found.source != "model" else ""
        yield Text.assemble((f"{found.severity:<8}", STYLES[found.severity]), f"{found.code}: {found.count:,}{source}")
        yield Text(f"        {kind.means}")
        if any(example.detail for example in found.examples):
            said = [f"{one.where}: {one.detail}" if one.detail else one.where for one in found.examples]
        else:
            said = [", ".join(one.where for one in found.examples)]
        if found.count > len(found.examples) > 1:
            said[-1] += ", ..."
        yield from (Text(f"        at {place}", style="dim") for place in said)
        yield Text(f"        do: {kind.do}")
