"""The processes of one run, over accelerate; alone, every collective is the identity.

There is no DDP wrapper: `update` sums gradients over ranks itself, so parts of a model may be called on their own and ranks
may hold different numbers of rows. Every method here is collective: all ranks call it, in the same order.

A rank that dies closes its connections, so the others find out at once (`PeerError`). A rank that is alive but never comes is
waited for `timeout_minutes()`; only work that rank 0 does for all (`on_main`) may take any time.
"""

import atexit
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from rewarden.errors import ConfigError, RewardenError

T = TypeVar("T")

TIMEOUT = "REWARDEN_TIMEOUT_MINUTES"
TIMEOUT_MINUTES = 10.0
"""How long a rank waits for the others in one collective, unless the environment says otherwise."""

BUCKET_ELEMENTS = 16 * 2**20
"""Gradients travel in buckets of at most this many numbers: few messages, bounded memory."""


class PeerError(RewardenError):
    """Another rank is gone, or did not come in time."""


class Ranks:
    """This process among its peers: `rank` of `world`, `is_main` on rank 0, and the `device` it computes on.

    patient: a process group without a time limit, for waiting while rank 0 works; None takes the default group.
    """

    def __init__(self, *, rank: int, world: int, device: torch.device, patient: "dist.ProcessGroup | None" = None) -> None:
        self.rank = rank
        self.world = world
        self.device = device
        self.patient = patient

    @property
    def is_main(self) -> bool:
        """True on rank 0, the only one that writes."""
        return self.rank == 0

    @classmethod
    def single(cls, device: str | torch.device | None = None) -> "Ranks":
        """One process, without accelerate; the device is CUDA where there is one."""
        chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
        return cls(rank=0, world=1, device=torch.device(chosen))

    @classmethod
    def start(cls) -> "Ranks":
        """Join the processes that `accelerate launch` or `torchrun` started (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...).

        gloo on CPUs, nccl on GPUs. Started by hand it is one process.

        Errors: ConfigError when accelerate was asked for several processes and started one; PeerError when they do not meet.
        """
        from accelerate import Accelerator
        from accelerate.utils import InitProcessGroupKwargs

        world = launched()
        cpu = not torch.cuda.is_available()
        if world == 1:
            _refuse_lonely()
        waiting = InitProcessGroupKwargs(timeout=timedelta(minutes=timeout_minutes()))
        with _meeting("join the run", world):
            accelerator = Accelerator(cpu=cpu, kwargs_handlers=[waiting] if world > 1 else None)
        if accelerator.num_processes != world:
            raise RewardenError(
                f"WORLD_SIZE is {world} but accelerate joined {accelerator.num_processes} processes; start with "
                "`accelerate launch` or `torchrun`, which set RANK, LOCAL_RANK, MASTER_ADDR and MASTER_PORT too"
            )
        patient = None
        if world > 1:
            atexit.register(_leave)
            with _meeting("join the run", world):
                # 30 days: a checkpoint, or a stage that rank 0 does alone, may take as long as it needs
                patient = dist.new_group(backend="gloo", timeout=timedelta(days=30))
        # accelerate says "cpu:0", which compares unequal to "cpu"
        device = torch.device("cpu") if accelerator.device.type == "cpu" else accelerator.device
        return cls(rank=accelerator.process_index, world=world, device=device, patient=patient)

    def share(self, num: int) -> range:
        """The indices of this rank when `num` rows are dealt out in turn; shares differ by at most one row."""
        return range(self.rank, num, self.world)

    def sum(self, value: Any) -> Any:
        """The sum over ranks of a tensor, a number, or a dict of either (keys may differ between ranks: absent counts as 0)."""
        if self.world == 1:
            return dict(value) if isinstance(value, Mapping) else value
        if isinstance(value, Tensor):
            total = value.detach().clone().to(torch.int64 if value.dtype == torch.bool else value.dtype)
            with self._meeting("a sum"):
                dist.all_reduce(total)
            return total
        if not isinstance(value, Mapping):
            return sum(self.gather_objects(value))
        local = {key: item.detach().cpu() if isinstance(item, Tensor) else item for key, item in value.items()}
        total_by_key: dict[str, Any] = {}
        for part in self.gather_objects(local):
            for key, item in part.items():
                total_by_key[key] = total_by_key[key] + item if key in total_by_key else item
        return {key: item.to(self.device) if isinstance(item, Tensor) else item for key, item in total_by_key.items()}

    def max(self, value: Any) -> Any:
        """The largest over ranks, element by element for a tensor, or of plain numbers."""
        if self.world == 1:
            return value
        if isinstance(value, Tensor):
            largest = value.detach().clone()
            with self._meeting("a maximum"):
                dist.all_reduce(largest, op=dist.ReduceOp.MAX)
            return largest
        return max(self.gather_objects(value))

    def sum_gradients(self, parameters: Iterable[Parameter]) -> None:
        """Replace every gradient by its sum over ranks, in place.

        A parameter without a gradient on this rank (no rows here) counts as 0; one without on any rank stays without.
        Gradients below float32 are added in float32.
        """
        if self.world == 1:
            return
        owned = list(parameters)
        present = torch.tensor([p.grad is not None for p in owned], dtype=torch.int32, device=self.device)
        with self._meeting("the sum of gradients"):
            dist.all_reduce(present)
        used = [p for p, count in zip(owned, present.tolist(), strict=True) if count]
        for p in used:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        for bucket in _buckets(used):
            grads = [p.grad for p in bucket if p.grad is not None]
            wide = torch.promote_types(grads[0].dtype, torch.float32)
            flat = torch.cat([grad.flatten().to(wide) for grad in grads])
            with self._meeting("the sum of gradients"):
                dist.all_reduce(flat)
            for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(total.view_as(grad))

    def gather_objects(self, value: T) -> list[T]:
        """What every rank passed, in rank order, on every rank (pickled: for small things)."""
        if self.world == 1:
            return [value]
        gathered: list[Any] = [None] * self.world
        with self._meeting("gathering numbers"):
            dist.all_gather_object(gathered, value)
        return gathered

    def broadcast_object(self, value: T) -> T:
        """What rank 0 passed, on every rank."""
        if self.world == 1:
            return value
        box = [value]
        device = self.device if self.patient is None else torch.device("cpu")
        with self._meeting("word from rank 0"):
            dist.broadcast_object_list(box, src=0, device=device, group=self.patient)
        return box[0]

    def on_main(self, function: Callable[[], T]) -> T:
        """Run `function` on rank 0 alone; every rank returns its result, or raises its error instead of waiting forever."""
        if self.world == 1:
            return function()
        if self.is_main:
            try:
                result = function()
            except Exception as error:
                known = isinstance(error, RewardenError)
                self.broadcast_object((None, error if known else RewardenError(f"rank 0 failed: {error!r}")))
                raise
            return self.broadcast_object((result, None))[0]
        received: Any = self.broadcast_object((None, None))
        if received[1] is not None:
            raise received[1]
        return received[0]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.world > 1:
            with self._meeting("a barrier"):
                dist.barrier()

    @contextmanager
    def _meeting(self, what: str) -> Iterator[None]:
        with _meeting(what, self.world, self.rank):
            yield


def launched() -> int:
    """How many processes the launcher says there are; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def timeout_minutes() -> float:
    """Minutes a rank waits for the others in a collective.

    Errors: ConfigError when the environment variable holds no number above 0.
    """
    text = os.environ.get(TIMEOUT, str(TIMEOUT_MINUTES))
    try:
        minutes = float(text)
    except ValueError:
        minutes = math.nan
    if not 0 < minutes < math.inf:
        raise ConfigError(f"{TIMEOUT} is {text!r}; give a number of minutes above 0, or unset it for {TIMEOUT_MINUTES:g}")
    return minutes


@contextmanager
def _meeting(what: str, world: int, rank: int | None = None) -> Iterator[None]:
    """Say in words that the others did not come; torch and its backends raise RuntimeError (and subclasses) for it."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, RewardenError) or world == 1:
            raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        me = f"rank {os.environ.get('RANK', '?') if rank is None else rank} of {world}"
        if "timed out" in reason.lower() or "timeout" in reason.lower():
            raise PeerError(
                f"{me} waited {timeout_minutes():g} minutes for the other ranks ({what}): one hangs or is far slower. Look "
                f"at what it does; if it needs that long, set {TIMEOUT} higher. The same command goes on from the last "
                "checkpoint"
            ) from error
        raise PeerError(
            f"{me} lost another rank ({what}): it was killed, ran out of memory, or could not be reached ({reason}). Look at "
            "the launcher's lines for which one; the same command goes on from the last checkpoint"
        ) from error


def _refuse_lonely() -> None:
    """`accelerate launch --num_processes 2` starts one process on a machine without GPUs, and says nothing.

    It sets MASTER_ADDR only when several were asked for, and then leaves the rest to mpirun.
    """
    asked = "ACCELERATE_USE_CPU" in os.environ and "MASTER_ADDR" in os.environ
    joined = any(name in os.environ for name in ("RANK", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"))
    if asked and not joined and not torch.cuda.is_available():
        raise ConfigError(
            "accelerate launch was asked for several processes but started one, as it does on CPUs. Add --multi_gpu (gloo "
            "joins the processes where there is no GPU): `accelerate launch --multi_gpu --num_processes 2 -m rewarden.cli run "
            "...`. If one process is meant, use --num_processes 1 and unset MASTER_ADDR"
        )


def _leave() -> None:
    """Close the connections at the end of the process; backends complain otherwise."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _buckets(parameters: list[Parameter]) -> Iterable[list[Parameter]]:
    """Runs of parameters of one dtype and device, at most BUCKET_ELEMENTS numbers together (a larger one goes alone)."""
    bucket: list[Parameter] = []
    size = 0
    for p in parameters:
        same = not bucket or (p.dtype == bucket[0].dtype and p.device == bucket[0].device)
        if bucket and (not same or size + p.numel() > BUCKET_ELEMENTS):
            yield bucket
            bucket, size = [], 0
        bucket.append(p)
        size += p.numel()
    if bucket:
        yield bucket
