"""Progress for people: a live table in a terminal, plain lines elsewhere.

The view only reads reports. It draws at most a few times a second and never from a thread of its own.
"""

import math
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rewarden.runtime.clock import Clock, phase, timed_by

__all__ = ["COLUMNS", "Clock", "Column", "View", "phase", "shares", "timed_by"]

Mode = Literal["auto", "live", "plain", "off"]

LIVE_INTERVAL_S = 0.25
PLAIN_INTERVAL_S = 1.0
PLAIN_LATER_S = 10.0
"""Plain lines come at most once a second in the first minute, then every ten seconds: a log stays readable."""
ROWS = 12
BAR = 60
NOT_PHASES = ("time/step", "time/tokens_per_s")


@dataclass(frozen=True, slots=True)
class Column:
    """One column: the first of `keys` that a report has, shown in `format`."""

    header: str
    keys: tuple[str, ...]
    format: str = ".4g"

    def value(self, report: Mapping[str, float]) -> float | None:
        """The number to show, if the report has it."""
        return next((report[key] for key in self.keys if key in report), None)


COLUMNS = (
    Column("score", ("score/mean", "score")),
    Column("kl", ("kl/k3", "kl")),
    Column("length", ("length/mean",), ".1f"),
    Column("eos", ("eos_rate",), ".0%"),
    Column("loss", ("loss/total",)),
    Column("accuracy", ("accuracy", "reward/accuracy", "eval/accuracy"), ".1%"),
    Column("tok/s", ("time/tokens_per_s",), ",.0f"),
)
"""What is shown unless a job names other keys; a column appears when a report first has it."""


def columns_for(keys: Sequence[str]) -> tuple[Column, ...]:
    """Columns that show exactly these report keys, or the default ones when there are none."""
    return tuple(Column(key, (key,)) for key in keys) or COLUMNS


def shares(report: Mapping[str, float]) -> dict[str, float]:
    """Share of the step's time per phase, largest first; what no phase claims is "other". Without any phase there are none."""
    total = report.get("time/step", 0.0)
    if total <= 0:
        return {}
    spent = {key.removeprefix("time/"): v for key, v in report.items() if key.startswith("time/") and key not in NOT_PHASES}
    if not spent:
        return {}
    spent["other"] = max(total - sum(spent.values()), 0.0)
    return {name: value / total for name, value in sorted(spent.items(), key=lambda item: -item[1]) if value >= 0.005 * total}


class View:
    """Shows the reports of one run; a context manager.

    mode: "live" redraws a table, "plain" prints lines, "off" prints nothing, "auto" is live on a terminal and plain elsewhere.
    """

    def __init__(
        self,
        title: str,
        steps: int,
        *,
        start: int = 0,
        columns: Sequence[Column] = COLUMNS,
        mode: Mode = "auto",
        file: Any = None,
    ) -> None:
        from rich.console import Console

        self.title, self.steps, self.step = title, steps, start
        self._console = Console(file=file or sys.stdout, highlight=False, soft_wrap=True)
        self.mode = mode if mode != "auto" else ("live" if self._console.is_terminal else "plain")
        self._columns = columns
        self._seen: list[Column] = []
        self._rows: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=ROWS)
        self._took: deque[float] = deque(maxlen=20)
        self._began = time.monotonic()
        self._drawn = -math.inf
        self._live: Any = None

    def __enter__(self) -> "View":
        if self.mode == "live":
            from rich.live import Live

            self._live = Live(self._table(), console=self._console, auto_refresh=False, transient=False)
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
            self._live.stop()
            self._live = None

    def note(self, line: str) -> None:
        """Print a line for people, above the table where there is one."""
        if self.mode != "off":
            self._console.print(line, markup=False)

    def update(self, step: int, report: Mapping[str, float]) -> None:
        """Take in the report of `step` and draw if it is time to."""
        self.step = step
        self._rows.append((step, report))
        self._took.append(report.get("time/step", 0.0))
        self._seen = [c for c in self._columns if c in self._seen or c.value(report) is not None]
        now = time.monotonic()
        if self.mode == "live" and (now - self._drawn >= LIVE_INTERVAL_S or step >= self.steps):
            self._drawn = now
            self._live.update(self._table(), refresh=True)
        elif self.mode == "plain":
            interval = PLAIN_INTERVAL_S if now - self._began < 60 else PLAIN_LATER_S
            if now - self._drawn >= interval or step >= self.steps:
                self._drawn = now
                self._console.print(self.line(), markup=False)

    def line(self) -> str:
        """The last report as one plain line."""
        step, report = self._rows[-1]
        cells = [f"{c.header} {_shown(c.value(report), c.format)}" for c in self._seen]
        where = f"{self.title} {step}/{self.steps}"
        return "  ".join([where, *cells, *([text] if (text := _phases(report)) else []), f"eta {self.eta()}"])

    def eta(self) -> str:
        """Time left at the pace of the last 20 steps, as h:mm:ss."""
        if not self._took:
            return "-"
        left = sum(self._took) / len(self._took) * max(self.steps - self.step, 0)
        minutes, seconds = divmod(math.ceil(left), 60)
        return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"

    def _table(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(title=self.title, title_justify="left", expand=False)
        table.add_column("step", justify="right")
        for column in self._seen:
            table.add_column(column.header, justify="right")
        for step, report in self._rows:
            table.add_row(str(step), *(_shown(c.value(report), c.format) for c in self._seen))
        last = self._rows[-1][1] if self._rows else {}
        done = round(BAR * min(self.step / max(self.steps, 1), 1.0))
        bar = Text("━" * done, style="green").append("━" * (BAR - done), style="bright_black")
        return Group(table, bar, Text(f"step {self.step}/{self.steps}  eta {self.eta()}  {_phases(last)}"))


def _shown(value: float | None, pattern: str) -> str:
    return "" if value is None else format(value, pattern)


def _phases(report: Mapping[str, float]) -> str:
    return " ".join(f"{name} {share:.0%}" for name, share in shares(report).items())
