"""Which pairs each step of a member takes: a function of seeds and lengths, so a resumed run takes the same ones."""

import math
import random
from collections.abc import Sequence

from rewarden.algos.pairs import EncodedPair
from rewarden.algos.reward_config import Reward
from rewarden.data.batches import length_batches


class Plan:
    """The steps of one member.

    A bootstrap draws as many pairs as there are, with replacement, once for the whole training of the member: some come
    several times, about 37 % not at all, so that members learn from different data.
    """

    def __init__(self, cfg: Reward, pairs: Sequence[EncodedPair], member: int) -> None:
        self._cfg, self._seed = cfg, cfg.order_seed(member)
        self._drawn = bootstrap_rows(len(pairs), self._seed) if cfg.bootstrap else list(range(len(pairs)))
        lengths = [len(pair.chosen_ids) + len(pair.rejected_ids) for pair in pairs]
        self._lengths = [lengths[row] for row in self._drawn]
        self._epoch, self._batches = -1, list[list[int]]()

    @property
    def per_epoch(self) -> int:
        """Steps of one pass over the pairs."""
        return steps_per_epoch(self._cfg, len(self._drawn))

    def rows(self, step: int) -> list[int]:
        """The pairs of the member's step `step`, by their place in the data."""
        return [self._drawn[place] for place in self._places(step)]

    def num_tokens(self, step: int) -> int:
        """Tokens of both sides of those pairs."""
        return sum(self._lengths[place] for place in self._places(step))

    def _places(self, step: int) -> list[int]:
        epoch, index = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            cfg = self._cfg
            self._epoch = epoch
            self._batches = length_batches(
                self._lengths, batch_size=cfg.train_batch_size, window=cfg.length_window, seed=self._seed, epoch=epoch
            )
        return self._batches[index]


def bootstrap_rows(num_rows: int, seed: int) -> list[int]:
    """As many rows as there are, drawn with replacement."""
    rng = random.Random(f"bootstrap/{seed}")
    return [rng.randrange(num_rows) for _ in range(num_rows)]


def steps_per_epoch(cfg: Reward, num_pairs: int) -> int:
    """Optimizer steps of one pass; the last may be smaller."""
    return math.ceil(num_pairs / cfg.train_batch_size)


def steps_per_member(cfg: Reward, num_pairs: int) -> int:
    """Optimizer steps of one member, or of all heads together."""
    whole = steps_per_epoch(cfg, num_pairs) * cfg.num_train_epochs
    return min(whole, cfg.max_steps or whole)
