"""`make bench`: check that both sides compute the same, run them A B A B, print the table, write results.json."""

import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import results
from bench.benchmark import Benchmark, Pair
from bench.registry import BENCHMARKS
from bench.run import Run, check_same_work, interleaved, run_script, run_side
from bench.settings import FOLDER, ROOT, Settings, check_places, chosen, read_settings
from bench.view import Progress, View, check_table
from rewarden.errors import RewardenError


def main(environ: Mapping[str, str], console: Console, registry: Sequence[Benchmark]) -> int:
    """Returns the exit code: 0, 1 when outputs differ by more than the limit, 2 when something could not be run."""
    try:
        settings = read_settings(environ, Path(sys.executable))
        benchmarks = chosen(registry, environ.get("BENCH_ONLY", ""))
        check_places(settings, benchmarks, registry)
        same = same_outputs(settings, console)
        measure(settings, benchmarks, registry, {key: same[key] for key in ("commit", "versions")}, console)
    except KeyboardInterrupt:
        console.print("bench: stopped; benchmarks that had finished are kept", style="red")
        return 130
    except RewardenError as error:
        console.print(f"bench: {error}", style="red", markup=False)
        return 2
    wrong = [name for name, value in same["checks"].items() if not value <= results.LIMIT]
    if wrong:
        told = f"bench: more than {results.LIMIT:g} apart on the same inputs: {', '.join(wrong)}"
        console.print(told, style="red", markup=False)
    return 1 if wrong else 0


def same_outputs(settings: Settings, console: Console) -> Mapping[str, Any]:
    """Largest differences where the work is deterministic, shown and written; also what of ours is being measured."""
    console.print("bench: comparing outputs on the same inputs")
    facts = run_script(settings, settings.our_python, FOLDER / "ours" / "same.py", {}, (ROOT,), "ours")
    console.print(check_table(facts["checks"], results.LIMIT))
    found = {"limit": results.LIMIT, "max_difference": facts["checks"], "commit": facts["commit"]}
    results.write(settings.results, [], {"same_outputs": found})
    return facts


def measure(
    settings: Settings,
    benchmarks: Sequence[Benchmark],
    registry: Sequence[Benchmark],
    ours: Mapping[str, Any],
    console: Console,
) -> None:
    """Every chosen benchmark's pairs; what is finished is written before the next begins.

    Errors: RewardenError when a side fails; finished benchmarks are kept.
    """
    if settings.pairs < 5:
        console.print(f"bench: BENCH_PAIRS={settings.pairs} is too few to quote; at least 5")
    with View(console, Progress(benchmarks, settings.pairs), settings.pairs) as view:
        for benchmark in benchmarks:
            runs: list[Run] = []
            starting = partial(view.starting, benchmark)
            for run in interleaved(benchmark, settings.pairs, partial(run_side, settings), starting):
                runs.append(run)
                view.ended(benchmark, run)
                if run.side == "peer":
                    check_same_work(benchmark, Pair(ours=runs[-2].facts, peer=run.facts))
            entries = [results.result(entry, results.pairs_of(runs)) for entry in benchmark.entries]
            details = {entry.name: results.detail(benchmark, entry, runs, settings, ours) for entry in benchmark.entries}
            results.write(settings.results, entries, details, names(registry))
            view.add(entries)
        view.finish()
    beside = results.details_path(settings.results)
    written = results.read(beside, dict)
    crowded = {b.name: most(written, b) for b in benchmarks if most(written, b) > results.BUSY_CORES}
    if crowded:
        told = ", ".join(f"{name} {cores:.1f}" for name, cores in crowded.items())
        console.print(f"bench: other processes kept cores busy meanwhile ({told}), so timings are off; run on a quiet machine")
    console.print(f"bench: numbers in {shown(settings.results)}, how they came about in {shown(beside)}")


def names(registry: Sequence[Benchmark]) -> list[str]:
    """Every result's name, in the order of results.json."""
    return [entry.name for benchmark in registry for entry in benchmark.entries]


def most(details: Mapping[str, Mapping[str, float]], benchmark: Benchmark) -> float:
    """Cores that others kept busy while a benchmark ran."""
    return details[benchmark.entries[0].name]["cores_busy_with_others"]


def shown(path: Path) -> str:
    """The path as seen from the repository."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


if __name__ == "__main__":
    wide = None if sys.stdout.isatty() else 120
    sys.exit(main(os.environ, Console(highlight=False, width=wide), BENCHMARKS))
