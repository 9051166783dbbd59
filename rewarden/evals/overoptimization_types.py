"""The results of an over-optimisation study: records that its page, figure and JSON are made from."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rewarden.evals.overoptimization_stats import Effect


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleResult:
    """One family and rule in one setting. gold, proxy and kl are at each n; `versus_*` are keyed by n."""

    family: str
    rule: str
    gold: tuple[Effect, ...]
    proxy: tuple[Effect, ...]
    kl: tuple[float, ...]
    gain: tuple[Effect, ...]
    proxy_gain: tuple[Effect, ...]
    peak_n: int
    rise: Effect
    fall: Effect
    versus_member: Mapping[int, Effect]
    versus_single: Mapping[int, Effect]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyResult:
    """One PPO reward in one setting, at each measured round; `versus_single` is at the last one."""

    name: str
    steps: tuple[int, ...]
    kl: tuple[float, ...]
    gold: tuple[Effect, ...]
    gain: tuple[Effect, ...]
    proxy_gain: tuple[Effect, ...]
    peak_step: int
    rise: Effect
    fall: Effect
    versus_single: Effect | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingResult:
    """Cells that differ only in the seed. diversity: by family, means over seeds."""

    keys: Mapping[str, Any]
    seeds: tuple[Any, ...]
    rules: tuple[RuleResult, ...]
    policies: tuple[PolicyResult, ...]
    diversity: Mapping[str, Mapping[str, float]]
    oracle: tuple[Effect, ...]
    num_prompts: int
    num_generations: int
    num_unscored: int

    @property
    def name(self) -> str:
        """key=value, ..."""
        return ", ".join(f"{key}={json.dumps(value)}" for key, value in self.keys.items()) or "all cells"


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """All settings."""

    settings: tuple[SettingResult, ...]
    n: tuple[int, ...]
    kl_bound: tuple[float, ...]
    compare_at: tuple[int, ...]
    single: str
    single_policy: str | None
    confidence: float
