"""What a score says about labeled pairs: accuracy and its intervals, calibration, length, and where it is right."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rewarden.evals.preference_pairs import Labels, Split, quantile_names
from rewarden.maths import (
    ConfidenceBin,
    bootstrap_interval,
    bradley_terry,
    brier_score,
    correlation,
    expected_calibration_error,
    quantile_bins,
    reliability,
    wilson_interval,
    wins_with_ties,
)
from rewarden.runtime.seed import generator

RESAMPLES = 2000
"""Of the bootstrap over pairs."""

LONGER = "longer answer"
"""The rule that every scorer has to beat."""

OWN_SPLIT = "score gap"
"""Groups of pairs by how far a scorer sees their sides apart; every scorer has its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A share of pairs with its Wilson interval; all None over no pairs."""

    num: int
    num_right: float
    value: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A number with its interval, and how many pairs are behind it (of the smaller set, where they are two)."""

    num: int
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One rule of one scorer on one data set; None where there is nothing to say."""

    scorer: str
    rule: str
    accuracy: Rate
    over_longer: Estimate | None
    """Accuracy minus that of the longer-answer rule, paired."""
    over_member: Estimate | None = None
    """Accuracy minus the mean accuracy of the members, paired; for rules of several members."""
    log_loss: float | None = None
    brier: float | None = None
    calibration_error: float | None = None
    reliability: tuple[ConfidenceBin, ...] = ()
    score_length_correlation: float | None = None
    margin_length_correlation: float | None = None
    accuracy_by: dict[str, dict[str, Rate]] | None = None
    drop: Estimate | None = None
    """Accuracy on the data set that scorers were trained on, minus this one."""
    own: bool = False
    """Whether this is what the scorer itself makes of its members."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A row, and how much of each decided pair it got right, in the order of the pairs."""

    row: Row
    right_D: Float[Tensor, " D"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruler:
    """Measures scores on the pairs of one data set, all in the same way."""

    labels: Labels
    splits: tuple[Split, ...]
    confidence: float
    bins: int
    calibration_bins: int
    seed: int

    def longer_answer(self) -> Measured:
        """The rule "the longer answer is better": no probability, but an accuracy to beat."""
        right_D = self._longer()
        row = Row(
            scorer=LONGER,
            rule="",
            accuracy=self.rate(right_D),
            over_longer=None,
            accuracy_by=self.accuracy_by(right_D, self.splits),
            own=True,
        )
        return Measured(row=row, right_D=right_D)

    def measure(
        self,
        scorer: str,
        rule: str,
        difference_B: Float[Tensor, " B"],
        value_B2: Float[Tensor, "B 2"] | None = None,
        *,
        members_right_D: Float[Tensor, " D"] | None = None,
        own: bool = False,
    ) -> Measured:
        """One rule by its log-odds that the chosen side is better; `value_B2` where it has a score of each text.

        members_right_D: how much of each decided pair the members got right on average, to compare with.
        """
        right_D = self.right(difference_B)
        labels, decided_B = self.labels, self.labels.decided_B
        gap_D = difference_B[decided_B].abs()
        smoothing_B = 1 - labels.preference_B
        calibrated = len(right_D) > 0
        sure_D = gap_D.sigmoid()
        row = Row(
            scorer=scorer,
            rule=rule,
            accuracy=self.rate(right_D),
            over_longer=self.paired(right_D, self._longer()),
            over_member=None if members_right_D is None else self.paired(right_D, members_right_D),
            log_loss=float(
                bradley_terry(difference_B, torch.zeros_like(difference_B), margin=0.0, label_smoothing=smoothing_B).mean()
            ),
            brier=brier_score(difference_B.sigmoid(), labels.preference_B),
            calibration_error=expected_calibration_error(sure_D, right_D, bins=self.calibration_bins) if calibrated else None,
            reliability=reliability(sure_D, right_D, bins=self.calibration_bins) if calibrated else (),
            score_length_correlation=None if value_B2 is None else correlation(value_B2.flatten(), labels.length_B2.flatten()),
            margin_length_correlation=correlation(difference_B, labels.length_B2[:, 0] - labels.length_B2[:, 1]),
            accuracy_by=self.accuracy_by(right_D, (*self.splits, *self.own_split(difference_B))),
            own=own,
        )
        return Measured(row=row, right_D=right_D)

    def one_member(self, scorer: str, members: Sequence[Measured]) -> Measured:
        """The members' mean: what a member taken at random is expected to show. Its interval is over pairs, not members."""
        rows = [member.row for member in members]
        right_D = torch.stack([member.right_D for member in members]).mean(dim=0)
        row = Row(
            scorer=scorer,
            rule="one member",
            accuracy=self.mean_rate(right_D),
            over_longer=self.paired(right_D, self._longer()),
            log_loss=_mean([row.log_loss for row in rows]),
            brier=_mean([row.brier for row in rows]),
            calibration_error=_mean([row.calibration_error for row in rows]),
            score_length_correlation=_mean([row.score_length_correlation for row in rows]),
            margin_length_correlation=_mean([row.margin_length_correlation for row in rows]),
            accuracy_by={
                split.name: self.groups(right_D, split.groups, self._decided(split.group_B), mean=True) for split in self.splits
            },
        )
        return Measured(row=row, right_D=right_D)

    def right(self, difference_B: Float[Tensor, " B"]) -> Float[Tensor, " D"]:
        """How much of each pair with a decided label is right: 1, 0, or 0.5 where the sides are equal."""
        decided_B = self.labels.decided_B
        return wins_with_ties((difference_B * self.labels.sign_B)[decided_B])

    def rate(self, right_D: Float[Tensor, " D"]) -> Rate:
        """Share right, with the Wilson interval."""
        num, right = len(right_D), float(right_D.sum())
        if not num:
            return Rate(num=0, num_right=0.0, value=None, low=None, high=None)
        low, high = wilson_interval(right, num, confidence=self.confidence)
        return Rate(num=num, num_right=right, value=right / num, low=low, high=high)

    def mean_rate(self, right_D: Float[Tensor, " D"]) -> Rate:
        """The same where each pair counts with the share of members that is right; the interval is a bootstrap over pairs."""
        if not len(right_D):
            return self.rate(right_D)
        low, high = self._bootstrap(right_D)
        right = float(right_D.sum())
        return Rate(num=len(right_D), num_right=right, value=right / len(right_D), low=low, high=high)

    def paired(self, right_D: Float[Tensor, " D"], other_D: Float[Tensor, " D"]) -> Estimate | None:
        """Mean difference over the pairs, with its bootstrap interval; None over no pairs."""
        if not len(right_D):
            return None
        difference_D = right_D - other_D
        low, high = self._bootstrap(difference_D)
        return Estimate(num=len(difference_D), value=float(difference_D.mean()), low=low, high=high)

    def accuracy_by(self, right_D: Float[Tensor, " D"], splits: Sequence[Split]) -> dict[str, dict[str, Rate]]:
        """Accuracy by group of each split, over the pairs with a decided label."""
        return {split.name: self.groups(right_D, split.groups, self._decided(split.group_B)) for split in splits}

    def groups(
        self, right_D: Float[Tensor, " D"], names: Sequence[str], group_D: Int[Tensor, " D"], *, mean: bool = False
    ) -> dict[str, Rate]:
        """Accuracy of each group; a group without a decided pair is there with nothing to say."""
        rate = self.mean_rate if mean else self.rate
        return {name: rate(right_D[group_D == place]) for place, name in enumerate(names)}

    def own_split(self, difference_B: Float[Tensor, " B"]) -> tuple[Split, ...]:
        """Equal groups by the size of the difference, for all pairs."""
        group_B, ends = quantile_bins(difference_B.abs(), bins=self.bins)
        return (Split(name=OWN_SPLIT, groups=quantile_names(ends), group_B=group_B),)

    def _longer(self) -> Float[Tensor, " D"]:
        return self.right(self.labels.length_B2[:, 0] - self.labels.length_B2[:, 1])

    def _decided(self, group_B: Int[Tensor, " B"]) -> Int[Tensor, " D"]:
        return group_B[self.labels.decided_B]

    def _bootstrap(self, values_D: Float[Tensor, " D"]) -> tuple[float, float]:
        # The same resampled pairs for every row, so that rows can be read beside one another.
        random = generator(self.seed, "bootstrap", "pairs")
        return bootstrap_interval(values_D, confidence=self.confidence, resamples=RESAMPLES, generator=random)


def _mean(values: Sequence[Any]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
