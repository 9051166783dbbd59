"""How far a grid is: a live table in a terminal, a line for each stage that ends elsewhere."""

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from rewarden.recipe.cells import LOGS
from rewarden.recipe.chain import Recipe

TAIL = 2000
"""Bytes at the end of a log in which the last line is looked for."""
BAR = 60


class GridView:
    """Shows finished of all stages, those that run with the last line of their logs, and the time left for the whole grid."""

    def __init__(self, recipe: Recipe, times: Mapping[str, Any], console: Console) -> None:
        self.recipe, self.times, self.console = recipe, times, console
        self.plain = not console.is_terminal
        self.bases = {stage.name: stage.base for stage in recipe.stages}
        self.open = set(self.bases)
        self.finished = 0
        self._live: Any = None

    def __enter__(self) -> "GridView":
        if not self.plain:
            from rich.live import Live

            self._live = Live(console=self.console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def note(self, line: str) -> None:
        """A line that stays."""
        self.console.print(line)

    def skipped(self, name: str) -> None:
        """A stage was done before."""
        self.open.discard(name)
        self.finished += 1

    def started(self, name: str) -> None:
        """A stage begins."""
        if self.plain:
            self.note(f"{name}: started")

    def ended(self, name: str, error: str | None, seconds: float, log: Path, running: Mapping[str, float]) -> None:
        """A stage is done or has failed."""
        self.open.discard(name)
        self.finished += error is None
        count = f"[{self.finished}/{len(self.bases)}]"
        left = f"time left {clock(self.left(running))}"
        if error is None:
            self.note(f"{count} {name}: done in {seconds:.0f} s; {left}")
        else:
            self.note(f"{count} {name}: FAILED after {seconds:.0f} s: {error.splitlines()[0]} (log: {log}); {left}")

    def left(self, running: Mapping[str, float]) -> float:
        """Seconds until the grid is done: stages of one name take as long as those of that name took on average."""
        took: dict[str, list[float]] = {}
        for name, facts in self.times.items():
            if name in self.bases and "error" not in facts:
                took.setdefault(self.bases[name], []).append(facts["seconds"])
        means = {base: sum(values) / len(values) for base, values in took.items()}
        if not means:
            return math.nan
        usual = sum(means.values()) / len(means)
        now = time.monotonic()
        work = sum(max(means.get(self.bases[name], usual) - (now - running.get(name, now)), 0.0) for name in self.open)
        return work / min(self.recipe.jobs, max(len(self.open), 1))

    def draw(self, running: Mapping[str, float]) -> None:
        """Draw the table again."""
        if self._live is None:
            return
        from rich.console import Group
        from rich.text import Text

        done = round(BAR * self.finished / max(len(self.bases), 1))
        now = time.monotonic()
        lines = []
        for name, began in running.items():
            said = _last_line(self.recipe.folder / LOGS / f"{name}.log")
            lines.append(Text(f"{name}  {now - began:.0f} s  {said}", overflow="ellipsis", no_wrap=True))
        bar = Text("━" * done, style="green").append("━" * (BAR - done), style="bright_black")
        bar.append(f"  {self.finished}/{len(self.bases)} stages  time left {clock(self.left(running))}")
        self._live.update(Group(*lines, bar), refresh=True)


def clock(seconds: float) -> str:
    """h:mm:ss, or - when it is not known."""
    if not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _last_line(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - TAIL, 0))
            lines = file.read().decode("utf-8", "replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
