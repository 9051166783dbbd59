"""A report on scorers as judges of labeled pairs: right how often, sure with what right, led by length how far.

Every scorer reads the same pairs. A pair that one of them cannot score is left out for all, and counted. Rows for an ensemble
show each member, a member at random, every aggregate that is asked for, and the mean of the members' probabilities. What is
compared is paired: differences between rules, scorers and the longer-answer rule are over the same pairs.
"""

import gc
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator
from rich.console import Console

from rewarden.data.sources import Data, load_comparisons
from rewarden.errors import ConfigError
from rewarden.evals.preference_measure import Ruler
from rewarden.evals.preference_pairs import PairSet, labels_of, pair_set, splits_of
from rewarden.evals.preference_report import PreferenceReport
from rewarden.evals.preference_rules import ScorerFacts, check_aggregates, facts_of, report_data, with_drops
from rewarden.evals.preference_scores import PairScores, score_pairs, scored_by_all
from rewarden.runtime.disk import write_atomic
from rewarden.scoring import RewardModelScorer, build_scorer, parse_scorer
from rewarden.scoring.aggregate import Aggregate
from rewarden.scoring.registry import named_scorers
from rewarden.spec import Spec, nearest

INSIDE = "in_distribution"
"""What the data set that the scorers were trained on is called unless the config says otherwise."""

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class Preference(Spec):
    """How well scorers judge labeled pairs, alone and against one another."""

    data: dict[str, Data] = Field(min_length=1)
    """Held-out pairs by name; every name but that of `in_distribution` is a shift that the drop in accuracy is measured for."""
    scorers: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Scorers by name, each {kind: ...}."""
    registry: str | None = Field(None, min_length=1)
    """A registry (models.yaml) whose scorers are added under their own names; read when the stage runs."""
    entries: tuple[str, ...] = ()
    """Which of its entries; none named: all."""
    in_distribution: str | None = None
    """Name of the data set that the scorers were trained on. None: the only one, or the one called in_distribution."""
    aggregates: tuple[Aggregate, ...] = (
        Aggregate(),
        Aggregate(rule="worst_case"),
        Aggregate(rule="lower_bound", coef=1.0),
    )
    """Rules that every ensemble is measured by, beside its own; center: group takes the two sides of a pair."""
    by: tuple[str, ...] = ("source",)
    """Columns of the data by which accuracy is split; a data set without the column goes without the split."""
    bins: int = Field(5, ge=1)
    """Equal groups of pairs by gold gap, margin, score gap and disagreement."""
    calibration_bins: int = Field(5, ge=1)
    """Equal widths of confidence from .5 to 1, for reliability and calibration error."""
    confidence: float = Field(0.95, gt=0, lt=1)
    """Of all intervals."""
    seed: int = 0
    """Of the bootstrap over pairs."""

    @model_validator(mode="after")
    def _names_are_known(self) -> "Preference":
        if not self.scorers and self.registry is None:
            raise ConfigError("scorers is empty, and there is no registry; give a scorer by name, such as {mine: {kind: ...}}")
        if self.entries and self.registry is None:
            raise ConfigError("entries names scorers of a registry, and there is none; set registry")
        for field, names in (("data", self.data), ("scorers", self.scorers)):
            for name in names:
                if not NAME.fullmatch(name):
                    raise ConfigError(f"{field}: name {name!r} is no plain word; names are letters, digits, _ - and .")
        for name, raw in self.scorers.items():
            parse_scorer(raw, f"scorers.{name}")
        twice = {str(rule) for rule in self.aggregates if self.aggregates.count(rule) > 1}
        if twice:
            raise ConfigError(f"aggregates: {min(twice)} is there twice; name each rule once")
        self.inside()
        return self

    def inside(self) -> str:
        """The name of the data set that the scorers were trained on. Errors: ConfigError where that is not clear."""
        if self.in_distribution is None and len(self.data) == 1:
            return next(iter(self.data))
        name = self.in_distribution or INSIDE
        if name not in self.data:
            raise ConfigError(f"in_distribution: no data set is called {name!r}; {nearest(name, self.data)}")
        return name

    def run(self, folder: Path) -> dict[str, float]:
        """Write preference.json, preference.md and preference.svg; return the figures of every scorer by its own rule."""
        console = Console(soft_wrap=True, highlight=False, markup=False)
        report = report_pairs(self, console)
        for name, text in report.files().items():
            write_atomic(folder / name, text)
        return report.facts()


def report_pairs(cfg: Preference, console: Console) -> PreferenceReport:
    """Read the pairs, score them with one scorer after another, and measure."""
    every = {name: pair_set(name, load_comparisons(data)) for name, data in cfg.data.items()}
    scores, scorers, notes = score_all(cfg, every, console)
    keep = {name: scored_by_all(pairs, scores[name]) for name, pairs in every.items()}
    pairs = {name: found.kept(keep[name]) for name, found in every.items()}
    scores = {name: {scorer: found.kept(keep[name]) for scorer, found in by.items()} for name, by in scores.items()}
    labels = {name: labels_of(found) for name, found in pairs.items()}
    data = {}
    for name, found in pairs.items():
        ruler = Ruler(
            labels=labels[name],
            splits=splits_of(found, labels[name], by=cfg.by, bins=cfg.bins),
            confidence=cfg.confidence,
            bins=cfg.bins,
            calibration_bins=cfg.calibration_bins,
            seed=cfg.seed,
        )
        data[name] = report_data(scores[name], scorers, cfg.aggregates, ruler)
    inside = data[cfg.inside()]
    data = {
        name: report if name == cfg.inside() else with_drops(inside, report, confidence=cfg.confidence)
        for name, report in data.items()
    }
    return PreferenceReport(
        inside=cfg.inside(),
        confidence=cfg.confidence,
        scorers=scorers,
        pairs=pairs,
        labels=labels,
        scores=scores,
        total={name: len(found.rows) for name, found in every.items()},
        data=data,
        notes=tuple(notes),
    )


def score_all(
    cfg: Preference, pairs: Mapping[str, PairSet], console: Console
) -> tuple[dict[str, dict[str, PairScores]], dict[str, ScorerFacts], list[str]]:
    """Scores by data set and scorer, what is known of each scorer, and notes; one scorer is in memory at a time."""
    scores: dict[str, dict[str, PairScores]] = {name: {} for name in pairs}
    facts: dict[str, ScorerFacts] = {}
    notes: list[str] = []
    for name, raw in named_scorers(cfg.scorers, registry=cfg.registry, entries=cfg.entries).items():
        began = time.monotonic()
        scorer = build_scorer(raw, f"scorers.{name}")
        for place, found in pairs.items():
            scores[place][name] = score_pairs(name, scorer, found)
        facts[name] = facts_of(name, scorer, [scores[place][name] for place in pairs])
        notes += check_aggregates(facts[name], cfg.aggregates)
        texts = 2 * sum(len(found.rows) for found in pairs.values())
        console.print(f"{name}: {texts} texts, {facts[name].num_members} member(s), {time.monotonic() - began:.1f} s")
        if isinstance(scorer, RewardModelScorer):
            del scorer
            gc.collect()  # adapters refer back to their trunk: without this two models would be in memory
    return scores, facts, notes
