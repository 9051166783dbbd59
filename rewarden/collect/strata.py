"""What a vote says of the labels: by strength, against the truth where it is known, and how sure the voters are."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from rewarden.maths import strata
from rewarden.types import Comparison

MEAN, STD = "mean preference difference", "std preference difference"
CHOSEN, REJECTED = "chosen score list", "rejected score list"
"""What a vote writes beside each pair, under the names of fnlp/hh-rlhf-strength-cleaned."""

GOLD = ("gold_chosen", "gold_rejected")
"""Columns with the true value of both sides, as the built-in worlds write them."""

JUDGE = "GPT4 label"
"""The column of fnlp/hh-rlhf-strength-cleaned with another judge's label: 1 chosen, 0 rejected, -1 none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Votes:
    """The votes on B pairs."""

    difference_BM: Float[Tensor, "B M"]
    mu_B: Float[Tensor, " B"]
    sigma_B: Float[Tensor, " B"]
    rows: Sequence[Comparison]

    def facts(self) -> dict[str, float]:
        """Numbers over all pairs; those of the truth are absent where no pair has one.

        vote/label_accuracy: share of pairs whose label is that of the truth; vote/accuracy: whose mu is on its side, 0 as half.
        """
        facts = {
            "vote/pairs": float(len(self.rows)),
            "vote/members": float(self.difference_BM.shape[1]),
            "vote/share_negative": float((self.mu_B < 0).double().mean()),
            "vote/mean": float(self.mu_B.mean()),
            "vote/std": float(self.sigma_B.mean()),
        }
        truth = _truths(self.rows, range(len(self.rows)))
        if truth:
            facts["vote/known"] = float(len(truth))
            facts["vote/label_accuracy"] = _label_accuracy(self.rows, truth)
            facts["vote/accuracy"] = sum(_hit(float(self.mu_B[place]), sign) for place, sign in truth) / len(truth)
        return facts


def strata_table(votes: Votes, *, groups: int) -> list[dict[str, Any]]:
    """One row per stratum, lowest mu first; `known` pairs have a truth, on which the two accuracies are."""
    table = []
    for number, place_N in enumerate(strata(votes.mu_B, groups=groups)):
        if not len(place_N):
            continue
        mu_N = votes.mu_B[place_N]
        truth = _truths(votes.rows, place_N.tolist())
        judged = [label for place in place_N.tolist() if (label := votes.rows[place].meta.get(JUDGE)) in (0, 1)]
        table.append(
            {
                "stratum": number,
                "pairs": len(place_N),
                "mu_low": float(mu_N.min()),
                "mu_high": float(mu_N.max()),
                "mu": float(mu_N.mean()),
                "sigma": float(votes.sigma_B[place_N].mean()),
                "votes_for_chosen": float((votes.difference_BM[place_N] > 0).double().mean()),
                "known": len(truth),
                "label_accuracy": _label_accuracy(votes.rows, truth) if truth else None,
                "vote_accuracy": sum(_hit(float(votes.mu_B[p]), sign) for p, sign in truth) / len(truth) if truth else None,
                "judged": len(judged),
                "judge_agrees": sum(judged) / len(judged) if judged else None,
            }
        )
    return table


def text_of(
    votes: Votes, table: Sequence[dict[str, Any]], *, scorers: Sequence[str], folds: int, read: str, failed: str
) -> str:
    """vote.md."""
    facts = votes.facts()
    how = f"out of fold ({folds} folds)" if folds else "by models that may have been trained on these pairs"
    lines = [
        "# Vote",
        "",
        f"{facts['vote/pairs']:.0f} pairs, {facts['vote/members']:.0f} votes each, {how}; scorers: {', '.join(scorers)}.",
        f"Data: {read}. Without a score: {failed}. mu < 0 in {facts['vote/share_negative']:.1%} of the pairs.",
    ]
    if "vote/known" in facts:
        lines.append(
            f"Of {facts['vote/known']:.0f} pairs with a known truth the label is right in {facts['vote/label_accuracy']:.1%}, "
            f"the vote in {facts['vote/accuracy']:.1%}."
        )
    judge = any(row["judged"] for row in table)
    heads = ["stratum", "pairs", "mu", "mean sigma", "votes for chosen", "label right", "vote right"]
    heads += [JUDGE] if judge else []
    lines += ["", f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for row in table:
        cells = [str(row["stratum"]), str(row["pairs"]), f"{row['mu_low']:.3f} to {row['mu_high']:.3f}", f"{row['sigma']:.3f}"]
        cells += [f"{row['votes_for_chosen']:.1%}", _share(row["label_accuracy"]), _share(row["vote_accuracy"])]
        cells += [_share(row["judge_agrees"])] if judge else []
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _truths(rows: Sequence[Comparison], places: Sequence[int]) -> list[tuple[int, int]]:
    """(place, 1 or -1) of the pairs whose true order is known and no tie: 1 where the chosen side is the better one."""
    found = []
    for place in places:
        chosen, rejected = (rows[place].meta.get(column) for column in GOLD)
        known = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (chosen, rejected))
        if known and chosen != rejected:
            found.append((place, 1 if float(chosen) > float(rejected) else -1))  # type: ignore[arg-type]
    return found


def _label_accuracy(rows: Sequence[Comparison], truth: Sequence[tuple[int, int]]) -> float:
    """Share of labels that are right; one that says tie counts half."""
    return sum(_hit(rows[place].preference - 0.5, sign) for place, sign in truth) / len(truth)


def _hit(mu: float, sign: int) -> float:
    return 0.5 if mu == 0 else float(mu * sign > 0)


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
