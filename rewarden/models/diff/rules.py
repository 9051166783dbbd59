"""The rules by which a tuned model and its base become a diff, tensor by tensor.

    exact        D = bits(T) xor bits(B)      any tensor that both hold in one shape; the others whole
    moss         D = T - B in float32         keys with "layers" in them; embeddings, final norm and heads whole (MOSS-RLHF,
                                              merge_weight_en.py and merge_weight_zh.py)
    alpaca_farm  D = T - B in float32         every key that both hold; a base with one embedding row less gets one more row,
                                              the mean of its rows, before the subtraction; reward models carry the
                                              prefix "backbone_model." (AlpacaFarm, recover_model_weights.py)

Plain subtraction loses bits: where |B| is much larger than |T|, (T - B) + B is not T. So our own rule works on the bits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

from rewarden.errors import ConfigError
from rewarden.models.diff.read import Checkpoint, Entry, some

Mode = Literal["full", "delta", "xor"]
Rule = Literal["exact", "moss", "alpaca_farm"]

RULES: dict[str, str] = {
    "exact": "xor: tuned = bits(diff) xor bits(base in the tuned dtype); full: tuned = diff",
    "moss": "keys with 'layers': tuned = diff + base in float32, rounded once to the output dtype; all others: tuned = diff",
    "alpaca_farm": "keys of the base: tuned = diff + base in float32, rounded once to the output dtype; a base with one "
    "embedding row less is extended by the mean of its rows; all others: tuned = diff",
}
"""Rule -> how the tuned model is recovered, in one sentence, as written into manifests."""

BACKBONE = "backbone_model."
HEADS = frozenset(
    {"lm_head.weight", "lm_head.bias", "embed_out.weight", "score.weight", "reward_head.weight", "reward_head.bias"}
)
"""Tensors that only one of the two models may have: a language model has no scalar head, a classifier no LM head."""


@dataclass(frozen=True, slots=True)
class Step:
    """How one tensor is differenced: against which tensor of the base, extended by how many rows."""

    key: str
    mode: Mode
    base_key: str | None = None
    added_rows: int = 0


def known_rule(rule: str) -> Rule:
    """The rule by its name. Errors: ConfigError with the names there are."""
    if rule not in RULES:
        raise ConfigError(f"rule is {rule!r}; use one of {', '.join(RULES)}")
    return cast(Rule, rule)


def plan(rule: Rule, tuned: Checkpoint, base: Checkpoint) -> list[Step]:
    """One step per tensor of `tuned` (a tuned model, or a published diff, which has the same tensors).

    Errors: ConfigError naming tensors that one of the two lacks, and shapes or types that do not fit.
    """
    names = {key: base_name(key, tuned.entries) for key in tuned.entries}
    _check_names(set(names.values()), tuned, base)
    return [_step(rule, key, name, tuned, base) for key, name in names.items()]


def base_name(key: str, entries: Mapping[str, Entry]) -> str:
    """The base's name of a tensor: AlpacaFarm's reward models wrap the language model in `backbone_model`."""
    wrapped = any(other.startswith(BACKBONE) for other in entries)
    return key.removeprefix(BACKBONE) if wrapped else key


def in_block(key: str) -> bool:
    """Whether a tensor belongs to a transformer block: its name holds a layer number."""
    return any(part.isdigit() for part in key.split("."))


def _check_names(names: set[str], tuned: Checkpoint, base: Checkpoint) -> None:
    if missing := sorted(set(base.entries) - names - HEADS):
        raise ConfigError(
            f"{tuned.path} lacks {len(missing)} tensors of the base {base.path}: {some(missing)}; it is incomplete, or was "
            "made from another architecture"
        )
    if extra := sorted(names - set(base.entries) - HEADS):
        raise ConfigError(
            f"{tuned.path} holds {len(extra)} tensors that the base {base.path} lacks: {some(extra)}; the base is incomplete, "
            "or of another architecture"
        )


def _step(rule: Rule, key: str, name: str, tuned: Checkpoint, base: Checkpoint) -> Step:
    own, other = tuned.entries[key], base.entries.get(name)
    if other is None or (rule == "moss" and "layers" not in key):
        return Step(key=key, mode="full")
    if own.dtype != other.dtype and not (own.dtype.is_floating_point and other.dtype.is_floating_point):
        raise ConfigError(
            f"{key} is {own.dtype} in {tuned.path} and {other.dtype} in {base.path}; only floating types may differ: the base "
            "is another model, or a quantised one"
        )
    if own.shape != other.shape:
        return _resized(rule, key, name, tuned, base)
    if rule == "exact":
        return Step(key=key, mode="xor", base_key=name)
    return Step(key=key, mode="delta" if own.dtype.is_floating_point else "full", base_key=name)


def _resized(rule: Rule, key: str, name: str, tuned: Checkpoint, base: Checkpoint) -> Step:
    """A tensor with other rows than the base's: a resized vocabulary, which blocks do not have."""
    own, other = tuned.entries[key].shape, base.entries[name].shape
    if in_block(key) or own[1:] != other[1:]:
        raise ConfigError(
            f"{key} is {list(own)} in {tuned.path} and {list(other)} in the base {base.path}; only the number of rows of "
            "embeddings and heads may differ: this is another base"
        )
    if rule == "alpaca_farm" and own[0] == other[0] + 1:
        return Step(key=key, mode="delta", base_key=name, added_rows=1)
    return Step(key=key, mode="full")
