"""What the cells of an over-optimisation study hold: gold and proxy of best-of-n for every rule, and of PPO round by round."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from jaxtyping import Float
from torch import Tensor

from rewarden.collect.choice import Proxy, proxy_of
from rewarden.collect.sample_store import CUT, Scores, answered, read_samples, read_scores
from rewarden.data.sources import Data, load_prompts
from rewarden.errors import ConfigError, DataError
from rewarden.evals.best_of_n import expected
from rewarden.maths import correlation, measured_best_of_n_kl, selection_weights
from rewarden.runtime.samples import Samples as Transcripts
from rewarden.scoring import build_scorer
from rewarden.scoring.aggregate import Aggregate, comparable
from rewarden.spec import nearest

ONE = "one member"
"""The rule that takes one member alone: the average over the members of a family, each choosing by itself."""

CENTERED = Aggregate(rule="mean", center="group")


@dataclass(frozen=True, slots=True, kw_only=True)
class CellPlace:
    """A cell of the grid: its keys, and the folder of each of its stages."""

    keys: Mapping[str, Any]
    stages: Mapping[str, Path]

    def stage(self, name: str) -> Path:
        """Errors: ConfigError when the cell has no such stage."""
        if name not in self.stages:
            raise ConfigError(f"cells: the cell {dict(self.keys)} has no stage {name!r}; {nearest(name, self.stages)}")
        return self.stages[name]


def read_cells(path: str) -> list[CellPlace]:
    """The cells of a grid, as `cells.json` lists them.

    Errors: DataError for what is no such file.
    """
    try:
        rows = json.loads(Path(path).read_text(encoding="utf-8"))
        return [CellPlace(keys=r["keys"], stages={name: Path(at) for name, at in r["stages"].items()}) for r in rows]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path} is no cells.json of a grid ({error!r}); give ${{cells}} in a stage of `gather:`") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One rule in one cell: for every n and prompt, gold of what is chosen, its proxy score, and the measured KL."""

    gold_nP: Float[Tensor, "n P"]
    proxy_nP: Float[Tensor, "n P"]
    kl_nP: Float[Tensor, "n P"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Diversity:
    """How the members of a family differ in one cell, from scores centered per prompt and member.

    correlation: mean over pairs of members. error_correlation: the same with gold partialled out, so 1 means one shared error.
    spread: members' standard deviation around their mean, as a share of that of the mean. gold_member, gold_mean: correlation
    with centered gold of a member on average, and of the members' mean.
    """

    correlation: float
    error_correlation: float
    spread: float
    gold_member: float
    gold_mean: float
    num_members: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CellCurves:
    """Best-of-n of one cell: by (family, rule) the curve, by family its diversity; and what was left out."""

    keys: Mapping[str, Any]
    curves: Mapping[tuple[str, str], Curve]
    diversity: Mapping[str, Diversity]
    oracle: Curve
    num_prompts: int
    num_generations: int
    num_unscored: int


def best_of_n_curves(
    cell: CellPlace,
    *,
    samples: str,
    scores: str,
    gold: str,
    families: Mapping[str, str],
    aggregates: Mapping[str, Aggregate],
    ns: Sequence[int],
) -> CellCurves:
    """Read the stores of a cell and make every curve.

    Errors: DataError when stores do not belong together; ConfigError for an n above N, or a rule that the members do not allow.
    """
    drawn = read_samples(cell.stage(samples))
    if ns[-1] > drawn.num_generations:
        raise ConfigError(
            f"n is {ns[-1]} with {drawn.num_generations} answers to each prompt in {drawn.folder}; lower n, or draw more"
        )
    folder = cell.stage(scores)
    truth = proxy_of(read_scores(folder, gold, drawn), Aggregate())
    found = {name: read_scores(folder, scorer, drawn) for name, scorer in families.items()}
    scored_PN = truth.scored_PN
    for one in found.values():
        scored_PN = scored_PN & one.score_PNK.isfinite().all(dim=2)
    gold_PN = truth.score_PN
    curves: dict[tuple[str, str], Curve] = {}
    for name, one in found.items():
        alone = [_curve(_member(one, k), scored_PN, gold_PN, ns) for k in range(one.score_PNK.shape[2])]
        curves[name, ONE] = _average(alone)
        if len(alone) > 1:
            curves |= {
                (name, rule): _curve(proxy_of(one, _grouped(how)), scored_PN, gold_PN, ns) for rule, how in aggregates.items()
            }
    return CellCurves(
        keys=cell.keys,
        curves=curves,
        diversity={name: diversity(one.score_PNK, gold_PN, scored_PN) for name, one in found.items()},
        oracle=_curve(truth, scored_PN, gold_PN, ns),
        num_prompts=len(drawn.prompts),
        num_generations=drawn.num_generations,
        num_unscored=int((~scored_PN).sum()),
    )


def _grouped(aggregate: Aggregate) -> Aggregate:
    """Members are centered per prompt for every rule, unless the rule names another center."""
    return aggregate.model_copy(update={"center": "group"}) if aggregate.center == "auto" else aggregate


def _member(scores: Scores, member: int) -> Proxy:
    """One member alone, centered per prompt."""
    return proxy_of(replace(scores, score_PNK=scores.score_PNK[:, :, [member]], facts={}, reference_PK=None), CENTERED)


def _curve(proxy: Proxy, scored_PN: Tensor, gold_PN: Tensor, ns: Sequence[int]) -> Curve:
    """Expected gold and proxy of the chosen answer over all subsets, at every n; answers without a score are never chosen."""
    rows = []
    for n in ns:
        weight_PN = selection_weights(proxy.score_PN, scored_PN, n=n)
        kl_P = measured_best_of_n_kl(proxy.score_PN, scored_PN, n=n)
        rows.append((expected(weight_PN, gold_PN.double()), expected(weight_PN, proxy.score_PN.double()), kl_P.double()))
    gold, value, kl = (torch.stack(part) for part in zip(*rows, strict=True))
    return Curve(gold_nP=gold, proxy_nP=value, kl_nP=kl)


def _average(curves: Sequence[Curve]) -> Curve:
    return Curve(
        gold_nP=torch.stack([curve.gold_nP for curve in curves]).mean(0),
        proxy_nP=torch.stack([curve.proxy_nP for curve in curves]).mean(0),
        kl_nP=torch.stack([curve.kl_nP for curve in curves]).mean(0),
    )


def diversity(score_PNK: Float[Tensor, "P N K"], gold_PN: Float[Tensor, "P N"], scored_PN: Tensor) -> Diversity:
    """See `Diversity`; with one member its two correlations are 1 and its spread 0."""
    there = scored_PN.flatten()
    group = torch.arange(score_PNK.shape[0]).repeat_interleave(score_PNK.shape[1])[there]
    members = comparable(score_PNK.reshape(-1, score_PNK.shape[2]).double()[there], CENTERED, group_B=group)
    gold = comparable(gold_PN.reshape(-1, 1).double()[there], CENTERED, group_B=group)[:, 0]
    with_gold = [correlation(members[:, k], gold) for k in range(members.shape[1])]
    plain, partial = [], []
    for i in range(members.shape[1]):
        for j in range(i):
            plain.append(correlation(members[:, i], members[:, j]))
            scale = ((1 - with_gold[i] ** 2) * (1 - with_gold[j] ** 2)) ** 0.5
            partial.append((plain[-1] - with_gold[i] * with_gold[j]) / scale if scale > 0 else 1.0)
    mean = members.mean(1)
    return Diversity(
        correlation=sum(plain) / len(plain) if plain else 1.0,
        error_correlation=sum(partial) / len(partial) if partial else 1.0,
        spread=float(members.std(dim=1, correction=0).mean() / mean.std(correction=0).clamp(min=1e-12)),
        gold_member=sum(with_gold) / len(with_gold),
        gold_mean=correlation(mean, gold),
        num_members=members.shape[1],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRun:
    """PPO in one cell: at every measured round the KL, and for every prompt gold and the reward it was trained against."""

    keys: Mapping[str, Any]
    steps: tuple[int, ...]
    kl_S: Float[Tensor, " S"]
    gold_SP: Float[Tensor, "S P"]
    proxy_SP: Float[Tensor, "S P"]
    num_prompts: int


def policy_run(cell: CellPlace, stage: str, gold: Mapping[str, Any]) -> PolicyRun:
    """The evaluations that a PPO run kept as transcripts (`num_sample_generations` of them a round), scored by gold.

    Errors: DataError when the run kept no evaluation, or other prompts than those of its `eval_data`.
    """
    folder = cell.stage(stage)
    config = yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))
    if not config.get("eval_data"):
        raise DataError(f"{folder}: the run has no eval_data, so nothing was measured round by round; set it")
    prompts = {prompt.id: prompt for prompt in load_prompts(Data.model_validate(config["eval_data"])).rows}
    rows = [row for row in Transcripts(folder / "samples.parquet").read() if row["kind"] == "eval"]
    strange = next((row["id"] for row in rows if row["id"] not in prompts), None)
    if not rows or strange is not None:
        why = f"a transcript of {strange!r}, which is not in its eval_data" if rows else "no transcripts of evaluations"
        raise DataError(
            f"{folder}/samples.parquet holds {why}; run it anew with num_sample_generations at the number of prompts"
        )
    scorer = build_scorer(dict(gold), "gold")
    values = scorer.score([answered(prompts[row["id"]], row["response"], cut=row["stop"] == CUT) for row in rows])
    steps = sorted({int(row["step"]) for row in rows})
    ids = list(dict.fromkeys(row["id"] for row in rows))
    shape = (len(steps), len(ids))
    gold_SP, proxy_SP = torch.full(shape, torch.nan, dtype=torch.float64), torch.full(shape, torch.nan, dtype=torch.float64)
    place = {step: number for number, step in enumerate(steps)}, {name: number for number, name in enumerate(ids)}
    for row, value in zip(rows, values, strict=True):
        at = place[0][int(row["step"])], place[1][row["id"]]
        gold_SP[at] = value.value if value.status == "ok" else torch.nan
        proxy_SP[at] = row["score"] if row["status"] == "ok" else torch.nan
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    kl = {int(line["step"]): float(line["eval/kl_sequence"]) for line in lines if "eval/kl_sequence" in line}
    return PolicyRun(
        keys=cell.keys,
        steps=tuple(steps),
        kl_S=torch.tensor([kl.get(step, 0.0 if step == 0 else float("nan")) for step in steps], dtype=torch.float64),
        gold_SP=gold_SP,
        proxy_SP=proxy_SP,
        num_prompts=len(ids),
    )


def gold_config(cell: CellPlace, scores: str, gold: str) -> dict[str, Any]:
    """{kind: ...} of the gold scorer, as the store of scores remembers it."""
    config = read_scores(cell.stage(scores), gold).facts.get("scorer")
    if not isinstance(config, dict) or "kind" not in config:
        raise DataError(f"{cell.stage(scores)}: scores/{gold}.json does not say which scorer it is of; score anew")
    return dict(config)
