"""What is asked of a chat endpoint, and the key under which its answer is kept."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rewarden.types import Message

SEED_RANGE = 2**31
"""Seeds are sent modulo this: some servers keep them in 32 bits, signed or with -1 for "any"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """One chat completion. None leaves a value to the server.

    Two requests that differ only in `seed` are two draws; with equal seeds they are the same request and are sent once.
    top_logprobs: None asks for no log-probabilities, 0 for those of the chosen tokens, n for the n most probable beside them.
    """

    messages: tuple[Message, ...]
    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    top_logprobs: int | None = None


def body_of(
    request: ChatRequest, *, model: str, length_field: str, send_seed: bool, extra: Mapping[str, Any]
) -> dict[str, Any]:
    """The JSON body of a request; `extra` is added last and may replace what stands there."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": message.role, "content": message.text} for message in request.messages],
        length_field: request.max_tokens,
        "stream": False,
    }
    if request.temperature is not None:
        body["temperature"] = request.temperature
    if request.top_p is not None:
        body["top_p"] = request.top_p
    if request.seed is not None and send_seed:
        body["seed"] = request.seed % SEED_RANGE
    if request.stop:
        body["stop"] = list(request.stop)
    if request.top_logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": request.top_logprobs}
    return body | dict(extra)


def key_of(body: Mapping[str, Any], *, seed: int | None, salt: str) -> str:
    """SHA-256 of all that decides the reply: the body, the seed (sent or not) and the salt; not where the server stands."""
    text = json.dumps({"body": body, "seed": seed, "salt": salt}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()
