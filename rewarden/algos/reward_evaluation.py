"""How far to trust a reward model: its accuracy and calibration on held-out pairs, and how much of that is length."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rewarden.algos.length_bias import length_facts
from rewarden.algos.pairs import EncodedPair, collate_pairs
from rewarden.maths import (
    bradley_terry,
    correlation,
    disagreement,
    expected_calibration_error,
    wilson_interval,
    wins_with_ties,
)
from rewarden.models.calibration import calibrate, calibration_card
from rewarden.models.features import FeatureCache
from rewarden.models.forward import sequence_scores
from rewarden.models.reward import RewardModel
from rewarden.runtime.ranks import Ranks

CALIBRATION_PAIRS = 256
"""Training pairs, the first ones, whose texts calibrate the members where there are no held-out pairs."""

MEMBER_ACCURACY = "eval/member_accuracy"


@torch.no_grad()
def score_pairs(
    model: RewardModel, pairs: Sequence[EncodedPair], ranks: Ranks, batch_size: int, features: FeatureCache | None = None
) -> Float[Tensor, "N 2 K"]:
    """Scores of (chosen, rejected) by every head, in the order of the pairs and on every rank; each rank scores a share."""
    mine = list(range(len(pairs)))[ranks.rank :: ranks.world]
    rows: list[tuple[int, list[list[float]]]] = []
    for start in range(0, len(mine), batch_size):
        index = mine[start : start + batch_size]
        tokens = collate_pairs([pairs[i] for i in index]).to(ranks.device)
        chosen_BK, rejected_BK = sequence_scores(model.model, tokens, features=features).chunk(2)
        rows += zip(index, torch.stack([chosen_BK, rejected_BK], dim=1).tolist(), strict=True)
    gathered = dict(row for part in ranks.gather_objects(rows) for row in part)
    return torch.tensor([gathered[i] for i in range(len(pairs))], dtype=torch.float32)


def evaluate(model: RewardModel, pairs: Sequence[EncodedPair], ranks: Ranks, batch_size: int) -> dict[str, float]:
    """`pair_facts` of a model on held-out pairs; with several heads the mean score decides."""
    return pair_facts(score_pairs(model, pairs, ranks, batch_size).mean(2), pairs)


def pair_facts(score_N2: Float[Tensor, "N 2"], pairs: Sequence[EncodedPair]) -> dict[str, float]:
    """Held-out accuracy (ties half, 95 % Wilson interval), log loss, calibration, and how much of it is length.

    Pairs labelled as ties (preference 0.5) are left out of accuracies and counted.
    """
    difference_B = (score_N2[:, 0] - score_N2[:, 1]).double()
    label_B = torch.tensor([pair.preference for pair in pairs], dtype=torch.float64)
    length_B2 = torch.tensor([(pair.chosen_length, pair.rejected_length) for pair in pairs]).double()
    longer_B = length_B2[:, 0] - length_B2[:, 1]
    decided_B = label_B != 0.5
    sign_B = torch.where(label_B > 0.5, 1.0, -1.0)
    hit_B = wins_with_ties(difference_B * sign_B)
    right_B = hit_B[decided_B]
    by_length_B = wins_with_ties(longer_B * sign_B)[decided_B]
    n = int(decided_B.sum())
    accuracy = float(right_B.mean()) if n else 0.5
    low, high = wilson_interval(float(right_B.sum()), n, confidence=0.95) if n else (0.0, 1.0)
    smoothing_B = 1 - label_B
    log_loss = bradley_terry(difference_B, torch.zeros_like(difference_B), margin=0.0, label_smoothing=smoothing_B).mean()
    return {
        "eval/accuracy": accuracy,
        "eval/accuracy_low": float(low),
        "eval/accuracy_high": float(high),
        "eval/longer_wins_accuracy": float(by_length_B.mean()) if n else 0.5,
        "eval/loss": float(log_loss),
        "eval/num_pairs": float(n),
        "eval/num_tied_labels": float(len(pairs) - n),
        "eval/score_mean": float(score_N2.double().mean()),
        "eval/score_std": float(score_N2.double().std(correction=0)),
        "eval/margin": float((difference_B * sign_B)[decided_B].mean()) if n else 0.0,
        "eval/calibration_error": expected_calibration_error(difference_B.abs().sigmoid()[decided_B], right_B) if n else 0.0,
        **length_facts(score_N2.double(), length_B2, hit_B, decided_B, sign_B > 0),
    }


def member_facts(score_N2K: Float[Tensor, "N 2 K"], pairs: Sequence[EncodedPair]) -> dict[str, float]:
    """What members have in common and what not, from their differences d within pairs, where free offsets cancel.

    eval/member_accuracy/k    accuracy of member k
    eval/member_correlation   mean Pearson correlation of d over the pairs of members
    eval/member_std           mean over pairs of the population spread of d among the members, in score
    """
    difference_NK = (score_N2K[:, 0] - score_N2K[:, 1]).double()
    label_N = torch.tensor([pair.preference for pair in pairs], dtype=torch.float64)
    decided_N = label_N != 0.5
    sign_N1 = torch.where(label_N > 0.5, 1.0, -1.0)[:, None]
    hit_NK = wins_with_ties(difference_NK * sign_N1)[decided_N]
    accuracy_K = hit_NK.mean(0).tolist() if len(hit_NK) else [0.5] * difference_NK.shape[1]
    together = [correlation(difference_NK[:, a], difference_NK[:, b]) for a, b in combinations(range(len(accuracy_K)), 2)]
    return {
        **{f"{MEMBER_ACCURACY}/{member}": accuracy for member, accuracy in enumerate(accuracy_K)},
        "eval/member_correlation": sum(together) / len(together) if together else 1.0,
        "eval/member_std": float(disagreement(difference_NK).mean()),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Exam:
    """The pairs that members are measured on: the held-out ones, or else the first training pairs, for calibration alone.

    They depend on the data alone, never on a member's seed.
    """

    pairs: Sequence[EncodedPair]
    held_out: bool
    ranks: Ranks
    batch_size: int

    @classmethod
    def of(cls, pairs: Sequence[EncodedPair], held_out: Sequence[EncodedPair], ranks: Ranks, batch_size: int) -> "Exam":
        """The exam of a run with these training and held-out pairs."""
        own = held_out or pairs[:CALIBRATION_PAIRS]
        return cls(pairs=own, held_out=bool(held_out), ranks=ranks, batch_size=batch_size)

    def score(self, model: RewardModel, features: FeatureCache | None) -> Float[Tensor, "N 2 K"]:
        """`score_pairs` on the pairs of the exam."""
        return score_pairs(model, self.pairs, self.ranks, self.batch_size, features)

    def facts(self, score_N2K: Float[Tensor, "N 2 K"]) -> dict[str, float]:
        """`pair_facts` of the mean of the members, and `member_facts` where there are several; none without held-out pairs."""
        if not self.held_out:
            return {}
        several = member_facts(score_N2K, self.pairs) if score_N2K.shape[2] > 1 else {}
        return {**pair_facts(score_N2K.mean(2), self.pairs), **several}

    def card(self, score_N2K: Float[Tensor, "N 2 K"]) -> dict[str, Any]:
        """What a checkpoint's card says of its members: "evaluation" and "calibration"."""
        texts = "eval_data" if self.held_out else "data"
        moments = calibrate(score_N2K.flatten(0, 1))
        return {"evaluation": as_lists(self.facts(score_N2K)), "calibration": calibration_card(moments, texts)}


def as_lists(facts: dict[str, float]) -> dict[str, Any]:
    """The accuracies of members as one list: evaluation.json has "eval/member_accuracy": [...]."""
    prefix = f"{MEMBER_ACCURACY}/"
    members = [value for name, value in facts.items() if name.startswith(prefix)]
    rest = {name: value for name, value in facts.items() if not name.startswith(prefix)}
    return rest | ({MEMBER_ACCURACY: members} if members else {})
