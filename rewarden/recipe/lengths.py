"""How many tokens a microbatch will hold: the first rows of the data, rendered, and the trainer's own plan of batches."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rewarden.algos.actors import load_prompt_rollouts
from rewarden.algos.pairs import encode_pairs
from rewarden.algos.ppo_config import PPO
from rewarden.algos.reward import Reward
from rewarden.algos.rows import encode_rows
from rewarden.algos.sft import SFT
from rewarden.collect.samples import SampleN
from rewarden.data.batches import length_batches
from rewarden.data.sources import Data, load_comparisons, load_conversations
from rewarden.errors import RewardenError
from rewarden.models.load import load_tokenizer, template_of
from rewarden.models.source import Model
from rewarden.text.render import Template, load_template

SAMPLE = 128
"""Rows that are looked at; a pair is two."""

MOST_ROWS = 4096
"""Rows of an epoch that is imagined from a sample; more of them hardly change its largest batch."""

UNKNOWN = 1024
"""Length of a row of which nothing is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Lengths of rows (of both sides of a pair together), in file order; whole: these are all. how: where they come from."""

    lengths: tuple[int, ...]
    whole: bool
    how: str

    @property
    def mean(self) -> float:
        """Tokens of a row."""
        return sum(self.lengths) / len(self.lengths)


def sample_lengths(spec: SFT | Reward | PPO | SampleN, model: Model) -> Sample:
    """Lengths of the first rows where data and tokenizer are on this machine; else every row is as long as allowed.

    `model` is where the tokenizer is found.
    """
    limit = _limit(spec)
    longest = (limit or UNKNOWN) * (2 if isinstance(spec, Reward) else 1)
    if not Path(spec.data.path).exists():
        full = f"rows of {'the full length' if limit else f'{longest} tokens'}"
        return Sample(lengths=(longest,), whole=False, how=f"{full}, since {spec.data.path} is not here")
    most = SAMPLE // (2 if isinstance(spec, Reward) else 1)
    wanted = min(most, spec.data.max_rows or most)
    data = spec.data.model_copy(update={"max_rows": wanted, "part": "all", "holdout_prompts": 0, "folds": 0, "fold": None})
    try:
        template = load_template(load_tokenizer(model), template_of(model))
        lengths, total = _lengths(spec, data, template)
    except RewardenError as error:
        reason = str(error).splitlines()[0]
        return Sample(lengths=(longest,), whole=False, how=f"rows of the full length, since they cannot be read: {reason}")
    whole = total < wanted or wanted == spec.data.max_rows
    return Sample(lengths=lengths, whole=whole, how="the rows themselves" if whole else f"the first {total} rows")


def _limit(spec: SFT | Reward | PPO | SampleN) -> int | None:
    """The longest row, side of a pair or prompt that the config lets through."""
    if isinstance(spec, SampleN):
        return None
    return spec.max_prompt_length if isinstance(spec, PPO) else spec.max_length


def _lengths(spec: SFT | Reward | PPO | SampleN, data: Data, template: Template) -> tuple[tuple[int, ...], int]:
    """Lengths of the rows that fit, and how many rows there were."""
    if isinstance(spec, PPO | SampleN):
        prompts = load_prompt_rollouts(data, template, _limit(spec))
        found = tuple(len(rollout.token_ids) for rollout in prompts.rollouts)
        return found, len(found) + sum(prompts.dropped.values())
    if isinstance(spec, Reward):
        comparisons = load_comparisons(data).rows
        pairs, _ = encode_pairs(comparisons, template, spec.max_length, "drop")
        found = tuple(len(pair.chosen_ids) + len(pair.rejected_ids) for pair in pairs)
        return found or ((spec.max_length or UNKNOWN) * 2,), len(comparisons)
    conversations = load_conversations(data).rows
    rows = encode_rows(conversations, template, spec.max_length, "drop" if spec.overlength == "error" else spec.overlength)
    return tuple(len(row.token_ids) for row in rows.rows) or (spec.max_length or UNKNOWN,), len(conversations)


def largest_microbatch(spec: SFT | Reward, sample: Sample) -> int:
    """Tokens of the largest microbatch of the first epoch, planned as the trainer plans it.

    From a sample it is that of an epoch like it, whatever `max_steps`: which of its batches come first is not known.
    """
    lengths = _epoch(spec, sample)
    size = spec.per_device_train_batch_size
    seeds = [spec.order_seed(member) for member in range(spec.num_members)] if isinstance(spec, Reward) else [spec.seed]
    found = []
    for seed in seeds:
        plan = length_batches(lengths, batch_size=spec.train_batch_size, window=spec.length_window, seed=seed, epoch=0)
        steps = plan[: spec.max_steps] if spec.max_steps and sample.whole else plan
        found += [
            sum(lengths[row] for row in batch[start : start + size]) for batch in steps for start in range(0, len(batch), size)
        ]
    return max(found)


def largest_rollouts(spec: PPO, sample: Sample) -> int:
    """Tokens of the largest microbatch of rollouts in which every answer is as long as allowed, over all minibatches."""
    minis = spec.num_minibatches
    rows = min(spec.per_device_train_batch_size, math.ceil(spec.rollout_batch_size / minis))
    draws = min(spec.max_steps * spec.num_ppo_epochs * minis, MOST_ROWS // rows + 1)
    rng = random.Random(spec.seed)
    prompts = max(sum(rng.choices(sample.lengths, k=rows)) for _ in range(draws))
    return prompts + rows * spec.sampling.max_completion_length


def num_rows(spec: SFT | Reward | PPO, sample: Sample) -> int:
    """Rows of the data, or of the epoch that stands for them when they were not all looked at."""
    return len(sample.lengths) if sample.whole else spec.data.max_rows or MOST_ROWS


def _epoch(spec: SFT | Reward, sample: Sample) -> Sequence[int]:
    if sample.whole:
        return sample.lengths
    return random.Random(spec.seed).choices(sample.lengths, k=min(num_rows(spec, sample), MOST_ROWS))
