"""Rewards: anything that satisfies `Scorer`, built from a config of `SCORERS` or of your own.

reward_model  a learned reward with its own tokenizer and template
function      a Python function with TRL's reward-function signature
length        a penalty on length
regex         a pattern the answer must hold
gold          the known truth of a built-in world
sum           a weighted sum of the above
registered    any of them, by its name in a registry (models.yaml)
"""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from rewarden.errors import ConfigError
from rewarden.protocols import Scorer
from rewarden.scoring.aggregate import Aggregate, combine
from rewarden.scoring.combine import SumReward, SumScorer
from rewarden.scoring.function import FunctionReward, FunctionScorer
from rewarden.scoring.gold import GoldReward, GoldScorer
from rewarden.scoring.registry import RegisteredReward
from rewarden.scoring.report import score_report, status_counts
from rewarden.scoring.reward_model import LearnedReward, RewardModelScorer
from rewarden.scoring.rules import LengthReward, LengthScorer, RegexReward, RegexScorer
from rewarden.spec import Spec, outside, parse

SCORERS: Mapping[str, type[Spec]] = {
    "reward_model": LearnedReward,
    "function": FunctionReward,
    "length": LengthReward,
    "regex": RegexReward,
    "gold": GoldReward,
    "sum": SumReward,
    "registered": RegisteredReward,
}
"""The rewards by kind; `kind: "my_file.py:MyReward"` names a Spec of your own with a `build()` that returns a `Scorer`."""


@runtime_checkable
class ScorerSpec(Protocol):
    """A config that builds a scorer."""

    def build(self) -> Scorer:
        """The scorer, ready to score."""
        ...


def parse_scorer(raw: Mapping[str, Any] | Spec, where: str = "") -> ScorerSpec:
    """The config that {kind: ..., **fields} describes; nothing is loaded yet.

    Errors: ConfigError for an unknown kind or key, or for a class of your own that is not a Spec with `build()`.
    """
    kind = raw.get("kind") if isinstance(raw, Mapping) else None
    if isinstance(kind, str) and ":" in kind:
        named = outside(kind, where)
        if not (isinstance(named, type) and issubclass(named, Spec) and hasattr(named, "build")):
            hint = f"for a plain function write {{kind: function, path: {kind!r}}}"
            raise ConfigError(f"{where or 'reward'}: kind {kind!r} is no Spec with a build(); {hint}")
    spec = parse(SCORERS, raw, where)
    if not isinstance(spec, ScorerSpec):
        raise ConfigError(
            f"{where or 'reward'}: {type(spec).__name__} builds no scorer; one of {', '.join(sorted(SCORERS))} does"
        )
    return spec


def build_scorer(raw: Mapping[str, Any] | Spec, where: str = "") -> Scorer:
    """The scorer that {kind: ..., **fields} describes, loaded and ready."""
    scorer = parse_scorer(raw, where).build()
    if not isinstance(scorer, Scorer):
        raise ConfigError(f"{where or 'reward'}: build() returned {type(scorer).__name__}; a scorer has score(conversations)")
    return scorer


def notes_of(scorer: Scorer) -> tuple[str, ...]:
    """What a scorer has to say before its first score: its `notes`, where it has any."""
    return tuple(getattr(scorer, "notes", ()))


__all__ = [
    "SCORERS",
    "Aggregate",
    "FunctionReward",
    "FunctionScorer",
    "GoldReward",
    "GoldScorer",
    "LearnedReward",
    "LengthReward",
    "LengthScorer",
    "RegisteredReward",
    "RegexReward",
    "RegexScorer",
    "RewardModelScorer",
    "ScorerSpec",
    "SumReward",
    "SumScorer",
    "build_scorer",
    "combine",
    "notes_of",
    "parse_scorer",
    "score_report",
    "status_counts",
]
