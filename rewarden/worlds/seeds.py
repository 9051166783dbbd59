"""Which users belong to which purpose: ranges of user seeds that never meet."""

from rewarden.errors import ConfigError
from rewarden.spec import nearest

PURPOSES: tuple[str, ...] = (
    "reference",
    "sft",
    "sft_eval",
    "pairs",
    "pairs_test",
    "candidates",
    "rl",
    "selection",
    "evaluation",
    "demo",
)
"""What users are drawn for; new ones go to the end, or every range moves."""

USERS_PER_RANGE = 1_000_000
_SLOTS_PER_INDEX = 64


def seed_range(purpose: str, index: int = 0) -> range:
    """The user seeds for one purpose; `index` (the seed of a run, say) picks one of many, and all of them are disjoint.

    A range of 1,000,000 integers: `seed_range("rl", 2)[7]` is user 7 of the run with seed 2.
    """
    if purpose not in PURPOSES:
        raise ConfigError(f"no users for purpose {purpose!r}; {nearest(purpose, PURPOSES)}")
    if index < 0:
        raise ConfigError(f"index of the seed range {purpose!r} is {index}; give 0 or more")
    start = (index * _SLOTS_PER_INDEX + PURPOSES.index(purpose)) * USERS_PER_RANGE
    return range(start, start + USERS_PER_RANGE)
