"""What a round's answers look like, and signs that a run goes wrong: each in words, with the evidence and a next step.

Nothing here changes a number of the training. Limits are those that docs/metrics.md gives beside each metric; most compare a
round with the first one.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence

from rewarden.algos.selection import Selection
from rewarden.rollout.hf import Sampling
from rewarden.runtime.ranks import Ranks
from rewarden.types import ScoredRollout

log = logging.getLogger(__name__)

FIRST_KEYS = (
    "length/mean",
    "eos_rate",
    "entropy/mean",
    "text/distinct_2",
    "text/repetition",
    "score/disagreement",
)
"""Facts of the first round that later rounds are compared with."""

NEGATIVE_KL = -0.05
"""Nats per token; k1 of a policy's own samples scatters around a KL that cannot be negative."""


def text_facts(scored: Sequence[ScoredRollout], ranks: Ranks) -> dict[str, float]:
    """Repetition and early endings of all sampled turns, over all ranks.

        eos_first_rate     share of turns whose first token is the end of turn
        text/distinct_N    distinct N-grams of tokens / N-grams, all turns together (Li et al. 2016, arXiv:1510.03055)
        text/repetition    mean over turns of 1 - distinct 3-grams / 3-grams of the turn; 0 for a turn without one

    N-grams leave the end of turn out. 0 where there is no N-gram at all.
    """
    local = [turn for item in scored for turn in _turns(item)]
    turns = [turn for part in ranks.gather_objects(local) for turn in part]
    share = sum(_repetition(turn) for turn in turns) / max(len(turns), 1)
    return {
        "eos_first_rate": sum(not turn for turn in turns) / max(len(turns), 1),
        "text/distinct_1": _distinct(turns, 1),
        "text/distinct_2": _distinct(turns, 2),
        "text/repetition": share,
    }


def first_facts(facts: Mapping[str, float]) -> dict[str, float]:
    """What to remember of the first round."""
    return {key: facts[key] for key in FIRST_KEYS if key in facts}


def alarms(facts: Mapping[str, float], first: Mapping[str, float], sampling: Sampling, selection: Selection) -> dict[str, str]:
    """The signs of trouble in a round's facts: name -> sentence. `first` holds the first round's."""
    return dict(_alarms(facts, first, sampling, selection))


def warn(found: Mapping[str, str], told: set[str], ranks: Ranks) -> int:
    """Say each new sign of trouble once, on rank 0; returns how many there are."""
    for name in [name for name in found if name not in told]:
        told.add(name)
        if ranks.is_main:
            log.warning("%s", found[name])
    return len(found)


def _alarms(
    facts: Mapping[str, float], first: Mapping[str, float], sampling: Sampling, selection: Selection
) -> Iterator[tuple[str, str]]:
    if facts["kl/k1"] < NEGATIVE_KL:
        yield "negative_kl", negative_kl(facts, sampling)
    if facts["eos_first_rate"] > 0.5:
        yield (
            "ends_at_once",
            f"{facts['eos_first_rate']:.0%} of the answers end with their first token; look for empty answers in the data the "
            "policy learned from, prompts that already hold an answer, or a reward that pays for saying nothing",
        )
    if facts["kl/sequence"] > selection.max_kl:
        yield (
            "far_from_reference",
            f"kl/sequence is {facts['kl/sequence']:.1f} nats, above selection.max_kl {selection.max_kl}: the reward model has "
            "not seen such answers; raise beta or lower the learning rate",
        )
    for key, falls, factor, why in COMPARED:
        if key not in facts or not first.get(key):
            continue
        if facts[key] < factor * first[key] if falls else facts[key] > factor * first[key]:
            yield key.replace("/", "_"), f"{key} went from {first[key]:.3g} in the first round to {facts[key]:.3g}: {why}"
    if facts["text/repetition"] > first.get("text/repetition", 0.0) + 0.2:
        yield (
            "text_repetition",
            f"text/repetition went from {first.get('text/repetition', 0.0):.2f} to {facts['text/repetition']:.2f}: answers "
            "repeat their own words; read samples.parquet, and raise beta or stop at an earlier step",
        )


COMPARED = (
    ("length/mean", False, 1.5, "answers grow; read samples.parquet, and see whether the reward pays for length"),
    ("eos_rate", True, 0.5, "fewer answers end by themselves; raise max_completion_length or set missing_eos_penalty"),
    ("entropy/mean", True, 0.3, "the policy says one thing only; raise beta or lower the learning rate"),
    ("text/distinct_2", True, 0.5, "answers share ever more of their words; raise beta or lower the learning rate"),
    ("score/disagreement", False, 2.0, "the members of the reward disagree: the policy leaves what they know; raise beta"),
)
"""Key, whether falling is the bad direction, factor on the first round's value, and what it means."""


def negative_kl(facts: Mapping[str, float], sampling: Sampling) -> str:
    """Why kl/k1 may be below 0, by what was measured: filters of the draw, a sampler that disagrees, or neither."""
    gap, behavior = facts["rollout/logp_gap_max"], facts["rollout/behavior_gap"]
    if behavior > 0.01:
        filters = ", ".join(f"{name} {getattr(sampling, name)}" for name in ("top_p", "top_k", "repetition_penalty"))
        cause = (
            f"answers are drawn {behavior:.3f} nats per token away from the policy (rollout/behavior_gap; {filters}): switch "
            "the filters off"
        )
    elif gap > 0.01:
        cause = (
            f"sampler and training forward disagree by up to {gap:.2g} nats (rollout/logp_gap_max): look for dropout, low "
            "precision, or a sampler with other weights"
        )
    else:
        cause = (
            f"neither filters (rollout/behavior_gap {behavior:.2g}) nor the sampler (rollout/logp_gap_max {gap:.2g}) explain "
            "it: see whether the reference is the policy before training (check/kl_max in the first line), or sample more"
        )
    return (
        f"kl/k1, the mean of log pi - log pi_ref over sampled tokens, is {facts['kl/k1']:.3f} (kl/k3, never negative, "
        f"is {facts['kl/k3']:.3f}). A KL cannot be negative; its estimate is, when answers come from elsewhere: {cause}"
    )


def _turns(item: ScoredRollout) -> Iterator[tuple[int, ...]]:
    """The ids of each sampled turn, without its end of turn."""
    for span in item.rollout.spans:
        if span.ended is not None:
            yield item.rollout.token_ids[span.start : span.stop - (span.ended == "eos")]


def _ngrams(turn: Sequence[int], n: int) -> list[tuple[int, ...]]:
    return [tuple(turn[i : i + n]) for i in range(len(turn) - n + 1)]


def _distinct(turns: Sequence[Sequence[int]], n: int) -> float:
    found = [ngram for turn in turns for ngram in _ngrams(turn, n)]
    return len(set(found)) / max(len(found), 1)


def _repetition(turn: Sequence[int]) -> float:
    found = _ngrams(turn, 3)
    return 1.0 - len(set(found)) / len(found) if found else 0.0
