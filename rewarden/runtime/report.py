"""The folder of one run: what ran, where, and what came of it.

recipe.yaml  env.json  metrics.jsonl  samples.parquet  checkpoints/  done.json  lock   and what the job exports (model/, ...);
while it runs also work/, what a job has finished and no longer holds in memory
"""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from rewarden.errors import ResumeError, RewardenError
from rewarden.runtime.disk import clean, remove, swap_in, write_atomic, writing
from rewarden.runtime.lock import FolderLock
from rewarden.runtime.metrics import Metrics
from rewarden.runtime.ranks import Ranks
from rewarden.runtime.samples import Samples

PACKAGES = ("rewarden", "torch", "transformers", "peft", "accelerate", "datasets", "safetensors", "numpy", "pyarrow")
RESULTS = (
    "checkpoints",
    "metrics.jsonl",
    "samples.parquet",
    "samples.tail.jsonl",
    "done.json",
    "recipe.yaml",
    "tensorboard",
    "wandb",
    "work",
)


class RunFolder:
    """Paths and writers of one run. Making the object touches nothing; `open` creates the folder and takes its lock."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.recipe = self.path / "recipe.yaml"
        self.env = self.path / "env.json"
        self.checkpoints = self.path / "checkpoints"
        self.done = self.path / "done.json"
        self.work = self.path / "work"
        self.metrics = Metrics(self.path / "metrics.jsonl")
        self._lock = FolderLock(self.path / "lock")
        self._samples: Samples | None = None

    @property
    def samples(self) -> Samples:
        """The sample store, opened on first use."""
        if self._samples is None:
            self._samples = Samples(self.path / "samples.parquet")
        return self._samples

    def open(self) -> list[str]:
        """Create the folder, take its lock and clean up after a killed run; returns lines for people.

        ResumeError when another run holds it, RewardenError when it cannot be written.
        """
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        notice = self._lock.acquire()
        with writing(self.path):
            return [*([notice] if notice else []), *clean(self.path), *clean(self.checkpoints)]

    def close(self) -> None:
        """Let go of the lock."""
        self._lock.release()

    def drop_work(self) -> None:
        """Remove what a job kept in `work` beside its checkpoints."""
        if self.work.exists():
            with writing(self.work):
                remove(self.work)

    def truncate(self, step: int) -> list[str]:
        """Drop metrics and samples of steps after `step`, which will be done again; returns lines for people."""
        steps = self.metrics.truncate(step)
        rows = self.samples.truncate(step or -1)  # a start from the beginning also makes its rows of step 0 again
        lines = []
        if steps:
            lines.append(f"dropped {len(steps)} lines of metrics.jsonl after step {step}: no checkpoint holds those steps")
        if rows:
            lines.append(f"dropped {rows} rows of samples.parquet after step {step}: no checkpoint holds those steps")
        return lines

    def set_aside(self, exported: list[str]) -> list[str]:
        """Move an earlier run's results into earlier-N, so that a new one starts clean; returns lines for people.

        exported: names the earlier run exported into the folder.
        """
        found = [name for name in dict.fromkeys((*RESULTS, *exported)) if (self.path / name).exists()]
        if not found:
            return []
        number = 1
        while (self.path / f"earlier-{number}").exists():
            number += 1
        aside = self.path / f"earlier-{number}"
        with writing(aside):
            aside.mkdir()
            for name in found:
                (self.path / name).rename(aside / name)
        self._samples = None
        return [f"moved {', '.join(found)} of an earlier run to {aside}"]

    def take(self, staging: Path) -> list[str]:
        """Move what a job exported into `staging` to its place in the folder, each file or folder at once; returns names."""
        names = sorted(path.name for path in staging.iterdir())
        taken = {*RESULTS, "env.json", "lock"} & {*names}
        if taken:
            raise RewardenError(f"the job exports {sorted(taken)}, which the run folder uses itself; choose other names")
        with writing(self.path):
            for name in names:
                swap_in(staging / name, self.path / name)
            staging.rmdir()
        return names

    def write_recipe(self, recipe: Mapping[str, Any]) -> None:
        """Write the resolved recipe as YAML."""
        write_atomic(
            self.recipe, yaml.safe_dump(json.loads(json.dumps(recipe, default=str)), sort_keys=False, allow_unicode=True)
        )

    def write_env(self, ranks: Ranks) -> None:
        """Write env.json: the environment of this start, and those of earlier starts below it."""
        earlier: list[Any] = []
        if self.env.exists():
            try:
                last = json.loads(self.env.read_text(encoding="utf-8"))
                earlier = [*last.pop("earlier_starts", []), last]
            except (ValueError, TypeError, AttributeError) as error:
                raise ResumeError(f"{self.env} is damaged ({error}); move it away, then run again") from error
        write_atomic(self.env, json.dumps({**environment(ranks), "earlier_starts": earlier}, indent=2))

    def read_done(self) -> dict[str, Any] | None:
        """What `write_done` wrote, or None while the run is not finished.

        Errors: ResumeError when the file is damaged.
        """
        if not self.done.exists():
            return None
        try:
            facts = json.loads(self.done.read_text(encoding="utf-8"))
            found = {key: facts[key] for key in ("step", "fingerprint", "recipe", "exported")}
            return {**facts, **found, "recipe": dict(found["recipe"]), "exported": [str(name) for name in found["exported"]]}
        except (ValueError, TypeError, KeyError) as error:
            raise ResumeError(
                f"{self.done} is damaged ({error!r}); remove it to go on from the last checkpoint, or use another folder"
            ) from error

    def write_done(self, facts: Mapping[str, Any]) -> None:
        """Mark the run as finished; the last thing a run writes."""
        write_atomic(self.done, json.dumps(facts, indent=2, default=str))


def environment(ranks: Ranks) -> dict[str, Any]:
    """Versions, device, threads, git commit of the working directory (None outside a repository), command line, time."""
    device = str(ranks.device)
    if ranks.device.type == "cuda":
        device = f"{device} ({torch.cuda.get_device_name(ranks.device)})"
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "argv": sys.argv,
        "commit": commit(Path.cwd()),
        "device": device,
        "num_ranks": ranks.world,
        "num_threads": torch.get_num_threads(),
        "num_cpus": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def commit(folder: Path) -> str | None:
    """The git commit checked out in `folder`, with "+changes" when tracked files differ from it; None without git."""
    head = _git(folder, "rev-parse", "HEAD")
    if head is None:
        return None
    return f"{head}+changes" if _git(folder, "status", "--porcelain", "--untracked-files=no") else head


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, encoding="utf-8", timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
