"""Several reward models as one: K scores for a text, whichever way the members share their weights.

    family        trained                          held in memory               passes for a text
    single        everything                       M + L                        1
    linear        trunk and K heads together       M + K L                      1
    independent   K models, each by itself         K (M + L)                    K
    lora          K adapters and K heads           M + K (L + A)                1 of the layers below the lowest adapter,
                  on one frozen trunk                                           K of those above

M, L and A are the parameters of the trunk, of a head and of an adapter. Zhang et al. 2024 (arXiv:2401.16635), section 3.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rewarden.errors import ConfigError
from rewarden.maths import Moments
from rewarden.models.adapters import freeze, lowest_adapted, select_adapter
from rewarden.models.calibration import read_calibration
from rewarden.models.cut import can_cut
from rewarden.models.ensemble_folder import (
    EnsembleFile,
    Family,
    check_trunk,
    is_ensemble,
    read_ensemble_file,
)
from rewarden.models.folder import is_adapter, read_card
from rewarden.models.forward import scores_by_adapter, sequence_scores
from rewarden.models.load import load_tokenizer
from rewarden.models.members import WITHOUT_LORA, attach_member
from rewarden.models.reward import RewardModel, load_reward_model, required_head
from rewarden.models.source import Model, base_of, template_of
from rewarden.models.trunk import position_limit
from rewarden.types import TokenBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardEnsemble:
    """K members with one tokenizer and one template kind; a single model is an ensemble of one.

    models: one for single, linear and lora (a trunk with all adapters), K for independent. adapters: the names of a LoRA
    ensemble's members. calibration: the moments of each member's scores on the texts of calibration, where they are known.
    """

    family: Family
    models: tuple[RewardModel, ...]
    adapters: tuple[str, ...] = ()
    calibration: tuple[Moments, ...] | None = None

    @property
    def num_members(self) -> int:
        """Scores per text."""
        return len(self.adapters) or sum(model.num_heads for model in self.models)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of all members."""
        return self.models[0].tokenizer

    @property
    def template_kind(self) -> str:
        """How conversations become text for all members."""
        return self.models[0].template_kind

    @property
    def num_positions(self) -> int | None:
        """The longest row that every member has positions for, if they say so."""
        limits = [position_limit(model.model) for model in self.models]
        return min((limit for limit in limits if limit is not None), default=None)

    def modules(self) -> Iterator[nn.Module]:
        """The models that hold all weights, each once."""
        return (model.model for model in self.models)

    def to(self, device: torch.device | str) -> "RewardEnsemble":
        """Move every model to `device`, in place; returns the ensemble."""
        for module in self.modules():
            module.to(device)
        return self

    @torch.no_grad()
    def score(self, tokens: TokenBatch, *, max_tokens: int | None = None) -> Float[Tensor, "B K"]:
        """The members' scores at the last real token, float32, without a gradient, whatever the models were left in."""
        if self.family != "lora":
            return torch.cat([sequence_scores(model.model, tokens, max_tokens=max_tokens) for model in self.models], dim=1)
        return member_scores(self.models[0].model, self.adapters, tokens, max_tokens=max_tokens)


@torch.no_grad()
def member_scores(
    model: nn.Module, adapters: tuple[str, ...], tokens: TokenBatch, *, max_tokens: int | None = None
) -> Float[Tensor, "B K"]:
    """One score by each adapter and its head. The layers below the lowest adapted one run once for all.

    The adapter in use and what trains are afterwards as before.
    """
    assert isinstance(model, PeftModel)
    before = model.active_adapter
    trains = [parameter for parameter in model.parameters() if parameter.requires_grad]
    level = lowest_adapted(model)

    def use(name: str) -> None:
        select_adapter(model, name, trains=False)

    try:
        return scores_by_adapter(
            model, tokens, adapters, use, level=level if _shares(model, level) else 0, max_tokens=max_tokens
        )
    finally:
        use(before)
        for parameter in trains:
            parameter.requires_grad_(True)


_cuts: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def _shares(model: nn.Module, level: int) -> bool:
    """Whether the layers below `level` can be run once for all: decided once per model."""
    if level > 0 and model not in _cuts:
        _cuts[model] = can_cut(model, level)
    return level > 0 and _cuts[model]


def load_ensemble(model: Model, *, device: torch.device | str | None = None) -> RewardEnsemble:
    """A reward model or ensemble of any family, frozen, in evaluation mode, on the CPU; `device` is where it will run.

    Errors: ConfigError for a missing member, head or adapter, for members of unequal heads, tokenizers or templates, and for
    a trunk that the adapters were not trained on.
    """
    path = model.model_name_or_path
    if not is_ensemble(path):
        only = load_reward_model(model, device=device)
        calibration = read_calibration(read_card(path), only.num_heads, path)
        return _frozen(
            RewardEnsemble(family="single" if only.num_heads == 1 else "linear", models=(only,), calibration=calibration)
        )
    file = read_ensemble_file(path)
    found = _lora(file, model, device) if file.family == "lora" else _independent(file, model, device)
    calibration = read_calibration(read_card(path), found.num_members, path)
    return _frozen(replace(found, calibration=calibration))


def _frozen(ensemble: RewardEnsemble) -> RewardEnsemble:
    for module in ensemble.modules():
        freeze(module)
    return ensemble


def _spec(file: EnsembleFile, index: int, model: Model) -> Model:
    place = {"model_name_or_path": str(file.member(index)), "revision": None, "gguf_file": None}
    return model.model_copy(update={**WITHOUT_LORA, "trainable_layers": None, **place})


def _independent(file: EnsembleFile, model: Model, device: torch.device | str | None) -> RewardEnsemble:
    members: list[RewardModel] = []
    for index in range(len(file.members)):
        member = load_reward_model(_spec(file, index, model), device=device)
        members.append(member)
        _check_member(file, index, member.num_heads, member.tokenizer, member.template_kind, members[0])
    return RewardEnsemble(family="independent", models=tuple(members))


def _lora(file: EnsembleFile, model: Model, device: torch.device | str | None) -> RewardEnsemble:
    check_trunk(file)
    bases = []
    for name in file.members:
        place = str(file.folder / name)
        if not is_adapter(place):
            raise ConfigError(f"{place} holds no adapter_config.json, and the family is lora; copy the whole folder again")
        bases.append(Path(base_of(place)).resolve())
        if bases[-1] != bases[0]:
            raise ConfigError(
                f"{place} is an adapter of {bases[-1]}, {file.members[0]} one of {bases[0]}; the members of a LoRA ensemble "
                "share one trunk: train them in one run"
            )
    first = load_reward_model(_spec(file, 0, model), device=device)
    names = ["default"]
    _check_member(file, 0, first.num_heads, first.tokenizer, first.template_kind, first)
    for index in range(1, len(file.members)):
        spec = _spec(file, index, model)
        head_KD = required_head(spec)
        _check_member(file, index, len(head_KD), load_tokenizer(spec), template_of(spec), first)
        attach_member(first.model, file.member(index), f"other_{index}")
        names.append(f"other_{index}")
    return RewardEnsemble(family="lora", models=(first,), adapters=tuple(names))


def _check_member(
    file: EnsembleFile, index: int, num_heads: int, tokenizer: PreTrainedTokenizerBase, template: str, first: RewardModel
) -> None:
    """Members are alike in all but their weights."""
    where, leader = file.member(index), file.members[0]
    if num_heads != 1:
        raise ConfigError(f"{where} has {num_heads} heads; each member of an ensemble has one: score with that folder alone")
    if tokenizer.get_vocab() != first.tokenizer.get_vocab():
        raise ConfigError(
            f"{where} has another tokenizer than {leader}, and an ensemble reads each text once; score with members of "
            "different tokenizers separately, as entries of a registry"
        )
    if template != first.template_kind:
        raise ConfigError(
            f"{where} was trained with the template {template!r}, {leader} with {first.template_kind!r}; the members of an "
            "ensemble share one template"
        )


def critic_folder(path: str) -> str:
    """The folder of a single model from which a critic can start: a LoRA ensemble's trunk, the first independent member.

    Other folders are their own start. The value network of Zhang et al. is left open by the paper; this is our choice.
    """
    if not is_ensemble(path):
        return path
    file = read_ensemble_file(path)
    return os.path.normpath(base_of(str(file.member(0)))) if file.family == "lora" else str(file.member(0))
