"""Randomness that depends on names, not on history: seeds from a hash, and the global generators as a value."""

import hashlib
import random
from typing import Any

import numpy as np
import torch

Seedable = int | float | str | bool | None | tuple


def seed_of(*parts: Any) -> int:
    """A 63-bit seed from what names the draw: `seed_of(run_seed, "rollout", row_id, turn, sample)`.

    blake2b over the repr of `parts`: the same parts give the same seed in every process and on every machine, and different
    parts give unrelated seeds. Only ints, floats, strings, bools, None and tuples of them have a repr that is safe to hash;
    anything else is a TypeError.
    """
    _check(parts)
    digest = hashlib.blake2b(repr(parts).encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(*parts: Any) -> torch.Generator:
    """A CPU generator seeded with `seed_of(*parts)`."""
    return torch.Generator().manual_seed(seed_of(*parts))


def seed_global(*parts: Any) -> None:
    """Seed the generators that libraries reach for on their own (dropout, numpy, random), all from `seed_of(*parts)`."""
    seed = seed_of(*parts)
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def capture_rng() -> dict[str, Any]:
    """The state of the global generators of torch (CPU and every CUDA device), numpy and random, as tensors and numbers."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, numbers, gauss_next = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), int(position), int(has_gauss), float(gauss)],
        "python": [version, torch.tensor(numbers, dtype=torch.int64), gauss_next],
    }


def restore_rng(saved: dict[str, Any]) -> None:
    """Set the global generators to what `capture_rng` returned; CUDA only where the same number of devices is present."""
    torch.set_rng_state(saved["torch"])
    if saved["cuda"] and torch.cuda.is_available() and len(saved["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(saved["cuda"])
    kind, keys, position, has_gauss, gauss = saved["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    version, numbers, gauss_next = saved["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss_next))


def _check(parts: tuple) -> None:
    for part in parts:
        if isinstance(part, tuple):
            _check(part)
        elif part is not None and type(part) not in (int, float, str, bool):
            raise TypeError(
                f"seed_of got {part!r} of type {type(part).__name__}; a seed is made of int, float, str, bool, None and tuples "
                "of them, because their repr is the same everywhere. Convert it first, for example int(x) or str(x)"
            )
