"""Over-optimisation measured against a known truth: gold and proxy as the answer is pushed further, by best-of-n and by PPO.

A grid makes the cells (seed, world, label noise, ...); this reads their stores. Cells that differ only in the seed are
repetitions of one setting. For every family of reward models and every rule that makes one score of its members: gold and proxy
at each n, peak, fall after the peak, and the paired difference to what one member alone gives.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, field_validator, model_validator

from rewarden.errors import ConfigError, DataError
from rewarden.evals.overoptimization_read import (
    ONE,
    CellCurves,
    CellPlace,
    Diversity,
    PolicyRun,
    best_of_n_curves,
    gold_config,
    policy_run,
    read_cells,
)
from rewarden.evals.overoptimization_stats import Effect, Settings, effect, peak, rise_and_fall
from rewarden.evals.overoptimization_text import figure, page
from rewarden.evals.overoptimization_types import PolicyResult, RuleResult, SettingResult, Study
from rewarden.maths import best_of_n_kl
from rewarden.runtime.disk import write_atomic
from rewarden.scoring.aggregate import Aggregate
from rewarden.spec import Spec

RULES = {
    "mean": Aggregate(rule="mean"),
    "median": Aggregate(rule="median"),
    "worst case": Aggregate(rule="worst_case"),
    "mean - std": Aggregate(rule="lower_bound", coef=1.0),
    "mean - 2 std": Aggregate(rule="lower_bound", coef=2.0),
    "mean - var": Aggregate(rule="variance_penalty", coef=1.0),
    "soft worst case": Aggregate(rule="soft_worst_case", temperature=0.2),
}
"""The rules of a study that names none."""


class Overoptimization(Spec):
    """Gold and proxy against the strength of optimisation, over the cells of a grid."""

    cells: str
    """`${cells}` of a grid: the file that lists its cells."""
    samples: str = "samples"
    """Stage of kind sample_n."""
    scores: str = "scores"
    """Stage of kind score_samples."""
    gold: str = "gold"
    """Its scorer that is the truth."""
    families: dict[str, str] = Field(min_length=1)
    """Families of reward models: name, and scorer of the scores stage. Members of each are also measured one by one."""
    single: str
    """The family whose members, one by one, are the plain single reward models that ensembles are compared with."""
    aggregates: dict[str, Aggregate] = Field(default_factory=lambda: dict(RULES), min_length=1)
    """Rules by name. Members are centered per prompt unless a rule names another center."""
    policies: dict[str, str] = Field(default_factory=dict)
    """PPO runs: name, and stage. Cells without the stage are left out."""
    single_policy: str | None = None
    """The one among them that used a single reward model; the others are compared with it."""
    n: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    """How many answers are chosen from, in rising order from 1."""
    compare_at: tuple[int, ...] = (16, 128)
    """Where differences are stated; named beforehand, so that no n is picked for its result."""
    seed_key: str = "seed"
    """Key of the grid that only repeats a setting."""
    confidence: float = Field(0.95, gt=0, lt=1)
    """Of the intervals."""
    resamples: int = Field(2000, ge=1)
    """Of the bootstrap over prompts."""
    seed: int = 0
    """Of the bootstrap."""

    @field_validator("n")
    @classmethod
    def _rising(cls, n: tuple[int, ...]) -> tuple[int, ...]:
        if list(n) != sorted(set(n)) or n[:1] != (1,) or len(n) < 2:
            raise ValueError("name 1 and larger numbers in rising order")
        return n

    @model_validator(mode="after")
    def _names_are_there(self) -> "Overoptimization":
        if self.single not in self.families:
            raise ConfigError(f"single is {self.single!r}, which is no family; name one of {', '.join(self.families)}")
        if self.single_policy is not None and self.single_policy not in self.policies:
            raise ConfigError(
                f"single_policy is {self.single_policy!r}; name one of policies ({', '.join(self.policies) or 'none'})"
            )
        if strange := [n for n in self.compare_at if n not in self.n]:
            raise ConfigError(f"compare_at has {strange[0]}, which n does not; use some of {', '.join(map(str, self.n))}")
        if ONE in self.aggregates:
            raise ConfigError(f"aggregates: {ONE!r} is what members give one by one; choose another name")
        return self

    def run(self, folder: Path) -> dict[str, float]:
        """Write overoptimization.json, overoptimization.md and overoptimization.svg; return the main effects."""
        study = measure(self, read_cells(self.cells))
        write_atomic(folder / "overoptimization.json", json.dumps(_finite(asdict(study)), indent=1, ensure_ascii=False))
        write_atomic(folder / "overoptimization.md", page(study))
        write_atomic(folder / "overoptimization.svg", figure(study))
        return figures(study)


def measure(cfg: Overoptimization, cells: Sequence[CellPlace]) -> Study:
    """Read every cell and work out every effect."""
    groups: dict[str, list[CellPlace]] = {}
    for cell in cells:
        keys = {key: value for key, value in cell.keys.items() if key != cfg.seed_key}
        groups.setdefault(json.dumps(keys, sort_keys=True), []).append(cell)
    if not groups:
        raise DataError(f"{cfg.cells} lists no cell")
    return Study(
        settings=tuple(setting(cfg, group) for group in groups.values()),
        n=cfg.n,
        kl_bound=tuple(best_of_n_kl(n) for n in cfg.n),
        compare_at=cfg.compare_at,
        single=cfg.single,
        single_policy=cfg.single_policy,
        confidence=cfg.confidence,
    )


def setting(cfg: Overoptimization, cells: Sequence[CellPlace]) -> SettingResult:
    """The cells of one setting, together."""
    how = Settings(confidence=cfg.confidence, resamples=cfg.resamples, seed=cfg.seed)
    read = [
        best_of_n_curves(
            cell,
            samples=cfg.samples,
            scores=cfg.scores,
            gold=cfg.gold,
            families=cfg.families,
            aggregates=cfg.aggregates,
            ns=cfg.n,
        )
        for cell in cells
    ]
    names = list(read[0].curves)
    first = read[0]
    return SettingResult(
        keys={key: value for key, value in cells[0].keys.items() if key != cfg.seed_key},
        seeds=tuple(cell.keys.get(cfg.seed_key) for cell in cells),
        rules=tuple(rule_result(cfg, family, rule, read, how) for family, rule in names),
        policies=tuple(policy_results(cfg, cells, how)),
        diversity={family: _mean_diversity([one.diversity[family] for one in read]) for family in cfg.families},
        oracle=tuple(effect([one.oracle.gold_nP[i] for one in read], how) for i in range(len(cfg.n))),
        num_prompts=first.num_prompts,
        num_generations=first.num_generations,
        num_unscored=sum(one.num_unscored for one in read),
    )


def rule_result(cfg: Overoptimization, family: str, rule: str, read: Sequence[CellCurves], how: Settings) -> RuleResult:
    """Every effect of one family and rule."""
    curves = [one.curves[family, rule] for one in read]
    gold = [curve.gold_nP for curve in curves]
    rises, falls = rise_and_fall(gold)

    def versus(other: tuple[str, str]) -> dict[int, Effect]:
        if other == (family, rule):
            return {}
        return {
            n: effect([one.curves[family, rule].gold_nP[i] - one.curves[other].gold_nP[i] for one in read], how)
            for i, n in enumerate(cfg.n)
            if n in cfg.compare_at
        }

    return RuleResult(
        family=family,
        rule=rule,
        gold=tuple(effect([values[i] for values in gold], how) for i in range(len(cfg.n))),
        proxy=tuple(effect([curve.proxy_nP[i] for curve in curves], how) for i in range(len(cfg.n))),
        kl=tuple(float(torch.stack([curve.kl_nP[i].nanmean() for curve in curves]).mean()) for i in range(len(cfg.n))),
        gain=tuple(effect([values[i] - values[0] for values in gold], how) for i in range(len(cfg.n))),
        proxy_gain=tuple(effect([c.proxy_nP[i] - c.proxy_nP[0] for c in curves], how) for i in range(len(cfg.n))),
        peak_n=cfg.n[peak(gold)],
        rise=effect(rises, how),
        fall=effect(falls, how),
        versus_member=versus((family, ONE)),
        versus_single=versus((cfg.single, ONE)),
    )


def policy_results(cfg: Overoptimization, cells: Sequence[CellPlace], how: Settings) -> list[PolicyResult]:
    """PPO, for each reward that some cell of the setting was trained against."""
    runs: dict[str, list[PolicyRun]] = {}
    for name, stage in cfg.policies.items():
        there = [cell for cell in cells if stage in cell.stages]
        if there:
            runs[name] = [policy_run(cell, stage, gold_config(cell, cfg.scores, cfg.gold)) for cell in there]
    return [_policy_result(name, found, runs.get(cfg.single_policy or ""), how, cfg.seed_key) for name, found in runs.items()]


def _policy_result(
    name: str, runs: Sequence[PolicyRun], single: Sequence[PolicyRun] | None, how: Settings, seed_key: str
) -> PolicyResult:
    steps = runs[0].steps
    if any(run.steps != steps for run in runs):
        raise DataError(
            f"policies.{name}: its runs were measured at different rounds; give all the same max_steps and eval_steps"
        )
    gold = [run.gold_SP for run in runs]
    rises, falls = rise_and_fall(gold)
    versus = None
    if single is not None and single is not runs:
        by_seed = {json.dumps(run.keys.get(seed_key)): run for run in single}
        pairs = [(run, by_seed[key]) for run in runs if (key := json.dumps(run.keys.get(seed_key))) in by_seed]
        versus = effect([run.gold_SP[-1] - other.gold_SP[-1] for run, other in pairs], how)
    return PolicyResult(
        name=name,
        steps=steps,
        kl=tuple(torch.stack([run.kl_S for run in runs]).mean(0).tolist()),
        gold=tuple(effect([values[i] for values in gold], how) for i in range(len(steps))),
        gain=tuple(effect([values[i] - values[0] for values in gold], how) for i in range(len(steps))),
        proxy_gain=tuple(effect([run.proxy_SP[i] - run.proxy_SP[0] for run in runs], how) for i in range(len(steps))),
        peak_step=steps[peak(gold)],
        rise=effect(rises, how),
        fall=effect(falls, how),
        versus_single=versus,
    )


def _mean_diversity(found: Sequence[Diversity]) -> dict[str, float]:
    rows = [asdict(one) for one in found]
    return {key: sum(row[key] for row in rows) / len(rows) for key in rows[0]}


def _finite(value: Any) -> Any:
    """NaN is not JSON: what is not there is null."""
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and value != value else value


def figures(study: Study) -> dict[str, float]:
    """SETTING/FAMILY/RULE/..., for facts.json."""
    out: dict[str, float] = {}
    for one in study.settings:
        for rule in one.rules:
            at = f"{one.name}/{rule.family}/{rule.rule}"
            out |= {f"{at}/peak_n": float(rule.peak_n), f"{at}/rise": rule.rise.mean, f"{at}/fall": rule.fall.mean}
            out |= {f"{at}/versus_member/n={n}": found.mean for n, found in rule.versus_member.items()}
        for policy in one.policies:
            out |= {f"{one.name}/ppo/{policy.name}/fall": policy.fall.mean}
    return {name: value for name, value in out.items() if value == value}
