"""One optimizer step over many microbatches and ranks, exact for any split of the batch.

    gradient of   sum over terms k of  weight_k * sum(value_k where mask_k) / count_k,

with count_k summed over all microbatches and all ranks before the first forward pass. Each microbatch adds its share of that
sum, ranks add theirs, so where the batch was cut cannot matter (a mean of microbatch means would weigh short ones more).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from rewarden.errors import RewardenError
from rewarden.runtime.optim import Optimizer
from rewarden.runtime.ranks import Ranks
from rewarden.types import Term


class Batch(Protocol):
    """What `update` and `split_batch` ask of an algorithm's batch."""

    def counts(self) -> dict[str, Any]:
        """Positions each term averages over in this batch: a number or a one-element tensor by term name."""
        ...

    def rows(self, index_b: Tensor) -> "Batch":
        """The sub-batch of these rows."""
        ...

    def __len__(self) -> int:
        """Number of rows."""
        ...


B = TypeVar("B")

ADDED = ("skipped_steps",)
LARGEST = ("skipped_in_a_row",)


def split_batch(batch: Any, size: int) -> list[Any]:
    """Cut `batch` into microbatches of at most `size` rows, in order; an empty batch gives none."""
    if size < 1:
        raise RewardenError(f"a microbatch of {size} rows was asked for; use at least 1 row")
    return [batch.rows(index_b) for index_b in torch.arange(len(batch)).split(size)] if len(batch) else []


def update(
    optimizer: Optimizer, microbatches: Sequence[B], loss: Callable[[B], Mapping[str, Term]], *, ranks: Ranks
) -> dict[str, float]:
    """Take one optimizer step; the only place where gradients meet parameters.

    Ranks may bring different numbers of microbatches, also none. Each group is clipped on its own, so that a policy and its
    critic do not throttle each other. When the loss or a gradient is not finite, nothing is changed but the count of skipped
    steps: weights, moments and schedules stay.

    Returns loss/NAME for weighted terms (NAME itself when it holds a slash), NAME for terms of weight 0, loss/total,
    grad_norm/GROUP before clipping, lr/GROUP of this step, skipped_steps (0 or 1) and skipped_in_a_row.

    RewardenError when a term was not counted, has a mask of another shape, or when no term reaches a parameter.
    """
    counts = _counts(microbatches, ranks)
    optimizer.zero_grad()
    local = _backward(microbatches, loss, counts)
    optimizer_parameters = optimizer.parameters()
    ranks.sum_gradients(optimizer_parameters)
    if all(p.grad is None for p in optimizer_parameters):
        optimizer.zero_grad()
        raise RewardenError(
            f"the loss reached no parameter of the optimizer ({len(microbatches)} microbatches on rank {ranks.rank}, terms "
            f"{sorted(local)}); give at least one row and one term of weight other than 0 that depends on the model"
        )
    report = _losses(local, ranks)
    norms = {group.name: gradient_norm(optimizer.parameters(group.name)) for group in optimizer.groups}
    rates = optimizer.learning_rates()
    finite = math.isfinite(report["loss/total"]) and all(map(math.isfinite, norms.values()))
    if finite:
        for group in optimizer.groups:
            scale_down(optimizer.parameters(group.name), norms[group.name], group.optim.max_grad_norm)
        optimizer.step()
    else:
        optimizer.skip()
    optimizer.zero_grad()
    report |= {f"grad_norm/{name}": norm for name, norm in norms.items()}
    report |= {f"lr/{name}": rate for name, rate in rates.items()}
    return report | {"skipped_steps": float(not finite), "skipped_in_a_row": float(optimizer.skipped_in_a_row)}


def summarize(reports: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One report for several updates: means, except that skipped_steps are added and skipped_in_a_row is the largest.

    Losses and norms of skipped steps are left out of their means, unless every step was skipped.
    """
    taken = [report for report in reports if not report.get("skipped_steps")] or list(reports)
    keys = dict.fromkeys(key for report in taken for key in report)
    means = {key: [report[key] for report in taken if key in report] for key in keys}
    merged = {key: sum(values) / len(values) for key, values in means.items()}
    merged |= {key: sum(report[key] for report in reports if key in report) for key in ADDED if key in keys}
    merged |= {key: max(report[key] for report in reports if key in report) for key in LARGEST if key in keys}
    return merged


def gradient_norm(parameters: Sequence[Parameter]) -> float:
    """L2 norm of all gradients together, in float32 or wider; 0 when there is none."""
    norms = [
        torch.linalg.vector_norm(p.grad, dtype=torch.promote_types(p.grad.dtype, torch.float32))
        for p in parameters
        if p.grad is not None
    ]
    return float(torch.linalg.vector_norm(torch.stack([norm.to(norms[0]) for norm in norms]))) if norms else 0.0


def scale_down(parameters: Sequence[Parameter], norm: float, max_norm: float | None) -> None:
    """Multiply gradients of L2 norm `norm` by max_norm / norm when that is below 1; None leaves them."""
    if max_norm is None or norm <= max_norm:
        return
    for p in parameters:
        if p.grad is not None:
            p.grad.mul_(max_norm / norm)


def _counts(microbatches: Sequence[Any], ranks: Ranks) -> dict[str, float]:
    local: dict[str, float] = {}
    for batch in microbatches:
        for name, count in batch.counts().items():
            local[name] = local.get(name, 0.0) + float(count)
    return ranks.sum(local)


def _backward(
    microbatches: Sequence[B], loss: Callable[[B], Mapping[str, Term]], counts: Mapping[str, float]
) -> dict[str, tuple[float, float]]:
    """Add the gradients of all microbatches; returns (this rank's part of the mean, weight) of each term."""
    parts: dict[str, list[Tensor]] = {}
    weights: dict[str, float] = {}
    for batch in microbatches:
        objective: Tensor | None = None
        for name, term in loss(batch).items():
            part = _mean_part(name, term, counts)
            parts.setdefault(name, []).append(part.detach())
            weights[name] = float(term.weight)
            if term.weight:
                objective = term.weight * part if objective is None else objective + term.weight * part
        if objective is not None and objective.requires_grad:
            objective.backward()
    # Read at the end: reading a number makes an accelerator wait for everything before it.
    return {name: (sum(float(part) for part in values), weights[name]) for name, values in parts.items()}


def _mean_part(name: str, term: Term, counts: Mapping[str, float]) -> Tensor:
    if name not in counts:
        raise RewardenError(f"the loss has a term {name!r} that counts() does not count; it counts {sorted(counts)}")
    value, mask = term.value_BT, term.mask_BT
    if value.shape != mask.shape:
        raise RewardenError(f"term {name!r} has values of shape {tuple(value.shape)} and a mask of shape {tuple(mask.shape)}")
    # where, not a product: what stands at masked positions may be NaN and must not reach the sum.
    return torch.where(mask, value, torch.zeros_like(value)).sum() / max(counts[name], 1.0)


def _losses(local: dict[str, tuple[float, float]], ranks: Ranks) -> dict[str, float]:
    means: dict[str, float] = {}
    weights: dict[str, float] = {}
    for part in ranks.gather_objects(local):
        for name, (value, weight) in part.items():
            means[name] = means.get(name, 0.0) + value
            weights[name] = weight
    report = {name if "/" in name or not weights[name] else f"loss/{name}": value for name, value in means.items()}
    return report | {"loss/total": sum(weights[name] * means[name] for name in means if weights[name])}
