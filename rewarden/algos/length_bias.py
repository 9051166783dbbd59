"""How far a reward model goes by length: correlations, and accuracy where length helps, hinders, or says nothing."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rewarden.maths import correlation, relative_gap

SIMILAR = 0.1
"""Lengths within this share of the longer one are called similar."""

BUCKETS = ("preferred_shorter", "similar_length", "preferred_longer")


def length_facts(
    score_B2: Float[Tensor, "B 2"],
    length_B2: Float[Tensor, "B 2"],
    right_B: Float[Tensor, " B"],
    decided_B: Bool[Tensor, " B"],
    preferred_first_B: Bool[Tensor, " B"],
) -> dict[str, float]:
    """Length and score of pairs; columns are (chosen, rejected), lengths those of the answers, in tokens.

        eval/score_length_correlation    Pearson, of score and length over all texts
        eval/margin_length_correlation   Pearson, of score and length differences within pairs: the prompt plays no part
        eval/accuracy/BUCKET             mean of `right_B` over decided pairs by the length of the preferred answer:
                                         shorter or longer than the other by more than 10 % of the longer one, or similar
        eval/num_pairs/BUCKET            pairs behind it; an empty bucket is left out

    A correlation is 0 where either side has no spread.
    """
    preferred_B = torch.where(preferred_first_B, length_B2[:, 0], length_B2[:, 1])
    other_B = torch.where(preferred_first_B, length_B2[:, 1], length_B2[:, 0])
    gap_B = relative_gap(preferred_B, other_B)
    kinds = (gap_B < -SIMILAR, gap_B.abs() <= SIMILAR, gap_B > SIMILAR)
    facts = {
        "eval/score_length_correlation": correlation(score_B2.flatten(), length_B2.flatten()),
        "eval/margin_length_correlation": correlation(score_B2[:, 0] - score_B2[:, 1], length_B2[:, 0] - length_B2[:, 1]),
    }
    for name, kind_B in zip(BUCKETS, kinds, strict=True):
        chosen_B = kind_B & decided_B
        if bool(chosen_B.any()):
            facts[f"eval/accuracy/{name}"] = float(right_B[chosen_B].mean())
            facts[f"eval/num_pairs/{name}"] = float(chosen_B.sum())
    return facts
