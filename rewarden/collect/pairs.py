"""Dialogue prefixes played by a policy and its user, and pairs of sampled answers to one prefix."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rewarden.protocols import Player, Sampler, User
from rewarden.types import Conversation, Message, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two sampled turns after one prefix; `first` and `second` hold the whole dialogue through that turn."""

    first: Rollout
    second: Rollout
    turn: int


def play_prefixes(
    openings: Sequence[Rollout],
    *,
    turns: Sequence[int],
    player: Player,
    user: User,
    user_seeds: Sequence[int],
    seeds: Sequence[int],
    extend: Callable[[Rollout, Message], Rollout],
) -> list[Rollout]:
    """Play each opening until it waits for assistant turn turns[i]: the turns before it and the user's answers.

    turns are 0-based; 0 leaves the opening as it is. A user who leaves ends the prefix there: it keeps its last open state.
    """
    prefixes = list(openings)
    index = [i for i, turn in enumerate(turns) if turn > 0]
    played = player.play([openings[i] for i in index], turns=[turns[i] - 1 for i in index], seeds=[seeds[i] for i in index])
    for i, rollout in zip(index, played, strict=True):
        message = user.reply(rollout.conversation, user_seeds[i])
        if message is not None and rollout.stop != "error":
            prefixes[i] = extend(rollout, message)
    return prefixes


def as_prompt(rollout: Rollout) -> Rollout:
    """The same ids as a prompt: what was sampled on the way becomes given text, so only the next turn is learnt from."""
    spans = tuple(replace(span, ended=None) for span in rollout.spans)
    return replace(rollout, spans=spans, logp_sampler=(), seeds=(), stop="open")


def sample_pairs(prefixes: Sequence[Rollout], *, sampler: Sampler, seeds: Sequence[tuple[int, int]]) -> tuple[list[Pair], int]:
    """Two independent turns per prefix; pairs with the same text are dropped. Returns the pairs and how many were dropped."""
    prompts = [as_prompt(prefix) for prefix in prefixes]
    both = sampler.sample([*prompts, *prompts], seeds=[s[0] for s in seeds] + [s[1] for s in seeds])
    pairs = [
        Pair(first=a, second=b, turn=a.spans[-1].turn)
        for a, b in zip(both[: len(prompts)], both[len(prompts) :], strict=True)
        if a.conversation.messages[-1].text != b.conversation.messages[-1].text
    ]
    return pairs, len(prompts) - len(pairs)


def through(conversation: Conversation, turn: int) -> Conversation:
    """The dialogue cut after assistant turn `turn` (0-based); the whole dialogue when it is shorter."""
    seen = -1
    for place, message in enumerate(conversation.messages):
        seen += message.role == "assistant"
        if seen == turn:
            return replace(conversation, messages=conversation.messages[: place + 1])
    return conversation
