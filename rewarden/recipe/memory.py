"""What a training recipe needs in memory, phase by phase, worked out from configs and the batch plan; nothing is loaded."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import cached_file

from rewarden.algos.actors import critic_start
from rewarden.algos.ppo_config import PPO
from rewarden.algos.reward import Reward
from rewarden.algos.sft import SFT
from rewarden.collect.samples import SampleN
from rewarden.errors import ConfigError, RewardenError
from rewarden.models.ensemble import critic_folder
from rewarden.models.ensemble_folder import is_ensemble, read_ensemble_file
from rewarden.models.folder import ADAPTER, is_adapter, quiet, read_card, tensor_shapes, weight_files
from rewarden.models.layout import MAX_TOKENS
from rewarden.models.load import load_tokenizer
from rewarden.models.memory import FLOAT32, LOGITS_ALIVE, ModelMemory, frozen_bytes, measure
from rewarden.models.source import Model, load_config
from rewarden.recipe.lengths import Sample, largest_microbatch, largest_rollouts, num_rows, sample_lengths
from rewarden.scoring.registry import resolve
from rewarden.spec import Spec

LIBRARIES = 80_000_000
"""Bytes beside models and batches: modules imported on first use, tokenizer, rows of data (measured)."""

STATISTICS = 6
"""Tensors as large as a chunk of logits in a pass that also computes entropies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A part of a run and the bytes that each kind of thing takes in it."""

    name: str
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Phases of a run, what is written to disk as a cache, and what was assumed."""

    phases: tuple[Phase, ...]
    disk: int = 0
    notes: tuple[str, ...] = ()

    @property
    def peak(self) -> Phase:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.total)


Known = Mapping[str, Model]
"""Models that earlier stages will write, by folder, and what stands for them: what those stages start from."""


def estimate(spec: Spec, known: Known | None = None) -> Estimate | None:
    """The memory of one stage on one rank; None for a stage that loads no model it could count.

    Errors: ConfigError where a model is not on this machine, or is of a kind that cannot be worked out.
    """
    found = known or {}
    if isinstance(spec, SFT):
        return _sft(spec, found)
    if isinstance(spec, Reward):
        return _reward(spec, found)
    if isinstance(spec, SampleN):
        return _sample_n(spec, found)
    return _ppo(spec, found) if isinstance(spec, PPO) else None


def stand_in(model: Model, known: Known) -> Model:
    """The model as it lies on this machine, or what an earlier stage will make it from. The network is not asked.

    Errors: ConfigError when it is not here.
    """
    path = model.model_name_or_path
    if Path(path).exists():
        return model
    start = next((start for folder, start in known.items() if Path(folder) == Path(path)), None)
    if start is not None:
        place = {"model_name_or_path": start.model_name_or_path, "revision": start.revision}
        return stand_in(model.model_copy(update=place), known)
    for name in ("config.json", "adapter_config.json"):
        file = _in_hub_cache(model, name)
        if file is not None:
            return model.model_copy(update={"model_name_or_path": str(file.parent), "revision": None})
    raise ConfigError(f"{path} is not on this machine yet")


def _in_hub_cache(model: Model, name: str) -> Path | None:
    try:
        with quiet():
            found = cached_file(model.model_name_or_path, name, revision=model.revision, local_files_only=True)
    except (OSError, ValueError):  # transformers' way to say that it is not there, or that this is no hub id
        return None
    return Path(found) if found else None


def _sft(spec: SFT, known: Known) -> Estimate:
    model = stand_in(spec.model, known)
    needs, sample = measure(model), sample_lengths(spec, model)
    tokens = largest_microbatch(spec, sample)
    base = _base({"weights": needs.weights}, needs)
    update = {**_update({"": needs}, tokens), "logits": needs.logits_at_once(tokens)}
    phases = [Phase(name="update", parts={**base, **update}), _checkpoint(base, needs)]
    if spec.eval_data is not None:
        phases.append(Phase(name="evaluate", parts={**base, **_passing(needs, tokens), "logits": needs.logits_at_once(tokens)}))
    return Estimate(phases=tuple(phases), notes=(_tokens_note(tokens, sample),))


def _reward(spec: Reward, known: Known) -> Estimate:
    model = stand_in(spec.model, known)
    needs, sample = measure(model, num_heads=spec.num_heads), sample_lengths(spec, model)
    tokens = largest_microbatch(spec, sample)
    weights = {"weights": needs.weights}
    if spec.family == "lora":  # all adapters stay in memory, and take their steps in turn
        weights["other members"] = (spec.num_members - 1) * needs.trained
    if spec.lm_coef and not load_config(model).get_text_config().tie_word_embeddings:
        weights["LM head"] = needs.logits // FLOAT32 * needs.hidden
    base = _base(weights, *[needs] * (spec.num_members if spec.family == "lora" else 1))
    update = _update({"": needs}, tokens)
    if spec.lm_coef:
        update["logits"] = needs.logits_at_once(tokens)
    disk = 0
    if spec.feature_cache_dir is not None:
        rows = num_rows(spec, sample)
        # A head alone needs the last state of each side; otherwise every token has one.
        disk = round(rows * (2 if needs.kept == 0 else sample.mean) * needs.hidden)
        update["cached features"] = tokens * needs.hidden
    phases = [Phase(name="update", parts={**base, **update}), _checkpoint(base, needs)]
    if spec.eval_data is not None or disk:
        name = "evaluate, fill the cache" if disk else "evaluate"
        phases.append(Phase(name=name, parts={**base, **_passing(needs, tokens)}))
    return Estimate(phases=tuple(phases), disk=disk, notes=(_tokens_note(tokens, sample),))


def _ppo(spec: PPO, known: Known) -> Estimate:
    policy = stand_in(spec.policy, known)
    reward = _local(spec.reward, known)
    given = None if spec.critic is None else stand_in(spec.critic, known)
    critic = given or critic_start(policy, reward, given, spec.critic_head, load_tokenizer(policy))[0]
    actor, judge = measure(policy), measure(critic, num_heads=1)
    sample = sample_lengths(spec, policy)
    tokens = largest_rollouts(spec, sample)
    weights = {
        "policy": actor.weights,
        # With an adapter the reference is the policy with it switched off.
        "reference": 0 if policy.lora_r else actor.weights,
        "critic": judge.weights,
        "reward model": sum(_frozen(model) for model in _reward_models(reward)),
        "best weights so far": actor.trained if spec.eval_data is not None else 0,
    }
    base = _base({name: size for name, size in weights.items() if size}, actor, judge)
    phases = (
        Phase(
            name="update",
            parts={**base, **_update({"": actor, "critic ": judge}, tokens), "logits": actor.logits_at_once(tokens)},
        ),
        Phase(name="rollout", parts={**base, **_passing(actor, tokens), **_decoding(spec, actor, max(sample.lengths))}),
        Phase(name="prepare", parts={**base, **_passing(actor, tokens), **_statistics(spec, actor)}),
        _checkpoint(base, actor, judge),
    )
    return Estimate(phases=phases, notes=(_tokens_note(tokens, sample),))


def _sample_n(spec: SampleN, known: Known) -> Estimate:
    policy = stand_in(spec.policy, known)
    needs, sample = measure(policy), sample_lengths(spec, policy)
    rows = min(spec.sampling.batch_size, spec.rows_per_step)
    prompts = math.ceil(rows / spec.num_generations) + 1
    positions = rows * spec.sampling.max_completion_length + prompts * max(sample.lengths)
    parts = {
        "libraries": LIBRARIES,
        "weights": needs.weights,
        "activations": min(prompts * max(sample.lengths), _at_once()) * needs.passing,
        "key-value cache": positions * needs.cache,
        "logits": 6 * rows * needs.logits,
    }
    note = f"{rows} rows decoded together, answers of full length, a prompt once for its answers; prompts: {sample.how}"
    return Estimate(phases=(Phase(name="rollout", parts=parts),), notes=(note,))


def _decoding(spec: PPO, policy: ModelMemory, longest: int) -> dict[str, int]:
    """The rows that are decoded together, prompts and evaluation prompts alike, and what is drawn from."""
    rows = max(spec.rollout_batch_size, 0 if spec.eval_data is None else spec.eval_data.max_rows or 0)
    rows = min(rows, spec.sampling.batch_size)
    positions = longest + spec.sampling.max_completion_length
    # Logits and probabilities in float32 with a copy of each, and cumulative sums in float64.
    return {"key-value cache": rows * positions * policy.cache, "logits": 6 * rows * policy.logits}


def _statistics(spec: PPO, policy: ModelMemory) -> dict[str, int]:
    """Log-probs and entropies of all sampled tokens, a chunk at a time."""
    every = spec.rollout_batch_size * spec.sampling.max_completion_length
    return {"logits": policy.logits_at_once(every) * STATISTICS // LOGITS_ALIVE}


def _base(weights: Mapping[str, int], *trained: ModelMemory) -> dict[str, int]:
    """What is there in every phase."""
    return {"libraries": LIBRARIES, **weights, "optimizer": sum(model.optimizer for model in trained)}


def _update(models: Mapping[str, ModelMemory], tokens: int) -> dict[str, int]:
    """What a forward and backward pass over a microbatch adds; `models` by what stands before their activations."""
    together = min(tokens, _at_once())
    parts = {"gradients": sum(model.gradients + model.projection for model in models.values())}
    for name, model in models.items():
        parts[f"{name}activations"] = tokens * model.activations + together * model.recomputed
    holes = sum((together if model.recomputed else tokens) * model.holes for model in models.values())
    return {**parts, **({"gaps that malloc leaves": holes} if holes else {})}


def _passing(model: ModelMemory, tokens: int) -> dict[str, int]:
    """A pass without gradients over as many tokens."""
    return {"activations": min(tokens, _at_once()) * model.passing}


def _checkpoint(base: Mapping[str, int], *trained: ModelMemory) -> Phase:
    """One file at a time is copied to be written."""
    largest = max(max(model.trained for model in trained), sum(model.optimizer for model in trained))
    return Phase(name="checkpoint", parts={**base, "copy to write": largest})


def _at_once() -> int:
    return MAX_TOKENS["cuda" if torch.cuda.is_available() else "cpu"]


def _local(reward: Mapping[str, Any], known: Known) -> dict[str, Any]:
    """A reward, and those inside a sum, with paths that are on this machine; entries of a registry as it has them."""
    if reward.get("kind") == "registered":
        entry = known.get(f"{reward['registry']}:{reward['name']}")
        if entry is not None and not Path(str(reward["registry"])).exists():
            return {"kind": "reward_model", "path": entry.model_name_or_path}
        return _local(resolve(reward), known)
    if reward.get("kind") == "reward_model":
        model = stand_in(Model(model_name_or_path=reward["path"], revision=reward.get("revision")), known)
        return {**reward, "path": model.model_name_or_path, "revision": model.revision}
    if reward.get("kind") == "sum":
        return {**reward, "scorers": [{**part, "scorer": _local(part["scorer"], known)} for part in reward["scorers"]]}
    return dict(reward)


def _reward_models(reward: Mapping[str, Any]) -> Iterator[Model]:
    if reward.get("kind") == "reward_model":
        yield Model(model_name_or_path=reward["path"], revision=reward.get("revision"), dtype=reward.get("dtype", "auto"))
    for part in reward.get("scorers", ()) if reward.get("kind") == "sum" else ():
        yield from _reward_models(part["scorer"])


def _frozen(model: Model) -> int:
    """Bytes of a reward model, or of all members of an ensemble; adapters stay beside their base, which they share."""
    path = model.model_name_or_path
    if is_ensemble(path):
        file = read_ensemble_file(path)
        members = [str(file.member(index)) for index in range(len(file.members))]
        if file.family == "independent":
            return sum(_frozen(_at(model, member)) for member in members)
        return _frozen(_at(model, critic_folder(path))) + sum(_adapter(member) for member in members)
    heads = int(read_card(path).get("num_heads", 1))
    return measure(model, num_heads=heads).weights + _adapter(path)


def _at(model: Model, path: str) -> Model:
    return model.model_copy(update={"model_name_or_path": path, "revision": None})


def _adapter(path: str) -> int:
    return frozen_bytes(list(tensor_shapes(weight_files(path, ADAPTER)).values())) if is_adapter(path) else 0


def _tokens_note(tokens: int, sample: Sample) -> str:
    return f"largest microbatch: {tokens:,} tokens, by {sample.how}"


def known_models(specs: Mapping[Path, Spec], described: Mapping[str, str] | None = None) -> Known:
    """What the stages of a chain start from, by the folder of the model that each will write.

    described: folders that hold a config alone, by the path of a model that is not here.
    """
    found = {path: Model(model_name_or_path=folder) for path, folder in (described or {}).items()}
    for folder, spec in specs.items():
        start = spec.policy if isinstance(spec, PPO) else spec.model if isinstance(spec, SFT | Reward) else None
        if start is not None:
            found[str(folder / "model")] = start
    return found


def memory_lines(spec: Spec, known: Known) -> list[str]:
    """The estimate as a small table, or why there is none; empty for a stage that trains nothing."""
    try:
        found = estimate(spec, known)
    except RewardenError as error:
        return [f"no estimate: {str(error).splitlines()[0]}"]
    if found is None:
        return []
    place = "GPU memory" if torch.cuda.is_available() else "this process, above what its imports take"
    lines = [f"{place}, in MB; {note}" for note in found.notes]
    names = list(dict.fromkeys(name for phase in found.phases for name in phase.parts))
    width = max(len("total"), *map(len, names))
    columns = [max(10, len(phase.name)) for phase in found.phases]

    def line(title: str, cells: Sequence[str]) -> str:
        filled = (f"{cell:>{column}}" for cell, column in zip(cells, columns, strict=True))
        return "  ".join([f"{title:<{width}}", *filled]).rstrip()

    lines.append(line("", [phase.name for phase in found.phases]))
    lines += [line(name, [_mb(phase.parts.get(name)) for phase in found.phases]) for name in names]
    lines.append(line("total", [_mb(phase.total) for phase in found.phases]))
    lines.append(f"peak: {_mb(found.peak.total)} MB, in the phase {found.peak.name!r}")
    if found.disk:
        lines.append(f"on disk, cached features: {_mb(found.disk)} MB")
    return lines


def _mb(size: int | None) -> str:
    return "" if size is None else f"{math.ceil(size / 1e6):,}"
