"""Which step of a run is worth keeping, decided on separate prompts and never by proxy reward alone.

    criterion = mean score - beta * KL(policy || reference) per sequence

A step is out of the running when it is longer, more often cut, or further from the reference than the limits allow: the
highest proxy reward belongs to collapsed policies (specification of the MOSS-RLHF study: Zheng et al. 2023, section 5).
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from pydantic import Field
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rewarden.models.load import trainable
from rewarden.spec import Spec


class Selection(Spec):
    """The guarded criterion that picks the step to export."""

    beta: float | None = Field(None, ge=0)
    """Weight of the sequence KL in score units; None takes the training beta times the scale scores are divided by."""
    max_kl: float = Field(10.0, gt=0)
    """Largest mean sequence KL to the reference, in nats."""
    max_length_ratio: float = Field(1.5, gt=0)
    """Largest mean length, relative to the policy before training."""
    max_truncated: float = Field(0.1, ge=0, le=1)
    """Largest share of answers cut by the token limit, above the share before training."""
    patience: int | None = Field(None, ge=1)
    """Stop after this many evaluations in a row that broke a limit, and export the best step so far; None goes on."""


def criterion(report: Mapping[str, float], start: Mapping[str, float], cfg: Selection, *, beta: float) -> tuple[float, str]:
    """(score - beta * KL, "") of an evaluated step, or (-inf, which limit it breaks)."""
    kl, length, cut = report["eval/kl_sequence"], report["eval/length"], report["eval/truncated"]
    if kl > cfg.max_kl:
        return float("-inf"), f"KL {kl:.2f} > max_kl {cfg.max_kl}"
    if length > cfg.max_length_ratio * max(start["eval/length"], 1.0):
        return float("-inf"), f"length {length:.1f} > {cfg.max_length_ratio} x {start['eval/length']:.1f}"
    if cut > start["eval/truncated"] + cfg.max_truncated:
        return float("-inf"), f"truncated {cut:.1%} > {start['eval/truncated']:.1%} + {cfg.max_truncated:.1%}"
    return report["eval/score"] - beta * kl, ""


class BestWeights:
    """The trained parameters of the best step so far, on the CPU; part of every checkpoint. Empty until `take`."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = dict(trainable(model))
        self.kept: dict[str, Tensor] = {}
        self.step: int | None = None

    def take(self, step: int) -> None:
        """Copy the parameters as they are now, after `step` rounds."""
        self.step = step
        self.kept = {name: p.detach().to("cpu", copy=True) for name, p in self.parameters.items()}

    @torch.no_grad()
    def put_back(self) -> None:
        """Set the parameters to the kept ones; without any they stay as they are."""
        for name, value in self.kept.items():
            self.parameters[name].copy_(value)

    def save(self, folder: Path) -> None:
        """Write what is kept."""
        # An empty metadata table of an empty file is a header that safetensors itself cannot read.
        metadata = None if self.step is None else {"step": str(self.step)}
        save_file(self.kept, folder / "best.safetensors", metadata=metadata)

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""
        file = folder / "best.safetensors"
        self.kept = load_file(file)
        with safe_open(file, "pt") as opened:
            step = (opened.metadata() or {}).get("step")
        self.step = None if step is None else int(step)
