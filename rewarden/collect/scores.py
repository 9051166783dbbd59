"""What scorers say of many answers, kept so that nothing is scored twice: any choice among the answers can be made afterwards.

Scores are raw, one per member. They are computed step by step into a cache beside the samples, under a name made from the
samples, the scorer (its config and what it reads from disk) and the size of a step. A run that is stopped goes on from there,
and a run with one more scorer computes that one alone.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, model_validator

from rewarden.collect.sample_store import read_samples
from rewarden.collect.score_work import Work
from rewarden.errors import ConfigError
from rewarden.runtime.clock import phase
from rewarden.runtime.job import Job, Tick
from rewarden.runtime.ranks import Ranks
from rewarden.scoring import parse_scorer
from rewarden.scoring.registry import named_scorers
from rewarden.spec import Spec


class ScoreSamples(Spec):
    """Every answer of a sample store, scored by every scorer."""

    drive_defaults: ClassVar[Mapping[str, Any]] = {"save_steps": 1}
    """A checkpoint of this job is a number, so it keeps every step."""

    samples: str
    """Folder of a finished run of kind sample_n."""
    scorers: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Scorers by name, each {kind: ...}."""
    registry: str | None = None
    """A registry (models.yaml) whose scorers are added under their own names."""
    entries: tuple[str, ...] = ()
    """Which of its entries; none named: all."""
    score_cache_dir: str | None = None
    """Where finished steps are kept; null: the folder score_cache beside the samples."""
    rows_per_step: int = Field(4096, ge=1)
    """Answers scored and stored together, whole prompts; a stopped run loses at most these."""

    @model_validator(mode="after")
    def _scorers_are_known(self) -> "ScoreSamples":
        if not self.scorers and self.registry is None:
            raise ConfigError("scorers is empty; name at least one, such as scorers: {gold: {kind: gold}}, or give a registry")
        if self.entries and self.registry is None:
            raise ConfigError("entries names scorers of a registry, and there is none; set registry")
        for name, raw in self.scorers.items():
            check_name(name)
            parse_scorer(raw, f"scorers.{name}")
        return self

    def build(self, ranks: Ranks) -> Job:
        """Read the samples and find what has been scored before; see `build`."""
        return build(self, ranks)


def check_name(name: str) -> None:
    """Errors: ConfigError for a scorer's name that is no file name."""
    if not name or name.startswith(".") or name.endswith(".reference") or any(mark in name for mark in "/\\:\n"):
        raise ConfigError(f"scorers: {name!r} cannot be the name of a file; use letters, digits, _ and -")


def all_scorers(cfg: ScoreSamples) -> dict[str, dict[str, Any]]:
    """{kind: ...} of the scorers of the config and its registry, by name; registered ones replaced by what their entry says.

    Errors: ConfigError for a name that both have, an unknown entry, or an entry that leads nowhere.
    """
    raws = named_scorers(cfg.scorers, registry=cfg.registry, entries=cfg.entries)
    for name in raws:
        check_name(name)
    return raws


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """How many steps are done, over all scorers."""

    done: int = 0


def build(cfg: ScoreSamples, ranks: Ranks) -> Job:
    """Read the samples, look what has been scored before, and return the job that scores the rest."""
    samples = read_samples(cfg.samples)
    raws = all_scorers(cfg)
    root = Path(cfg.score_cache_dir) if cfg.score_cache_dir else Path(cfg.samples).resolve().parent / "score_cache"
    size = max(1, cfg.rows_per_step // samples.num_generations)
    works = [Work(name, raw, samples, size, root, ranks) for name, raw in raws.items()]
    per_scorer = math.ceil(len(samples.prompts) / size)
    known = ranks.on_main(lambda: [work.num_known(per_scorer) for work in works])
    notes = [f"{len(samples.prompts)} prompts with {samples.num_generations} answers each"] + [
        f"{work.name}: {count} of {per_scorer} steps were scored before"
        for work, count in zip(works, known, strict=True)
        if count
    ]

    def export(folder: Path) -> None:
        (folder / "scores").mkdir()
        for work in works:
            work.export(folder / "scores", per_scorer)

    return Job(
        title=f"scores by {', '.join(raws)}",
        steps=per_scorer * len(works),
        start=State(),
        train=lambda state: train(works, per_scorer, ranks, state),
        parts={},
        export=export,
        notes=notes,
        columns=("scores/rows", "scores/distinct", "scores/unscored"),
        dump_state=asdict,
        restore_state=lambda raw: State(**raw),
    )


def train(works: Sequence[Work], per_scorer: int, ranks: Ranks, state: State) -> Iterator[Tick]:
    """One tick per step of one scorer, one scorer after another; only the current one is in memory."""
    while state.done < per_scorer * len(works):
        which, step = divmod(state.done, per_scorer)
        with phase("score"):
            part, known = works[which].part(step)
        if step == per_scorer - 1:
            works[which].close()
        state = State(done=state.done + 1)
        report = {
            "scores/rows": float(part.score_pNK.shape[0] * part.score_pNK.shape[1]),
            "scores/distinct": float(part.num_distinct),
            "scores/unscored": float(sum(count for status, count in part.status.items() if status != "ok")),
            "scores/cached": float(known),
        }
        yield Tick(state=state, report=report)
