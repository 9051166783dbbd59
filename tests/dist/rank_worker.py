"""One rank of the two-process tests: `python rank_worker.py FOLDER`, with the variables a launcher sets. Writes what it saw."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
from toy_job import make_job

from rewarden.errors import RewardenError
from rewarden.runtime.job import Drive, drive
from rewarden.runtime.optim import Group, Optim, Optimizer
from rewarden.runtime.ranks import Ranks
from rewarden.runtime.report import RunFolder
from rewarden.runtime.step import split_batch, update
from rewarden.types import Term

ROWS = 12
STEPS = 8


@dataclass(frozen=True)
class Batch:
    x_BTD: Tensor
    mask_BT: Tensor

    def counts(self) -> dict[str, Any]:
        return {"square": self.mask_BT.sum(), "row": len(self), "stat/mean": self.mask_BT.sum()}

    def rows(self, index_b: Tensor) -> "Batch":
        return Batch(self.x_BTD[index_b], self.mask_BT[index_b])

    def __len__(self) -> int:
        return len(self.x_BTD)


class Net(nn.Module):
    """Two linear maps of different precision, so that gradients travel in several buckets, and one map that is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = nn.Linear(3, 4, dtype=torch.float64)
        self.outer = nn.Linear(4, 1)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x)).float()).squeeze(-1).double()


def make_batch() -> Batch:
    g = torch.Generator().manual_seed(0)
    return Batch(torch.randn(ROWS, 5, 3, generator=g, dtype=torch.float64), torch.rand(ROWS, 5, generator=g) > 0.4)


def make_net(kind: str) -> nn.Module:
    if kind == "mixed":
        return Net()
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4, dtype=torch.float64), nn.Tanh(), nn.Linear(4, 1, dtype=torch.float64), nn.Flatten(-2))


def loss_of(net: nn.Module):
    def loss(batch: Batch) -> dict[str, Term]:
        y_BT = net(batch.x_BTD)
        return {
            "square": Term(value_BT=(y_BT - 1) ** 2, mask_BT=batch.mask_BT, weight=0.7),
            "row": Term(value_BT=y_BT.sum(1, keepdim=True).exp(), mask_BT=torch.ones(len(batch), 1, dtype=torch.bool)),
            "stat/mean": Term(value_BT=y_BT, mask_BT=batch.mask_BT, weight=0.0),
        }

    return loss


def step(ranks: Ranks, shares: list[list[int]], *, kind: str = "double", size: int = 3, poison: bool = False) -> dict[str, Any]:
    """One `update` with the rows `shares[rank]` on this rank: gradients before clipping, weights after, report."""
    seen: dict[str, Tensor | None] = {}
    net = make_net(kind)
    names = dict(net.named_parameters())

    class Watching(Ranks):
        def sum_gradients(self, parameters) -> None:
            super().sum_gradients(parameters)
            seen.update({name: None if p.grad is None else p.grad.clone() for name, p in names.items()})

    optimizer = Optimizer([Group("net", list(names.items()), Optim(learning_rate=0.1))], 10)
    mine = make_batch().rows(torch.tensor(shares[ranks.rank], dtype=torch.long))
    if poison and ranks.rank == 1:
        mine.x_BTD[0] = float("nan")
    watching = Watching(rank=ranks.rank, world=ranks.world, device=ranks.device)
    report = update(optimizer, split_batch(mine, size), loss_of(net), ranks=watching)
    return {"grads": seen, "weights": {name: p.detach() for name, p in names.items()}, "report": report}


def collectives(ranks: Ranks) -> dict[str, Any]:
    """What every collective gives when ranks bring different things."""
    r = ranks.rank
    uneven = ranks.sum(
        {"n": torch.tensor(1 + 2 * r), "total": torch.tensor([1.0, 6.0][r], dtype=torch.float64), f"only{r}": 5.0}
    )
    error = None
    try:
        ranks.on_main(lambda: (_ for _ in ()).throw(RewardenError("the disk is full")))
    except RewardenError as caught:
        error = str(caught)
    ranks.barrier()
    return {
        "mask": ranks.sum(torch.tensor([True, r == 1])).tolist(),
        "number": ranks.sum(r + 0.5),
        "dict": {key: float(value) for key, value in uneven.items()},
        "max": (ranks.max(torch.tensor([float(r), 5.0 - r])).tolist(), ranks.max(-r)),
        "gathered": ranks.gather_objects({"rank": r}),
        "broadcast": ranks.broadcast_object(f"from {r}"),
        "main": ranks.on_main(lambda: 41 + 1),
        "error": error,
        "share": list(ranks.share(5)),
        "identity": (ranks.rank, ranks.world, ranks.is_main, str(ranks.device)),
    }


def run_job(ranks: Ranks, folder: Path) -> list[Any]:
    """The toy job in float64 without dropout: stopped half way, refused by another recipe, resumed to its end."""
    log: list[Any] = []
    for stop_at, recipe in ((5, {"a": 1}), (-1, {"a": 2}), (-1, {"a": 1})):
        job, policy, _ = make_job(STEPS, ranks, dropout=0.0, dtype=torch.float64, stop_at=stop_at)
        try:
            outcome = drive(job, RunFolder(folder), ranks, cfg=Drive(save_steps=2, view="plain"), recipe=recipe)
            log.append((outcome.step, outcome.resumed_from))
        except RewardenError as error:
            log.append(str(error))
    return [log, {name: p.detach() for name, p in policy.named_parameters()}]


def main() -> None:
    torch.set_num_threads(1)
    ranks = Ranks.start()
    folder = Path(sys.argv[1])
    eight_and_four, all_and_none = [list(range(8)), list(range(8, 12))], [list(range(12)), []]
    seen = {
        "collectives": collectives(ranks),
        "unequal": step(ranks, eight_and_four),
        "one microbatch each": step(ranks, eight_and_four, size=100),
        "no rows on one rank": step(ranks, all_and_none),
        "mixed precision": step(ranks, eight_and_four, kind="mixed"),
        "mixed, no rows": step(ranks, all_and_none, kind="mixed"),
        "poison": step(ranks, eight_and_four, poison=True),
        "job": run_job(ranks, folder / "run"),
    }
    torch.save(seen, folder / f"rank{ranks.rank}.pt")
    ranks.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
