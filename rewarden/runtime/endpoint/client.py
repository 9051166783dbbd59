"""Sends chat requests: some at a time, again when that may help, each distinct one once."""

import asyncio
import ipaddress
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from rewarden.errors import ConfigError, EndpointError
from rewarden.runtime.asynchronous import finish
from rewarden.runtime.endpoint.cache import ReplyCache
from rewarden.runtime.endpoint.config import Endpoint
from rewarden.runtime.endpoint.reply import CONFIG, FAULTS, KEPT, RETRIED, Reply, read_refusal, read_reply, words_of
from rewarden.runtime.endpoint.request import ChatRequest, body_of, key_of
from rewarden.runtime.endpoint.usage import Meter, Usage
from rewarden.runtime.endpoint.wait import back_off, retry_after

log = logging.getLogger(__name__)

MOST_BYTES = 64 * 2**20
"""A reply larger than this is malformed; reading on could fill the memory."""

OnReply = Callable[[int, int], None]
"""Called after each reply with (replies so far, replies in all)."""


@dataclass(frozen=True, slots=True)
class _Try:
    """One try: the reply, whether another may help, and how long the server asks to wait first."""

    reply: Reply
    again: bool = False
    wait_s: float | None = None


class EndpointClient:
    """A chat endpoint; make it with `Endpoint.build`. `usage` counts what it did."""

    def __init__(self, endpoint: Endpoint, *, cache: ReplyCache) -> None:
        self.endpoint = endpoint
        self.cache = cache
        self._key = endpoint.key()
        self._meter = Meter(prompt_price=endpoint.prompt_price, completion_price=endpoint.completion_price)
        self._answered = False
        self._failures = 0
        self._quiet_until = 0.0
        self._told = False

    @property
    def usage(self) -> Usage:
        """What was asked, sent, answered and paid so far."""
        return self._meter.read()

    def complete(self, requests: Sequence[ChatRequest], *, on_reply: OnReply | None = None) -> list[Reply]:
        """One reply per request, in order; equal requests are sent once, cached ones not at all.

        A reply's `status` says what went wrong with it. Errors: ConfigError for what every request would meet (401, 402, 403,
        404, 405, a redirect); EndpointError when nothing answers at the first contact, or `max_failures` replies in a row
        failed. Replies that came before the error are in the cache.
        """
        if not requests:
            return []
        bodies = [self._body(request) for request in requests]
        keys = [
            key_of(body, seed=request.seed, salt=self.endpoint.cache_salt)
            for body, request in zip(bodies, requests, strict=True)
        ]
        jobs = dict(zip(keys, bodies, strict=True))
        kept = {key: entry for key in jobs if (entry := self.cache.find(key)) is not None}
        found = {key: reply for key, (reply, _) in kept.items()}
        self._note_sources(Counter(source for _, source in kept.values()))
        counts = self._meter.counts
        counts["asked"] += len(requests)
        counts["repeated"] += len(requests) - len(jobs)
        counts["cached"] += len(found)
        todo = {key: body for key, body in jobs.items() if key not in found}
        if todo:
            try:
                finish(self._send_all(todo, found, len(jobs), on_reply))
            finally:
                self.cache.sync()
        return [found[key] for key in keys]

    def _note_sources(self, sources: Counter[str]) -> None:
        """Say once that replies of another server are used: a server that moved, or another model of the same name."""
        moved = {source: n for source, n in sources.items() if source != self.endpoint.base_url}
        self._meter.counts["elsewhere"] += sum(moved.values())
        if moved and not self._told:
            self._told = True
            log.warning(
                "%s: replies of %s are used for %s, which has a model of the same name; another cache_salt refuses them",
                self.cache.path,
                " and ".join(sorted(moved)),
                self.endpoint.base_url,
            )

    def _body(self, request: ChatRequest) -> dict[str, Any]:
        at = self.endpoint
        return body_of(request, model=at.model, length_field=at.length_field, send_seed=at.send_seed, extra=at.extra_body)

    async def _send_all(
        self, todo: Mapping[str, dict[str, Any]], found: dict[str, Reply], total: int, on_reply: OnReply | None
    ) -> None:
        """Workers that share one queue; the first that raises ends all."""
        queue = iter(todo.items())
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        direct = _is_loopback(self.endpoint.base_url)
        self._quiet_until = 0.0
        # The time limit is one for the whole try, kept by asyncio: httpx has none for a reply that trickles in.
        limits = httpx.Limits(max_connections=self.endpoint.concurrency)
        async with httpx.AsyncClient(headers=headers, timeout=None, limits=limits, trust_env=not direct) as http:
            workers = [
                asyncio.create_task(self._work(http, queue, found, total, on_reply))
                for _ in range(min(self.endpoint.concurrency, len(todo)))
            ]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)

    async def _work(
        self,
        http: httpx.AsyncClient,
        queue: Iterator[tuple[str, dict[str, Any]]],
        found: dict[str, Reply],
        total: int,
        on_reply: OnReply | None,
    ) -> None:
        for key, body in queue:
            reply = await self._reply(http, key, json.dumps(body).encode("ascii"))
            if reply.status in KEPT:
                self.cache.keep(key, reply, self.endpoint.base_url)
            self._meter.reply(reply)
            found[key] = reply
            self._check(reply)
            if on_reply is not None:
                on_reply(len(found), total)

    async def _reply(self, http: httpx.AsyncClient, key: str, content: bytes) -> Reply:
        """The reply to one request after as many tries as it takes and is allowed."""
        at = self.endpoint
        for attempt in range(at.max_retries + 1):
            await self._keep_quiet()
            self._meter.counts["sent"] += 1
            self._meter.counts["retries"] += attempt > 0
            tried = await self._try(http, content)
            if not tried.again or attempt == at.max_retries or (tried.wait_s or 0.0) > at.max_wait_s:
                break
            wait = back_off(attempt, first_s=at.backoff_s, most_s=at.max_wait_s, seed=at.seed, key=key)
            if tried.wait_s is not None:  # it concerns everybody, not this request alone
                self._quiet_until = max(self._quiet_until, asyncio.get_running_loop().time() + tried.wait_s)
            level = logging.INFO if self._answered else logging.WARNING
            soon = max(wait, tried.wait_s or 0.0)
            log.log(
                level, "endpoint %s: %s (%s); asking again in %.1f s", at.base_url, tried.reply.status, tried.reply.error, soon
            )
            await asyncio.sleep(wait)
        return tried.reply

    async def _keep_quiet(self) -> None:
        while (wait := self._quiet_until - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(wait)

    async def _try(self, http: httpx.AsyncClient, content: bytes) -> _Try:
        """Send once and read what comes back, whatever it is."""
        try:
            async with asyncio.timeout(self.endpoint.timeout_s):
                code, headers, text = await self._exchange(http, content)
        except TimeoutError:
            return _Try(Reply(status="timeout", error=f"no reply within {self.endpoint.timeout_s:g} s"), again=True)
        except httpx.DecodingError as error:
            return _Try(Reply(status="malformed", error=_words(error)), again=True)
        except httpx.HTTPError as error:  # refused, reset, closed half-way, no such host, a bad certificate
            return _Try(Reply(status="unreachable", error=_words(error)), again=True)
        self._answered = True
        if code == 200:
            reply = read_reply(text)
            return _Try(reply, again=reply.status == "malformed")
        if code in CONFIG or 300 <= code < 400:
            raise ConfigError(self._misconfigured(code, headers, text))
        if code in RETRIED or code >= 500:
            reply = Reply(status=RETRIED.get(code, "server_error"), error=f"HTTP {code}: {words_of(text)}")
            return _Try(reply, again=True, wait_s=retry_after(headers.get("retry-after")))
        return _Try(read_refusal(code, text))

    async def _exchange(self, http: httpx.AsyncClient, content: bytes) -> tuple[int, Mapping[str, str], str]:
        """Status, headers and body of one POST; the key is struck out of the body, should the server repeat it."""
        url = f"{self.endpoint.base_url}/chat/completions"
        async with http.stream("POST", url, content=content) as response:
            parts, size = [], 0
            async for part in response.aiter_bytes():
                size += len(part)
                if size > MOST_BYTES:
                    raise httpx.DecodingError(f"a reply of more than {MOST_BYTES // 2**20} MiB")
                parts.append(part)
        text = b"".join(parts).decode("utf-8", "replace")
        # A word such as "none", which servers without keys are given, may well stand in an honest reply.
        if self._key and (len(self._key) >= 16 or response.status_code != 200):
            text = text.replace(self._key, "***")
        return response.status_code, dict(response.headers), text

    def _check(self, reply: Reply) -> None:
        """Raise when going on makes no sense."""
        at = self.endpoint
        self._failures = self._failures + 1 if reply.status in FAULTS else 0
        if reply.status == "unreachable" and not self._answered:
            raise EndpointError(
                f"nothing answers at {at.base_url} after {at.max_retries + 1} tries ({reply.error}); start the server, "
                "or correct base_url"
            )
        if at.max_failures and self._failures >= at.max_failures:
            raise EndpointError(
                f"endpoint {at.base_url}: {self._failures} requests failed one after another, the last with {reply.status} "
                f"({reply.error}); look at the server, then run again: what came is kept (max_failures: {at.max_failures})"
            )

    def _misconfigured(self, code: int, headers: Mapping[str, str], text: str) -> str:
        at, words = self.endpoint, words_of(text)
        if 300 <= code < 400:
            target = (
                urlsplit(headers.get("location", ""))._replace(query="", fragment="").geturl().replace(self._key or "\0", "***")
            )
            return f"endpoint {at.base_url} redirects ({code}) to {target!r}; write the address it leads to as base_url"
        if code in (401, 403):
            todo = f"check the key in {at.key_env}" if at.key_env else "name the variable that holds the key in key_env"
        elif code == 402:
            todo = "the account has no credit left"
        else:
            todo = (
                f"check base_url (it must end before /chat/completions, most often in /v1) and the model's name, {at.model!r}"
            )
        return f"endpoint {at.base_url} answers {code} ({words}); {todo}"


def _is_loopback(url: str) -> bool:
    """Whether the URL is this machine, to which no proxy leads."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _words(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")[:200]
