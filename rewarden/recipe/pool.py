"""Processes that take orders: started when first needed, replaced when they die, ended with the command."""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

PATIENCE_S = 5.0
"""How long a process that is told to stop may take to let go of its folder."""


class Worker:
    """One process and the order it is working on."""

    def __init__(self, threads: int) -> None:
        self.name = ""
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rewarden.recipe.grid_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)},
            # Ctrl-C is for the command, which then stops its processes itself.
            start_new_session=True,
        )

    def give(self, name: str, order: Mapping[str, Any]) -> None:
        """Start on an order."""
        assert self.process.stdin is not None
        self.name, self.began = name, time.monotonic()
        self.process.stdin.write((json.dumps(order) + "\n").encode())
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The answer that is there to be read; when the process died instead, what ended it."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if line:
            return dict(json.loads(line))
        code = self.process.wait()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        hint = "; the machine may have run out of memory: fewer jobs at a time need less" if code == -signal.SIGKILL else ""
        return {"error": f"its process ended ({how}){hint}", "seconds": time.monotonic() - self.began}

    def stop(self) -> None:
        """End the process; one that is in a stage may first let go of its folder."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if self.name:
            self.process.send_signal(signal.SIGINT)
            until = time.monotonic() + PATIENCE_S
            while self.process.poll() is None and time.monotonic() < until and not self._answers():
                time.sleep(0.02)
        try:
            self.process.stdin.close()
        except OSError:
            self.process.kill()  # it is gone, with an order that it never read
        self.process.stdout.close()
        self.process.wait()

    def _answers(self) -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)  # type: ignore[arg-type]
            return bool(selector.select(0))


class Pool:
    """Up to `size` processes of `threads` threads; a context manager that ends all of them."""

    def __init__(self, size: int, threads: int) -> None:
        self.size, self.threads = size, threads
        self.idle: list[Worker] = []
        self.busy: list[Worker] = []

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *exception: object) -> None:
        for worker in (*self.busy, *self.idle):
            worker.stop()
        self.busy, self.idle = [], []

    @property
    def free(self) -> bool:
        """Whether another order can be taken."""
        return len(self.busy) < self.size

    @property
    def running(self) -> dict[str, float]:
        """Orders that are worked on, and since when on the monotonic clock."""
        return {worker.name: worker.began for worker in self.busy}

    def give(self, name: str, order: Mapping[str, Any]) -> None:
        """Start on an order in a free process."""
        worker = self.idle.pop() if self.idle else Worker(self.threads)
        self.busy.append(worker)
        worker.give(name, order)

    def wait(self, seconds: float) -> list[tuple[str, dict[str, Any]]]:
        """Names and answers of the orders that end within `seconds`, as soon as one does."""
        with selectors.DefaultSelector() as selector:
            for worker in self.busy:
                assert worker.process.stdout is not None
                selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
            ended = [key.data for key, _ in selector.select(seconds)] if self.busy else []
        answers = []
        for worker in ended:
            name, answer = worker.name, worker.answer()
            worker.name = ""
            self.busy.remove(worker)
            if worker.process.poll() is None:
                self.idle.append(worker)
            else:
                worker.stop()
            answers.append((name, answer))
        return answers
