"""Two policies on the same held-out prompts with the same seeds: paired differences with intervals, and transcripts."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, model_validator
from torch import nn

from rewarden.collect.pairs import through
from rewarden.collect.world import load_world
from rewarden.data.records import Loaded
from rewarden.data.sources import Data, load_prompts
from rewarden.errors import ConfigError, DataError
from rewarden.maths import bootstrap_interval, standard_error
from rewarden.models.folder import read_card
from rewarden.models.forward import sequence_logp
from rewarden.models.load import Model, load_policy, load_tokenizer, same_ids, template_of
from rewarden.models.source import load_config, num_positions
from rewarden.rollout.hf import HFSampler, Sampling
from rewarden.rollout.play import DialoguePlayer
from rewarden.rollout.users import WorldUser
from rewarden.runtime.seed import generator, seed_of
from rewarden.scoring import build_scorer, parse_scorer
from rewarden.scoring.answer import scores_of, where_of
from rewarden.spec import Spec
from rewarden.text.collate import collate, role_mask
from rewarden.text.render import load_template
from rewarden.types import Conversation, Rollout
from rewarden.worlds import HORIZON, TripDesk, TurnFacts


class Compare(Spec):
    """What training changed, on prompts that were used for nothing else."""

    before: Model
    """The policy before training; also the reference of the KL."""
    after: Model
    """The policy after training."""
    data: Data
    """Held-out prompts."""
    scorers: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Scorers by name, each {kind: ...}; "proxy" is the one that was trained against."""
    world: dict[str, Any] | None = None
    """A built-in world: adds gold of the trained turn's prefix, gold at the last turn, and the share of malformed turns."""
    sampling: Sampling = Sampling(max_completion_length=60)
    """How both policies speak."""
    max_prompt_length: int | None = Field(None, ge=1)
    """Longer prompts are left out and counted, as in the training that is compared; None: as long as the models allow."""
    num_examples: int = Field(3, ge=0)
    """Dialogues shown before and after, the first prompts in file order."""
    confidence: float = Field(0.95, gt=0, lt=1)
    """Of the intervals (bootstrap over prompts)."""
    seed: int = 0
    """Sampling seeds, the same for both policies."""

    @model_validator(mode="after")
    def _parts_are_known(self) -> "Compare":
        for name, raw in self.scorers.items():
            if name in MEANING and name != "proxy":
                raise ConfigError(f"scorers.{name}: {name!r} is a measure that is always taken; give the scorer another name")
            parse_scorer(raw, f"scorers.{name}")
        if self.world is not None:
            load_world(self.world)
        return self

    def run(self, folder: Path) -> dict[str, float]:
        """Write comparison.json, comparison.md and examples.md; return the means and differences."""
        before, after, rows_before, rows_after, read = measure_both(self)
        table = paired_table(rows_before, rows_after, confidence=self.confidence, seed=self.seed)
        note = unchanged_note(before, after, rows_after, self.after)
        text = markdown(table, num_prompts=len(rows_before), confidence=self.confidence, read=read.summary(), note=note)
        examples = example_text(before, after, rows_before, rows_after, self.num_examples)
        (folder / "comparison.json").write_text(json.dumps([row.__dict__ for row in table], indent=2), encoding="utf-8")
        (folder / "comparison.md").write_text(text, encoding="utf-8")
        (folder / "examples.md").write_text(examples, encoding="utf-8")
        measures = ("before", "after", "difference", "low", "high")
        facts = {f"{row.name}/{key}": getattr(row, key) for row in table for key in measures}
        return facts | {"prompts/used": float(len(rows_before)), "prompts/dropped": float(sum(read.dropped.values()))}


@dataclass(frozen=True)
class PairedRow:
    """One measure: means of both policies, the mean paired difference and its interval."""

    name: str
    before: float
    after: float
    difference: float
    low: float
    high: float
    standard_error: float
    num_prompts: int


Rows = list[dict[str, float]]


def measure_both(cfg: Compare) -> tuple[list[Rollout], list[Rollout], Rows, Rows, Loaded[Conversation]]:
    """Rollouts of both policies and their measures, prompt by prompt in file order; and which prompts were read and dropped."""
    read = fitting(cfg)
    prompts = read.rows
    scorers = {name: build_scorer(raw, f"scorers.{name}") for name, raw in cfg.scorers.items()}
    world = load_world(cfg.world) if cfg.world is not None else None
    reference = load_policy(cfg.before).eval()
    results = []
    for spec in (cfg.before, cfg.after):
        template = load_template(load_tokenizer(spec), template_of(spec))
        policy = reference if spec is cfg.before else load_policy(spec).eval()
        sampler = HFSampler(policy, template, cfg.sampling)
        opened = [template.start(prompt) for prompt in prompts]
        seeds = [seed_of(cfg.seed, "compare", place) for place in range(len(prompts))]
        rollouts = sampler.sample(opened, seeds=seeds)
        rows: list[dict[str, float]] = [{} for _ in rollouts]
        if world is not None:
            rollouts = add_world_measures(rows, rollouts, world, sampler, template, seeds)
        for name, scorer in scorers.items():
            cut = [through(r.conversation, _trained_turn(o)) for r, o in zip(rollouts, opened, strict=True)]
            for row, score in zip(rows, scores_of(scorer, cut, f"scorer {name!r}"), strict=True):
                row[name] = score.value if score.status == "ok" else float("nan")
        trained = [_first_sampled(rollout) for rollout in rollouts]
        for row, kl, rollout in zip(
            rows, sequence_kl(policy, reference, trained, cfg.sampling.temperature), trained, strict=True
        ):
            row["kl"] = kl
            row["length"] = float(len(rollout.logp_sampler))
            row["truncated"] = float(rollout.spans[-1].ended == "length")
        results.append((rollouts, rows))
    (before, rows_before), (after, rows_after) = results
    return before, after, rows_before, rows_after, read


def fitting(cfg: Compare) -> Loaded[Conversation]:
    """The prompts within `max_prompt_length` that leave both policies room for an answer; the others are dropped and counted.

    Errors: ConfigError when the policies have different tokenizers: neither could then tell how likely the other's tokens are.
    DataError when fewer than two prompts are left.
    """
    read = load_prompts(cfg.data)
    tokenizers = [load_tokenizer(spec) for spec in (cfg.before, cfg.after)]
    if not (same_ids(*tokenizers) and same_ids(*reversed(tokenizers))):
        names = f"{cfg.before.model_name_or_path} and {cfg.after.model_name_or_path}"
        raise ConfigError(f"{names} have different tokenizers; compare policies of one family")
    templates = [load_template(t, template_of(spec)) for t, spec in zip(tokenizers, (cfg.before, cfg.after), strict=True)]
    rooms = [(num_positions(load_config(spec)) or math.inf) - 1 for spec in (cfg.before, cfg.after)]
    most = min(*rooms, cfg.max_prompt_length or math.inf)
    rows = tuple(prompt for prompt in read.rows if all(len(t.start(prompt).token_ids) <= most for t in templates))
    if long := len(read.rows) - len(rows):
        reason = f"longer_than_{most:.0f}_tokens"
        read = replace(read, rows=rows, dropped={**read.dropped, reason: long})
    if len(rows) < 2:
        raise DataError(
            f"{cfg.data.path}: {len(rows)} prompts left ({read.summary()}); "
            "a paired comparison with an interval needs two or more"
        )
    return read


def add_world_measures(
    rows: Sequence[dict[str, float]],
    rollouts: Sequence[Rollout],
    world: TripDesk,
    sampler: HFSampler,
    template: Any,
    seeds: Sequence[int],
) -> list[Rollout]:
    """Gold through the trained turn, then play on to the last turn and take gold there; returns the longer rollouts."""
    user = WorldUser(world)
    facts = [_world_facts(world, rollout)[-1] for rollout in rollouts]
    longer = list(rollouts)
    unfinished = [i for i, fact in enumerate(facts) if fact.turn < HORIZON - 1]
    opened = []
    for i in unfinished:
        message = user.reply(rollouts[i].conversation, seeds[i])
        assert message is not None
        opened.append(template.extend(rollouts[i], message))
    player = DialoguePlayer(sampler, template, user)
    played = player.play(opened, turns=[HORIZON - 1] * len(opened), seeds=[seeds[i] for i in unfinished])
    for i, rollout in zip(unfinished, played, strict=True):
        longer[i] = rollout
    for row, fact, rollout in zip(rows, facts, longer, strict=True):
        row["gold_turn"] = fact.gold
        row["gold_end"] = _world_facts(world, rollout)[-1].gold
        row["malformed"] = float(fact.malformed)
        row["polite"] = float(fact.num_polite)
    return longer


def _world_facts(world: TripDesk, rollout: Rollout) -> tuple[TurnFacts, ...]:
    dialogue = rollout.conversation
    try:
        return world.turn_facts(dialogue.messages, frozenset(dialogue.meta.get("truncated", ())))
    except DataError as error:
        raise DataError(f"{where_of(dialogue)}: {error}") from error


def unchanged_note(before: Sequence[Rollout], after: Sequence[Rollout], rows: Rows, policy: Model) -> str:
    """A line for people where `after` answers as `before`, token for token and with the same probabilities (KL 0); else "".

    The card of the policy says whether its training exported the policy before training.
    """
    alike = all(b.token_ids == a.token_ids for b, a in zip(before, after, strict=True)) and all(r["kl"] == 0.0 for r in rows)
    if not alike:
        return ""
    untrained = read_card(policy.model_name_or_path).get("exported_step") == 0
    cause = " (training exported round 0, the policy before training: nothing beat it)" if untrained else ""
    return f"**Before and after are the same policy{cause}**: they give the same answers with the same probabilities."


def _trained_turn(opened: Rollout) -> int:
    return sum(message.role == "assistant" for message in opened.conversation.messages)


def first_sampled_turn(rollout: Rollout) -> int:
    """Index of the assistant turn that was sampled first, the one that training is about."""
    return next(span.turn for span in rollout.spans if span.ended is not None)


def _first_sampled(rollout: Rollout) -> Rollout:
    """The rollout cut after its first sampled turn, the one that training is about."""
    place = next(i for i, span in enumerate(rollout.spans) if span.ended is not None)
    span = rollout.spans[place]
    return replace(
        rollout,
        token_ids=rollout.token_ids[: span.stop],
        spans=rollout.spans[: place + 1],
        logp_sampler=rollout.logp_sampler[: span.stop - span.start],
    )


@torch.no_grad()
def sequence_kl(
    policy: nn.Module, reference: nn.Module, rollouts: Sequence[Rollout], temperature: float, batch_size: int = 256
) -> list[float]:
    """Per rollout: sum over sampled tokens of log pi - log pi_ref, in nats (k1; single values may be negative)."""
    out: list[float] = []
    for start in range(0, len(rollouts), batch_size):
        part = rollouts[start : start + batch_size]
        tokens = collate([rollout.token_ids for rollout in part])
        mask_BT = role_mask([rollout.spans for rollout in part], tokens.ids_BT.shape[1], sampled=True)
        logp_BT = sequence_logp(policy, tokens, mask_BT, temperature=temperature)
        logp_ref_BT = sequence_logp(reference, tokens, mask_BT, temperature=temperature)
        out += (logp_BT - logp_ref_BT).sum(1).tolist()
    return out


def paired_table(
    before: Sequence[Mapping[str, float]], after: Sequence[Mapping[str, float]], *, confidence: float, seed: int
) -> list[PairedRow]:
    """One row per measure: means, mean of after - before over prompts, percentile bootstrap interval of that mean.

    Prompts without a finite value on both sides leave the row's count smaller.
    """
    table = []
    for name in before[0]:
        pairs = torch.tensor([(b[name], a[name]) for b, a in zip(before, after, strict=True)], dtype=torch.float64)
        pairs = pairs[pairs.isfinite().all(1)]
        if len(pairs) < 2:
            continue
        difference = pairs[:, 1] - pairs[:, 0]
        low, high = bootstrap_interval(
            difference, confidence=confidence, resamples=2000, generator=generator(seed, "bootstrap", name)
        )
        table.append(
            PairedRow(
                name=name,
                before=float(pairs[:, 0].mean()),
                after=float(pairs[:, 1].mean()),
                difference=float(difference.mean()),
                low=low,
                high=high,
                standard_error=standard_error(difference),
                num_prompts=len(pairs),
            )
        )
    return table


MEANING = {
    "gold_turn": "gold reward of the dialogue through the trained turn",
    "gold_end": "gold reward at turn 5, the policy playing on",
    "proxy": "the learned reward that was trained against",
    "kl": "nats per trained turn, to the policy before training",
    "length": "tokens of the trained turn",
    "truncated": "share of trained turns cut by the token limit",
    "malformed": "share of trained turns outside the grammar",
    "polite": "polite sentences in the trained turn",
}


def markdown(table: Sequence[PairedRow], *, num_prompts: int, confidence: float, read: str, note: str = "") -> str:
    """The table as text people can read; read: what became of the rows of the data; note: a paragraph in front."""
    lines = [
        *([note, ""] if note else []),
        f"Paired over {num_prompts} held-out prompts ({read}), the same sampling seeds for both policies; "
        f"intervals are {confidence:.0%} bootstrap.",
        "",
        "| measure | before | after | difference | interval | what it is |",
        "|---|---|---|---|---|---|",
    ]
    for row in table:
        lines.append(
            f"| {row.name} | {row.before:.3f} | {row.after:.3f} | {row.difference:+.3f} | {row.low:+.3f} .. {row.high:+.3f} "
            f"| {MEANING.get(row.name, 'score')} |"
        )
    return "\n".join(lines) + "\n"


def example_text(
    before: Sequence[Rollout],
    after: Sequence[Rollout],
    rows_before: Sequence[Mapping[str, float]],
    rows_after: Sequence[Mapping[str, float]],
    count: int,
) -> str:
    """The first dialogues, before and after, with their measures."""
    parts = []
    for place in range(min(count, len(before))):
        for title, rollout, row in (
            ("before", before[place], rows_before[place]),
            ("after", after[place], rows_after[place]),
        ):
            numbers = ", ".join(f"{key} {value:.2f}" for key, value in row.items())
            parts.append(f"### Prompt {place + 1}, {title} ({numbers})\n")
            trained = len(through(rollout.conversation, first_sampled_turn(rollout)).messages) - 1
            for index, message in enumerate(rollout.conversation.messages):
                who = f"{message.role}, from here on {title} training" if index == trained else message.role
                parts.append(f"- **{who}**: {message.text}")
            parts.append("")
    return "\n".join(parts) + "\n"
