"""What a checkpoint holds of the members that are not in use."""

from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from rewarden.models.members import member_name
from rewarden.runtime.optim import Optimizer


class Optimizers:
    """An optimizer for each member, as one part of a checkpoint."""

    def __init__(self, members: Sequence[Optimizer]) -> None:
        self.members = tuple(members)

    @property
    def notes(self) -> list[str]:
        """Those of the first: all have the same settings."""
        return self.members[0].notes

    def save(self, folder: Path) -> None:
        """Write a folder for each."""
        for member, optimizer in enumerate(self.members):
            (folder / member_name(member)).mkdir()
            optimizer.save(folder / member_name(member))

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""
        for member, optimizer in enumerate(self.members):
            optimizer.load(folder / member_name(member))


class Scores:
    """The scores of finished members, which are no longer in memory, as a part of a checkpoint."""

    def __init__(self) -> None:
        self._of: dict[int, Tensor] = {}

    def put(self, member: int, score_N2K: Float[Tensor, "N 2 K"]) -> None:
        """Note what a member gave."""
        self._of[member] = score_N2K

    def all(self) -> Float[Tensor, "N 2 K"]:
        """Side by side, in the order of the members."""
        return torch.cat([self._of[member] for member in sorted(self._of)], dim=2)

    def save(self, folder: Path) -> None:
        """Write scores.pt."""
        with (folder / "scores.pt").open("wb") as file:
            torch.save(self._of, file)

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""
        self._of = torch.load(folder / "scores.pt", map_location="cpu", weights_only=True)
