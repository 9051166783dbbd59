"""How often a command that works for long says how far it is."""

import time
from collections.abc import Callable

TOLD_EVERY_S = 10.0


def every(seconds: float = TOLD_EVERY_S) -> Callable[[], bool]:
    """A function that says whether `seconds` have passed since it last said yes, or since this call."""
    told = time.monotonic()

    def due() -> bool:
        nonlocal told
        now = time.monotonic()
        if now - told < seconds:
            return False
        told = now
        return True

    return due
