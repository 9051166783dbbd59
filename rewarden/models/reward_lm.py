"""The language model inside a reward model: the LM head that an LM loss reads its hidden states with."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rewarden.errors import ConfigError
from rewarden.models.load import load_causal, proven
from rewarden.models.reward import stored_head
from rewarden.models.source import Model
from rewarden.models.trunk import output_projection, trunk_of, unwrap


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageHead:
    """The vocabulary projection of the language model that a reward model started from.

    weight_VD None: it is the input embeddings, as in that language model, and trains with them where they train. Otherwise a
    copy that stays as it was.
    """

    weight_VD: Float[Tensor, "V D"] | None
    bias_V: Float[Tensor, " V"] | None

    def weight(self, model: nn.Module) -> Float[Tensor, "V D"]:
        """The projection for a reward model."""
        if self.weight_VD is not None:
            return self.weight_VD
        embeddings: Any = trunk_of(model).get_input_embeddings()
        weight_VD: Tensor = embeddings.weight
        return weight_VD


def load_language_head(model: Model, device: torch.device | str) -> LanguageHead:
    """The LM head of the language model that a `model:` part names. The rest of that model is let go of again.

    Errors: ConfigError for a checkpoint that has none, such as a reward model's, or one whose logits are scaled or capped.
    """
    path = model.model_name_or_path
    if stored_head(model) is not None:
        raise ConfigError(
            f"{path} is a reward model, without the LM head that the LM loss needs; start from a language model, or set "
            "lm_coef: 0"
        )
    policy = load_causal(model, device)
    proven(policy, model)
    weight_VD, bias_V = output_projection(policy)
    tied = weight_VD is unwrap(policy).get_input_embeddings().weight
    bias_V = None if bias_V is None else bias_V.detach().clone().to(device)
    return LanguageHead(weight_VD=None if tied else weight_VD.detach().clone().to(device), bias_V=bias_V)
