"""The records that flow through a run. Frozen: a stage makes a new one, it never edits one.

    Conversation -> Rollout -> ScoredRollout -> Batch -> Term -> update

Shape legend, used as name suffixes: B sequences, T token positions, V vocabulary, K ensemble members, D hidden width,
N samples per prompt. Every per-token tensor speaks of its own token: x_BT[b, t] is about token t given the tokens before it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

Role = Literal["system", "user", "assistant"]
SpanRole = Literal["system", "user", "assistant", "template"]
Ended = Literal["eos", "length"]
Stop = Literal["open", "eos", "length", "turns", "user", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation; the text may be empty."""

    role: Role
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages in order: an optional system message, then user and assistant in turn, the user first.

    `meta` carries the other columns of the row, `meta["where"]` its file and line.
    """

    id: str
    messages: tuple[Message, ...]
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two continuations of one prompt. `preference` is the probability that `chosen` is better (0.5: a tie)."""

    id: str
    prompt: tuple[Message, ...]
    chosen: tuple[Message, ...]
    rejected: tuple[Message, ...]
    preference: float = 1.0
    margin: float | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Tokens [start, stop) of one message.

    An assistant span is the content and its end-of-turn token; headers, separators and generation prompts have role
    "template". `turn` counts exchanges from 0 (user and assistant of one exchange share it; system and what stands before
    the first user message have 0). `ended` says how sampling stopped; None means the text was given, not sampled.
    """

    role: SpanRole
    turn: int
    start: int
    stop: int
    ended: Ended | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A conversation in text and in the very tokens that were given and sampled; never re-tokenised.

    Spans cover `token_ids` once, in order. `logp_sampler` has one entry per sampled token, in order. `stop` "open" means
    the ids end in a generation prompt and wait for the policy. `policy_version` counts optimizer steps of the policy that
    sampled the last turn; `seeds` has one seed per sampled turn.
    """

    conversation: Conversation
    token_ids: tuple[int, ...]
    spans: tuple[Span, ...]
    logp_sampler: tuple[float, ...] = ()
    policy_version: int = 0
    seeds: tuple[int, ...] = ()
    stop: Stop = "open"


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What a scorer thinks of one conversation.

    `value` is finite when `status` is "ok"; any other status says in a word why there is none ("not_applicable", "too_long").
    `members` holds one score per ensemble member, `parts` explains the value (name -> number).
    """

    value: float
    members: tuple[float, ...] = ()
    parts: Mapping[str, float] = field(default_factory=dict)
    status: str = "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRollout:
    """A rollout and the score of its prefix through assistant turn `through_turn`."""

    rollout: Rollout
    score: Score
    through_turn: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """Right-padded ids; `mask_BT` is True on real tokens, `length_B` counts them."""

    ids_BT: Tensor
    mask_BT: Tensor
    length_B: Tensor

    def to(self, device: torch.device | str) -> "TokenBatch":
        """The same batch on a device."""
        return TokenBatch(ids_BT=self.ids_BT.to(device), mask_BT=self.mask_BT.to(device), length_B=self.length_B.to(device))

    def rows(self, index_b: Tensor) -> "TokenBatch":
        """The sub-batch of these rows, trimmed to its own longest row."""
        longest = int(self.length_B[index_b].max()) if len(index_b) else 0
        return TokenBatch(
            ids_BT=self.ids_BT[index_b, :longest], mask_BT=self.mask_BT[index_b, :longest], length_B=self.length_B[index_b]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One additive part of a loss, per position and unreduced: which positions count, and a weight.

    A weight of 0 makes it a statistic: averaged and reported like a loss, without a gradient.
    """

    value_BT: Tensor
    mask_BT: Tensor
    weight: float = 1.0
