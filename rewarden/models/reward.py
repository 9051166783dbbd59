"""Reward models and critics: a decoder with a bias-free linear head `score`, a sequence classifier to transformers."""

import re
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from rewarden.errors import ConfigError, DataError
from rewarden.models.folder import ADAPTER, FULL, head_key, is_adapter, read_tensor, tensor_shapes, weight_files
from rewarden.models.forward import sequence_scores
from rewarden.models.heads import fresh_head, set_head, with_score
from rewarden.models.load import attach_adapter, load_causal, load_tokenizer, prepare_training, pretrained, proven
from rewarden.models.recompute import recompute_layers
from rewarden.models.save import Origin, origin_of, remember
from rewarden.models.source import Model, base_model, check_choice, load_config, locate, named, template_of
from rewarden.models.trunk import score_head
from rewarden.types import TokenBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModel:
    """A scalar-head model with its own tokenizer and template kind."""

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    template_kind: str

    @property
    def num_heads(self) -> int:
        """Scores per text."""
        return score_head(self.model).out_features

    @torch.no_grad()
    def score(self, tokens: TokenBatch) -> Float[Tensor, "B K"]:
        """Scores at the last real token, float32, without a gradient."""
        return sequence_scores(self.model, tokens)

    def score_padded(
        self, input_ids: Int[Tensor, "B T"], attention_mask: Bool[Tensor, "B T"] | Int[Tensor, "B T"]
    ) -> Float[Tensor, "B K"]:
        """Scores of ids padded on the left, the right, or not at all; the mask alone says which tokens are real."""
        return self.score(right_padded(input_ids, attention_mask))


def right_padded(input_ids: Int[Tensor, "B T"], attention_mask: Bool[Tensor, "B T"] | Int[Tensor, "B T"]) -> TokenBatch:
    """Move every row's real tokens to the left edge.

    Errors: DataError for a row without a real token, or with padding between real tokens.
    """
    mask_BT = attention_mask.bool()
    length_B = mask_BT.sum(1)
    if (empty := (length_B == 0).nonzero().flatten()).numel():
        raise DataError(f"row {int(empty[0])} has no real token; remove empty rows before scoring")
    edges_B = (mask_BT[:, 1:] != mask_BT[:, :-1]).sum(1)
    holes_B = (edges_B > 2) | ((edges_B == 2) & mask_BT[:, 0])
    if (holed := holes_B.nonzero().flatten()).numel():
        raise DataError(f"row {int(holed[0])} has padding between real tokens; pad on the left or on the right")
    order_BT = (~mask_BT).to(torch.uint8).argsort(dim=1, stable=True)
    longest = int(length_B.max())
    return TokenBatch(
        ids_BT=input_ids.gather(1, order_BT)[:, :longest],
        mask_BT=mask_BT.gather(1, order_BT)[:, :longest],
        length_B=length_B,
    )


def load_reward_model(
    model: Model,
    *,
    num_heads: int | None = None,
    head: Literal["saved", "fresh"] = "saved",
    head_seed: int = 0,
    head_std: float | None = None,
    device: torch.device | str | None = None,
) -> RewardModel:
    """A reward model or critic in evaluation mode on the CPU.

    "saved" takes the head of the checkpoint, a full folder or a PEFT folder, and fails when there is none; "fresh" draws one
    from `head_seed`, also on a plain language model. `num_heads` None means as many as are saved, or one. A PEFT folder keeps
    its adapter, which then trains further, unless a fresh head, `lora_r` or `trainable_layers` is asked for: then it is merged.

    Errors: ConfigError for a missing head, a head of another size, and all that `load_policy` refuses.
    """
    check_choice(model)
    tokenizer = load_tokenizer(model)
    path = model.model_name_or_path
    stored_KD = stored_head(model)
    if head == "saved":
        weight_KD = required_head(model, num_heads)
        if len(weight_KD) > 1:
            _refuse_classes(model)
    else:
        width = load_config(model).get_text_config().hidden_size
        weight_KD = fresh_head(num_heads or 1, width, seed=head_seed, std=head_std)
    rows = len(weight_KD if stored_KD is None else stored_KD)
    if locate(model)[1] is None and is_adapter(path, model.revision) and stored_KD is not None:
        adapted = _adapted(model, stored_KD, device)
        if head == "saved" and not model.lora_r and model.trainable_layers is None:
            set_head(adapted, weight_KD)
            proven(adapted, model)
            if model.gradient_checkpointing:
                recompute_layers(adapted)
            return RewardModel(model=adapted.eval(), tokenizer=tokenizer, template_kind=template_of(model))
        loaded: PreTrainedModel = adapted.merge_and_unload()
        remember(loaded, Origin(path=None, template=template_of(model)))
    else:
        loaded = _scalar(model, rows, device)
    set_head(loaded, weight_KD)
    proven(loaded, model)
    return RewardModel(
        model=prepare_training(loaded, model, seed=head_seed), tokenizer=tokenizer, template_kind=template_of(model)
    )


def stored_head(model: Model) -> Float[Tensor, "K D"] | None:
    """The scalar heads in a checkpoint, bit for bit, or None where it has none."""
    path, gguf_file = locate(model)
    if gguf_file is not None:
        return None
    files = weight_files(path, ADAPTER if is_adapter(path, model.revision) else FULL, model.revision)
    shapes = tensor_shapes(files)
    key = head_key(shapes)
    if key is not None and f"{key.removesuffix('weight')}bias" in shapes:
        raise ConfigError(f"{path}: its head `score` has a bias; only bias-free heads are supported")
    return None if key is None else read_tensor(files, key).float()


def required_head(model: Model, num_heads: int | None = None) -> Float[Tensor, "K D"]:
    """The scalar heads in a checkpoint. Errors: ConfigError when it has none, or not `num_heads` of them."""
    path, stored_KD = model.model_name_or_path, stored_head(model)
    if stored_KD is None:
        raise ConfigError(
            f"{path} has no scalar head (no tensor score.weight), so its scores would be random; give a reward model's folder. "
            "A checkpoint with a reward_head (MOSS-RLHF, AlpacaFarm) becomes one by `rewarden import`. "
            "If it is a PEFT folder, 'score' was not among its modules_to_save. To start a new head, ask for head='fresh'"
        )
    if num_heads is not None and num_heads != len(stored_KD):
        raise ConfigError(f"{path} has {len(stored_KD)} heads, num_heads is {num_heads}; leave it out to take what is saved")
    return stored_KD


def _refuse_classes(model: Model) -> None:
    """A classifier whose labels have names is no ensemble of rewards; the mean of its logits means nothing."""
    labels = list((load_config(model).id2label or {}).values())
    named_ones = [str(label) for label in labels if not re.fullmatch(r"LABEL_\d+", str(label))]
    if len(named_ones) > 1:
        raise ConfigError(
            f"{model.model_name_or_path} is a classifier with the labels {', '.join(named_ones[:5])}, not a reward model; "
            "give one whose single label is the reward"
        )


def _scalar(model: Model, num_heads: int, device: torch.device | str | None) -> PreTrainedModel:
    """The trunk with a scalar head that is still to be set."""
    path, gguf_file = locate(model)
    template = template_of(model)
    if gguf_file is not None or is_adapter(path, model.revision):
        loaded = with_score(load_causal(model, device), num_heads)
        remember(loaded, Origin(path=None, template=template))
        return loaded
    loaded = pretrained(
        AutoModelForSequenceClassification, model, device, allowed_missing=("score.weight",), num_labels=num_heads
    )
    remember(loaded, Origin(path=named(path), template=template))
    return loaded


def _adapted(model: Model, weight_KD: Tensor, device: torch.device | str | None) -> PeftModel:
    """A PEFT reward model: its base, which needs no head of its own, inside its adapter."""
    path = model.model_name_or_path
    base = _scalar(base_model(model), len(weight_KD), device)
    set_head(base, weight_KD)
    remember(base, Origin(path=origin_of(base).path, template=template_of(model)))
    return attach_adapter(base, path, weight_files(path, ADAPTER, model.revision), model.revision)
