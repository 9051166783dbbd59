"""Coroutines called from ordinary code."""

import asyncio
import threading
from collections.abc import Awaitable
from typing import Any


def finish(awaitable: Awaitable[Any]) -> Any:
    """Run a coroutine to its end, also where an event loop is already running, as in a notebook."""

    async def wait() -> Any:
        return await awaitable

    if not _is_running():
        return asyncio.run(wait())
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["value"] = asyncio.run(wait())
        except BaseException as error:  # noqa: BLE001 - carried to the caller's thread and raised there
            outcome["error"] = error

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]


def _is_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
