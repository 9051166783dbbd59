"""What is shown while benchmarks run: the table so far, what runs now, what is left; off a terminal, a line per run."""

import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from bench.benchmark import Benchmark
from bench.run import Run, Side

BAR = 50


class Progress:
    """Counts runs and estimates the time left.

    A run takes as long as the mean of the same benchmark and side so far; before the first one, what the registry says, scaled
    by how this machine has compared until now.
    """

    def __init__(self, benchmarks: Sequence[Benchmark], pairs: int, *, scale: float = 1.0) -> None:
        self.expected = {(b.name, side): seconds for b in benchmarks for side, seconds in zip(SIDES, b.seconds, strict=True)}
        self.left = dict.fromkeys(self.expected, pairs)
        self.took: dict[tuple[str, Side], list[float]] = defaultdict(list)
        self.total, self.done, self.scale = 2 * pairs * len(benchmarks), 0, scale

    def add(self, benchmark: str, side: Side, seconds: float) -> None:
        """A run has ended."""
        self.took[benchmark, side].append(seconds)
        self.left[benchmark, side] -= 1
        self.done += 1
        spent = sum(sum(all_) for all_ in self.took.values())
        self.scale = spent / sum(self.expected[key] * len(all_) for key, all_ in self.took.items())

    def left_s(self) -> float:
        """Seconds left, the run now going on included in full."""
        return sum(count * self.each(key) for key, count in self.left.items())

    def each(self, key: tuple[str, Side]) -> float:
        """Seconds that one run of this side takes."""
        known = self.took.get(key)
        return sum(known) / len(known) if known else self.expected[key] * self.scale


SIDES: tuple[Side, Side] = ("ours", "peer")


class View:
    """A live table on a terminal, else a line per run; a context manager."""

    def __init__(self, console: Console, progress: Progress, pairs: int) -> None:
        self.console, self.progress, self.pairs = console, progress, pairs
        self.results: list[Mapping[str, Any]] = []
        self.now, self.since = "starting", time.monotonic()
        self.live = Live(self, console=console, refresh_per_second=2) if console.is_terminal else None

    def __enter__(self) -> "View":
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.live:
            self.live.stop()

    def __rich__(self) -> Group:
        done, total = self.progress.done, self.progress.total
        filled = round(BAR * done / max(total, 1))
        bar = Text("━" * filled, style="green").append("━" * (BAR - filled), style="bright_black")
        left = self.progress.left_s() - (time.monotonic() - self.since if done < total else 0.0)
        state = f" {done}/{total} runs, about {clock(left)} left"
        running = f"{self.now}, {clock(time.monotonic() - self.since)}" if done < total else "all runs done"
        return Group(result_table(self.results), bar.append(state, style=""), Text(running))

    def starting(self, benchmark: Benchmark, side: Side, pair: int) -> None:
        """A run begins."""
        self.now, self.since = f"{benchmark.name}: pair {pair} of {self.pairs}, {side}", time.monotonic()

    def ended(self, benchmark: Benchmark, run: Run) -> None:
        """A run has ended well."""
        self.progress.add(benchmark.name, run.side, run.seconds)
        self.since = time.monotonic()
        if not self.live:
            entry = benchmark.entries[0]
            self.console.print(
                f"{benchmark.name}: pair {run.pair} of {self.pairs}, {run.side}: {run.facts[entry.key]:.4g} {entry.unit} "
                f"({self.progress.done}/{self.progress.total} runs, about {clock(self.progress.left_s())} left)"
            )

    def add(self, results: Sequence[Mapping[str, Any]]) -> None:
        """A benchmark has ended."""
        self.results += results

    def finish(self) -> None:
        """The table once more where nothing is redrawn."""
        if not self.live:
            self.console.print(result_table(self.results))


def clock(seconds: float) -> str:
    """m:ss, or h:mm:ss."""
    minutes, rest = divmod(max(math.ceil(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def result_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """The lines of results.json."""
    table = Table(title="ours against the peer", title_justify="left")
    table.add_column("name", no_wrap=True)
    for header in ("ours", "peer"):
        table.add_column(header, justify="right")
    table.add_column("unit")
    for header in ("ratio", "range", "pairs"):
        table.add_column(header, justify="right")
    for row in results:
        table.add_row(
            row["name"],
            f"{row['ours']:.4g}",
            f"{row['peer']:.4g}",
            row["unit"],
            f"{row['ratio_median']:.2f}",
            f"{row['ratio_min']:.2f} .. {row['ratio_max']:.2f}",
            str(row["runs"]),
        )
    return table


def check_table(checks: Mapping[str, float], limit: float) -> Table:
    """Largest differences on the same inputs."""
    table = Table("same inputs", title=f"ours and the peer's formulas, at most {limit:g} apart", title_justify="left")
    table.add_column("max difference", justify="right")
    table.add_column("")
    for name, value in checks.items():
        table.add_row(name, f"{value:.1e}" if value else "0", "ok" if value <= limit else Text("TOO LARGE", style="bold red"))
    return table
