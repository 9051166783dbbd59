"""Writing completions with any Hugging Face decoder: prompts once, then token by token, with rows that leave when finished."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rewarden.errors import RewardenError
from rewarden.rollout.bundles import plan
from rewarden.rollout.choose import Choice, wide
from rewarden.rollout.decoder import Decoder
from rewarden.rollout.past import Past, Separate, Shared
from rewarden.rollout.rows import Completion, Record, Rows
from rewarden.rollout.shareable import cannot_share, mark_unshareable
from rewarden.rollout.shared import CannotShare

KEEP_ROWS_ABOVE = 0.7
"""Finished rows leave when the share of live rows falls below this: copying the cache more often costs more than it saves."""

SHARE_FROM = 2
"""Rows that a prompt must have in a batch to be shared."""

Chooser = Callable[[Tensor, Tensor, Tensor], Choice]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one batch cost: token positions that went through the model, how many of them served a row, who shared a prompt."""

    processed: int
    useful: int
    prompt_tokens: int
    shared_rows: int
    copied_rows: int
    not_shared: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to write: one completion per prompt of one batch.

    uniform_BN: the numbers that decide row b's tokens; limits: most tokens per row, >= 1; name_of: names a row in errors.
    """

    prompts: Sequence[tuple[int, ...]]
    uniform_BN: np.ndarray
    limits: Sequence[int]
    stop_ids: Sequence[int]
    choose_next: Chooser
    name_of: Callable[[int], str]


def complete(decoder: Decoder, job: Job) -> tuple[list[Completion], Work]:
    """The completions of one batch, in its order. Runs under the caller's no_grad.

    Equal prompts go through the model once, and their rows share what it made of them, where the model's attention can.
    """
    planned, reason = plan(job.prompts, SHARE_FROM), None
    if planned.shared and (reason := cannot_share(decoder)) is None:
        try:
            return _complete(decoder, job, Shared(decoder, job.prompts, max(job.limits), planned), None)
        except CannotShare as error:
            # What the trial did not meet, such as a mask rule that shows only in long rows.
            reason = mark_unshareable(decoder, str(error))
    return _complete(decoder, job, Separate(decoder, job.prompts, max(job.limits)), reason)


def _complete(decoder: Decoder, job: Job, past: Past, reason: str | None) -> tuple[list[Completion], Work]:
    rows = Rows(job.prompts, job.limits, decoder.device, past.order)
    record = Record(len(job.prompts), max(job.limits), decoder.device)
    numbers_BN = torch.from_numpy(job.uniform_BN).to(decoder.device, wide(decoder.device))
    stop_S = torch.tensor(sorted(job.stop_ids), device=decoder.device)
    logits_BV, processed, useful = past.logits_BV, past.processed, past.prompt_tokens
    for step in range(max(job.limits)):
        choice = job.choose_next(logits_BV, record.id_BN[rows.row_B, :step], numbers_BN[rows.row_B, step])
        bad_B = ~torch.isfinite(choice.logp_B)
        stopped_B = torch.isin(choice.id_B, stop_S)
        ends_B = rows.live_B & (stopped_B | (step + 1 >= rows.limit_B))
        record.write(rows.row_B, step, choice, ends_B, stopped_B)
        rows.live_B = rows.live_B & ~ends_B
        # One look at the device a token: each makes an accelerator wait.
        num_live, num_bad = torch.stack([rows.live_B.sum(), bad_B.sum()]).tolist()
        if num_bad:
            raise _not_finite(job.name_of(int(rows.row_B[bad_B].min())), step)
        if not num_live:
            break
        rows.feed(choice.id_B)
        if num_live < KEEP_ROWS_ABOVE * len(rows):
            live_b = rows.live_B.nonzero()[:, 0]
            past.select(live_b)
            rows.select(live_b)
        logits_BV = past.logits(rows)
        processed += len(rows)
        useful += num_live
    work = Work(
        processed=processed,
        useful=useful,
        prompt_tokens=past.prompt_tokens,
        shared_rows=past.num_shared,
        copied_rows=past.num_copies,
        not_shared=reason,
    )
    return record.completions(), work


def _not_finite(name: str, step: int) -> RewardenError:
    return RewardenError(
        f"{name}: the policy's logits are not finite at completion token {step}; its weights or activations hold NaN or inf. "
        "Go back to an earlier checkpoint and lower the learning rate"
    )
