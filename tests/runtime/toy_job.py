"""A small job with everything that can break a resume: dropout, moments, two groups, a skipped step, samples.

`main` makes it the victim of the kill tests; its arguments are FOLDER STEPS RESUME.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rewarden.errors import RewardenError
from rewarden.runtime.clock import phase
from rewarden.runtime.job import Drive, Job, Tick, drive
from rewarden.runtime.optim import Group, Optim, Optimizer
from rewarden.runtime.ranks import Ranks
from rewarden.runtime.report import RunFolder
from rewarden.runtime.seed import generator, seed_of
from rewarden.runtime.step import split_batch, update
from rewarden.types import Term

NAN_STEP = 6
ROWS = 10


@dataclass(frozen=True)
class Batch:
    x_BT: Tensor
    mask_BT: Tensor

    def counts(self) -> dict[str, Tensor]:
        return {"policy": self.mask_BT.sum(), "value": self.mask_BT.sum()}

    def rows(self, index_b: Tensor) -> "Batch":
        return Batch(self.x_BT[index_b], self.mask_BT[index_b])

    def __len__(self) -> int:
        return len(self.x_BT)


@dataclass(frozen=True)
class Moments:
    count: int = 0
    mean: float = 0.0


@dataclass(frozen=True)
class State:
    step: int = 0
    moments: Moments = Moments()
    last: tuple[float, ...] = ()


class Net(nn.Module):
    """Two layers with dropout, so that the global generator matters. Satisfies Part."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.inner, self.outer, self.drop = nn.Linear(5, 32), nn.Linear(32, 5), nn.Dropout(0.3)
        for name, p in self.named_parameters():
            nn.init.normal_(p, std=0.3, generator=generator(seed, name))
        self.to(dtype)
        self.before_save = lambda folder: None

    def forward(self, x_BT: Tensor) -> Tensor:
        return self.outer(self.drop(torch.tanh(self.inner(x_BT))))

    def save(self, folder: Path) -> None:
        save_file(self.state_dict(), folder / "weights.safetensors")
        self.before_save(folder)

    def load(self, folder: Path) -> None:
        self.load_state_dict(load_file(folder / "weights.safetensors"))


def make_batch(step: int, index: Sequence[int], dtype: torch.dtype = torch.float32) -> Batch:
    """The rows `index` of step `step`, each from its own seed, with masks of uneven size."""
    x = (
        torch.stack([torch.randn(5, generator=generator("x", step, i)).to(dtype) for i in index])
        if index
        else torch.zeros(0, 5).to(dtype)
    )
    keep = [[seed_of("m", step, i, t) % 3 != 0 for t in range(5)] for i in index]
    return Batch(x, torch.tensor(keep, dtype=torch.bool).reshape(len(index), 5))


def make_job(
    steps: int,
    ranks: Ranks,
    *,
    dropout: float = 0.3,
    dtype: torch.dtype = torch.float32,
    stop_at: int = -1,
    wait_s: float = 0.0,
) -> tuple[Job, Net, Optimizer]:
    """The toy job; `stop_at` raises after that many steps, `wait_s` slows each step down."""
    policy, critic = Net(1, dtype), Net(2, dtype)
    policy.drop.p = critic.drop.p = dropout
    optimizer = Optimizer(
        [
            Group(
                "policy",
                list(policy.named_parameters()),
                Optim(learning_rate=1e-2, lr_scheduler_type="inverse_sqrt", warmup_steps=4),
            ),
            Group(
                "critic",
                list(critic.named_parameters()),
                Optim(learning_rate=3e-2, lr_scheduler_type="cosine", weight_decay=0.1, max_grad_norm=0.5),
            ),
        ],
        steps,
    )

    def loss(step: int, batch: Batch) -> dict[str, Term]:
        value = (policy(batch.x_BT) - batch.x_BT.roll(1, 1)) ** 2
        return {
            "policy": Term(value_BT=value * (float("nan") if step == NAN_STEP else 1.0), mask_BT=batch.mask_BT),
            "value": Term(value_BT=(critic(batch.x_BT) - value.detach()) ** 2, mask_BT=batch.mask_BT, weight=0.5),
        }

    def train(state: State) -> Iterator[Tick]:
        while state.step < steps:
            if state.step == stop_at:
                raise RewardenError("stopped on purpose")
            with phase("rollout"):
                batch = make_batch(state.step, list(ranks.share(ROWS)), dtype)
                time.sleep(wait_s)
            with phase("update"):
                report = update(optimizer, split_batch(batch, 3), lambda b, step=state.step: loss(step, b), ranks=ranks)
            score = report["loss/policy"]
            count = state.moments.count + 1
            moments = Moments(
                count,
                state.moments.mean + (min(score, 9.0) - state.moments.mean) / count if score == score else state.moments.mean,
            )
            state = State(state.step + 1, moments, (*state.last[-2:], moments.mean))
            samples = [{"text": f"step {state.step} rank {ranks.rank}", "score": float(batch.x_BT.sum()), "parts": {"a": 1}}]
            yield Tick(state=state, report={**report, "score/mean": moments.mean, "num_tokens": 50.0}, samples=samples)

    def export(folder: Path) -> None:
        (folder / "model").mkdir()
        policy.save(folder / "model")

    job = Job(
        title="toy",
        steps=steps,
        start=State(),
        train=train,
        parts={"policy": policy, "critic": critic, "optimizer": optimizer},
        export=export,
        notes=["toy data: 10 rows"],
    )
    return job, policy, optimizer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("steps", type=int)
    parser.add_argument("resume")
    args = parser.parse_args()
    torch.set_num_threads(1)
    ranks = Ranks.single("cpu")
    job, policy, _ = make_job(args.steps, ranks, wait_s=0.02)
    saves = iter(range(1, 1000))

    def pause(folder: Path) -> None:
        # Stands still inside a checkpoint write, half of it on disk, until the test kills this process.
        if "checkpoints" in str(folder) and next(saves) == int(os.environ.get("TOY_PAUSE_AT_SAVE", "0")):
            Path(args.folder, "paused").touch()
            time.sleep(60)

    policy.before_save = pause
    try:
        drive(
            job,
            RunFolder(args.folder),
            ranks,
            resume=args.resume,
            cfg=Drive(save_steps=4, view="plain"),
            recipe={"toy": {"steps": args.steps}},
        )
    except RewardenError as error:
        sys.exit(f"error: {error}")
