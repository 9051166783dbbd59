"""AdamW over named parameter groups, each with its own learning rate, schedule and gradient clip."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor
from torch.nn import Parameter

from rewarden.errors import ConfigError, ResumeError
from rewarden.spec import Spec

Schedule = Literal["constant", "linear", "cosine", "inverse_sqrt"]


class Optim(Spec):
    """AdamW and its schedule, for one group of parameters."""

    learning_rate: float = Field(ge=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of AdamW's running mean and running square."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to AdamW's denominator."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay; biases and norms (tensors with fewer than two dimensions) never decay."""
    lr_scheduler_type: Schedule = "constant"
    """What follows the warm-up: constant, linear or cosine to min_lr_ratio, or inverse_sqrt."""
    warmup_steps: int | float = Field(default=0, ge=0)
    """Steps until the peak; 0 starts at the peak; a number below 1 is a share of all steps."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """The schedule never falls below this share of the peak after the warm-up."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Gradients of the group are scaled down to this L2 norm; None does not clip."""

    @field_validator("warmup_steps")
    @classmethod
    def _whole_or_share(cls, value: int | float) -> int | float:
        if value >= 1 and value != int(value):
            raise ValueError("a number of steps must be whole; below 1 it is a share of all steps")
        return value

    @field_validator("betas")
    @classmethod
    def _below_one(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError("both betas must lie in [0, 1)")
        return value

    def num_warmup_steps(self, total_steps: int) -> int:
        """Warm-up in whole steps, a share rounded up."""
        return math.ceil(self.warmup_steps * total_steps) if self.warmup_steps < 1 else int(self.warmup_steps)


def lr_factor(step: int, *, schedule: Schedule, warmup_steps: int, total_steps: int, min_lr_ratio: float = 0.0) -> float:
    """The learning rate of optimizer step `step` (counted from 0) as a share of the peak.

    With W = warmup_steps and u = (step - W) / (total_steps - W), cut to [0, 1]:

        step < W:      (step + 1) / (W + 1)          transformers has step / W, whose first step does nothing
        constant       1
        linear         m + (1 - m) * (1 - u)         m = min_lr_ratio
        cosine         m + (1 - m) * (1 + cos(pi u)) / 2
        inverse_sqrt   max(step / W, 0.1) while step < W, then max(sqrt(W / step), m); constant 1 when W is 0

    Source: inverse_sqrt as in PPO-max's code (Zheng et al. 2023), which divides by zero when W is 0; the others as in
    transformers' `get_*_schedule_with_warmup`.
    """
    if schedule == "inverse_sqrt":
        if warmup_steps == 0:
            return 1.0
        if step < warmup_steps:
            return max(step / warmup_steps, 0.1)
        return max(math.sqrt(warmup_steps / step), min_lr_ratio)
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if schedule == "constant":
        return 1.0
    progress = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
    shape = 1.0 - progress if schedule == "linear" else (1.0 + math.cos(math.pi * progress)) / 2
    return min_lr_ratio + (1.0 - min_lr_ratio) * shape


@dataclass(frozen=True, slots=True)
class Group:
    """Named parameters that share one `Optim`: clipped together, reported as grad_norm/NAME and lr/NAME."""

    name: str
    params: Sequence[tuple[str, Parameter]]
    optim: Optim


class Optimizer:
    """torch's AdamW with named groups; satisfies the checkpoint's `Part`.

    num_steps: steps taken, which is where the schedules stand (a skipped step does not count).
    num_skipped, skipped_in_a_row: steps left out because a loss or a gradient was not finite; `update` counts them.

    Weights below float32 are stepped on a float32 copy and rounded after each step: at PPO's learning rates a bfloat16
    weight would otherwise never move.
    """

    def __init__(self, groups: Sequence[Group], total_steps: int, *, made_of: str = "") -> None:
        """Groups must have distinct names and share no parameter; ConfigError says which does.

        made_of: how the steps come about where they are not the steps of the run, such as "2 rounds of 4"; for messages.
        """
        self.groups = tuple(groups)
        self.total_steps = total_steps
        self._made_of = f" ({made_of})" if made_of else ""
        self.num_steps = 0
        self.num_skipped = 0
        self.skipped_in_a_row = 0
        self._parameters = _named(self.groups)
        self._copies = {key: p.detach().float().clone() for key, p in self._parameters.items() if _narrow(p)}
        torch_groups = []
        for group in self.groups:
            stepped = [(name, p, self._stepped(f"{group.name}/{name}")) for name, p in group.params]
            for decays in (True, False):
                params = [target for _, p, target in stepped if (p.ndim >= 2) is decays]
                options = {"lr": group.optim.learning_rate, "betas": group.optim.betas, "eps": group.optim.eps}
                decay = group.optim.weight_decay if decays else 0.0
                if params:
                    torch_groups.append({"params": params, "name": group.name, "weight_decay": decay, **options})
        fused = all(p.device.type in ("cpu", "cuda") for p in self._parameters.values())
        self._adamw = torch.optim.AdamW(torch_groups, fused=fused or None)

    def parameters(self, name: str | None = None) -> list[Parameter]:
        """The parameters of group `name`, or of all groups."""
        return [p for group in self.groups if name in (None, group.name) for _, p in group.params]

    def learning_rates(self) -> dict[str, float]:
        """The learning rate of the next step, by group."""
        return {group.name: group.optim.learning_rate * self._factor(group.optim) for group in self.groups}

    def step(self) -> None:
        """Move every parameter that has a gradient, then advance the schedules."""
        rates = self.learning_rates()
        for torch_group in self._adamw.param_groups:
            torch_group["lr"] = rates[torch_group["name"]]
        for key, copy in self._copies.items():
            gradient = self._parameters[key].grad
            copy.grad = None if gradient is None else gradient.to(copy.dtype)
        self._adamw.step()
        with torch.no_grad():
            for key, copy in self._copies.items():
                if copy.grad is not None:
                    self._parameters[key].copy_(copy)
                    copy.grad = None
        self.num_steps += 1
        self.skipped_in_a_row = 0

    def skip(self) -> None:
        """Count a step that was left out; parameters, moments and schedules stay as they are."""
        self.num_skipped += 1
        self.skipped_in_a_row += 1

    def restart(self) -> None:
        """Begin anew with the parameters as they are now: no moments, no steps, the schedule at its start."""
        self.zero_grad()
        self._adamw.state.clear()
        for key, copy in self._copies.items():
            copy.copy_(self._parameters[key].detach())
        self.num_steps = self.num_skipped = self.skipped_in_a_row = 0

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for p in self._parameters.values():
            p.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes while training, by group and parameter name; tensors on the CPU are shared, not copied."""
        moments = {}
        for key in self._parameters:
            state = self._adamw.state.get(self._stepped(key), {})
            moments[key] = {name: value.detach().cpu() for name, value in state.items()}
        counts = {"num_steps": self.num_steps, "num_skipped": self.num_skipped, "skipped_in_a_row": self.skipped_in_a_row}
        return {**counts, "moments": moments, "copies": {key: copy.cpu() for key, copy in self._copies.items()}}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; ResumeError names parameters that do not match."""
        missing, unknown = self._parameters.keys() - saved["moments"].keys(), saved["moments"].keys() - self._parameters.keys()
        if missing or unknown:
            raise ResumeError(
                f"the optimizer state is of other parameters: without {_few(missing)}, with {_few(unknown)}; "
                "resume with the model and training options that wrote it"
            )
        for key, state in saved["moments"].items():
            shapes = {tuple(value.shape) for name, value in state.items() if name != "step"}
            if shapes and shapes != {tuple(self._parameters[key].shape)}:
                raise ResumeError(
                    f"the optimizer state of {key} has shape {shapes.pop()}, not {tuple(self._parameters[key].shape)}; "
                    "resume with the model that wrote it"
                )
        order = [p for group in self._adamw.param_groups for p in group["params"]]
        position = {id(p): index for index, p in enumerate(order)}
        by_index = {position[id(self._stepped(key))]: state for key, state in saved["moments"].items() if state}
        self._adamw.load_state_dict({"state": by_index, "param_groups": self._adamw.state_dict()["param_groups"]})
        for key, copy in self._copies.items():
            copy.copy_(saved["copies"][key])
        self.num_steps, self.num_skipped = saved["num_steps"], saved["num_skipped"]
        self.skipped_in_a_row = saved["skipped_in_a_row"]

    @property
    def notes(self) -> list[str]:
        """Sentences for people: a group whose warm-up outlasts the training never reaches its learning rate."""
        warmups = {group.name: group.optim.num_warmup_steps(self.total_steps) for group in self.groups}
        return [
            f"{name}: warmup_steps is {steps}, beyond the {self.total_steps} optimizer steps of the run{self._made_of}; "
            "learning_rate is never reached"
            for name, steps in warmups.items()
            if steps > self.total_steps > 0
        ]

    def save(self, folder: Path) -> None:
        """Write optimizer.pt."""
        with (folder / "optimizer.pt").open("wb") as file:
            torch.save(self.state_dict(), file)

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""
        self.load_state_dict(torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True))

    def _stepped(self, key: str) -> Tensor:
        return self._copies.get(key, self._parameters[key])

    def _factor(self, optim: Optim) -> float:
        return lr_factor(
            self.num_steps,
            schedule=optim.lr_scheduler_type,
            warmup_steps=optim.num_warmup_steps(self.total_steps),
            total_steps=self.total_steps,
            min_lr_ratio=optim.min_lr_ratio,
        )


def _narrow(p: Tensor) -> bool:
    return p.is_floating_point() and torch.finfo(p.dtype).bits < 32


def _named(groups: Sequence[Group]) -> dict[str, Parameter]:
    """Parameters by "group/name", after checking that groups are distinct, trainable and disjoint."""
    names = [group.name for group in groups]
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"optimizer groups are named {names}; give at least one group, each with its own name")
    named: dict[str, Parameter] = {}
    owner: dict[int, str] = {}
    for group in groups:
        if not group.params:
            raise ConfigError(
                f"optimizer group {group.name!r} has no trainable parameter; unfreeze some, or leave the group out"
            )
        for name, p in group.params:
            key = f"{group.name}/{name}"
            if id(p) in owner or key in named:
                other = owner.get(id(p), key)
                raise ConfigError(f"{key} and {other} are one parameter; it can be in one optimizer group, once")
            if not p.requires_grad:
                raise ConfigError(f"{key} does not require a gradient; pass only the parameters to train")
            owner[id(p)] = key
            named[key] = p
    return named


def _few(keys: set[str]) -> str:
    shown = sorted(keys)
    return (", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")) if shown else "nothing else"
