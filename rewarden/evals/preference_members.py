"""What the members of an ensemble have to do with one another: how alike they are, and what their disagreement is worth."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from jaxtyping import Float
from torch import Tensor

from rewarden.evals.preference_measure import Estimate, Rate, Ruler
from rewarden.evals.preference_pairs import quantile_names
from rewarden.maths import auroc, auroc_interval, correlation, disagreement, mean, quantile_bins, sign_disagreement


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """The members of one scorer on one data set. All is about differences within pairs, where free offsets cancel.

    Matrices are [K][K], with means over the pairs of members beside them.
    """

    scorer: str
    num_members: int
    correlation: list[list[float]]
    """Pearson, of the differences."""
    mean_correlation: float
    sign_disagreement: list[list[float]]
    """Share of pairs in which two members prefer different sides."""
    mean_sign_disagreement: float
    error_correlation: float | None
    """Mean Pearson correlation of two members' being right; 1 where all err on the same pairs, and no mean can mend it."""
    mean_disagreement: float
    """Mean over pairs of the population std of the members' differences."""
    relative_disagreement: float | None
    """The same as a share of the std, over pairs, of the mean difference."""
    error_by_disagreement: Estimate | None
    """Area under the ROC curve of disagreement as a sign that the mean is wrong; .5 tells nothing."""
    error_by_small_gap: Estimate | None
    """The same of a small mean difference: what there is to beat."""
    accuracy_by_disagreement: dict[str, Rate]
    """Accuracy of the mean by quantile of disagreement, the most agreed first."""


def measure_members(scorer: str, difference_BK: Float[Tensor, "B K"], ruler: Ruler) -> Members:
    """Agreement of the members, and disagreement against the errors of their mean."""
    decided_B = ruler.labels.decided_B
    spread_B, average_B = disagreement(difference_BK), mean(difference_BK)
    right_D = ruler.right(average_B)
    rights = [ruler.right(member_B) for member_B in difference_BK.unbind(1)]
    alike = _matrix(difference_BK, correlation)
    differ = _matrix(difference_BK, sign_disagreement)
    group_B, ends = quantile_bins(spread_B, bins=ruler.bins)
    scale = float(average_B.std(correction=0))
    return Members(
        scorer=scorer,
        num_members=difference_BK.shape[1],
        correlation=alike,
        mean_correlation=_off_diagonal(alike),
        sign_disagreement=differ,
        mean_sign_disagreement=_off_diagonal(differ),
        error_correlation=_off_diagonal(_matrix(torch.stack(rights, dim=1), correlation)) if len(right_D) > 1 else None,
        mean_disagreement=float(spread_B.mean()),
        relative_disagreement=float(spread_B.mean()) / scale if scale > 0 else None,
        error_by_disagreement=_predicts(spread_B[decided_B], right_D, ruler.confidence),
        error_by_small_gap=_predicts(-average_B[decided_B].abs(), right_D, ruler.confidence),
        accuracy_by_disagreement=ruler.groups(right_D, quantile_names(ends), group_B[decided_B]),
    )


def _predicts(sign_D: Float[Tensor, " D"], right_D: Float[Tensor, " D"], confidence: float) -> Estimate | None:
    """Area under the ROC curve of `sign_D` for errors; None unless two pairs are right and two wrong.

    Pairs whose sides score the same are neither, and left out.
    """
    clear_D = right_D != 0.5
    wrong_D = right_D[clear_D] == 0
    if min(int(wrong_D.sum()), int((~wrong_D).sum())) < 2:
        return None
    low, high = auroc_interval(sign_D[clear_D], wrong_D, confidence=confidence)
    return Estimate(num=len(wrong_D), value=auroc(sign_D[clear_D], wrong_D), low=low, high=high)


def _matrix(columns_NK: Float[Tensor, "N K"], measure: Callable[[Tensor, Tensor], float]) -> list[list[float]]:
    columns = columns_NK.unbind(1)
    return [[measure(one, other) for other in columns] for one in columns]


def _off_diagonal(matrix: Sequence[Sequence[float]]) -> float:
    pairs = [matrix[i][j] for i, j in combinations(range(len(matrix)), 2)]
    return sum(pairs) / len(pairs)
