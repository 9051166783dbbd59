"""The sampler on a Hugging Face model: open rollouts in, rollouts with one more sampled assistant turn out."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from pydantic import Field
from torch import nn

from rewarden.errors import ConfigError, DataError
from rewarden.rollout.choose import choose, uniforms
from rewarden.rollout.decode import Job, Work, complete
from rewarden.rollout.decoder import Decoder, evaluating
from rewarden.rollout.rows import Completion
from rewarden.spec import Spec
from rewarden.types import Conversation, Ended, Message, Rollout, Span

log = logging.getLogger(__name__)


class Sampling(Spec):
    """How completions are drawn."""

    max_completion_length: int = Field(ge=1)
    """Most tokens of one assistant turn, its end-of-turn token included."""
    temperature: float = Field(1.0, ge=0.0)
    """Divides the logits; 0 takes the most probable token. Training must use the same number."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Nucleus: draw from the most probable tokens that together hold this share. 1 is off."""
    top_k: int = Field(0, ge=0)
    """Draw from the k most probable tokens. 0 is off."""
    repetition_penalty: float = Field(1.0, gt=0.0)
    """Above 1, tokens already in this response become less probable. 1 is off."""
    batch_size: int = Field(512, ge=1)
    """Most rows decoded together, which bounds memory; more samples of a prompt than this are written in several blocks."""


@runtime_checkable
class TurnTemplate(Protocol):
    """What sampling needs of a `text.Template`."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end an assistant turn."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a sampled turn, without its end-of-turn token."""
        ...

    def extend(self, rollout: Rollout, message: Message) -> Rollout:
        """The user's message and a generation prompt appended to the same ids."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleStats:
    """What one call to `sample` did.

    padding_share: share of token positions sent through the model that were padding or belonged to finished rows.
    prompt_tokens counts each distinct prompt of a batch once, as it is computed once. cut_by_length, cut_by_context: rows
    without end of turn, stopped by `max_completion_length` or by the model's positions. behavior_gap: mean over tokens of
    log p(drawn from) - log p(policy), an estimate of their KL in nats; 0 unless top-p, top-k or the penalty is on, or greedy.
    cache: "block", or "dynamic" where the model's layers need the cache of transformers. shared_rows: rows that shared their
    prompt's keys and values with others. copied_rows: rows that hold a copy of another row's prompt instead, because the model
    could not share it; not_shared says why.
    """

    rows: int = 0
    batches: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    padding_share: float = 0.0
    ended_by_eos: int = 0
    cut_by_length: int = 0
    cut_by_context: int = 0
    behavior_gap: float = 0.0
    seconds: float = 0.0
    cache: str = "block"
    shared_rows: int = 0
    copied_rows: int = 0
    not_shared: str | None = None

    def report(self) -> dict[str, float]:
        """The numbers by metric name."""
        return {
            "rollout/rows": float(self.rows),
            "rollout/tokens": float(self.generated_tokens),
            "rollout/length": self.generated_tokens / max(self.rows, 1),
            "rollout/eos_rate": self.ended_by_eos / max(self.rows, 1),
            "rollout/cut_by_length": float(self.cut_by_length),
            "rollout/cut_by_context": float(self.cut_by_context),
            "rollout/padding_share": self.padding_share,
            "rollout/behavior_gap": self.behavior_gap,
            "rollout/shared_rows": float(self.shared_rows),
            "rollout/copied_rows": float(self.copied_rows),
            "time/tokens_per_s": self.generated_tokens / self.seconds if self.seconds else 0.0,
        }


class HFSampler:
    """Samples assistant turns from a causal LM, plain or with PEFT layers; satisfies `protocols.Sampler`.

    A row's text depends on its ids and its seed, not on the rows beside it (floating-point noise apart: a draw that falls
    within it can go either way). Only the chosen tokens and their log-probabilities are kept. The model is put in eval mode
    for the call and back afterwards. `stats` describes the last call.
    """

    def __init__(self, model: nn.Module, template: TurnTemplate, sampling: Sampling) -> None:
        if not template.stop_ids:
            raise ConfigError("the template has no stop id, so no turn could end; give the tokenizer an end-of-turn token")
        self.model = model
        self.template = template
        self.sampling = sampling
        self.stats = SampleStats()
        self._decoder = Decoder(model)
        self._told = False

    @property
    def num_positions(self) -> int | None:
        """Most tokens a rollout can have, prompt and completion together; None where the model has no limit."""
        return self._decoder.num_positions

    def sample(self, rollouts: Sequence[Rollout], *, seeds: Sequence[int], policy_version: int = 0) -> list[Rollout]:
        """Each open rollout with one more sampled assistant turn, in the order given.

        The new span is the content and, if sampled, the end-of-turn token. `stop` and the span say "eos", or "length" when
        `max_completion_length` or the model's positions cut the turn; the number of a cut turn is also added to
        `conversation.meta["truncated"]`, from which users and scorers know that its text has no end. `logp_sampler` grows by
        log p(token) under softmax(logits / temperature), whatever top-p, top-k or penalty did to the draw (at temperature 0: of
        temperature 1).
        Raises DataError, naming the row, for a rollout that is not open or leaves no room for a token.
        """
        started = time.perf_counter()
        self._check(rollouts, seeds)
        completions: dict[int, Completion] = {}
        works: list[Work] = []
        with torch.no_grad(), evaluating(self.model):
            for index in self._batches(rollouts):
                done, work = self._complete([rollouts[i] for i in index], [seeds[i] for i in index])
                completions.update(zip(index, done, strict=True))
                works.append(work)
        ordered = [completions[i] for i in range(len(rollouts))]
        out = [
            self._extended(rollout, completion, seed, policy_version)
            for rollout, completion, seed in zip(rollouts, ordered, seeds, strict=True)
        ]
        self.stats = self._stats(ordered, works, time.perf_counter() - started)
        return out

    def _check(self, rollouts: Sequence[Rollout], seeds: Sequence[int]) -> None:
        if len(seeds) != len(rollouts):
            raise DataError(f"got {len(seeds)} seeds for {len(rollouts)} rollouts; give one seed per rollout")
        most = self.num_positions
        for rollout in rollouts:
            where = _name(rollout.conversation)
            if rollout.stop != "open" or not rollout.token_ids:
                raise DataError(
                    f"{where}: stop is {rollout.stop!r} with {len(rollout.token_ids)} tokens; only an open rollout, whose ids "
                    "end in a generation prompt, can be sampled: make it with template.start or template.extend"
                )
            cut = rollout.conversation.meta.get("truncated", ())
            if not isinstance(cut, list | tuple):
                raise DataError(
                    f"{where}: meta['truncated'] is {cut!r}; the sampler keeps its cut turns there: rename that column"
                )
            if most is not None and len(rollout.token_ids) >= most:
                raise DataError(
                    f"{where}: the prompt has {len(rollout.token_ids)} tokens and the model {most} positions, which leaves no "
                    "room for a completion; drop or shorten such prompts, or take a model with more positions"
                )

    def _batches(self, rollouts: Sequence[Rollout]) -> list[list[int]]:
        """Row numbers by batch: sorted by length (then ids, so equal prompts meet), cut at `batch_size`.

        Where padding is not safely masked, rows of unequal length do not share a batch.
        """
        size = self.sampling.batch_size
        order = sorted(range(len(rollouts)), key=lambda i: (len(rollouts[i].token_ids), rollouts[i].token_ids, i))
        if self._decoder.pads_safely:
            return [order[start : start + size] for start in range(0, len(order), size)]
        batches: list[list[int]] = []
        for i in order:
            first = rollouts[batches[-1][0]] if batches and len(batches[-1]) < size else None
            if first is not None and len(first.token_ids) == len(rollouts[i].token_ids):
                batches[-1].append(i)
            else:
                batches.append([i])
        return batches

    def _complete(self, rollouts: Sequence[Rollout], seeds: Sequence[int]) -> tuple[list[Completion], Work]:
        sampling = self.sampling
        limits = [min(sampling.max_completion_length, self._room(rollout)) for rollout in rollouts]
        choose_next = partial(
            choose,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            repetition_penalty=sampling.repetition_penalty,
        )
        job = Job(
            prompts=[rollout.token_ids for rollout in rollouts],
            uniform_BN=uniforms(seeds, max(limits)),
            limits=limits,
            stop_ids=sorted(self.template.stop_ids),
            choose_next=choose_next,
            name_of=lambda row: _name(rollouts[row].conversation),
        )
        if self._decoder.cache_kind == "dynamic" and not self._told:
            self._told = True
            name = type(self._decoder.base).__name__
            log.warning("%s has layers other than plain attention; sampling with transformers' dynamic cache", name)
        return complete(self._decoder, job)

    def _room(self, rollout: Rollout) -> int:
        most = self.num_positions
        return self.sampling.max_completion_length if most is None else most - len(rollout.token_ids)

    def _extended(self, rollout: Rollout, completion: Completion, seed: int, policy_version: int) -> Rollout:
        ended: Ended = "eos" if completion.stopped else "length"
        before = rollout.conversation
        turn = sum(message.role == "assistant" for message in before.messages)
        start = len(rollout.token_ids)
        span = Span(
            role="assistant",
            turn=turn,
            start=start,
            stop=start + len(completion.token_ids),
            ended=ended,
        )
        message = Message(role="assistant", text=self.template.decode(completion.token_ids))
        meta = before.meta if completion.stopped else {**before.meta, "truncated": (*before.meta.get("truncated", ()), turn)}
        return replace(
            rollout,
            conversation=replace(before, messages=(*before.messages, message), meta=meta),
            token_ids=rollout.token_ids + completion.token_ids,
            spans=(*rollout.spans, span),
            logp_sampler=rollout.logp_sampler + completion.logp,
            policy_version=policy_version,
            seeds=(*rollout.seeds, seed),
            stop=ended,
        )

    def _stats(self, completions: Sequence[Completion], works: Sequence[Work], seconds: float) -> SampleStats:
        tokens = sum(len(c.token_ids) for c in completions)
        cut = [c for c in completions if not c.stopped]
        at_limit = sum(len(c.token_ids) == self.sampling.max_completion_length for c in cut)
        gap = sum(sum(c.behavior_logp) - sum(c.logp) for c in completions)
        processed = sum(work.processed for work in works)
        return SampleStats(
            rows=len(completions),
            batches=len(works),
            generated_tokens=tokens,
            prompt_tokens=sum(work.prompt_tokens for work in works),
            padding_share=1 - sum(work.useful for work in works) / processed if processed else 0.0,
            ended_by_eos=len(completions) - len(cut),
            cut_by_length=at_limit,
            cut_by_context=len(cut) - at_limit,
            behavior_gap=gap / tokens if tokens else 0.0,
            seconds=seconds,
            cache=self._decoder.cache_kind,
            shared_rows=sum(work.shared_rows for work in works),
            copied_rows=sum(work.copied_rows for work in works),
            not_shared=next((work.not_shared for work in works if work.not_shared), None),
        )


def _name(conversation: Conversation) -> str:
    where = conversation.meta.get("where")
    return f"conversation {conversation.id!r} ({where})" if where else f"conversation {conversation.id!r}"
