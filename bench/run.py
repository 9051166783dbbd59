"""Running the two sides: each in a process of its own, A B A B, under the same conditions."""

import json
import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bench.benchmark import Benchmark, Pair
from bench.settings import FOLDER, ROOT, Settings
from rewarden.errors import RewardenError

Side = Literal["ours", "peer"]
SHOWN_LINES = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One process that has ended well: which, its facts, how long it took, and how many cores other processes kept busy."""

    side: Side
    pair: int
    facts: Mapping[str, Any]
    seconds: float
    others: float


Runner = Callable[[Benchmark, Side], Mapping[str, Any]]


def interleaved(benchmark: Benchmark, pairs: int, run: Runner, starting: Callable[[Side, int], None]) -> Iterator[Run]:
    """Ours, the peer, ours, the peer, ...: what slows the machine for a while then slows both.

    `starting` is told before each.
    """
    for pair in range(1, pairs + 1):
        sides: tuple[Side, Side] = ("ours", "peer")
        for side in sides:
            starting(side, pair)
            before = usage()
            facts = run(benchmark, side)
            seconds, busy, own = (after - start for after, start in zip(usage(), before, strict=True))
            yield Run(side=side, pair=pair, facts=facts, seconds=seconds, others=max(busy - own, 0.0) / max(seconds, 1e-9))


def usage() -> tuple[float, float, float]:
    """Seconds so far: of the clock, of all busy cores together (time stolen by a host included), of our ended children."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = children.ru_utime + children.ru_stime
    try:
        ticks = [int(word) for word in Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:9]]
    except OSError:  # a system without /proc: what others do cannot be told
        return time.monotonic(), own, own
    user, nice, system, _idle, _wait, irq, softirq, steal = ticks
    return time.monotonic(), (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK"), own


def check_same_work(benchmark: Benchmark, pair: Pair) -> None:
    """Refuse a pair whose sides report other amounts of work.

    Errors: RewardenError.
    """
    for key in benchmark.same:
        ours, peer = pair.ours.get(key), pair.peer.get(key)
        if ours is None or ours != peer:
            raise RewardenError(
                f"{benchmark.name}: {key} is {ours!r} on our side and {peer!r} on the peer's; both must do the same work"
            )


def run_side(settings: Settings, benchmark: Benchmark, side: Side) -> Mapping[str, Any]:
    """One run of one side through measure.py; its facts with the memory added.

    Errors: RewardenError with the command and the end of the output when it fails, takes too long or prints no result.
    """
    sizes = benchmark.environment(side, settings.sizes_of(benchmark))
    if side == "ours":
        return run_script(settings, settings.our_python, FOLDER / "ours" / benchmark.ours, sizes, (ROOT,), "ours")
    path = tuple(settings.peers / folder for folder in benchmark.peer_path)
    return run_script(settings, settings.peer_python, settings.peer_script(benchmark), sizes, path, "peer")


def run_script(
    settings: Settings, python: Path, script: Path, sizes: Mapping[str, str], path: tuple[Path, ...], side: Side
) -> Mapping[str, Any]:
    """See `run_side`."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "memory.json"
        command = [str(python), str(FOLDER / "measure.py"), str(out), str(script)]
        try:
            done = subprocess.run(
                command,
                cwd=scratch,
                env=environment(settings, sizes, (*path, settings.scripts), scratch),
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=settings.timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            # Whatever `text` says, a timeout carries bytes, and None for a stream without any.
            text = b"".join(part for part in (error.stdout, error.stderr) if isinstance(part, bytes)).decode(errors="replace")
            raise failure(f"took longer than BENCH_TIMEOUT={settings.timeout_s:g} s", command, sizes, side, text) from error
        if done.returncode:
            text = done.stdout + done.stderr
            raise failure(f"ended with exit code {done.returncode}", command, sizes, side, text)
        facts = last_facts(done.stdout, side)
        if facts is None:
            raise failure(f"printed no JSON object with {side!r}", command, sizes, side, done.stdout + done.stderr)
        return {**facts, **json.loads(out.read_text(encoding="utf-8"))}


def environment(settings: Settings, sizes: Mapping[str, str], path: tuple[Path, ...], scratch: str) -> dict[str, str]:
    """The same for both sides but for the sizes and where to import from; no GPU, no network, a fixed number of threads."""
    threads = str(settings.threads)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "BENCH_", "MALLOC_", "HF_"))}
    return {
        **kept,
        **sizes,
        **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), threads),
        **dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRL_EXPERIMENTAL_SILENCE"), "1"),
        "HF_HOME": str(Path(scratch) / "hf"),
        "TMPDIR": scratch,
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(map(str, path)),
    }


def last_facts(stdout: str, key: str) -> dict[str, Any] | None:
    """The last line that is a JSON object with `key`; libraries print lines of their own around it."""
    for line in reversed(stdout.splitlines()):
        if line.startswith("{"):
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if key in found:
                return found
    return None


def failure(what: str, command: list[str], sizes: Mapping[str, str], side: Side, text: str) -> RewardenError:
    """The error of a side that gave no result: what happened, how to repeat it, the end of what it printed."""
    who = "our side" if side == "ours" else "the peer"
    # Progress bars rewrite one line with carriage returns; only what would stay visible is shown.
    lines = [line.rsplit("\r", 1)[-1] for line in text.rstrip().splitlines()][-SHOWN_LINES:]
    settings = " ".join(f"{key}={value}" for key, value in sizes.items())
    script = Path(command[-1]).name
    shown = "\n".join(f"  | {line}" for line in lines) or "  | (no output)"
    return RewardenError(f"{who}: {script} {what}\n  sizes: {settings}\n  command: {' '.join(command)}\n{shown}")
