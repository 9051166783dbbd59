"""Two real processes (gloo, CPU) with unequal shards do what one process does."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
from launching import spawn
from rank_worker import ROWS, STEPS, make_batch, make_net
from toy_job import make_job

from rewarden.runtime.job import Drive, drive
from rewarden.runtime.metrics import read_metrics
from rewarden.runtime.ranks import Ranks
from rewarden.runtime.report import RunFolder
from rewarden.runtime.samples import Samples

WORKER = Path(__file__).with_name("rank_worker.py")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> tuple[Path, list[dict[str, Any]], list[str]]:
    """Folder, what each rank saw, what each rank printed. Both run once for all tests of this file."""
    folder = tmp_path_factory.mktemp("two")
    outputs = [rank.out for rank in spawn(WORKER, str(folder), world=2)]
    return folder, [torch.load(folder / f"rank{r}.pt", weights_only=True) for r in range(2)], outputs


def whole_gradient(kind: str) -> tuple[dict[str, Any], dict[str, float]]:
    """Gradient and means over all rows at once, straight from the formula."""
    net, batch = make_net(kind), make_batch()
    y_BT = net(batch.x_BTD)
    square = (((y_BT - 1) ** 2)[batch.mask_BT]).sum() / int(batch.mask_BT.sum())
    row = y_BT.sum(1).exp().sum() / ROWS
    (0.7 * square + row).backward()
    means = {"loss/square": square, "loss/row": row, "stat/mean": y_BT[batch.mask_BT].mean(), "loss/total": 0.7 * square + row}
    return {name: p.grad for name, p in net.named_parameters()}, {name: float(value.detach()) for name, value in means.items()}


@pytest.mark.parametrize("case", ["unequal", "one microbatch each", "no rows on one rank"])
def test_the_gradient_of_two_processes_is_that_of_one(ranks, case):
    _, seen, _ = ranks
    expected, means = whole_gradient("double")
    for rank in range(2):
        got = seen[rank][case]
        assert got["grads"].keys() == expected.keys()
        for name, grad in expected.items():
            torch.testing.assert_close(got["grads"][name], grad, rtol=1e-12, atol=1e-12)
        for name, value in means.items():
            assert got["report"][name] == pytest.approx(value, rel=1e-12)
        norm = sum(float((grad**2).sum()) for grad in expected.values()) ** 0.5
        assert got["report"]["grad_norm/net"] == pytest.approx(norm, rel=1e-12)


@pytest.mark.parametrize("case", ["mixed precision", "mixed, no rows"])
def test_parameters_of_mixed_precision_and_unused_ones_are_summed_as_they_are(ranks, case):
    _, seen, _ = ranks
    expected, _ = whole_gradient("mixed")
    assert expected["unused.weight"] is None
    for rank in range(2):
        for name, grad in expected.items():
            got = seen[rank][case]["grads"][name]
            if grad is None:
                assert got is None
            else:
                assert got.dtype == grad.dtype
                torch.testing.assert_close(got, grad, rtol=1e-5, atol=1e-6)


def test_both_ranks_hold_the_same_weights_after_a_step(ranks):
    _, seen, _ = ranks
    for case in ("unequal", "no rows on one rank", "mixed precision"):
        for name, weight in seen[0][case]["weights"].items():
            assert torch.equal(weight, seen[1][case]["weights"][name])


def test_a_bad_row_on_one_rank_skips_the_step_on_both(ranks):
    _, seen, _ = ranks
    start = dict(make_net("double").named_parameters())
    for rank in range(2):
        report = seen[rank]["poison"]["report"]
        assert (report["skipped_steps"], report["skipped_in_a_row"]) == (1.0, 1.0)
        for name, weight in seen[rank]["poison"]["weights"].items():
            assert torch.equal(weight, start[name].detach())


def test_collectives_take_unequal_contributions(ranks):
    _, seen, _ = ranks
    for rank in range(2):
        got = seen[rank]["collectives"]
        assert got["mask"] == [2, 1]
        assert got["number"] == 2.0
        assert got["dict"] == {"n": 4.0, "total": 7.0, "only0": 5.0, "only1": 5.0}
        # one value 1.0 on rank 0, three values 2.0 on rank 1: weighted 1.75, not the 1.5 of averaged means (ppomax.md T33)
        assert got["dict"]["total"] / got["dict"]["n"] == 1.75
        assert got["max"] == ([1.0, 5.0], 0)
        assert got["gathered"] == [{"rank": 0}, {"rank": 1}]
        assert got["broadcast"] == "from 0"
        assert got["main"] == 42
        assert got["error"] == "the disk is full"
        assert got["share"] == [[0, 2, 4], [1, 3]][rank]
        assert got["identity"] == (rank, 2, rank == 0, "cpu")


def test_a_run_of_two_ranks_stops_refuses_resumes_and_equals_that_of_one(ranks, tmp_path):
    folder, seen, _ = ranks
    one = Ranks.single("cpu")
    job, policy, _ = make_job(STEPS, one, dropout=0.0, dtype=torch.float64)
    drive(job, RunFolder(tmp_path), one, cfg=Drive(save_steps=2, view="off"), recipe={"a": 1})
    for rank in range(2):
        (stopped, refused, finished), weights = seen[rank]["job"]
        assert stopped == "stopped on purpose"
        assert "a: 1 -> 2" in refused
        assert finished == (STEPS, 4)
        for name, p in policy.named_parameters():
            torch.testing.assert_close(weights[name], p.detach(), rtol=1e-9, atol=1e-12)
    ours, theirs = read_metrics(folder / "run/metrics.jsonl"), read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in ours] == list(range(1, STEPS + 1))
    for a, b in zip(ours, theirs, strict=True):
        for name in b:
            assert name.startswith("time/") or a[name] == pytest.approx(b[name], rel=1e-9, nan_ok=True)


def test_only_rank_0_writes_and_prints(ranks):
    folder, _, outputs = ranks
    assert "toy 8/8" in outputs[0]
    assert outputs[1] == ""
    texts = [row["text"] for row in Samples(folder / "run/samples.parquet").read()]
    assert texts == [f"step {step} rank {rank}" for step in range(1, STEPS + 1) for rank in range(2)]
    assert sorted(path.name for path in (folder / "run").iterdir()) == [
        "checkpoints", "done.json", "env.json", "metrics.jsonl", "model", "recipe.yaml", "samples.parquet",
    ]  # fmt: skip
