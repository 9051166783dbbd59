"""What a benchmark is: two scripts that do the same work, and the numbers read from what they print."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Ratio = Callable[[float, float], float]


def times_faster(ours_s: float, peer_s: float) -> float:
    """Speed-up from two times: above 1 where ours is shorter."""
    return peer_s / ours_s


def times_as_much(ours: float, peer: float) -> float:
    """Ours as a multiple of the peer's: a speed-up from two rates (above 1 where we are faster), or a share of memory."""
    return ours / peer


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of results.json: `key` is read from the facts of both sides, `ratio(ours, peer)` compares them."""

    name: str
    unit: str
    key: str
    ratio: Ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """How to run ours, how to run the peer, and what to read.

    ours: a script in bench/ours. peer: a script in bench/peers, or else in the shared folder of peer scripts. Each prints one
    JSON object with "ours" or "peer" and the numbers; `measure.py`, which runs them, adds the memory. sizes: environment of
    both sides, complete, so that nothing depends on the caller's; only_ours: of ours alone. small: other sizes, to see that all
    works. same: facts in which both sides must agree, or the work was not the same. peer_path: folders of the peers'
    environment to import from first. seconds: rough time of one run of each side, (ours, peer), on two idle cores, for the
    first estimate.
    """

    name: str
    title: str
    ours: str
    peer: str
    entries: tuple[Entry, ...]
    sizes: Mapping[str, str]
    small: Mapping[str, str]
    same: tuple[str, ...]
    seconds: tuple[float, float]
    only_ours: Mapping[str, str] = field(default_factory=dict)
    peer_path: tuple[str, ...] = ()

    def environment(self, side: str, sizes: Mapping[str, str]) -> dict[str, str]:
        """The variables that set the sizes of one side."""
        return {**(self.only_ours if side == "ours" else {}), **sizes}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The facts of one run of ours and the run of the peer right after it."""

    ours: Mapping[str, Any]
    peer: Mapping[str, Any]
