"""What joins playing and scoring: prefixes, pairs, labels, and the data jobs of a world."""

from rewarden.collect.world import WorldPairs, WorldStart
from rewarden.spec import Spec

COLLECTORS: dict[str, type[Spec]] = {"world_start": WorldStart, "world_pairs": WorldPairs}
