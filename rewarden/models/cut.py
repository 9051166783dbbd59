"""A decoder cut between two layers: what enters layer `level`, and the layers from there on, run apart from each other."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rewarden.models.attention import run_trunk
from rewarden.models.layout import Layout
from rewarden.models.trunk import decoder_layers, distance, final_hidden, trunk_of


class _PassOn(nn.Module):
    """Stands in for a decoder layer that need not run."""

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        return hidden_states


class _Inject(nn.Module):
    """Stands in for the layer below the cut: its output is what was computed before."""

    def __init__(self, hidden_BTD: Tensor) -> None:
        super().__init__()
        self.hidden_BTD = hidden_BTD

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        return self.hidden_BTD


@contextmanager
def _replaced(layers: nn.ModuleList, stand_ins: dict[int, nn.Module]) -> Iterator[None]:
    """Some layers swapped for others inside the block."""
    kept = {index: layers[index] for index in stand_ins}
    try:
        for index, module in stand_ins.items():
            layers[index] = module
        yield
    finally:
        for index, module in kept.items():
            layers[index] = module


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Every module in evaluation mode inside: what is kept for later must not carry a dropout draw."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


def below(model: nn.Module, level: int, run: Callable[[], object]) -> Tensor:
    """What leaves layer `level` - 1 while `run` runs the trunk; the layers from `level` on do nothing."""
    layers = decoder_layers(model)
    seen: list[Tensor] = []
    hook = layers[level - 1].register_forward_hook(lambda module, args, output: seen.append(output))
    try:
        with _replaced(layers, {index: _PassOn() for index in range(level, len(layers))}):
            run()
    finally:
        hook.remove()
    return seen[0]


def above(model: nn.Module, level: int, layout: Layout, ids_RT: Tensor, hidden_RTD: Tensor) -> Tensor:
    """Final hidden states from what enters layer `level` in this layout; the ids only give shapes and positions."""
    stand_ins: dict[int, nn.Module] = {index: _PassOn() for index in range(level - 1)}
    with _replaced(decoder_layers(model), {**stand_ins, level - 1: _Inject(hidden_RTD)}):
        return run_trunk(trunk_of(model), layout, ids_RT)


@torch.no_grad()
def can_cut(model: nn.Module, level: int) -> bool:
    """Whether cutting below `level` changes nothing, tried on four tokens; some architectures pass more than hidden states."""
    embeddings: Any = trunk_of(model).get_input_embeddings()
    ids_BT = torch.tensor([[1, 2, 3, 0]], device=embeddings.weight.device) % embeddings.num_embeddings
    with evaluating(model):
        whole_BTD = final_hidden(trunk_of(model), ids_BT)
        lower_BTD = below(model, level, lambda: final_hidden(trunk_of(model), ids_BT))
        alone = Layout.of([0], [ids_BT.shape[1]], ids_BT.device, packed=False)
        return isinstance(lower_BTD, Tensor) and distance(above(model, level, alone, ids_BT, lower_BTD), whole_BTD) <= 1e-3
