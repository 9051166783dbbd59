"""Getting the tuned model back."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rewarden.errors import ConfigError
from rewarden.models.diff.carry import has_tokenizer, moss_template, read_config
from rewarden.models.diff.make import inputs, place, silent
from rewarden.models.diff.manifest import Manifest, check_base, check_carried, digest, open_diff, read_manifest
from rewarden.models.diff.output import Output, choose_dtype, head_bias, model_config, surround, write_shards
from rewarden.models.diff.read import DTYPE_NAMES, Checkpoint
from rewarden.models.diff.reward import BIAS, EMBEDDINGS, check_fits, is_reward, renamed
from rewarden.models.diff.rules import BACKBONE
from rewarden.models.diff.verify import (
    Recipe,
    all_steps,
    check_sum,
    choose_check,
    choose_rule,
    refuse_not_finite,
    refuse_wrong_sum,
)
from rewarden.models.diff.write import Draft, refuse_existing
from rewarden.models.folder import find, read_card


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What `recover` did: the rule, how the result was checked and what is to be known about it, in words."""

    folder: Path
    rule: str
    num_tensors: int
    checked: str
    base_sha256: str
    total: float
    notes: tuple[str, ...]


def recover(
    raw: str | Path,
    diff: str | Path,
    out: str | Path,
    *,
    rule: str | None = None,
    dtype: str = "auto",
    check: str = "auto",
    expected: str | None = None,
    template: str | None = None,
    tokenizer: str | None = None,
    keep_names: bool = False,
    report: Callable[[str], None] = silent,
) -> Recovered:
    """Add a diff to its base `raw` and write the tuned model to the folder `out`, as safetensors.

    `rule` is needed for published diffs only, which have no manifest. `dtype` "auto" is that of the tuned model, for published
    diffs float32. `check` is "manifest" (every hash), "sum" (the published integrity sum, `expected` or the diff's own) or
    "off"; "auto" takes the best there is. A model with a `reward_head` becomes a Rewarden reward model, unless `keep_names`.
    Killed, a second call goes on after the last complete file.

    Errors: ConfigError for an existing folder, a wrong base, and damage of any kind, naming the tensor; nothing is left then.
    """
    raw, diff, out = str(raw), str(diff), Path(out)
    refuse_existing(out)
    manifest = read_manifest(diff)
    chosen = choose_rule(manifest, rule, diff)
    mode = choose_check(manifest, check, expected, diff)
    if manifest is not None and mode == "manifest":
        check_carried(diff, manifest.carried)
    with open_diff(diff, manifest) as source, Checkpoint(raw) as base:
        if manifest is not None:
            check_base(base, manifest)
        steps = all_steps(manifest, chosen, source, base)
        recipe = Recipe(diff=source, base=base, manifest=manifest, rule=chosen, check=mode, steps=steps)
        convert = is_reward(source.entries) and not keep_names
        names = renamed(source.entries) if convert else {key: key for key in source.entries}
        output = _output(recipe, names, dtype, convert, keep_names)
        tokens_from = _tokenizer(recipe, tokenizer, output.notes)
        mark = ["recover", chosen, mode, dtype, convert, inputs(source, base), _manifest_mark(manifest)]
        with Draft(out, mark) as draft:
            facts = _write(draft, recipe, output, report)
            checked, total = _judge(recipe, facts, expected)
            if output.dtype is not None and (lost := sum(fact["overflow"] for fact in facts.values())):
                raise ConfigError(f"dtype is {dtype}: {lost} entries are too large for it; use bfloat16 or float32")
            base_sha256 = _base_digest(recipe, facts)
            provenance = {"rule": chosen, "base": Path(raw).name, "base_sha256": base_sha256, "checked": checked}
            surround(
                draft.path,
                output,
                source=diff,
                tokenizer=tokens_from,
                template=template or _template(recipe, convert),
                provenance={"recovered": provenance},
            )
            draft.publish()
    return Recovered(
        folder=out,
        rule=chosen,
        num_tensors=len(steps),
        checked=checked,
        base_sha256=base_sha256,
        total=total,
        notes=(*output.notes, *_inexact(manifest)),
    )


def _output(recipe: Recipe, names: dict[str, str], dtype: str, convert: bool, keep_names: bool) -> Output:
    """Names, types and config of what is written; without a manifest the config is held against the tensors."""
    diff, raw = recipe.diff, recipe.base.path
    notes: list[str] = []
    asked = choose_dtype(dtype)
    shapes = {new: diff.entries[old].shape for old, new in names.items()}
    types = {old: _type(recipe, old, new, asked) for old, new in names.items()}
    config: dict[str, Any] | None = None
    wrapped = any(old.startswith(BACKBONE) for old in names)
    # A wrapped model's own config says nothing but the path of its backbone.
    where = raw if wrapped else diff.path
    if convert or (not wrapped and find(where, "config.json") is not None):
        plain = recipe.manifest is None or asked is not None
        found = read_config(where)
        changed = model_config(found, shapes, types, names, reward=convert, dtype=plain, where=where, notes=notes)
        if (recipe.manifest is None or convert) and not keep_names:
            check_fits(changed, shapes, diff.path)
        config = None if changed == found and not wrapped else changed
    bias = head_bias(diff, notes) if convert else None
    return Output(names=names, types=types, config=config, reward=convert, bias=bias, dtype=asked, notes=notes)


def _type(recipe: Recipe, old: str, new: str, asked: torch.dtype | None) -> torch.dtype:
    natural = recipe.natural_dtype(old)
    # The scalar head stays as it is: differences of scores need its digits.
    return asked if asked is not None and natural.is_floating_point and new != "score.weight" else natural


def _tokenizer(recipe: Recipe, given: str | None, notes: list[str]) -> str | None:
    """Where the tokenizer comes from: the place that was given, the diff itself (None), or the base if it has the same rows.

    Errors: ConfigError when it would be the base's, but the embeddings have other rows.
    """
    diff, base = recipe.diff, recipe.base
    if given is not None or has_tokenizer(diff.path):
        return given
    if recipe.manifest is not None or not has_tokenizer(base.path):
        notes.append("no tokenizer: the diff holds none; put tokenizer files into the folder")
        return None
    rows = [entry.shape[0] for key, entry in diff.entries.items() if key.endswith(EMBEDDINGS)]
    there = [entry.shape[0] for key, entry in base.entries.items() if key.endswith(EMBEDDINGS)]
    if rows != there:
        raise ConfigError(
            f"{diff.path} holds no tokenizer, and its embeddings have {rows} rows, the base's {there}, so the base's tokenizer "
            "lacks tokens; give the tokenizer's folder (--tokenizer)"
        )
    notes.append("tokenizer: the diff holds none, it is the base's")
    return base.path


def _write(draft: Draft, recipe: Recipe, output: Output, report: Callable[[str], None]) -> dict[str, Any]:
    """Write all shards; returns what was seen of every tensor."""
    source = recipe.diff
    facts: dict[str, Any] = {}
    if BIAS in source.entries and BIAS not in output.names:
        for _ in recipe.rows(BIAS, recipe.natural_dtype(BIAS), facts):
            pass
    order = partial(place, recipe.steps, recipe.base)
    return facts | write_shards(draft, source, output, recipe.rows, report, order=order)


def _judge(recipe: Recipe, facts: Mapping[str, Any], expected: str | None) -> tuple[str, float]:
    """Whether the result is what it should be, in words, and the integrity sum."""
    raw, diff = recipe.base.path, recipe.diff.path
    if recipe.manifest is None:
        refuse_not_finite(facts, raw, diff)
    config = read_config(raw) if find(raw, "config.json") is not None else {}
    found = check_sum(facts, config, expected if recipe.check == "sum" else None, diff)
    if recipe.check == "sum":
        refuse_wrong_sum(found, raw, diff)
        return found.words(), found.total
    if recipe.check == "off":
        return "not checked", found.total
    return f"sha256 of all {len(facts)} tensors as in the manifest", found.total


def _base_digest(recipe: Recipe, facts: Mapping[str, Any]) -> str:
    """As in a manifest: one hash for all tensors of the base that were read."""
    rows = []
    for key, step in recipe.steps.items():
        if step.base_key is not None and step.mode != "full":
            entry = recipe.base.entries[step.base_key]
            rows.append((step.base_key, DTYPE_NAMES[entry.dtype], entry.shape, facts[key]["sha256"]["base"]))
    return digest(rows)


def _inexact(manifest: Manifest | None) -> list[str]:
    """A note on the entries that the rule does not give back, which the manifest counts."""
    lost = 0 if manifest is None else sum(record.inexact for record in manifest.tensors.values())
    if manifest is None or not lost:
        return []
    return [f"rule {manifest.rule}: {lost} entries are not bit for bit those of the tuned model (float32 subtraction)"]


def _manifest_mark(manifest: Manifest | None) -> str:
    return "" if manifest is None else f"{manifest.base.sha256} {manifest.tuned_sha256}"


def _template(recipe: Recipe, convert: bool) -> str | None:
    """The conversation format of a published model, unless its card names one; a model of ours is known by its card alone."""
    diff = recipe.diff
    if "template" in read_card(diff.path) or (recipe.rule == "exact" and not convert):
        return None
    wrapped = any(key.startswith(BACKBONE) for key in diff.entries)
    return "alpaca" if wrapped or recipe.rule == "alpaca_farm" else moss_template(diff.path)
