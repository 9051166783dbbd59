"""From pairs of runs to results.json, and the facts about the measurement to details.json beside it."""

import json
import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.benchmark import Benchmark, Entry, Pair
from bench.run import Run
from bench.settings import Settings
from rewarden.errors import RewardenError
from rewarden.runtime.disk import write_atomic

LIMIT = 1e-4
"""Largest difference between ours and the peer's where the work is deterministic."""

BUSY_CORES = 0.2
"""Other processes keeping more than this many cores busy make timings doubtful; the runner itself takes about 0.02."""


def result(entry: Entry, pairs: Sequence[Pair]) -> dict[str, Any]:
    """One line of results.json: medians of both sides, and median and range of the ratios of the pairs.

    The median ratio is taken over pairs, not of the two medians: a slow minute that hits both sides of a pair cancels.
    """
    ours = [float(pair.ours[entry.key]) for pair in pairs]
    peer = [float(pair.peer[entry.key]) for pair in pairs]
    ratios = [entry.ratio(a, b) for a, b in zip(ours, peer, strict=True)]
    return {
        "name": entry.name,
        "ours": statistics.median(ours),
        "peer": statistics.median(peer),
        "unit": entry.unit,
        "ratio_median": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "runs": len(pairs),
    }


def pairs_of(runs: Sequence[Run]) -> list[Pair]:
    """Each run of ours with the run of the peer after it."""
    return [Pair(ours=ours.facts, peer=peer.facts) for ours, peer in zip(runs[::2], runs[1::2], strict=True)]


def detail(
    benchmark: Benchmark, entry: Entry, runs: Sequence[Run], settings: Settings, ours: Mapping[str, Any]
) -> dict[str, Any]:
    """How an entry came about: every pair, sizes, versions, machine; `ours` says which commit and versions were measured."""
    pairs = pairs_of(runs)
    return {
        "pairs": [[float(pair.ours[entry.key]), float(pair.peer[entry.key])] for pair in pairs],
        "ours": pairs[0].ours["ours"],
        "peer": pairs[0].peer["peer"],
        "sizes": benchmark.environment("ours", settings.sizes_of(benchmark)),
        "threads": settings.threads,
        "seconds": {side: [round(run.seconds, 1) for run in runs if run.side == side] for side in ("ours", "peer")},
        "footprint_gb": [[pair.ours["footprint_gb"], pair.peer["footprint_gb"]] for pair in pairs],
        "cores_busy_with_others": round(statistics.mean(run.others for run in runs), 2),
        "measured": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": machine(),
        **ours,
    }


def read(path: Path, kind: type) -> Any:
    """What an earlier call wrote, or an empty `kind`.

    Errors: RewardenError when the file is damaged.
    """
    if not path.exists():
        return kind()
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RewardenError(f"{path} is no JSON ({error}); remove it") from error
    if not isinstance(found, kind):
        raise RewardenError(f"{path} holds a {type(found).__name__}, not a {kind.__name__}; remove it")
    return found


def write(path: Path, new: Sequence[Mapping[str, Any]], details: Mapping[str, Any], order: Sequence[str] = ()) -> None:
    """Put new entries beside those of other names that are there, in the order of the registry, unknown names last; atomic."""
    by_name = {entry["name"]: entry for entry in [*read(path, list), *new]}
    names = dict.fromkeys([*(name for name in order if name in by_name), *by_name])
    write_atomic(path, _text([by_name[name] for name in names]))
    beside = details_path(path)
    write_atomic(beside, _text({**read(beside, dict), **details}))


def details_path(path: Path) -> Path:
    """Where the details lie: beside the results."""
    return path.with_name(path.name.replace("results", "details"))


def _text(value: Any) -> str:
    return json.dumps(value, indent=1) + "\n"


def machine() -> str:
    """Processor, cores and system, in words."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"{model}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}"
