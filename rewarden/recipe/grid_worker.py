"""A process that runs stages of a grid, one after another, for the command that started it.

Orders come as JSON lines on its standard input, one answer a line goes back on its standard output. What a stage prints goes to
the log that the order names. When the input ends, because the command has no more orders or was killed, the process ends at
once, also in the middle of a stage: stages are made to be killed, and a process left behind would hold their folders.
"""

import json
import os
import queue
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, TextIO

from rewarden.errors import RewardenError, in_words


def main() -> None:
    """Take orders until there are none."""
    orders: queue.Queue[str] = queue.Queue()
    given, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", buffering=1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    threading.Thread(target=_listen, args=(given, orders), daemon=True).start()
    while True:
        order = json.loads(orders.get())
        with open(order["log"], "a", encoding="utf-8") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        answer = _obey(order)
        sys.stdout.flush()
        sys.stderr.flush()
        answers.write(json.dumps(answer) + "\n")


def _listen(given: TextIO, orders: "queue.Queue[str]") -> None:
    for line in given:
        orders.put(line)
    os._exit(1)


def _obey(order: dict[str, Any]) -> dict[str, Any]:
    """Run the stage of an order; the answer holds the seconds it took and, when it failed, why."""
    began, before = time.monotonic(), time.process_time()
    error = None
    try:
        _run(order)
    except RewardenError as caught:
        error = str(caught)
        sys.stderr.write(f"error: {error}\n")
    except KeyboardInterrupt:
        error = "interrupted"
    except (Exception, SystemExit) as caught:  # noqa: BLE001 - anybody's code
        error = in_words(caught)
        traceback.print_exc()
    return {"error": error, "seconds": time.monotonic() - began, "cpu_seconds": time.process_time() - before}


def _run(order: dict[str, Any]) -> None:
    from rich.console import Console

    from rewarden.recipe.jobs import parse_stage
    from rewarden.recipe.read import Stage
    from rewarden.recipe.run_stage import Ready, run_stage
    from rewarden.recipe.stages import resolved
    from rewarden.runtime.ranks import Ranks

    stage = Stage(name=order["name"], folder=Path(order["folder"]), raw=order["raw"])
    spec, how = parse_stage(stage, order["where"])
    ready = Ready(stage=stage, spec=spec, how=how, config=resolved(str(stage.raw["kind"]), spec), print_=order["print"])
    run_stage(ready, Ranks.start(), resume=order["resume"], console=Console(soft_wrap=True, highlight=False, markup=False))


if __name__ == "__main__":
    main()
