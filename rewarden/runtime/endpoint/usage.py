"""What an endpoint was asked, what it cost and how often it failed."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from rewarden.runtime.endpoint.reply import FAULTS, Reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Counts over the life of a client.

    asked: requests handed to `complete`; of these `repeated` had an equal one in the same call, `cached` were found in the
    cache (`elsewhere`: of those, replies that another base URL gave), the rest was sent. sent: HTTP requests, tries included;
    retries: those after the first of a request. statuses: replies that were sent for, by status. prompt_tokens,
    completion_tokens: of replies that were sent for, as the server counts; uncounted: replies for which it did not say. cost:
    from the prices of the config; None without prices.
    """

    asked: int = 0
    repeated: int = 0
    cached: int = 0
    elsewhere: int = 0
    sent: int = 0
    retries: int = 0
    statuses: Mapping[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    uncounted: int = 0
    cost: float | None = None

    @property
    def failed(self) -> int:
        """Replies lost to the server or the network."""
        return sum(count for status, count in self.statuses.items() if status in FAULTS)

    def report(self, area: str = "endpoint") -> dict[str, float]:
        """The counts as numbers of a report, under `area/`; statuses other than "ok" under their own names."""
        names = ("asked", "cached", "elsewhere", "sent", "retries", "failed", "prompt_tokens", "completion_tokens", "uncounted")
        out = {f"{area}/{name}": float(getattr(self, name)) for name in names}
        if self.cost is not None:
            out[f"{area}/cost"] = self.cost
        return out | {f"{area}/{status}": float(n) for status, n in sorted(self.statuses.items()) if status != "ok"}

    def summary(self) -> str:
        """One line for people."""
        states = ", ".join(f"{count} {status}" for status, count in sorted(self.statuses.items()))
        cost = "" if self.cost is None else f", cost {self.cost:.4f}"
        return (
            f"{self.asked} requests, {self.cached + self.repeated} from the cache, {self.sent} sent ({self.retries} again): "
            f"{states or 'no replies'}; {self.prompt_tokens} prompt and {self.completion_tokens} completion tokens{cost}"
        )


class Meter:
    """Counts while a client works; `read` gives the `Usage` so far."""

    def __init__(self, *, prompt_price: float | None, completion_price: float | None) -> None:
        self.counts: Counter[str] = Counter()
        self.statuses: Counter[str] = Counter()
        self.prices = (prompt_price, completion_price)

    def reply(self, reply: Reply) -> None:
        """Count a reply that was sent for."""
        self.statuses[reply.status] += 1
        self.counts["prompt_tokens"] += reply.prompt_tokens or 0
        self.counts["completion_tokens"] += reply.completion_tokens or 0
        # A request that failed has no tokens to count; a reply without counts is a hole in the bill.
        unknown = reply.prompt_tokens is None or reply.completion_tokens is None
        self.counts["uncounted"] += unknown and reply.status in ("ok", "truncated", "refused", "empty")

    def read(self) -> Usage:
        """The counts so far."""
        prompt, completion = self.prices
        cost = None
        if prompt is not None or completion is not None:
            tokens = (self.counts["prompt_tokens"], self.counts["completion_tokens"])
            cost = (tokens[0] * (prompt or 0.0) + tokens[1] * (completion or 0.0)) / 1e6
        return Usage(**self.counts, statuses=dict(self.statuses), cost=cost)
