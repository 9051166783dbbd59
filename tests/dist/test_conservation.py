"""No row is lost or taken twice when sizes do not divide: every id that goes in comes out, counted over all ranks.

Sizes below the number of ranks, one row, primes, and batches larger than the data.
"""

import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from launching import spawn

from rewarden.collect.world import WorldPairs, WorldStart
from rewarden.data.read import read_rows
from rewarden.models.load import Model
from rewarden.rollout.hf import Sampling

WORKER = Path(__file__).with_name("conservation_worker.py")
MOST = 19


def case(kind: str, rows: int, batch: int, evaluated: int, mini: int = 0) -> dict[str, Any]:
    return {"kind": kind, "rows": rows, "batch": batch, "eval": evaluated, "mini": mini}


FEW = [
    case("sft", 1, 4, 1),
    case("sft", 7, 3, 3),
    case("reward", 1, 2, 1),
    case("reward", 5, 2, 3),
    case("ppo", 1, 2, 1, 1),
    case("ppo", 3, 5, 2, 2),
]
"""In every `make test`, on two ranks."""


def many() -> Iterator[dict[str, Any]]:
    """Sizes around and below the number of ranks, and primes."""
    for rows in (1, 2, 3, 4, 7, 13, 19):
        for batch in (1, 2, 3, 5, 19):
            yield case("sft", rows, batch, 1 + rows % 5)
            yield case("reward", rows, batch, 1 + rows % 3)
    for rows in (1, 2, 3, 5):
        for batch, mini in ((2, 1), (2, 2), (3, 2), (5, 2), (7, 3), (7, 7), (11, 4)):
            yield case("ppo", rows, batch, 1 + batch % 4, mini)


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A world's files, with rows enough for every case."""
    root = tmp_path_factory.mktemp("conservation")
    for name in ("start", "pairs"):
        (root / name).mkdir()
    WorldStart(num_dialogues=MOST, num_heldout=5).run(root / "start")
    WorldPairs(
        policy=Model(model_name_or_path=str(root / "start/model")),
        num_pairs=MOST + 6,
        num_test_pairs=0,
        num_prompts=MOST,
        num_selection=5,
        num_heldout=0,
        sampling=Sampling(max_completion_length=6),
    ).run(root / "pairs")
    lines = (root / "pairs/pairs.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (root / "pairs/heldout.jsonl").write_text("".join(lines[-5:]), encoding="utf-8")
    return root


def ids(path: Path, rows: int) -> list[str]:
    """The ids of a file's first rows, from the file itself."""
    return [str(row.fields["id"]) for row, _ in zip(read_rows(path), range(rows), strict=False)]


def run(world: Path, folder: Path, cases: list[dict[str, Any]], ranks: int) -> list[dict[str, Any]]:
    """What each rank wrote down."""
    shutil.copytree(world, folder)
    (folder / "cases.json").write_text(json.dumps(cases), encoding="utf-8")
    spawn(WORKER, str(folder), world=ranks, timeout=900)
    return [json.loads((folder / f"rank{rank}.json").read_text(encoding="utf-8")) for rank in range(ranks)]


def together(ranks: list[dict[str, Any]], number: int, kind: str) -> Counter:
    """How often each row of one case was seen on all ranks."""
    rows = [row for rank in ranks for row in rank["cases"][number].get(kind, [])]
    return Counter(tuple(row) if isinstance(row, list) else row for row in rows)


def times(names: list[str], number: int) -> Counter:
    return Counter({name: number * count for name, count in Counter(names).items()})


def check(world: Path, ranks: list[dict[str, Any]], number: int, item: dict[str, Any]) -> None:
    """Ids in == ids out, for one case."""
    if item["kind"] in ("sft", "reward"):
        trained, held = {
            "sft": ("start/sft.jsonl", "start/sft_heldout.jsonl"),
            "reward": ("pairs/pairs.jsonl", "pairs/heldout.jsonl"),
        }[item["kind"]]
        assert together(ranks, number, "trained") == times(ids(world / trained, item["rows"]), 2), item
        assert together(ranks, number, "evaluated") == times(ids(world / held, item["eval"]), 1), item
        return
    prompts = ids(world / "pairs/prompts.jsonl", item["rows"])
    held_out = ids(world / "pairs/selection.jsonl", item["eval"])
    for stage in ("asked", "scored"):
        assert together(ranks, number, f"rollouts {stage}") == times(prompts, item["batch"]), item
        # before the first round and after each of `rows` rounds
        assert together(ranks, number, f"evaluation {stage}") == times(held_out, item["rows"] + 1), item
    sampled = together(ranks, number, "rollouts to learn")
    assert sampled.total() == item["rows"] * item["batch"], item
    assert together(ranks, number, "rollouts learnt") == Counter({row: 2 * n for row, n in sampled.items()}), item


@pytest.fixture(scope="module")
def two(world, tmp_path_factory) -> list[dict[str, Any]]:
    return run(world, tmp_path_factory.mktemp("two") / "files", FEW, 2)


@pytest.mark.parametrize("number", range(len(FEW)), ids=lambda number: "-".join(map(str, FEW[number].values())))
def test_every_row_is_handled_once_by_one_of_two_ranks(world, two, number):
    check(world, two, number, FEW[number])


def test_a_row_that_two_ranks_cache_at_the_same_moment_is_whole(two):
    for rank in two:
        facts = rank["features"]
        assert facts["gap"] < 1e-5
        assert facts["gap read"] == 0.0
        assert facts["computed"] + facts["read"] == 12
        assert facts["read"] >= 6


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_row_is_handled_once_for_a_table_of_sizes(world, tmp_path, record_property, ranks):
    cases = list(many())
    if ranks == 1:  # PPO without a launcher is what the fast tests of PPO run; the ids are counted all the same
        cases = cases[::3]
    record_property("point", f"5 sample conservation on {ranks} processes: ids in == ids out")
    record_property("cases", len(cases))
    seen = run(world, tmp_path / "files", cases, ranks)
    for number, item in enumerate(cases):
        check(world, seen, number, item)
