"""What a chat endpoint said, read without trust: every shape it can have becomes a status."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rewarden.errors import shortened

KEPT = frozenset({"ok", "truncated", "refused", "empty", "too_long"})
"""Statuses that asking again would not change; they are cached. All others are asked anew by the next run."""

FAULTS = frozenset({"malformed", "rejected", "rate_limited", "server_error", "timeout", "unreachable"})
"""Statuses that are the server's or the network's fault."""

RETRIED = {408: "timeout", 409: "server_error", 425: "server_error", 429: "rate_limited"}
"""HTTP statuses below 500 that are tried again, and what remains of them when that does not help."""

CONFIG = {401, 402, 403, 404, 405}
"""HTTP statuses that no second try and no other request can mend."""

_TOO_LONG = re.compile(r"context.?(length|window|size)|maximum.{0,20}(context|tokens)|too (long|many tokens)", re.IGNORECASE)
_FILTERED = {"content_filter", "content_policy_violation"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogp:
    """One token of a reply with its log-probability, and the most probable tokens at its place (text, log-probability)."""

    token: str
    logp: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer, or why there is none.

    status: "ok"; "truncated" (cut at the token limit), "refused" (by a filter or in the model's refusal field), "empty";
    "too_long" (the prompt does not fit the model), "rejected" (any other 4xx); "malformed" (no JSON, no choice, no text where
    text belongs); "rate_limited", "server_error", "timeout", "unreachable" (after all tries). Only "ok" has all of its text.
    error: the server's words. prompt_tokens, completion_tokens: as the server counts, None when it does not say.
    logprobs: None when not asked for, or when the server left them out. cached: not sent, but found in the cache.
    """

    status: str
    text: str = ""
    error: str = ""
    finish_reason: str = ""
    model: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    logprobs: tuple[TokenLogp, ...] | None = None
    cached: bool = False


def read_reply(text: str) -> Reply:
    """The reply in the body of a 200. Never raises."""
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError):
        return Reply(status="malformed", error=f"no JSON: {_cut(text)}")
    if isinstance(raw, Mapping) and not raw.get("choices") and raw.get("error"):
        return Reply(status="malformed", error=words_of(text))
    choices = raw.get("choices") if isinstance(raw, Mapping) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, Mapping) else None
    if not isinstance(choice, Mapping) or not isinstance(message, Mapping):
        return Reply(status="malformed", error=f"no choices[0].message: {_cut(text)}")
    content = _content(message.get("content"))
    if content is None:
        return Reply(status="malformed", error=f"choices[0].message.content is no text: {_cut(text)}")
    refusal = message.get("refusal")
    reason = choice.get("finish_reason")
    usage = raw.get("usage")
    return Reply(
        status=_status(content, reason, refusal),
        text=content,
        error=_clean(refusal) if isinstance(refusal, str) else "",
        finish_reason=reason if isinstance(reason, str) else "",
        model=_clean(raw["model"]) if isinstance(raw.get("model"), str) else "",
        prompt_tokens=_count(usage, "prompt_tokens"),
        completion_tokens=_count(usage, "completion_tokens"),
        logprobs=_logprobs(choice.get("logprobs")),
    )


def read_refusal(code: int, text: str) -> Reply:
    """The reply behind a 4xx that concerns this request alone. Never raises."""
    words, status = words_of(text), "rejected"
    if (kind := _error_code(text)) in _FILTERED:
        status = "refused"
    elif kind == "context_length_exceeded" or (code in (400, 413, 422) and _TOO_LONG.search(words)):
        status = "too_long"
    return Reply(status=status, error=f"HTTP {code}: {words}")


def words_of(text: str) -> str:
    """The message in an error body, of whatever shape, on one short line."""
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError):
        raw = text
    for name in ("error", "message", "detail", "msg"):
        if isinstance(raw, list) and raw:
            raw = raw[0]
        if isinstance(raw, Mapping) and raw.get(name):
            raw = raw[name]
    return _cut(raw if isinstance(raw, str) else json.dumps(raw)) or "no words"


def as_record(reply: Reply) -> dict[str, Any]:
    """The reply as plain JSON, without what is empty."""
    return {name: value for name, value in asdict(reply).items() if name != "cached" and value not in ("", None)}


def from_record(record: Mapping[str, Any]) -> Reply:
    """The reply that `as_record` wrote, marked as cached. Errors: KeyError, TypeError or ValueError for anything else."""
    fields = dict(record)
    if fields.get("logprobs") is not None:
        fields["logprobs"] = tuple(
            TokenLogp(token=t["token"], logp=t["logp"], top=tuple((word, logp) for word, logp in t["top"]))
            for t in fields["logprobs"]
        )
    return Reply(**fields, cached=True)


def _status(content: str, reason: Any, refusal: Any) -> str:
    if reason == "content_filter" or refusal:
        return "refused"
    if reason == "length":
        return "truncated"
    return "ok" if content.strip() else "empty"


def _content(content: Any) -> str | None:
    """The text of a message: a string, nothing, or a list of parts of which the texts are joined; None for anything else."""
    if content is None or isinstance(content, str):
        return _clean(content or "")
    parts = content if isinstance(content, list) else [None]
    texts: list[str] = []
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            return None
        texts.append(text)
    return _clean("".join(texts))


def _clean(text: str) -> str:
    """Half a surrogate pair (an emoji cut in two) cannot be tokenized or written; it becomes the replacement character."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _count(usage: Any, name: str) -> int | None:
    value = usage.get(name) if isinstance(usage, Mapping) else None
    return value if type(value) is int and 0 <= value < 2**53 else None


def _logprobs(raw: Any) -> tuple[TokenLogp, ...] | None:
    """`choices[0].logprobs.content`; None unless every entry is a token with a number."""
    entries = raw.get("content") if isinstance(raw, Mapping) else None
    if not isinstance(entries, list):
        return None
    out = []
    for entry in entries:
        pair = _pair(entry)
        tops = [_pair(top) for top in (entry.get("top_logprobs") or [])] if pair else [None]
        if pair is None or None in tops:
            return None
        out.append(TokenLogp(token=pair[0], logp=pair[1], top=tuple(top for top in tops if top)))
    return tuple(out)


def _pair(entry: Any) -> tuple[str, float] | None:
    if not isinstance(entry, Mapping):
        return None
    token, logp = entry.get("token"), entry.get("logprob")
    if not isinstance(token, str) or not isinstance(logp, (int, float)) or isinstance(logp, bool) or math.isnan(logp):
        return None
    return _clean(token), float(logp)


def _error_code(text: str) -> Any:
    try:
        error = json.loads(text)["error"]
        return error.get("code") or error.get("type")
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return None


def _cut(text: str) -> str:
    return shortened(" ".join(_clean(text[:2000]).split()), 200)
