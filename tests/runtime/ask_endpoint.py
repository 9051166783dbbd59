"""Forty requests to an endpoint, for a process that is killed; it imports the client alone, so that it starts quickly."""

import sys
from pathlib import Path

from rewarden.runtime.endpoint import ChatRequest, Endpoint
from rewarden.types import Message

TOTAL, AT_ONCE = 40, 4


def ask_all(url, path):
    """The replies, and what it took."""
    client = Endpoint(base_url=url, model="tiny", concurrency=AT_ONCE, backoff_s=0.01).build(cache=Path(path))
    said = (Message(role="user", text="I see."),)
    return client.complete([ChatRequest(messages=said, max_tokens=2, seed=seed) for seed in range(TOTAL)]), client.usage


if __name__ == "__main__":
    ask_all(*sys.argv[1:])
