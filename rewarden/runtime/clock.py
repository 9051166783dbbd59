"""Where the time goes: `with phase("rollout"):` anywhere, seconds per phase in the report.

Phases may nest; a second is charged to the innermost phase only, so shares never add up to more than all of it. Without a clock
(library use, tests) a phase does nothing. One phase costs about a microsecond; it does not wait for an accelerator's queue.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class Clock:
    """Seconds per phase since the last `report`."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._mark = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charge the time inside to `name`, less what inner phases take."""
        self._charge()
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def report(self) -> dict[str, float]:
        """{"time/NAME": seconds} since the last call, and start again from zero; open phases go on."""
        self._charge()
        seconds, self._seconds = self._seconds, {}
        return {f"time/{name}": value for name, value in seconds.items()}

    def _charge(self) -> None:
        now = time.perf_counter()
        if self._open:
            self._seconds[self._open[-1]] = self._seconds.get(self._open[-1], 0.0) + now - self._mark
        self._mark = now


_CURRENT: ContextVar[Clock | None] = ContextVar("rewarden_clock", default=None)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Charge the time inside to `name` on the clock that `timed_by` has set, if any."""
    clock = _CURRENT.get()
    if clock is None:
        yield
    else:
        with clock.phase(name):
            yield


@contextmanager
def timed_by(clock: Clock) -> Iterator[Clock]:
    """Let `phase` inside this block charge `clock`."""
    token = _CURRENT.set(clock)
    try:
        yield clock
    finally:
        _CURRENT.reset(token)
