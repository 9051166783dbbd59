"""A model's trained weights as part of a run's checkpoint."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from rewarden.errors import ResumeError
from rewarden.models.adapters import trainable
from rewarden.models.folder import tensor_shapes
from rewarden.models.trunk import unwrap

FILE = "trainable.safetensors"


class ModelPart:
    """Saves and restores the parameters that train; the frozen rest comes from the model the recipe names.

    What trains is noted when the part is made, so freezing a model for a while changes no checkpoint.
    """

    def __init__(self, model: nn.Module, names: Sequence[str] | None = None) -> None:
        """`names` are the parameters, where not all of them train at the same time."""
        self.model = model
        self.names = tuple(name for name, _ in trainable(model)) if names is None else tuple(names)

    def save(self, folder: Path) -> None:
        """Write the trained parameters, bit for bit."""
        parameters = dict(self.model.named_parameters())
        tensors = {name: parameters[name].detach().contiguous() for name in self.names}
        save_file(tensors, folder / FILE, metadata={"model": type(unwrap(self.model)).__name__})

    def load(self, folder: Path) -> None:
        """Restore in place what `save` wrote.

        Errors: ResumeError when the file is absent, damaged, or holds other parameters than train now.
        """
        file = folder / FILE
        if not file.exists():
            raise ResumeError(f"{folder} holds no {FILE}; the checkpoint is incomplete or belongs to another run")
        parameters = dict(self.model.named_parameters())
        try:
            saved = tensor_shapes([file])
        except ValueError as error:
            raise ResumeError(
                f"{file} is truncated or damaged; move {folder.parent} away to go on from an older checkpoint, "
                "or from the beginning"
            ) from error
        now = {name: tuple(parameters[name].shape) for name in self.names}
        if saved != now:
            differing = sorted(key for key in {*saved, *now} if saved.get(key) != now.get(key))
            raise ResumeError(
                f"{file}: {len(differing)} parameters differ from those that train now, first {differing[0]!r}; "
                "the checkpoint belongs to another model or another choice of layers"
            )
        with torch.no_grad():
            for name, tensor in load_file(file).items():
                parameters[name].copy_(tensor)
