"""`overoptimization`: curves of small stores against brute force, effects by hand, and words that claim no more than intervals."""

import itertools
import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from rewarden.data.write import prompt_row, write_jsonl
from rewarden.errors import ConfigError, DataError
from rewarden.evals.overoptimization import Overoptimization, measure
from rewarden.evals.overoptimization_read import ONE, CellPlace, diversity, policy_run, read_cells
from rewarden.evals.overoptimization_stats import Settings, effect, rise_and_fall
from rewarden.evals.overoptimization_text import page
from rewarden.runtime.samples import Samples
from rewarden.scoring.aggregate import Aggregate
from rewarden.worlds import TripDesk
from tests.collect.stores import write_scores, write_store

HOW = Settings(confidence=0.95, resamples=400, seed=0)
P, N, K = 6, 5, 3


def members(seed: int, gold: torch.Tensor, noise: float) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return gold.unsqueeze(2) + noise * torch.randn(*gold.shape, K, generator=random)


@pytest.fixture
def cells(tmp_path) -> Path:
    """Two seeds of one setting, and one of another; the members of `pair` are noisy gold."""
    rows = []
    for number, (seed, flip) in enumerate([(0, 0.25), (1, 0.25), (0, 0.0)]):
        gold = torch.randn(P, N, generator=torch.Generator().manual_seed(10 + number))
        texts = [[f"answer {p} {i}" for i in range(N)] for p in range(P)]
        samples = write_store(tmp_path / f"samples{number}", texts)
        scores = tmp_path / f"scores{number}"
        write_scores(scores, samples, "gold", gold.tolist(), scorer={"kind": "gold"})
        write_scores(scores, samples, "independent", members(number, gold, 1.0).tolist())
        write_scores(scores, samples, "boot", members(20 + number, gold, 0.5).tolist())
        rows.append({"keys": {"seed": seed, "flip": flip}, "stages": {"samples": str(samples), "scores": str(scores)}})
    path = tmp_path / "cells.json"
    path.write_text(json.dumps(rows))
    return path


def config(cells: Path, **fields) -> Overoptimization:
    base = {
        "cells": str(cells),
        "families": {"independent": "independent", "bootstrap": "boot"},
        "single": "independent",
        "aggregates": {"mean": Aggregate(), "worst": Aggregate(rule="worst_case")},
        "n": (1, 2, 4),
        "compare_at": (2,),
        "resamples": 200,
    }
    return Overoptimization(**{**base, **fields})


def brute(proxy: list[float], gold: list[float], n: int) -> float:
    best = [max(subset, key=lambda i: proxy[i]) for subset in itertools.combinations(range(N), n)]
    return statistics.fmean(gold[i] for i in best)


def stored(cells: Path, cell: int, name: str) -> torch.Tensor:
    import numpy as np

    scores = Path(json.loads(cells.read_text())[cell]["stages"]["scores"])
    return torch.from_numpy(np.load(scores / "scores" / f"{name}.npy")).double()


def test_curves_are_means_over_all_subsets_and_seeds(cells):
    study = measure(config(cells), read_cells(str(cells)))
    noisy, clean = study.settings
    assert (noisy.keys, noisy.seeds, clean.seeds) == ({"flip": 0.25}, (0, 1), (0,))
    assert study.kl_bound == pytest.approx((0.0, math.log(2) - 0.5, math.log(4) - 0.75))
    for family, name in (("independent", "independent"), ("bootstrap", "boot")):
        for rule in (ONE, "mean", "worst"):
            found = next(r for r in noisy.rules if (r.family, r.rule) == (family, rule))
            for place, n in enumerate((1, 2, 4)):
                per_seed = []
                for cell in (0, 1):
                    gold, score = stored(cells, cell, "gold")[:, :, 0], stored(cells, cell, name)
                    score = score - score.mean(1, keepdim=True)  # centered per prompt and member
                    proxies = {ONE: [score[:, :, k] for k in range(K)], "mean": [score.mean(2)], "worst": [score.amin(2)]}[rule]
                    values = [brute(proxy[p].tolist(), gold[p].tolist(), n) for proxy in proxies for p in range(P)]
                    per_seed.append(statistics.fmean(values))
                assert found.gold[place].mean == pytest.approx(statistics.fmean(per_seed), abs=1e-6)
                half = 12.7062 * statistics.stdev(per_seed) / math.sqrt(2)
                assert found.gold[place].high - found.gold[place].mean == pytest.approx(half, abs=1e-4)
            assert found.gold[0].num_seeds == 2
            assert found.gold[0].num_prompts == 2 * P
    oracle = [brute(row.tolist(), row.tolist(), 4) for row in stored(cells, 2, "gold")[:, :, 0]]
    assert clean.oracle[2].mean == pytest.approx(statistics.fmean(oracle), abs=1e-6)


def test_differences_are_paired_with_one_member_of_the_family_and_of_the_single_one(cells):
    noisy = measure(config(cells), read_cells(str(cells))).settings[0]
    by_name = {(rule.family, rule.rule): rule for rule in noisy.rules}
    mean = by_name["bootstrap", "mean"]
    assert mean.versus_member[2].mean == pytest.approx(mean.gold[1].mean - by_name["bootstrap", ONE].gold[1].mean)
    assert mean.versus_single[2].mean == pytest.approx(mean.gold[1].mean - by_name["independent", ONE].gold[1].mean)
    assert by_name["independent", ONE].versus_member == {}
    assert set(by_name["bootstrap", ONE].versus_single) == {2}


def test_an_answer_that_some_scorer_could_not_score_is_never_chosen_and_counted(cells):
    import numpy as np

    path = Path(json.loads(cells.read_text())[2]["stages"]["scores"]) / "scores" / "boot.npy"
    table = np.load(path)
    table[0, 1] = np.nan
    np.save(path, table)
    clean = measure(config(cells), read_cells(str(cells))).settings[1]
    assert clean.num_unscored == 1
    found = next(r for r in clean.rules if (r.family, r.rule) == ("independent", "mean"))
    gold = stored(cells, 2, "gold")[:, :, 0]
    values = [gold[0, [0, 2, 3, 4]].mean(), *gold[1:].mean(1)]
    assert found.gold[0].mean == pytest.approx(statistics.fmean(float(v) for v in values), abs=1e-6)


def test_the_peak_that_a_prompt_is_measured_at_comes_from_the_other_half_of_the_prompts():
    even, odd = torch.tensor([0.0, 2.0, 1.0]), torch.tensor([0.0, 1.0, 3.0])
    gold = torch.stack([even, odd, even, odd], dim=1)
    rises, falls = rise_and_fall([gold])
    # Even prompts peak at place 1, odd ones at place 2; each is measured at the other's peak.
    assert rises[0].tolist() == [1.0, 1.0, 1.0, 1.0]
    assert falls[0].tolist() == [0.0, 2.0, 0.0, 2.0]


def test_a_flat_noisy_curve_shows_no_fall_on_average():
    random = torch.Generator().manual_seed(0)
    found = [effect(rise_and_fall([torch.randn(8, 40, generator=random).double()])[1], HOW).mean for _ in range(200)]
    assert abs(statistics.fmean(found)) < 4 * statistics.stdev(found) / math.sqrt(200)


def test_effects_hold_both_intervals_and_one_seed_has_none_over_seeds():
    two = effect([torch.tensor([0.0, 2.0]), torch.tensor([3.0, 3.0, math.nan])], HOW)
    assert (two.mean, two.num_seeds, two.num_prompts) == (2.0, 2, 4)
    assert (two.low, two.high) == pytest.approx((2 - 12.7062, 2 + 12.7062), abs=1e-4)  # means 1 and 3
    assert (two.low_prompts, two.high_prompts) == (1.5, 2.5)  # the first seed's mean lies in 0..2, the second's is 3
    one = effect([torch.tensor([0.0, 2.0])], HOW)
    assert math.isnan(one.low)
    assert not one.above_zero
    assert not one.below_zero
    assert effect([torch.tensor([math.nan])], HOW).num_seeds == 0


def test_members_that_share_an_error_correlate_once_gold_is_partialled_out():
    random = torch.Generator().manual_seed(0)
    gold, shared = torch.randn(40, 50, generator=random), torch.randn(40, 50, generator=random)
    own = torch.randn(40, 50, 2, generator=random)
    there = torch.ones(40, 50, dtype=torch.bool)
    apart = diversity(gold.unsqueeze(2) + own, gold, there)
    together = diversity((gold + shared).unsqueeze(2) + 0.2 * own, gold, there)
    assert apart.correlation == pytest.approx(0.5, abs=0.05)  # 1 of 2 parts of the variance is gold
    assert apart.error_correlation == pytest.approx(0.0, abs=0.05)
    assert apart.gold_mean == pytest.approx((2 / 3) ** 0.5, abs=0.03)  # the mean of two halves the error
    assert together.error_correlation == pytest.approx(1 / 1.04, abs=0.02)
    assert together.spread < apart.spread
    alone = diversity(gold.unsqueeze(2), gold, there)
    assert (alone.correlation, alone.error_correlation, alone.spread) == (1.0, 1.0, 0.0)


def test_the_run_writes_page_figure_and_numbers_and_claims_nothing_of_one_seed(cells, tmp_path):
    facts = config(cells).run(tmp_path)
    text = (tmp_path / "overoptimization.md").read_text()
    assert "**flip=0.0** (1 seed, 6 prompts each, N = 5). One seed says nothing of other seeds" in text
    assert "**flip=0.25** (2 seeds, 6 prompts each, N = 5). With a single reward model gold" in text
    assert "differences between a rule and one member lie beyond their 95% interval over seeds; if none were real" in text
    numbers = json.loads((tmp_path / "overoptimization.json").read_text())
    assert numbers["settings"][1]["rules"][0]["gold"][0]["low"] is None
    assert facts["flip=0.25/bootstrap/mean/peak_n"] in (1.0, 2.0, 4.0)
    assert all(math.isfinite(value) for value in facts.values())
    picture = (tmp_path / "overoptimization.svg").read_text()
    assert picture.startswith("<svg")
    assert "bootstrap, flip=0.25" in picture


def shaped(cells: Path, curve: list[float], spread: float) -> str:
    """The page of a study in which gold follows `curve` in two seeds, up to `spread` between them."""
    study = measure(config(cells), read_cells(str(cells)))
    apart = spread * torch.tensor([0.0, 1.0, 3.0]).unsqueeze(1)
    rises, falls = rise_and_fall([torch.tensor(curve).unsqueeze(1).repeat(1, 40) + sign * apart for sign in (-1, 1)])
    noisy = study.settings[0]
    rules = tuple(replace(rule, rise=effect(rises, HOW), fall=effect(falls, HOW)) for rule in noisy.rules)
    return page(replace(study, settings=(replace(noisy, rules=rules),)))


def test_words_follow_the_intervals(cells):
    clear = shaped(cells, [0.0, 1.0, 0.5], 0.001)
    assert "gold rises (+1.000 [" in clear
    assert "and falls after it (-0.500 [" in clear
    assert "All 4 ensembles still fall after their peak." in clear
    vague = shaped(cells, [0.0, 1.0, 0.5], 0.4)
    assert "gold is not shown to rise" in vague
    assert "a fall after the peak is not established (" in vague
    assert "For none of the 4 ensembles is a fall after the peak established." in vague


@pytest.fixture
def ppo(tmp_path) -> CellPlace:
    """A PPO run with two measured rounds on two prompts: first a plain question, then a polite one."""
    world = TripDesk()
    prompts = [world.start(seed) for seed in (0, 1)]
    write_jsonl(tmp_path / "prompts.jsonl", [prompt_row(prompt) for prompt in prompts])
    folder = tmp_path / "ppo"
    folder.mkdir()
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"kind": "ppo", "eval_data": {"path": str(tmp_path / "prompts.jsonl")}}))
    store = Samples(folder / "samples.parquet")
    for step, (text, score) in enumerate([("Trips are fun.", 0.5), ("Thank you. Trips are fun. Of course.", 0.75)]):
        rows = [{"id": p.id, "response": text, "score": score, "status": "ok", "stop": "eos"} for p in prompts]
        store.append(step, [{"step": step, "kind": "eval", **row} for row in rows])
        store.append(step, [{"step": step, "kind": "rollout", **rows[0]}])
    store.flush(final=True)
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "eval/kl_sequence": 1.25}) + "\n")
    return CellPlace(keys={"seed": 0}, stages={"ppo": folder})


def test_a_ppo_run_is_scored_by_gold_round_by_round(ppo):
    run = policy_run(ppo, "ppo", {"kind": "gold"})
    assert run.steps == (0, 1)
    assert run.kl_S.tolist() == [0.0, 1.25]
    assert run.gold_SP.tolist() == [[0.0, 0.0], [0.5, 0.5]]  # two polite sentences are worth 0.5, chat nothing
    assert run.proxy_SP.tolist() == [[0.5, 0.5], [0.75, 0.75]]


def test_a_ppo_run_without_evaluations_is_refused(ppo):
    folder = ppo.stages["ppo"]
    (folder / "recipe.yaml").write_text("kind: ppo\n")
    with pytest.raises(DataError, match="has no eval_data"):
        policy_run(ppo, "ppo", {"kind": "gold"})


def test_what_cannot_be_measured_is_refused(cells):
    with pytest.raises(ConfigError, match=r"n is 8 with 5 answers to each prompt"):
        measure(config(cells, n=(1, 2, 8)), read_cells(str(cells)))
    with pytest.raises(ConfigError, match=r"has no stage 'sample'; did you mean 'samples'\?"):
        measure(config(cells, samples="sample"), read_cells(str(cells)))
    with pytest.raises(DataError, match=r"is no cells\.json of a grid"):
        read_cells("absent.json")
    for fields, message in (
        ({"single": "x"}, "single is 'x', which is no family"),
        ({"compare_at": (3,)}, "compare_at has 3, which n does not"),
        ({"n": (2, 4)}, "name 1 and larger numbers in rising order"),
        ({"single_policy": "x"}, "single_policy is 'x'; name one of policies"),
        ({"aggregates": {ONE: Aggregate()}}, "is what members give one by one"),
    ):
        with pytest.raises(ValueError, match=message):
            config(cells, **fields)
