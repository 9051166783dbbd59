"""A batch of pairs, and the terms of the objective on it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from peft import PeftModel
from torch import Tensor

from rewarden.algos.pairs import EncodedPair, collate_pairs
from rewarden.algos.reward_config import Reward
from rewarden.maths import adapter_diversity, bradley_terry, reward_centering, wins_with_ties
from rewarden.models.diversity import down_projections
from rewarden.models.features import FeatureCache
from rewarden.models.forward import scores_and_logp, sequence_scores
from rewarden.models.reward import RewardModel
from rewarden.models.reward_lm import LanguageHead
from rewarden.types import Term, TokenBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """B pairs as 2B rows, the chosen sides first; `answer_BT` marks the tokens of the chosen answers."""

    tokens: TokenBatch
    preference_B: Float[Tensor, " B"]
    margin_B: Float[Tensor, " B"]
    answer_BT: Bool[Tensor, "B T"]
    num_heads: int

    def __len__(self) -> int:
        return len(self.preference_B)

    def counts(self) -> dict[str, Tensor]:
        """Pairs times heads, tokens of the chosen answers, pairs; a tie has no right side to be accurate about."""
        device = self.preference_B.device
        scored = torch.tensor(len(self) * self.num_heads, device=device)
        per_score = dict.fromkeys(("preference", "centering", "reward/accuracy", "reward/margin", "reward/tie_rate"), scored)
        return {**per_score, "lm": self.answer_BT.sum(), "diversity": torch.tensor(len(self), device=device)}

    def rows(self, index_b: Tensor) -> "Batch":
        """The sub-batch of these pairs."""
        tokens = self.tokens.rows(torch.cat([index_b, index_b + len(self)]))
        return Batch(
            tokens=tokens,
            preference_B=self.preference_B[index_b],
            margin_B=self.margin_B[index_b],
            answer_BT=self.answer_BT[index_b, : tokens.ids_BT.shape[1]],
            num_heads=self.num_heads,
        )


def prepare(
    pairs: Sequence[EncodedPair],
    device: torch.device,
    *,
    margin_scale: float,
    num_heads: int,
    margin_clip: tuple[float, float] | None = None,
) -> Batch:
    """Encoded pairs -> tensors."""
    tokens = collate_pairs(pairs).to(device)
    margin_B = torch.tensor([margin_scale * pair.margin for pair in pairs], dtype=torch.float32, device=device)
    answer_BT = torch.zeros(len(pairs), tokens.ids_BT.shape[1], dtype=torch.bool)
    for place, pair in enumerate(pairs):
        for start, stop in pair.chosen_answer:
            answer_BT[place, start:stop] = True
    return Batch(
        tokens=tokens,
        preference_B=torch.tensor([pair.preference for pair in pairs], dtype=torch.float32, device=device),
        margin_B=margin_B if margin_clip is None else margin_B.clamp(*margin_clip),
        answer_BT=answer_BT.to(device),
        num_heads=num_heads,
    )


def loss(
    model: RewardModel, batch: Batch, cfg: Reward, features: FeatureCache | None, language: LanguageHead | None = None
) -> dict[str, Term]:
    """The pair loss per pair and head, the centering term, statistics, and where the recipe has them LM loss and diversity.

    language: the LM head of the LM loss, which is left out without one.
    """
    terms: dict[str, Term] = {}
    if language is None:
        score_NK = sequence_scores(model.model, batch.tokens, features=features)
    else:
        score_NK, terms["lm"] = _with_lm(model, batch, cfg, features, language)
    if cfg.diversity_coef:
        terms["diversity"] = _diversity(model, batch, cfg)
    return _of_scores(score_NK, batch, cfg) | terms


def _of_scores(score_NK: Tensor, batch: Batch, cfg: Reward) -> dict[str, Term]:
    chosen_BK, rejected_BK = score_NK.chunk(2)
    ones_BK = torch.ones_like(chosen_BK, dtype=torch.bool)
    smoothing_B = (1 - batch.preference_B) * (1 - cfg.label_smoothing) + batch.preference_B * cfg.label_smoothing
    pair_BK = torch.stack(
        [
            bradley_terry(chosen_B, rejected_B, margin=batch.margin_B, label_smoothing=smoothing_B)
            for chosen_B, rejected_B in zip(chosen_BK.T, rejected_BK.T, strict=True)
        ],
        dim=1,
    )
    center_BK = reward_centering(chosen_BK.flatten(), rejected_BK.flatten()).view_as(chosen_BK)
    difference_BK = (chosen_BK - rejected_BK).detach()
    sign_B1 = torch.where(batch.preference_B >= 0.5, 1.0, -1.0).unsqueeze(1)
    decided_BK = (batch.preference_B != 0.5).unsqueeze(1) & ones_BK
    return {
        "preference": Term(value_BT=pair_BK, mask_BT=ones_BK),
        "centering": Term(value_BT=center_BK, mask_BT=ones_BK, weight=cfg.center_rewards_coefficient),
        "reward/accuracy": Term(value_BT=wins_with_ties(difference_BK * sign_B1), mask_BT=decided_BK, weight=0.0),
        "reward/margin": Term(value_BT=difference_BK, mask_BT=ones_BK, weight=0.0),
        "reward/tie_rate": Term(value_BT=(difference_BK == 0).float(), mask_BT=ones_BK, weight=0.0),
    }


def _with_lm(
    model: RewardModel, batch: Batch, cfg: Reward, features: FeatureCache | None, language: LanguageHead
) -> tuple[Tensor, Term]:
    """Scores, and the LM loss per token of the chosen answers, from the hidden states of one pass."""
    nothing_BT = torch.zeros_like(batch.answer_BT)
    score_NK, logp_NT = scores_and_logp(
        model.model,
        batch.tokens,
        torch.cat([batch.answer_BT, nothing_BT]),
        (language.weight(model.model), language.bias_V),
        features=features,
    )
    return score_NK, Term(value_BT=-logp_NT[: len(batch)], mask_BT=batch.answer_BT, weight=cfg.lm_coef)


def _diversity(model: RewardModel, batch: Batch, cfg: Reward) -> Term:
    """A number of the adapters, given to every pair, so that its mean is itself however the batch is cut."""
    assert isinstance(model.model, PeftModel)
    value = adapter_diversity(down_projections(model.model), scale_free=cfg.diversity_scale_free)
    each_B1 = value.expand(len(batch), 1)
    return Term(value_BT=each_B1, mask_BT=torch.ones_like(each_B1, dtype=torch.bool), weight=-cfg.diversity_coef)
