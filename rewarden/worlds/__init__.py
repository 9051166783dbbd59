"""Built-in offline worlds: a scripted user, text people can read, and a gold reward that is known."""

from collections.abc import Mapping

from rewarden.spec import Spec
from rewarden.worlds.gold import TurnFacts
from rewarden.worlds.seeds import seed_range
from rewarden.worlds.trip_desk import HORIZON, TripDesk, truncated_turns

WORLDS: Mapping[str, type[Spec]] = {"trip_desk": TripDesk}
"""The worlds by kind."""

__all__ = ["HORIZON", "WORLDS", "TripDesk", "TurnFacts", "seed_range", "truncated_turns"]
