"""How to reach a chat endpoint, and how patient to be with it."""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import httpx
from pydantic import Field, field_validator

from rewarden.errors import ConfigError
from rewarden.runtime.endpoint.cache import ReplyCache
from rewarden.spec import Spec

if TYPE_CHECKING:
    from rewarden.runtime.endpoint.client import EndpointClient


class Endpoint(Spec):
    """An OpenAI-compatible chat endpoint."""

    base_url: str
    """Where it answers, up to and without /chat/completions, such as http://localhost:8000/v1."""
    model: str = Field(min_length=1)
    """The model's name, as the server knows it."""
    key_env: str | None = None
    """Name of the environment variable that holds the key; the key itself is never written or shown. None sends no key."""
    concurrency: int = Field(8, ge=1, le=1024)
    """Most requests on the way at once (for each process of a distributed run)."""
    timeout_s: float = Field(120.0, gt=0)
    """Longest one try may take, from connecting to the last byte."""
    max_retries: int = Field(5, ge=0, le=100)
    """Tries after the first for a rate limit, a server error, a timeout, a broken connection or a malformed reply."""
    backoff_s: float = Field(0.5, ge=0)
    """Wait before the first retry; doubles each time, with jitter. A Retry-After of the server is waited for in full."""
    max_wait_s: float = Field(60.0, ge=0)
    """Longest wait before a retry; a server that asks for more is not asked again."""
    max_failures: int = Field(32, ge=0)
    """Requests that may fail one after another, all retries used, before the run is stopped; 0 never stops it."""
    cache: str | None = None
    """File that keeps the replies, so that a run that is restarted or repeated does not send them again. None: whoever uses
    the endpoint decides (a stage keeps it in its own folder)."""
    cache_salt: str = ""
    """Part of every cache key; change it when the server's model has changed but not its name."""
    length_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """How the server calls the token limit; newer hosted models want max_completion_tokens."""
    send_seed: bool = True
    """Send `seed` with each request. Where a server refuses the field, false leaves it out; it still separates draws."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """More fields for every request body, such as {chat_template_kwargs: {enable_thinking: false}}."""
    prompt_price: float | None = Field(None, ge=0)
    """Price of a million prompt tokens, to count the cost."""
    completion_price: float | None = Field(None, ge=0)
    """Price of a million completion tokens."""
    seed: int = Field(0, ge=0)
    """Of the jitter between retries."""

    @field_validator("base_url", mode="before")
    @classmethod
    def _url_is_plain(cls, url: Any) -> Any:
        if not isinstance(url, str):
            return url
        try:
            parts = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ConfigError(f"base_url is no URL ({error}); write http://HOST:PORT/v1 or https://HOST/v1") from None
        # A URL may hold a password, so this message does not show it.
        if parts.userinfo or parts.query or parts.fragment:
            raise ConfigError(
                "base_url holds a user name, a password, a query or a fragment; write scheme, host, port and path only, and "
                "give the key by key_env"
            )
        if parts.scheme not in ("http", "https") or not parts.host:
            raise ConfigError(f"base_url is {url!r}; write http://HOST:PORT/v1 or https://HOST/v1")
        plain = re.sub("(/(chat/)?completions)?/*$", "", url)
        if plain != url.rstrip("/"):
            raise ConfigError(f"base_url is {url!r}; leave out what follows the version: {plain}")
        return plain

    @field_validator("key_env", mode="before")
    @classmethod
    def _key_is_not_here(cls, name: Any) -> Any:
        # Somebody who writes the key here must not find it in a message or a log.
        if name is not None and not (isinstance(name, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,63}", name)):
            raise ConfigError(
                "key_env is no name of an environment variable (not shown: it may be a key); write such as MY_API_KEY"
            )
        return name

    def key(self) -> str | None:
        """The key, from the environment. Errors: ConfigError when the variable is not set, or cannot be a key."""
        if self.key_env is None:
            return None
        key = os.environ.get(self.key_env, "").strip()
        where = f"endpoint {self.base_url}: the environment variable {self.key_env}"
        if not key:
            raise ConfigError(f"{where} is not set; export it with the key")
        if not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(f"{where} holds blanks or characters that no key has; export it again")
        return key

    def build(self, *, cache: Path | None = None) -> "EndpointClient":
        """A client; nothing is sent yet. `cache` is the file for replies when the config names none.

        Errors: as `key`, and ConfigError when the cache is some other file.
        """
        from rewarden.runtime.endpoint.client import EndpointClient  # which reads this config

        return EndpointClient(self, cache=ReplyCache(Path(self.cache) if self.cache is not None else cache))
