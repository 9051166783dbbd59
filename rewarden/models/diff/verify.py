"""Undoing a diff tensor by tensor with its hashes compared: what `recover` writes and `check_diff` throws away."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from rewarden.errors import ConfigError
from rewarden.models.diff.combine import Trace, recover_rows
from rewarden.models.diff.manifest import Manifest, hash_problem, torch_dtype
from rewarden.models.diff.read import Checkpoint
from rewarden.models.diff.rules import Rule, Step, known_rule, plan
from rewarden.models.diff.sums import SumCheck, compare, expected_sum

Check = Literal["manifest", "sum", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A diff, its base, and how the one is added to the other."""

    diff: Checkpoint
    base: Checkpoint
    manifest: Manifest | None
    rule: Rule
    check: Check
    steps: dict[str, Step]

    def tuned_dtype(self, key: str) -> torch.dtype | None:
        """The tuned tensor's own type, where a manifest says it."""
        return None if self.manifest is None else torch_dtype(self.manifest.tensors[key].dtype)

    def natural_dtype(self, key: str) -> torch.dtype:
        """The type that `recover` gives unless asked for another: the tuned type, for published diffs float32."""
        known = self.tuned_dtype(key)
        own = self.diff.entries[key].dtype
        return known or (torch.promote_types(own, torch.float32) if own.is_floating_point else own)

    def rows(self, key: str, output: torch.dtype, facts: dict[str, Any]) -> Iterator[Tensor]:
        """The tuned rows; at the end what was seen lies in `facts`, and with check "manifest" a wrong hash is a ConfigError."""
        trace = Trace()
        step = self.steps[key]
        yield from recover_rows(step, self.diff, self.base, tuned=self.tuned_dtype(key), output=output, trace=trace)
        facts[key] = {
            "sha256": {part: getattr(trace, part).hexdigest() for part in ("tuned", "diff", "base")},
            "total": trace.total,
            "overflow": trace.overflow,
            "not_finite": trace.not_finite,
        }
        problem = self.problem(key, facts[key]["sha256"]) if self.check == "manifest" else None
        if problem:
            raise ConfigError(f"{problem}; nothing was written")

    def problem(self, key: str, seen: Mapping[str, str]) -> str | None:
        """What the hashes of one tensor say."""
        assert self.manifest is not None
        return hash_problem(key, self.manifest.tensors[key], seen, self.diff.path, self.base.path, self.manifest.base.name)


def choose_rule(manifest: Manifest | None, rule: str | None, diff: str) -> Rule:
    """The manifest's rule, or the one that was given for a published diff.

    Errors: ConfigError when there is none, or both and they differ.
    """
    if manifest is None:
        if rule is None:
            raise ConfigError(f"{diff} has no manifest, as published diffs have none; name its rule: moss or alpaca_farm")
        if known_rule(rule) == "exact":
            raise ConfigError(f"{diff} has no manifest, so it was not made by the rule exact; its rule is moss or alpaca_farm")
        return known_rule(rule)
    if rule is not None and rule != manifest.rule:
        raise ConfigError(f"rule is {rule!r}, but {diff} was made with {manifest.rule!r}; leave the rule out")
    return manifest.rule


def choose_check(manifest: Manifest | None, check: str, expected: str | None, diff: str) -> Check:
    """What is verified: "auto" means the manifest's hashes where there is one, else the published sum.

    Errors: ConfigError for an unknown word, and for hashes without a manifest.
    """
    if check == "manifest" or (check == "auto" and manifest is not None and expected is None):
        if manifest is None:
            raise ConfigError(f"check is 'manifest', but {diff} has none; use sum, or off")
        return "manifest"
    if check in ("auto", "sum"):
        return "sum"
    if check == "off":
        return "off"
    raise ConfigError(f"check is {check!r}; use auto, manifest, sum or off")


def all_steps(manifest: Manifest | None, rule: Rule, diff: Checkpoint, base: Checkpoint) -> dict[str, Step]:
    """Tensor -> step, from the manifest or by the rule."""
    steps = plan(rule, diff, base) if manifest is None else manifest.steps()
    return {step.key: step for step in steps}


def check_sum(facts: Mapping[str, Any], config: Mapping[str, Any], given: str | None, diff: str) -> SumCheck:
    """The integrity sum of what was recovered."""
    return compare(math.fsum(fact["total"] for fact in facts.values()), config, *expected_sum(given, diff))


def refuse_not_finite(facts: Mapping[str, Any], raw: str, diff: str) -> None:
    """Errors: ConfigError when a published diff gave NaN or inf."""
    if bad := [key for key, fact in facts.items() if fact["not_finite"]]:
        count = sum(facts[key]["not_finite"] for key in bad)
        raise ConfigError(
            f"{diff} + {raw}: {count} entries are NaN or inf, first in {bad[0]!r}; a file is damaged, or this is not the base"
        )


def refuse_wrong_sum(found: SumCheck, raw: str, diff: str) -> None:
    """Errors: ConfigError when the sum is not the expected one."""
    if found.status == "different":
        raise ConfigError(
            f"{diff} + {raw}: {found.words()}; the base is another one (or was converted wrongly), or a file is damaged"
        )
