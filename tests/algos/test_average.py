"""The job that averages members: what it writes, registers, resumes and refuses."""

import json

import pytest

from rewarden.algos.average import Average
from rewarden.algos.reward import Reward
from rewarden.errors import DataError
from rewarden.models.ensemble import load_ensemble
from rewarden.models.load import Model
from rewarden.runtime.job import Drive, drive
from rewarden.runtime.metrics import read_metrics
from rewarden.runtime.ranks import Ranks
from rewarden.runtime.report import RunFolder
from rewarden.scoring.registry import read_registry


def run(cfg, folder, **how):
    ranks = Ranks.single("cpu")
    outcome = drive(cfg.build(ranks), RunFolder(folder), ranks, cfg=Drive(save_steps=1, view="off"), **how)
    return outcome, folder / "model"


@pytest.fixture(scope="module")
def members(world_files, tmp_path_factory):
    fields = {"model": {"model_name_or_path": str(world_files.policy)}, "data": {"path": str(world_files.pairs)}}
    cfg = Reward(**fields, num_members=2, max_steps=2, train_batch_size=4, optim={"learning_rate": 1e-4})
    return run(cfg, tmp_path_factory.mktemp("members") / "two")[1]


def test_an_averaged_model_is_an_ordinary_one_with_evaluation_and_calibration(world_files, members, tmp_path):
    cfg = Average(models=({"model_name_or_path": str(members)},), eval_data={"path": str(world_files.pairs), "max_rows": 8})
    outcome, model = run(cfg, tmp_path / "mean")
    assert outcome.step == 1
    loaded = load_ensemble(Model(model_name_or_path=str(model)))
    assert (loaded.family, loaded.num_members) == ("single", 1)
    assert loaded.calibration is not None
    assert loaded.calibration[0].count == 16
    card = json.loads((model / "rewarden.json").read_text())
    assert [name.rsplit("(")[1] for name in card["averaged"]] == ["member 0)", "member 1)"]
    evaluation = json.loads((tmp_path / "mean" / "evaluation.json").read_text())
    assert evaluation == card["evaluation"]
    assert evaluation["eval/num_pairs"] == 8.0
    (row,) = read_metrics(tmp_path / "mean" / "metrics.jsonl")
    assert row["average/members"] == 2.0
    assert row["eval/accuracy"] == evaluation["eval/accuracy"]
    assert read_registry(tmp_path / "models.yaml")["mean"]["path"] == str(model.resolve())
    assert run(cfg, tmp_path / "mean")[0].already_done


def test_without_held_out_pairs_there_is_neither_and_it_is_said(members, tmp_path):
    cfg = Average(models=({"model_name_or_path": str(members)},))
    job = cfg.build(Ranks.single("cpu"))
    assert any("without eval_data there is neither" in note for note in job.notes)
    assert any("their heads did not start as one" in note for note in job.notes)
    _, model = run(cfg, tmp_path / "mean")
    assert load_ensemble(Model(model_name_or_path=str(model))).calibration is None
    assert not (tmp_path / "mean" / "evaluation.json").exists()


def test_held_out_pairs_that_do_not_fit_are_refused(world_files, members):
    cfg = Average(models=({"model_name_or_path": str(members)},), eval_data={"path": str(world_files.pairs)}, max_length=2)
    with pytest.raises(DataError, match=r"no held-out pair is left, .* longer than 2 tokens dropped"):
        cfg.build(Ranks.single("cpu"))
