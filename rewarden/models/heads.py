"""Scalar heads: where they come from and how they are drawn."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from rewarden.errors import ConfigError
from rewarden.models.adapters import seeded
from rewarden.models.trunk import score_head, unwrap


def fresh_head(num_heads: int, width: int, *, seed: int, std: float | None) -> Float[Tensor, "K D"]:
    """Rows of normal numbers with standard deviation `std`, by default 0.3 / sqrt(width).

    With hidden states of unit variance a fresh score then has a spread of about 0.3: small against a log-odds scale, so the
    first gradient is that of an undecided model, and not zero, so heads of an ensemble differ. Row k depends on `seed` and k
    alone, never on how many heads there are.
    """
    scale = 0.3 / math.sqrt(width) if std is None else std
    rows = [
        torch.randn(width, generator=torch.Generator().manual_seed(seeded("head", seed, index))) for index in range(num_heads)
    ]
    return torch.stack(rows) * scale


def refuse_equal_heads(weight_KD: Float[Tensor, "K D"], where: str) -> None:
    """ConfigError when two heads that are to be trained are equal: they would get equal gradients for ever.

    With a shared trunk and the same batches two equal heads stay one head, and the ensemble has fewer members than it says.
    """
    for first in range(len(weight_KD)):
        for second in range(first + 1, len(weight_KD)):
            if torch.equal(weight_KD[first], weight_KD[second]):
                raise ConfigError(
                    f"{where}: the heads of members {first} and {second} are equal at the start, so nothing would ever tell "
                    "them apart; use head: fresh, another seed, or fewer members"
                )


def set_head(model: nn.Module, weight_KD: Float[Tensor, "K D"]) -> None:
    """Make `weight_KD` the model's scalar head: float32 whatever the trunk is, with as many rows as the weight."""
    head = score_head(model)
    if head.weight.shape != weight_KD.shape:
        inner = unwrap(model)
        head = nn.Linear(weight_KD.shape[1], weight_KD.shape[0], bias=False)
        inner.score = head
        inner.config.num_labels = len(weight_KD)
    head.float()
    with torch.no_grad():
        head.weight.copy_(weight_KD)


def with_score(causal: PreTrainedModel, num_heads: int) -> PreTrainedModel:
    """A sequence classifier around the trunk of a causal LM, without copying it; its head is zero until it is set.

    Errors: ConfigError when transformers has no such class for the architecture.
    """
    config = causal.config
    config.num_labels = num_heads
    try:
        with torch.device("meta"):
            model = AutoModelForSequenceClassification.from_config(config)
    except ValueError as error:
        raise ConfigError(
            f"{type(causal).__name__}: transformers has no sequence classifier for it; use another model"
        ) from error
    setattr(model, model.base_model_prefix, causal.base_model)
    model.score = nn.Linear(score_head(model).in_features, num_heads, bias=False)
    nn.init.zeros_(model.score.weight)
    return model
