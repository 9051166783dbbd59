"""The rows of one batch while they are written: what each needs for its next token, and what has been chosen for it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rewarden.rollout.choose import Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What one row got: ids (the stop id included), log p under policy and behavior, and whether a stop id ended it."""

    token_ids: tuple[int, ...]
    logp: tuple[float, ...]
    behavior_logp: tuple[float, ...]
    stopped: bool


class Rows:
    """The rows still being decoded: which rows of the batch they are, and what the next forward of each needs."""

    def __init__(
        self,
        prompts: Sequence[tuple[int, ...]],
        limits: Sequence[int],
        device: torch.device,
        order: Sequence[int] | None = None,
    ) -> None:
        """`order`: numbers of the rows of the batch, in the order in which they stand here; by default 0, 1, ..."""
        order = range(len(prompts)) if order is None else order
        self.width, num = max(map(len, prompts)), len(prompts)
        self.padded = min(map(len, prompts)) < self.width
        ids_BT = np.zeros((num, self.width), dtype=np.int64)
        mask_BS = np.ones((num, self.width + max(limits)), dtype=bool)
        for place, row in enumerate(order):
            ids_BT[place, self.width - len(prompts[row]) :] = prompts[row]
            mask_BS[place, : self.width - len(prompts[row])] = False
        self.ids_BT, self.mask_BS = torch.from_numpy(ids_BT).to(device), torch.from_numpy(mask_BS).to(device)
        self.row_B = torch.tensor(list(order), device=device)
        self.limit_B = torch.tensor(limits, device=device)[self.row_B]
        self.live_B = torch.ones(num, dtype=torch.bool, device=device)
        self.position_BT = (self.mask_BS[:, : self.width].cumsum(-1) - 1).clamp(min=0)

    def select(self, index_b: Tensor) -> None:
        """Keep these rows, in this order."""
        for name in ("ids_BT", "mask_BS", "limit_B", "row_B", "live_B", "position_BT"):
            setattr(self, name, getattr(self, name)[index_b])

    def feed(self, id_B: Tensor) -> None:
        """The next forward takes these tokens, one a row."""
        self.ids_BT = id_B[:, None]
        # A finished row stays where it is: beyond the last position an absolute embedding has no row to look up.
        self.position_BT = self.position_BT[:, -1:] + self.live_B[:, None]
        self.width += 1

    def __len__(self) -> int:
        return len(self.row_B)


class Record:
    """What was chosen, by row of the batch. Rows that wait to leave write on past their end; `length_B` cuts that off."""

    def __init__(self, num: int, most: int, device: torch.device) -> None:
        self.id_BN = torch.zeros((num, most), dtype=torch.long, device=device)
        self.logp_BN = torch.zeros((num, most), device=device)
        self.behavior_BN = torch.zeros((num, most), device=device)
        self.length_B = torch.zeros(num, dtype=torch.long, device=device)
        self.stopped_B = torch.zeros(num, dtype=torch.bool, device=device)

    def write(self, row_b: Tensor, step: int, choice: Choice, ends_b: Tensor, stopped_b: Tensor) -> None:
        """What these rows got at this step, and which of them end with it."""
        self.id_BN[row_b, step] = choice.id_B
        self.logp_BN[row_b, step] = choice.logp_B
        self.behavior_BN[row_b, step] = choice.behavior_logp_B
        self.length_B[row_b[ends_b]] = step + 1
        self.stopped_B[row_b[ends_b]] = stopped_b[ends_b]

    def completions(self) -> list[Completion]:
        """All rows, in the order of the batch."""
        kept = (self.id_BN, self.logp_BN, self.behavior_BN, self.length_B, self.stopped_B)
        columns = zip(*(tensor.tolist() for tensor in kept), strict=True)
        return [
            Completion(token_ids=tuple(ids[:num]), logp=tuple(logp[:num]), behavior_logp=tuple(behavior[:num]), stopped=stopped)
            for ids, logp, behavior, num, stopped in columns
        ]
