"""User reports 3.8: what a run leaves for people to read."""

import math

import pyarrow.parquet as pq
import pytest

from rewarden.runtime.job import Drive, drive
from rewarden.runtime.metrics import read_metrics
from rewarden.runtime.report import RunFolder
from rewarden.runtime.trackers import Trackers, plain_names
from tests.reports.short_runs import ALONE, ppo_config


def test_samples_lie_in_the_run_folder_without_any_account(world_files, tmp_path):
    """Row 94 (trl#2099): prompt, answer, score and ending of every kept rollout, in a file that any parquet reader opens."""
    cfg = ppo_config(world_files, num_sample_generations=3)
    drive(cfg.build(ALONE), RunFolder(tmp_path / "run"), ALONE, cfg=Drive(view="off"))
    rows = pq.read_table(tmp_path / "run" / "samples.parquet").to_pylist()
    assert [row["step"] for row in rows] == [1, 1, 1, 2, 2, 2]
    for row in rows:
        assert row["kind"] == "rollout"
        assert row["score"] == pytest.approx(-0.1 * len(row["response"]))
        assert row["prompt"]
        assert row["stop"] in ("eos", "length")
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 2


ODD = {
    "score/part/a b": 1.0,
    "score/part/a:b": 2.0,
    "score/part/a_b": 3.0,
    "score/part//é/": 4.0,
    "kl/k1": 5.0,
    "bad": math.nan,
}


def test_names_become_ones_that_every_tracker_takes_and_stay_apart():
    """Row 95 (nemo#2861): odd characters are replaced, names that would meet are numbered, plain names keep their form."""
    names = plain_names(ODD)
    assert names["kl/k1"] == "kl/k1"
    assert names["score/part/a_b"] == "score/part/a_b"
    assert {names["score/part/a b"], names["score/part/a:b"]} == {"score/part/a_b_2", "score/part/a_b_3"}
    assert names["score/part//é/"] == "score/part/_"
    assert len(set(names.values())) == len(ODD)


def test_a_name_is_called_the_same_in_every_step():
    """Row 95: a name keeps what it was called, whichever names a later report holds."""
    first = plain_names(["a b"])
    later = plain_names(["a:b", "a_b", "a b"], first)
    assert first == {"a b": "a_b"}
    assert later["a b"] == "a_b"
    assert len(set(later.values())) == 3


def test_a_tracker_gets_all_numbers_of_a_report_with_odd_names(tmp_path):
    """Row 95: seven kinds of name in a real TensorBoard file."""
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trackers = Trackers(["tensorboard"], tmp_path, project="p", run_name="r", config={})
    trackers.log(1, ODD)
    trackers.log(2, {**ODD, "new one": 7.0})
    trackers.finish()
    (file,) = tmp_path.rglob("events.out.*")
    events = event_accumulator.EventAccumulator(str(file)).Reload()
    values = {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert values["score/part/a_b"] == [3.0, 3.0]
    assert sorted(number for numbers in values.values() for number in numbers) == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 7]
