"""N answers to every prompt, drawn once and kept: what best-of-n, rejection sampling and their statistics start from.

Each answer has a seed of its own, made from the run's seed, the prompt's id and the answer's number. So answers do not depend
on where a run was stopped, and those of a larger N begin with those of a smaller one.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from rewarden.collect.sample_store import CUT, FORMAT, Samples, read_samples
from rewarden.data.records import Loaded
from rewarden.data.sources import Data, load_prompts
from rewarden.data.write import prompt_row, write_jsonl
from rewarden.errors import ConfigError, DataError
from rewarden.models.load import Model, load_policy, load_tokenizer, template_of
from rewarden.models.source import load_config, num_positions
from rewarden.rollout.hf import HFSampler, Sampling
from rewarden.runtime.clock import phase
from rewarden.runtime.inputs import identity
from rewarden.runtime.job import Job, Tick
from rewarden.runtime.ranks import Ranks
from rewarden.runtime.seed import seed_of
from rewarden.spec import Spec
from rewarden.text.render import Template, load_template
from rewarden.types import Conversation, Rollout


class SampleN(Spec):
    """N answers of a policy to every prompt."""

    drive_defaults: ClassVar[Mapping[str, Any]] = {"save_steps": 1}
    """A checkpoint of this job is a few numbers, so it keeps every step."""

    policy: Model
    """The policy that answers."""
    data: Data
    """The prompts."""
    num_generations: int = Field(200, ge=1, le=1_000_000)
    """N, the answers to each prompt."""
    sampling: Sampling = Sampling(max_completion_length=300)
    """How it answers; written into samples.json whole."""
    extends: str | None = None
    """Folder of an earlier run with fewer answers and all else (policy, prompts, sampling, seed) equal: they are taken over."""
    rows_per_step: int = Field(1024, ge=1)
    """Answers drawn and stored together; a stopped run loses at most these."""
    seed: int = 0
    """Of the answers."""

    def build(self, ranks: Ranks) -> Job:
        """Load policy and prompts; see `build`."""
        return build(self, ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """How many answers are stored."""

    done: int = 0


def build(cfg: SampleN, ranks: Ranks) -> Job:
    """Load policy and prompts and return the job that samples.

    Errors: DataError when no prompt leaves room for an answer; ConfigError when `extends` names samples of something else.
    """
    template = load_template(load_tokenizer(cfg.policy), template_of(cfg.policy))
    read = fitting(cfg, template)
    facts = {
        "format": FORMAT,
        "num_prompts": len(read.rows),
        "num_generations": cfg.num_generations,
        "policy": cfg.policy.model_name_or_path,
        "policy_identity": identity(cfg.policy.model_dump(mode="json", exclude_defaults=True)),
        "sampling": cfg.sampling.model_dump(mode="json", exclude={"batch_size"}),
        "seed": cfg.seed,
        "prompts_dropped": dict(read.dropped),
    }
    earlier = None if cfg.extends is None else extended(cfg.extends, facts, read.rows)
    sampler = HFSampler(load_policy(cfg.policy, device=ranks.device).to(ranks.device).eval(), template, cfg.sampling)
    total = len(read.rows) * cfg.num_generations
    notes = [
        *template.notes,
        f"prompts: {read.summary()}",
        f"{total} answers, {cfg.num_generations} to each of {len(read.rows)}",
    ]
    if earlier is not None:
        notes.append(f"the first {earlier.num_generations} answers to each prompt are taken over from {cfg.extends}")

    def export(folder: Path) -> None:
        write_jsonl(folder / "prompts.jsonl", (prompt_row(prompt) for prompt in read.rows))
        (folder / "samples.json").write_text(json.dumps(facts, indent=2, ensure_ascii=False), encoding="utf-8")

    return Job(
        title=f"best-of-{cfg.num_generations} samples",
        steps=math.ceil(total / cfg.rows_per_step),
        start=State(),
        train=lambda state: train(cfg, sampler, template, read.rows, earlier, ranks, state),
        parts={},
        export=export,
        notes=notes,
        columns=("samples/done", "samples/length", "samples/eos_rate"),
        dump_state=asdict,
        restore_state=lambda raw: State(**raw),
    )


def train(
    cfg: SampleN,
    sampler: HFSampler,
    template: Template,
    prompts: Sequence[Conversation],
    earlier: Samples | None,
    ranks: Ranks,
    state: State,
) -> Iterator[Tick]:
    """One tick per `rows_per_step` answers, in the order of (prompt, answer); ranks take consecutive parts of a step."""
    total = len(prompts) * cfg.num_generations
    known = 0 if earlier is None else earlier.num_generations
    while state.done < total:
        stop = min(state.done + cfg.rows_per_step, total)
        mine = _part(range(state.done, stop), ranks)
        places = [divmod(place, cfg.num_generations) for place in mine]
        drawn = [(p, i) for p, i in places if i >= known]
        opened = {p: template.start(prompts[p]) for p in sorted({p for p, _ in drawn})}
        seeds = {(p, i): seed_of(cfg.seed, "sample_n", prompts[p].id, i) for p, i in places}
        with phase("rollout"):
            rollouts = iter(sampler.sample([opened[p] for p, _ in drawn], seeds=[seeds[at] for at in drawn]))
        rows = []
        for p, i in places:
            row = _copied(earlier, p, i) if earlier is not None and i < known else _row(next(rollouts))
            rows.append({"prompt": p, "index": i, **row, "seed": seeds[p, i]})
        state = State(done=stop)
        yield Tick(state=state, report=_report(rows, len(rows) - len(drawn), stop, ranks), samples=rows)


def fitting(cfg: SampleN, template: Template) -> Loaded[Conversation]:
    """The prompts that leave room for an answer; the others are dropped and counted."""
    read = load_prompts(cfg.data)
    limit = num_positions(load_config(cfg.policy))
    if limit is None:
        return read
    rows = tuple(prompt for prompt in read.rows if len(template.start(prompt).token_ids) < limit)
    if long := len(read.rows) - len(rows):
        read = replace(read, rows=rows, dropped={**read.dropped, f"longer_than_{limit - 1}_tokens": long})
    if not rows:
        raise DataError(f"{cfg.data.path}: no prompt leaves the policy room for an answer ({read.summary()}); shorten them")
    return read


def extended(folder: str, facts: Mapping[str, Any], prompts: Sequence[Conversation]) -> Samples:
    """The samples of an earlier run that this one goes on from.

    Errors: ConfigError unless they are the beginning of the samples that `facts` describes, naming the first difference.
    """
    earlier = read_samples(folder)
    for key in ("policy_identity", "sampling", "seed"):
        if earlier.facts.get(key) != facts[key]:
            what = "policy" if key == "policy_identity" else key
            was = earlier.facts.get("policy" if key == "policy_identity" else key)
            raise ConfigError(
                f"extends: {folder} holds samples of another {what} ({was!r}); only samples of the same policy, prompts, "
                "sampling and seed can be added to: leave `extends` out, or put the old value back"
            )
    if [(p.id, p.messages) for p in earlier.prompts] != [(p.id, p.messages) for p in prompts]:
        raise ConfigError(
            f"extends: {folder} holds samples for {len(earlier.prompts)} prompts, not for the {len(prompts)} of the data; "
            "only samples of the same prompts in the same order can be added to"
        )
    if earlier.num_generations >= int(facts["num_generations"]):
        raise ConfigError(
            f"extends: {folder} already holds {earlier.num_generations} answers to each prompt, and num_generations is "
            f"{facts['num_generations']}; raise it, or use that folder as it is"
        )
    return earlier


def _part(places: range, ranks: Ranks) -> range:
    """The consecutive share of this rank, so that gathering in rank order keeps the order of rows."""
    size = math.ceil(len(places) / ranks.world)
    return places[ranks.rank * size : (ranks.rank + 1) * size]


def _row(rollout: Rollout) -> dict[str, Any]:
    return {
        "text": rollout.conversation.messages[-1].text,
        "num_tokens": len(rollout.logp_sampler),
        "logp": math.fsum(rollout.logp_sampler),
        "ended": rollout.stop,
    }


def _copied(earlier: Samples, prompt: int, index: int) -> dict[str, Any]:
    return {
        "text": earlier.text(prompt, index),
        "num_tokens": int(earlier.num_tokens_PN[prompt, index]),
        "logp": float(earlier.logp_PN[prompt, index]),
        "ended": earlier.ended[prompt * earlier.num_generations + index].as_py(),
    }


def _report(rows: Sequence[Mapping[str, Any]], num_copied: int, done: int, ranks: Ranks) -> dict[str, float]:
    counts = {
        "rows": len(rows),
        "tokens": sum(row["num_tokens"] for row in rows),
        "cut": sum(row["ended"] == CUT for row in rows),
        "empty": sum(not row["text"].strip() for row in rows),
        "copied": num_copied,
    }
    total = ranks.sum(counts)
    return {
        "samples/done": float(done),
        "samples/length": total["tokens"] / total["rows"],
        "samples/eos_rate": 1 - total["cut"] / total["rows"],
        "samples/empty": float(total["empty"]),
        "samples/copied": float(total["copied"]),
        "num_tokens": float(total["tokens"]),
    }
