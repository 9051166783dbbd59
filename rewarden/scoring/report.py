"""What a batch of scores says in numbers for the log."""

import math
from collections import Counter
from collections.abc import Sequence

from rewarden.types import Score


def status_counts(scores: Sequence[Score]) -> dict[str, int]:
    """How many scores have each status, "ok" included even when it is 0."""
    return {"ok": 0} | dict(Counter(score.status for score in scores))


def score_report(scores: Sequence[Score]) -> dict[str, float]:
    """Numbers by name.

        score/mean, score/std     over the scores that are ok (population std); left out when there is none
        score/num_STATUS          count of every status other than ok
        score/disagreement        mean over texts of the population std of the members, where there is more than one
        score/member_mean/K       mean of member K (from 0) over the texts, as it scores them: not centered, not scaled
        score/member_std/K        population std of the same
        score/part/NAME           mean of a part over the scores that have it

    The spread of the members uses the same population convention as `score/std`.
    """
    values = [score.value for score in scores if score.status == "ok"]
    report: dict[str, float] = {}
    if values:
        report |= {"score/mean": _mean(values), "score/std": _std(values)}
    report |= {f"score/num_{status}": float(n) for status, n in sorted(status_counts(scores).items()) if status != "ok"}
    members = [score.members for score in scores if score.status == "ok" and len(score.members) > 1]
    if members:
        report["score/disagreement"] = _mean([_std(one) for one in members])
    # Rows of a sum may have members of another ensemble each; only those of one size pair up.
    if len({len(one) for one in members}) == 1:
        for place, column in enumerate(zip(*members, strict=True)):
            report |= {f"score/member_mean/{place}": _mean(column), f"score/member_std/{place}": _std(column)}
    names = sorted({name for score in scores for name in score.parts})
    return report | {f"score/part/{name}": _mean([s.parts[name] for s in scores if name in s.parts]) for name in names}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _std(values: Sequence[float]) -> float:
    mean = _mean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
