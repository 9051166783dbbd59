"""A reward report as files: everything in JSON, a page to read, and a picture."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rewarden.evals.preference_figure import figure
from rewarden.evals.preference_pairs import Labels, PairSet
from rewarden.evals.preference_rules import DataReport, ScorerFacts, plain
from rewarden.evals.preference_scores import PairScores, left_out
from rewarden.evals.preference_text import page

FEW_PAIRS = 100
"""Below this many pairs the interval of an accuracy is wider than +-.10, which is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceReport:
    """Everything that was measured, by name of data set and scorer."""

    inside: str
    """The data set that the scorers were trained on."""
    confidence: float
    scorers: Mapping[str, ScorerFacts]
    pairs: Mapping[str, PairSet]
    """Those that every scorer scored; labels and scores are of them."""
    labels: Mapping[str, Labels]
    scores: Mapping[str, Mapping[str, PairScores]]
    total: Mapping[str, int]
    """Pairs of each data set before those without a score were left out."""
    data: Mapping[str, DataReport]
    notes: tuple[str, ...]

    def files(self) -> dict[str, str]:
        """The content of every file by name."""
        text = page(
            self.data,
            {name: self.about(name) for name in self.data},
            inside=self.inside,
            confidence=self.confidence,
            figure="preference.svg",
            notes=self.notes,
        )
        return {
            "preference.json": json.dumps(self.as_json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n",
            "preference.md": text,
            "preference.svg": figure(self.data, self.labels, self.scores),
        }

    def about(self, name: str) -> list[str]:
        """What became of the pairs of a data set, line by line."""
        labels, pairs, scores = self.labels[name], self.pairs[name], self.scores[name]
        num_pairs, decided = len(pairs.rows), int(labels.decided_B.sum())
        lines = [f"Read: {pairs.read}.", "", f"{decided} pairs with a preferred side, {num_pairs - decided} labeled as ties."]
        if lost := self.total[name] - num_pairs:
            lines += ["", f"{lost} of {self.total[name]} pairs left out for all, without a score ({left_out(scores)})."]
        if not decided:
            lines += ["", "**Every label is a tie: there is no side to be right about, and no accuracy.**"]
        elif decided < FEW_PAIRS:
            lines += ["", f"**{decided} pairs are few: below {FEW_PAIRS} the intervals are too wide to tell scorers apart.**"]
        if labels.num_prompts < num_pairs:
            lines += ["", f"{num_pairs} pairs of {labels.num_prompts} prompts; the intervals take pairs as independent."]
        return lines

    def as_json(self) -> dict[str, Any]:
        """Everything, single members included; what could not be computed is null."""
        return {
            "confidence": self.confidence,
            "in_distribution": self.inside,
            "notes": list(self.notes),
            "scorers": {
                name: {
                    "num_members": facts.num_members,
                    "aggregate": facts.aggregate,
                    "calibrated": facts.calibration is not None,
                }
                for name, facts in self.scorers.items()
            },
            "data": {name: {**self._counts(name), **plain(report)} for name, report in self.data.items()},
        }

    def _counts(self, name: str) -> dict[str, Any]:
        num_pairs, labels = len(self.pairs[name].rows), self.labels[name]
        return {
            "read": self.pairs[name].read,
            "num_pairs": num_pairs,
            "num_tied_labels": num_pairs - int(labels.decided_B.sum()),
            "num_prompts": labels.num_prompts,
            "num_without_score": self.total[name] - num_pairs,
            "without_score": {scorer: dict(found.failed) for scorer, found in self.scores[name].items() if found.failed},
        }

    def facts(self) -> dict[str, float]:
        """A few numbers for facts.json: "DATA/SCORER/accuracy" and its interval, and log loss, by the scorer's own rule."""
        found: dict[str, float] = {}
        for name, report in self.data.items():
            found[f"{name}/num_pairs"] = float(len(self.pairs[name].rows))
            for row in report.rows:
                if row.own:
                    numbers = {
                        "accuracy": row.accuracy.value,
                        "accuracy_low": row.accuracy.low,
                        "accuracy_high": row.accuracy.high,
                        "log_loss": row.log_loss,
                    }
                    found |= {f"{name}/{row.scorer}/{key}": value for key, value in numbers.items() if value is not None}
        return found
