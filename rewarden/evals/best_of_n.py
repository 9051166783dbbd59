"""Best-of-n by any scorer and any rule, from answers that were sampled and scored once: what it is worth, how far it goes.

For each n two figures: the mean over all subsets of n of the N answers (unbiased, and without the noise of one subset), and the
first n answers as they came. Gold and other judges never choose, they only measure. Nothing is sampled or scored here.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from jaxtyping import Float
from pydantic import Field, field_validator
from torch import Tensor

from rewarden.collect.choice import Choice, Proxy, check_n, check_some_scored, proxy_of
from rewarden.collect.sample_store import Samples, read_samples, read_scores, score_names
from rewarden.errors import ConfigError, DataError
from rewarden.evals.alpaca_eval import ModelOutput, write_outputs
from rewarden.evals.best_of_n_text import figure, page
from rewarden.evals.best_of_n_types import Curve, Measure, PointAt, Report
from rewarden.evals.winrate import FEW_PROMPTS
from rewarden.maths import best_of_n_kl, bootstrap_interval, first_best, measured_best_of_n_kl, selection_weights
from rewarden.runtime.disk import write_atomic
from rewarden.runtime.seed import generator
from rewarden.spec import Spec
from rewarden.types import Conversation

OWN = ("score", "tokens", "characters", "cut", "empty")
"""Measures that are always taken: the chooser's own score, the answer's length, whether it has no end or says nothing."""


class BestOfN(Spec):
    """Curves over n for every way of choosing, with intervals over prompts."""

    samples: str
    """Folder of a finished run of kind sample_n."""
    scores: str
    """Folder of a finished run of kind score_samples, of these samples."""
    choose: dict[str, Choice] = Field(default_factory=dict)
    """Ways of choosing by name, each {scorer: NAME, aggregate: {...}}; without any: each scorer but the judges."""
    judges: tuple[str, ...] = ()
    """Scorers that measure what was chosen, such as gold."""
    n: tuple[int, ...] = ()
    """How many answers are looked at; none named: 1, 2, 4, ... and all."""
    outputs: tuple[int, ...] = ()
    """For these n the chosen answers (of the first n) are written as AlpacaEval's model outputs, one file for each way."""
    generator: str = "best_of_n"
    """What the outputs call the model; the way of choosing and n are added."""
    confidence: float = Field(0.95, gt=0, lt=1)
    """Of the intervals."""
    resamples: int = Field(2000, ge=1)
    """Of the bootstrap over prompts."""
    seed: int = 0
    """Of the bootstrap."""

    @field_validator("judges")
    @classmethod
    def _judges_are_no_measures(cls, judges: tuple[str, ...]) -> tuple[str, ...]:
        if taken := sorted({name for name in judges if name in OWN or judges.count(name) > 1}):
            raise ConfigError(f"judges: {taken[0]!r} is named twice, or is a measure that is always taken ({', '.join(OWN)})")
        return judges

    @field_validator("choose")
    @classmethod
    def _names_are_names(cls, choose: dict[str, Choice]) -> dict[str, Choice]:
        for name in choose:
            if not name or any(mark in name for mark in "/\\\n|") or name.startswith("."):
                raise ConfigError(f"choose: {name!r} cannot be the name of a file and a column; use letters, digits, _ and -")
        return choose

    def run(self, folder: Path) -> dict[str, float]:
        """Write best_of_n.json, best_of_n.md, best_of_n.svg and outputs/; return the figures by name."""
        samples = read_samples(self.samples)
        for key, values in (("n", self.n), ("outputs", self.outputs)):
            for n in values:
                check_n(n, samples, key)
        proxies = proxies_of(self, samples)
        judges = {name: proxy_of(read_scores(self.scores, name, samples)) for name in self.judges}
        ns = sorted(set(self.n)) or default_ns(samples.num_generations)
        curves = [measured(self, name, proxy, judges, samples, ns) for name, proxy in proxies.items()]
        report = Report(
            num_prompts=len(samples.prompts),
            num_generations=samples.num_generations,
            policy=str(samples.facts.get("policy")),
            confidence=self.confidence,
            judges=tuple(self.judges),
            curves=tuple(curves),
            warnings=tuple(warnings_of(curves, samples)),
        )
        write_atomic(folder / "best_of_n.json", json.dumps(asdict(report), indent=2, ensure_ascii=False))
        write_atomic(folder / "best_of_n.md", page(report))
        write_atomic(folder / "best_of_n.svg", figure(report))
        skipped = write_chosen(self, folder / "outputs", proxies, samples)
        return figures(report) | skipped


def default_ns(num_generations: int) -> list[int]:
    """1, 2, 4, ... and N."""
    powers = [2**k for k in range(num_generations.bit_length()) if 2**k <= num_generations]
    return sorted({*powers, num_generations})


def proxies_of(cfg: BestOfN, samples: Samples) -> dict[str, Proxy]:
    """The score of every answer for every way of choosing.

    Errors: DataError for scores of other samples, an unknown scorer, or a scorer without any score.
    """
    choose = cfg.choose or {name: Choice(scorer=name) for name in score_names(cfg.scores) if name not in cfg.judges}
    if not choose:
        raise DataError(f"{cfg.scores} holds no scorer that could choose (judges: {', '.join(cfg.judges) or 'none'}); name one")
    proxies = {}
    for name, choice in choose.items():
        scores = read_scores(cfg.scores, choice.scorer, samples)
        proxies[name] = proxy_of(scores, choice.aggregate)
        check_some_scored(proxies[name], scores)
    return proxies


def measured(cfg: BestOfN, name: str, proxy: Proxy, judges: Mapping[str, Proxy], samples: Samples, ns: Sequence[int]) -> Curve:
    """One way of choosing at every n."""
    values: dict[str, Tensor] = {
        "score": proxy.score_PN,
        **{judge: found.score_PN for judge, found in judges.items()},
        "tokens": samples.num_tokens_PN.double(),
        "characters": samples.characters_PN().double(),
        "cut": samples.cut_PN().double(),
        "empty": samples.empty_PN().double(),
    }
    base = selection_weights(proxy.score_PN, proxy.scored_PN, n=1)
    start = {measure: expected(base, value_PN) for measure, value_PN in values.items()}
    points = []
    for n in ns:
        weight_PN = selection_weights(proxy.score_PN, proxy.scored_PN, n=n)
        first_P = first_best(proxy.score_PN, proxy.scored_PN, n=n)
        kl_P = measured_best_of_n_kl(proxy.score_PN, proxy.scored_PN, n=n)[proxy.some_P]
        kl_low, kl_high = interval(cfg, kl_P)
        points.append(
            PointAt(
                n=n,
                kl_bound=best_of_n_kl(n),
                kl=float(kl_P.mean()),
                kl_low=kl_low,
                kl_high=kl_high,
                measures={
                    measure: measure_of(cfg, expected(weight_PN, value_PN), start[measure], value_PN, first_P)
                    for measure, value_PN in values.items()
                },
            )
        )
    return Curve(
        name=name,
        chooses=str(proxy.aggregate),
        score_std=float(proxy.score_PN[proxy.scored_PN].std(correction=0)),
        num_without_score=int((~proxy.some_P).sum()),
        num_tied=int(proxy.tied_P.sum()),
        num_unscored=int((~proxy.scored_PN).sum()),
        points=tuple(points),
    )


def expected(weight_PN: Float[Tensor, "P N"], value_PN: Float[Tensor, "P N"]) -> Float[Tensor, " P"]:
    """Mean of a measure over the answers that may be chosen; NaN where one of them has none, or nothing can be chosen."""
    mean_P = torch.where(weight_PN > 0, weight_PN * value_PN, 0.0).sum(dim=1)
    return torch.where(weight_PN.sum(dim=1) > 0, mean_P, torch.nan)


def measure_of(
    cfg: BestOfN,
    value_P: Float[Tensor, " P"],
    start_P: Float[Tensor, " P"],
    value_PN: Float[Tensor, "P N"],
    first_P: Tensor,
) -> Measure:
    """Means over the prompts that have the measure both at n and at 1, and their intervals."""
    there_P = value_P.isfinite() & start_P.isfinite()
    if not bool(there_P.any()):
        nan = float("nan")
        return Measure(value=nan, low=nan, high=nan, gain=nan, gain_low=nan, gain_high=nan, first=nan, num_prompts=0)
    low, high = interval(cfg, value_P[there_P])
    gain_low, gain_high = interval(cfg, (value_P - start_P)[there_P])
    at_first_P = value_PN.gather(1, first_P.clamp(min=0).unsqueeze(1)).squeeze(1)[there_P & (first_P >= 0)]
    return Measure(
        value=float(value_P[there_P].mean()),
        low=low,
        high=high,
        gain=float((value_P - start_P)[there_P].mean()),
        gain_low=gain_low,
        gain_high=gain_high,
        first=float(at_first_P.mean()),
        num_prompts=int(there_P.sum()),
    )


def interval(cfg: BestOfN, value_P: Float[Tensor, " P"]) -> tuple[float, float]:
    """Of the mean over prompts; every figure sees the same resampled prompts."""
    random = generator(cfg.seed, "best_of_n", "bootstrap")
    return bootstrap_interval(value_P, confidence=cfg.confidence, resamples=cfg.resamples, generator=random)


def warnings_of(curves: Sequence[Curve], samples: Samples) -> Iterator[str]:
    """What a reader must know before believing a curve."""
    num = len(samples.prompts)
    if num < FEW_PROMPTS:
        yield f"{num} prompts are few: the intervals are too narrow below {FEW_PROMPTS}, and say little"
    for curve in curves:
        if curve.num_without_score:
            yield f"{curve.name}: {curve.num_without_score} of {num} prompts have no answer with a score and are left out"
        if curve.num_unscored:
            total = num * samples.num_generations
            yield f"{curve.name}: {curve.num_unscored} of {total} answers have no score and are never chosen"
        if curve.num_tied:
            yield f"{curve.name}: all answers to {curve.num_tied} of {num} prompts have one score, so nothing is chosen there"
        for judge in curve.points[-1].measures:
            missing = num - curve.num_without_score - curve.points[-1].measures[judge].num_prompts
            if missing and judge not in OWN:
                yield f"{curve.name}: {judge} has no score for a possible choice of {missing} prompts, which are left out of it"


def write_chosen(cfg: BestOfN, folder: Path, proxies: Mapping[str, Proxy], samples: Samples) -> dict[str, float]:
    """The chosen answers as AlpacaEval's model outputs; returns how many prompts have none, by file."""
    skipped: dict[str, float] = {}
    for name, proxy in proxies.items():
        for n in cfg.outputs:
            first_P = first_best(proxy.score_PN, proxy.scored_PN, n=n).tolist()
            model = f"{cfg.generator}_{name}_n{n}"
            rows = [
                output_row(prompt, samples.text(p, index), model)
                for p, (prompt, index) in enumerate(zip(samples.prompts, first_P, strict=True))
                if index >= 0
            ]
            write_outputs(folder / f"{name}_n{n}.json", rows)
            skipped[f"{name}/n={n}/outputs_skipped"] = float(len(samples.prompts) - len(rows))
    return skipped


def output_row(prompt: Conversation, answer: str, model: str) -> ModelOutput:
    """One row of model_outputs.json. The instruction is the user's text; of a longer dialogue, each message with its role."""
    texts = [message.text for message in prompt.messages]
    said = texts[0] if len(texts) == 1 else "\n\n".join(f"{message.role}: {message.text}" for message in prompt.messages)
    dataset = prompt.meta.get("dataset")
    return ModelOutput(instruction=said, output=answer, generator=model, dataset=dataset if isinstance(dataset, str) else None)


def figures(report: Report) -> dict[str, float]:
    """CHOICE/n=N/MEASURE and CHOICE/n=N/kl, for facts.json."""
    out: dict[str, float] = {}
    for curve in report.curves:
        for point in curve.points:
            at = f"{curve.name}/n={point.n}"
            out[f"{at}/kl"] = point.kl
            out |= {f"{at}/{measure}": found.value for measure, found in point.measures.items()}
    return out
