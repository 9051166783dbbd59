"""Start several processes as a user or a launcher does, and compare what they left with what one process left."""

import json
import math
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from safetensors.torch import load_file

BIN = Path(sys.executable).parent
TOLERANCE = 1e-5
FLAGS = ("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0")
"""What `accelerate launch` would otherwise name in a warning, and a free port."""


@dataclass(frozen=True)
class Finished:
    code: int
    out: str
    err: str

    def errors(self) -> list[str]:
        """Our error messages, by their first line."""
        return [line for line in self.err.splitlines() if line.startswith("error: ")]


def environment(**more: str) -> dict[str, str]:
    """One thread for each process, no network, no line of a log held back."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1", **more}


def command(processes: int, *words: str) -> list[str]:
    """`rewarden ...`, by itself or under accelerate."""
    if processes == 1:
        return [sys.executable, "-m", "rewarden.cli", *words]
    launch = [str(BIN / "accelerate"), "launch", "--multi_gpu", "--num_processes", str(processes), *FLAGS]
    return [*launch, "-m", "rewarden.cli", *words]


def rewarden(processes: int, *words: str, cwd: Path, timeout: float = 300, **more: str) -> Finished:
    """Run `rewarden WORDS` on this many processes to its end."""
    done = subprocess.run(
        command(processes, *words),
        cwd=cwd, env=environment(**more), capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    return Finished(done.returncode, done.stdout, done.stderr)


def spawn(worker: Path, *arguments: str, world: int, timeout: float = 150) -> list[Finished]:
    """`python WORKER ARGUMENTS` once for each rank, with the variables a launcher sets; all must end well."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, str(worker), *arguments],
            env=environment(**common, RANK=str(rank), LOCAL_RANK=str(rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        outputs = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    ranks = [Finished(p.returncode, *texts) for p, texts in zip(processes, outputs, strict=True)]
    assert [rank.code for rank in ranks] == [0] * world, "\n".join(rank.err for rank in ranks)
    return ranks


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without times."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{key: value for key, value in json.loads(line).items() if not key.startswith("time/")} for line in lines]


def samples(run: Path) -> list[dict[str, Any]]:
    return pq.read_table(run / "samples.parquet").to_pylist()


def weights(folder: Path) -> dict[str, Any]:
    """Every tensor of every safetensors file below a folder, by file and name."""
    files = sorted(folder.rglob("*.safetensors"))
    assert files, f"no weights below {folder}"
    return {f"{file.relative_to(folder)}:{name}": value for file in files for name, value in load_file(file).items()}


def largest_gap(one: Path, other: Path) -> float:
    """The largest difference of any weight below two folders."""
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    return max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours)


def assert_same_numbers(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    """Equal words and, to TOLERANCE * (1 + |x|), equal numbers, row by row."""
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.keys() == b.keys()
        for name, value in a.items():
            shown = f"step {a.get('step')}: {name} is {value} and {b[name]}"
            if isinstance(value, float) and not math.isnan(value):
                assert abs(value - b[name]) <= TOLERANCE * (1 + abs(value)), shown
            else:
                assert value == b[name] or (math.isnan(value) and math.isnan(b[name])), shown
