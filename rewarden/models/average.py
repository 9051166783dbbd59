"""Weight averaging: the members of an ensemble as one ordinary reward model, the mean of their weights.

    phi = mean over members of phi_k         LoRA: W + mean over members of scale * B_k A_k,  never the factors apart

Ramé et al. 2024, "WARM: On the Benefits of Weight Averaged Reward Models" (arXiv:2401.12187). The mean of products B_k A_k
keeps what the members add to the trunk; the product of mean factors would keep, of a direction that a share p of the members
has learned, p^2 instead of p. Between whole models of several layers it is p^2 in any case, which is the point of the method:
what few members learned, such as noise in the labels, fades.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from rewarden.errors import ConfigError
from rewarden.models.adapters import select_adapter
from rewarden.models.ensemble import RewardEnsemble, load_ensemble
from rewarden.models.heads import set_head
from rewarden.models.members import trunk_hash
from rewarden.models.reward import RewardModel
from rewarden.models.save import Origin, remember, without_adapter
from rewarden.models.source import Model
from rewarden.models.trunk import score_head, unwrap

HEAD = "score.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaged:
    """The mean of `members` models.

    distance: the largest |phi_k - phi| / |phi| of a member's trunk. head_cosine: the lowest between two heads.
    """

    model: RewardModel
    members: tuple[str, ...]
    distance: float
    head_cosine: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """A member: where it is from, its weights with its adapter merged, and the hash of the trunk that the adapter is on."""

    where: str
    tensors: dict[str, Tensor]
    trunk: str | None
    about: RewardModel


def average_members(models: Sequence[Model]) -> Averaged:
    """The mean of all members of reward models and ensembles with one scalar head each; evaluation mode, on the CPU.

    Sums are in float64; the result has the type of the first member's weights.

    Errors: ConfigError for fewer than two members, several heads on one trunk, members that differ in shapes, tokenizer or
    template, adapters on different trunks, and models that did not start from the same weights.
    """
    first: _Member | None = None
    total: dict[str, Tensor] = {}
    seen: list[_Member] = []
    for member in (one for model in models for one in _members(model)):
        first = first or member
        _check_alike(member, first)
        for name, tensor in member.tensors.items():
            if tensor.is_floating_point():
                total[name] = total[name] + tensor.double() if name in total else tensor.double()
        seen.append(member)
    if first is None or len(seen) < 2:
        raise ConfigError(f"{first.where if first else 'models'}: one member has no mean; give two or more")
    mean = {name: tensor / len(seen) for name, tensor in total.items()}
    distance = max(_distance(member.tensors, mean) for member in seen)
    # Models without a common start are about orthogonal: each is sqrt(K - 1) times the size of their mean away from it.
    if distance > 0.5 * math.sqrt(len(seen) - 1):
        raise ConfigError(
            f"{', '.join(member.where for member in seen)}: a member is {distance:.2f} times the size of the mean away from "
            "it, so they did not start from the same weights, and their mean is no model; average members of one start"
        )
    heads = [member.tensors[HEAD].flatten().double() for member in seen]
    cosine = min(float(cosine_similarity(a, b, dim=0)) for a, b in combinations(heads, 2))
    model = replace(first.about, model=_filled(first.about.model, mean))
    return Averaged(model=model, members=tuple(m.where for m in seen), distance=distance, head_cosine=cosine)


def _members(model: Model) -> Iterator[_Member]:
    ensemble = load_ensemble(model)
    path = model.model_name_or_path
    if ensemble.family == "linear":
        raise ConfigError(
            f"{path} has {ensemble.num_members} heads on one trunk, whose mean is the mean of their scores: use the aggregate "
            "mean, or give members that were trained apart"
        )
    several = ensemble.num_members > 1
    for index in range(ensemble.num_members):
        yield _member(ensemble, index, f"{path} (member {index})" if several else path)


@torch.no_grad()
def _member(ensemble: RewardEnsemble, index: int, where: str) -> _Member:
    about = ensemble.models[0 if ensemble.adapters else index]
    module = about.model
    if not isinstance(module, PeftModel):
        return _Member(where=where, tensors=dict(unwrap(module).state_dict()), trunk=None, about=about)
    name = ensemble.adapters[index] if ensemble.adapters else module.active_adapter
    select_adapter(module, name, trains=False)
    tensors = dict(without_adapter(unwrap(module)))
    for place, layer in unwrap(module).named_modules():
        if isinstance(layer, BaseTunerLayer) and name in getattr(layer, "lora_A", {}):
            product: Tensor = layer.get_delta_weight(name)  # type: ignore[operator,attr-defined]
            tensors[f"{place}.weight"] = tensors[f"{place}.weight"].double() + product.double()
    tensors[HEAD] = score_head(module).weight.detach().clone()
    return _Member(where=where, tensors=tensors, trunk=trunk_hash(module), about=about)


def _check_alike(member: _Member, first: _Member) -> None:
    here, there = ({name: tuple(t.shape) for name, t in one.tensors.items()} for one in (member, first))
    if here != there:
        name = min(name for name in {*here, *there} if here.get(name) != there.get(name))
        raise ConfigError(
            f"{member.where} and {first.where} have different shapes, first {name}: {here.get(name)} and {there.get(name)}; "
            "average models of one architecture"
        )
    if member.about.tokenizer.get_vocab() != first.about.tokenizer.get_vocab():
        raise ConfigError(f"{member.where} and {first.where} have different tokenizers; average members of one start")
    if member.about.template_kind != first.about.template_kind:
        raise ConfigError(
            f"{member.where} has the template {member.about.template_kind!r}, {first.where} {first.about.template_kind!r}; "
            "average members that read texts alike"
        )
    if member.trunk != first.trunk:
        mixed = None in (member.trunk, first.trunk)
        what = ": one is an adapter, the other a whole model" if mixed else " are adapters on different trunks"
        raise ConfigError(f"{member.where} and {first.where}{what}; average members of one start")


def _distance(tensors: dict[str, Tensor], mean: dict[str, Tensor]) -> float:
    names = [name for name in mean if name != HEAD]
    off = sum(float((tensors[name].double() - mean[name]).square().sum()) for name in names)
    return math.sqrt(off / max(sum(float(mean[name].square().sum()) for name in names), 1e-300))


@torch.no_grad()
def _filled(model: nn.Module, mean: dict[str, Tensor]) -> nn.Module:
    """The model without its adapters, its weights replaced by the mean."""
    template = getattr(unwrap(model), "rewarden_origin", Origin(path=None)).template
    plain: Any = model.unload() if isinstance(model, PeftModel) else model
    set_head(plain, mean[HEAD].float())
    for name, tensor in plain.state_dict().items():
        if name in mean and name != HEAD:
            tensor.copy_(mean[name])
    remember(plain, Origin(path=None, template=template))
    module: nn.Module = plain
    return module.eval()
