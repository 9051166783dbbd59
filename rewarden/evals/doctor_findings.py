"""Findings as they are collected: one for each code and source, with a count and the first places."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from rewarden.evals.doctor_kinds import KINDS, SEVERITIES, Severity

NUM_EXAMPLES = 5
"""Places kept for each finding; the count says how many there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One place: file:line of a row, or the folder of a model; `detail` says what stands there."""

    where: str
    detail: str = ""


@dataclass(slots=True, kw_only=True)
class Finding:
    """What was found under one code in one source ("data", "eval_data" or "model")."""

    code: str
    source: str
    severity: Severity
    count: int = 0
    examples: list[Example] = field(default_factory=list)


class Findings:
    """A collection in the making. Iterating gives the worst first, then the most frequent."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], Finding] = {}

    def add(
        self,
        source: str,
        code: str,
        where: str,
        detail: str = "",
        *,
        count: int = 1,
        severity: Severity | None = None,
    ) -> None:
        """Count one more. A severity other than the usual one of the code holds when it is worse than what was found so far."""
        given = severity or KINDS[code].severity
        found = self._found.setdefault((source, code), Finding(code=code, source=source, severity=given))
        found.count += count
        found.severity = min(found.severity, given, key=SEVERITIES.index)
        if len(found.examples) < NUM_EXAMPLES:
            found.examples.append(Example(where=where, detail=detail))

    def __iter__(self) -> Iterator[Finding]:
        def rank(found: Finding) -> tuple[int, str, int, str]:
            return SEVERITIES.index(found.severity), found.source, -found.count, found.code

        return iter(sorted(self._found.values(), key=rank))

    def worst(self) -> Severity | None:
        """The worst severity, or None when nothing was found."""
        return min((found.severity for found in self), key=SEVERITIES.index, default=None)
