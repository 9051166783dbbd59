"""Preference strength by voting: how much M reward models together prefer the chosen side of each pair.

    d_m = r_m(chosen) - r_m(rejected)      mu = mean of d_m      sigma = population standard deviation of d_m

The columns have the names of fnlp/hh-rlhf-strength-cleaned. Models that were trained on a pair have seen its label, so that
their vote on it is no second opinion: with `folds` each pair is scored only by models that were trained on the other folds.
Wang et al. 2024 (arXiv:2401.06080) train 10 models on the same pairs, and vote on those.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from pydantic import Field, model_validator
from rich.console import Console
from torch import Tensor

from rewarden.collect.strata import CHOSEN, MEAN, REJECTED, STD, Votes, strata_table, text_of
from rewarden.collect.unseen import check_unseen
from rewarden.data.sources import Data, load_comparisons
from rewarden.data.split import fold_of
from rewarden.data.write import comparison_row, write_jsonl
from rewarden.errors import ConfigError, DataError, ScoreError
from rewarden.maths import preference_strength
from rewarden.protocols import Scorer
from rewarden.scoring import Aggregate, LearnedReward, parse_scorer
from rewarden.scoring.answer import refuse_not_finite, scores_of
from rewarden.scoring.registry import named_scorers
from rewarden.spec import Spec
from rewarden.types import Comparison, Conversation, Score

COLUMNS = (MEAN, STD, CHOSEN, REJECTED)
"""What is written beside each pair."""

Raw = dict[str, Any]


class Vote(Spec):
    """Pairs with the preference strength that several reward models give them."""

    data: Data
    """The pairs; with folds, all of them."""
    scorers: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Who votes, by name; every member of an ensemble has a vote."""
    registry: str | None = None
    """A models.yaml whose entries vote too."""
    entries: tuple[str, ...] = ()
    """Entries of the registry; none named: all."""
    folds: int = Field(0, ge=0)
    """Folds that the models were trained by, as `data.folds` of their recipes, with the `split_seed` of `data`. 0: none."""
    unseen: dict[str, int] = Field(default_factory=dict)
    """With folds: the fold that each scorer was not trained on, from 0; it votes on the pairs of that fold alone."""
    strata: int = Field(10, ge=1)
    """Groups of equal size, by mu, in the report."""

    @model_validator(mode="after")
    def _somebody_votes(self) -> "Vote":
        if not self.scorers and self.registry is None:
            raise ConfigError("scorers is empty, and there is no registry; name who votes, such as {mine: {kind: ...}}")
        if self.entries and self.registry is None:
            raise ConfigError("entries names scorers of a registry, and there is none; set registry")
        return self

    def run(self, folder: Path) -> dict[str, float]:
        """Write pairs.jsonl, vote.json and vote.md; returns counts and shares.

        Errors: ConfigError for folds that do not fit the scorers, fewer than two votes, or an unequal number of them; DataError
        when no pair is left.
        """
        raws = named_scorers(self.scorers, registry=self.registry, entries=self.entries)
        checked = self._check_folds(raws)
        loaded = load_comparisons(self.data)
        ballots = [self._fold_ballot(loaded.rows, raws, fold) for fold in range(self.folds)]
        ballot = joined(ballots, len(loaded.rows)) if ballots else counted(loaded.rows, range(len(loaded.rows)), raws)
        if not ballot.places:
            raise DataError(f"{self.data.path}: no pair has a score of every voter ({_reasons(ballot.failed)})")
        rows = [loaded.rows[place] for place in ballot.places]
        mu_B, sigma_B = preference_strength(ballot.score_B2M[:, 0], ballot.score_B2M[:, 1])
        write_jsonl(folder / "pairs.jsonl", _rows(rows, ballot.score_B2M, mu_B, sigma_B))
        votes = Votes(difference_BM=ballot.score_B2M[:, 0] - ballot.score_B2M[:, 1], mu_B=mu_B, sigma_B=sigma_B, rows=rows)
        table = strata_table(votes, groups=self.strata)
        replaced = sum(any(name in row.meta for name in COLUMNS) for row in rows)
        facts = votes.facts() | {"vote/replaced_columns": float(replaced), "vote/folds": float(self.folds)}
        facts["vote/checked_scorers"] = float(checked)
        facts |= {f"vote/without_score/{status}": float(count) for status, count in sorted(ballot.failed.items())}
        about = {**facts, "read": loaded.summary(), "scorers": list(raws), "unseen": self.unseen, "strata": table}
        (folder / "vote.json").write_text(json.dumps(about, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        failed = _reasons(ballot.failed)
        text = text_of(votes, table, scorers=list(raws), folds=self.folds, read=loaded.summary(), failed=failed)
        (folder / "vote.md").write_text(text, encoding="utf-8")
        Console(highlight=False, markup=False).print(text.rstrip())
        return facts

    def _check_folds(self, raws: Mapping[str, Raw]) -> int:
        """How many scorers are known by their own recipes not to have seen their fold."""
        if not self.folds and self.unseen:
            raise ConfigError("unseen is set and folds is 0; set folds to the number that the scorers were trained by")
        if not self.folds:
            return 0
        if self.folds == 1:
            raise ConfigError("folds is 1, and a model that has not seen the one fold has seen nothing; use 2 or more, or 0")
        if self.data.part != "all" or self.data.folds or self.data.holdout_prompts:
            raise ConfigError("data names a part or folds of its own; with folds a vote takes all pairs, each in its fold")
        if other := sorted(set(self.unseen) ^ set(raws)):
            raise ConfigError(
                f"unseen: {', '.join(other)} is in one of scorers and unseen alone; with folds, name for each scorer the fold "
                "that it was not trained on"
            )
        if beyond := sorted({fold for fold in self.unseen.values() if not 0 <= fold < self.folds}):
            raise ConfigError(f"unseen: fold {beyond[0]} with folds {self.folds}; folds are 0 to {self.folds - 1}")
        if empty := sorted(set(range(self.folds)) - set(self.unseen.values())):
            raise ConfigError(
                f"unseen: no scorer for fold {', '.join(map(str, empty))}, whose pairs nobody could judge; train one with "
                f"data: {{folds: {self.folds}, fold: {empty[0]}, part: train}}"
            )
        return sum(
            check_unseen(name, raw, fold=self.unseen[name], folds=self.folds, data=self.data) for name, raw in raws.items()
        )

    def _fold_ballot(self, rows: Sequence[Comparison], raws: Mapping[str, Raw], fold: int) -> "Ballot":
        seed = self.data.split_seed
        places = [place for place, row in enumerate(rows) if fold_of(row.prompt, folds=self.folds, seed=seed) == fold]
        return counted(rows, places, {name: raw for name, raw in raws.items() if self.unseen[name] == fold})


@dataclass(frozen=True, slots=True, kw_only=True)
class Ballot:
    """Scores (chosen, rejected) of the pairs at `places`, which every voter could score. failed: the others, by status."""

    places: tuple[int, ...]
    score_B2M: Float[Tensor, "B 2 M"]
    failed: Mapping[str, int]


def counted(rows: Sequence[Comparison], places: Sequence[int], raws: Mapping[str, Raw]) -> Ballot:
    """Let every member of every scorer score both sides of the pairs at `places`; one scorer is in memory at a time.

    Errors: ConfigError for fewer than two members in all; ScoreError for a score that is not finite.
    """
    texts = [
        Conversation(id=rows[place].id, messages=(*rows[place].prompt, *side), meta=rows[place].meta)
        for place in places
        for side in (rows[place].chosen, rows[place].rejected)
    ]
    if not texts:
        return Ballot(places=(), score_B2M=torch.zeros(0, 2, 0, dtype=torch.float64), failed={})
    columns = []
    status = ["ok"] * len(places)
    for name, raw in raws.items():
        scores = scores_of(voter(name, raw), texts, f"scorer {name!r}")
        for pair in range(len(places)):
            found = next((s.status for s in scores[2 * pair : 2 * pair + 2] if s.status != "ok"), "ok")
            status[pair] = found if status[pair] == "ok" else status[pair]
        columns.append(_members(name, scores, texts))
    score_B2M = torch.cat(columns, dim=1).view(len(places), 2, -1)
    keep_B = torch.tensor([one == "ok" for one in status])
    if bool(keep_B.any()) and score_B2M.shape[2] < 2:
        raise ConfigError(
            f"scorers: {', '.join(raws)} has one vote in all; a vote needs two or more models, such as an ensemble's members"
        )
    kept = tuple(place for place, one in zip(places, status, strict=True) if one == "ok")
    return Ballot(places=kept, score_B2M=score_B2M[keep_B], failed=Counter(one for one in status if one != "ok"))


def voter(name: str, raw: Raw) -> Scorer:
    """A scorer whose members are asked; how it would make one score of them plays no part."""
    spec = parse_scorer(raw, f"scorers.{name}")
    return (spec.model_copy(update={"aggregate": Aggregate()}) if isinstance(spec, LearnedReward) else spec).build()


def joined(ballots: Sequence[Ballot], num_rows: int) -> Ballot:
    """The ballots of all folds as one, in the order of the pairs.

    Errors: ConfigError where one fold has more votes than another: their spreads could not be compared.
    """
    sizes = {fold: ballot.score_B2M.shape[2] for fold, ballot in enumerate(ballots) if ballot.places}
    if len(set(sizes.values())) > 1:
        words = ", ".join(f"{size} in fold {fold}" for fold, size in sizes.items())
        raise ConfigError(f"unseen: {words} votes; every pair needs as many: train as many members without each fold")
    failed: Counter[str] = Counter()
    for ballot in ballots:
        failed.update(ballot.failed)
    order = {place: (fold, row) for fold, ballot in enumerate(ballots) for row, place in enumerate(ballot.places)}
    places = tuple(place for place in range(num_rows) if place in order)
    rows = [ballots[order[place][0]].score_B2M[order[place][1]] for place in places]
    score_B2M = torch.stack(rows) if rows else torch.zeros(0, 2, 0, dtype=torch.float64)
    return Ballot(places=places, score_B2M=score_B2M, failed=failed)


def _members(name: str, scores: Sequence[Score], texts: Sequence[Conversation]) -> Float[Tensor, "N M"]:
    """The members' scores of each text, or the one score of a scorer without members; NaN where there is none."""
    lists = [list(score.members or (score.value,)) if score.status == "ok" else [] for score in scores]
    sizes = {len(members) for members in lists if members} or {1}
    if len(sizes) > 1:
        raise ScoreError(f"scorer {name!r} gave {sorted(sizes)} members for different texts; it must give as many for each")
    for members, text in zip(lists, texts, strict=True):
        refuse_not_finite(members, text, f"scorer {name!r}")
    blank = [math.nan] * sizes.pop()
    return torch.tensor([members or blank for members in lists], dtype=torch.float64)


def _rows(rows: Sequence[Comparison], score_B2M: Tensor, mu_B: Tensor, sigma_B: Tensor) -> list[dict[str, Any]]:
    return [
        {
            **{key: value for key, value in comparison_row(row).items() if key not in COLUMNS},
            MEAN: mu,
            STD: sigma,
            CHOSEN: members[0],
            REJECTED: members[1],
        }
        for row, members, mu, sigma in zip(rows, score_B2M.tolist(), mu_B.tolist(), sigma_B.tolist(), strict=True)
    ]


def _reasons(failed: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {status}" for status, count in sorted(failed.items())) or "none"
