"""Whether a diff is whole, without writing anything."""

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewarden.errors import ConfigError
from rewarden.models.diff.carry import read_config
from rewarden.models.diff.combine import raw_bytes
from rewarden.models.diff.manifest import Manifest, check_base, check_carried, open_diff, read_manifest
from rewarden.models.diff.read import Checkpoint
from rewarden.models.diff.verify import (
    Recipe,
    all_steps,
    check_sum,
    choose_rule,
    refuse_not_finite,
    refuse_wrong_sum,
)
from rewarden.models.diff.write import file_sha256
from rewarden.models.folder import find


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What was found, one line per finding; everything in it is right, since what is wrong is raised."""

    lines: tuple[str, ...]
    total: float | None = None


def check_diff(
    diff: str | Path, raw: str | Path | None = None, *, rule: str | None = None, expected: str | None = None
) -> Checked:
    """Check a diff against its manifest: files, names, shapes, types, hashes; with `raw` also the base and the result.

    A published diff has no manifest: then its tensors are held against the base's by `rule`, and the published sum is compared.

    Errors: ConfigError that names what is missing, left over, truncated, changed, of another shape or type, or a wrong base.
    """
    diff = str(diff)
    manifest = read_manifest(diff)
    if manifest is not None:
        choose_rule(manifest, rule, diff)
        check_carried(diff, manifest.carried)
    with open_diff(diff, manifest) as source:
        if raw is not None:
            with Checkpoint(raw) as base:
                return _with_base(source, base, manifest, rule, expected)
        if manifest is None:
            return Checked(
                lines=(
                    f"{diff}: {len(source.entries)} tensors in {len(source.files)} files, headers are whole; there is no "
                    "manifest, as published diffs have none: give the base and the rule to check names, shapes and the sum",
                )
            )
        _check_files(source, manifest)
        return Checked(lines=(*_headline(diff, manifest), "the base was not checked: give it too"), total=manifest.total)


def _headline(diff: str, manifest: Manifest) -> tuple[str, ...]:
    inexact = sum(record.inexact for record in manifest.tensors.values())
    lost = f"; {inexact} entries do not come back bit for bit" if inexact else "; comes back bit for bit"
    return (
        f"{diff}: rule {manifest.rule}, {len(manifest.tensors)} tensors ({manifest.modes()}) in {len(manifest.files)} files"
        f"{lost}",
        f"made from {manifest.base.name}, base sha256 {manifest.base.sha256[:16]}, tuned sha256 {manifest.tuned_sha256[:16]}, "
        f"sum {manifest.total:.4f}",
        "every file has the sha256 of the manifest",
    )


def _check_files(source: Checkpoint, manifest: Manifest) -> None:
    """File hashes; of a file that differs, the tensors that do."""
    grouped = source.names()
    for file, keys in grouped.items():
        if file_sha256(file) == manifest.files[file.name].sha256:
            continue
        changed = [key for key in sorted(keys) if _sha256(source, key) != manifest.tensors[key].diff_sha256]
        what = f"{', '.join(map(repr, changed[:5]))}: {len(changed)} tensors" if changed else "its header"
        raise ConfigError(f"{file} was changed: {what} differ from the manifest; get the diff again")


def _sha256(source: Checkpoint, key: str) -> str:
    digest = hashlib.sha256()
    for start, stop in source.entries[key].ranges():
        digest.update(raw_bytes(source.rows(key, start, stop)))
    return digest.hexdigest()


def _with_base(
    source: Checkpoint, base: Checkpoint, manifest: Manifest | None, rule: str | None, expected: str | None
) -> Checked:
    """Recover every tensor and throw it away."""
    chosen = choose_rule(manifest, rule, source.path)
    if manifest is not None:
        check_base(base, manifest)
    steps = all_steps(manifest, chosen, source, base)
    recipe = Recipe(diff=source, base=base, manifest=manifest, rule=chosen, check="off", steps=steps)
    facts: dict[str, Any] = {}
    for key in source.entries:
        for _ in recipe.rows(key, recipe.natural_dtype(key), facts):
            pass
    if manifest is not None:
        found = {key: recipe.problem(key, fact["sha256"]) for key, fact in facts.items()}
        if problems := [problem for problem in found.values() if problem]:
            more = f" (and {len(problems) - 1} more tensors)" if len(problems) > 1 else ""
            raise ConfigError(f"{problems[0]}{more}")
        _check_files(source, manifest)
        total = math.fsum(fact["total"] for fact in facts.values())
        lines = (
            *_headline(source.path, manifest),
            f"{base.path} is its base, and base + diff is the tuned model by every hash",
        )
        return Checked(lines=lines, total=total)
    refuse_not_finite(facts, base.path, source.path)
    config = read_config(base.path) if find(base.path, "config.json") is not None else {}
    summed = check_sum(facts, config, expected, source.path)
    refuse_wrong_sum(summed, base.path, source.path)
    modes = [step.mode for step in steps.values()]
    counts = ", ".join(f"{modes.count(mode)} {mode}" for mode in ("delta", "full"))
    first = f"{source.path}: rule {chosen}, {len(steps)} tensors ({counts}), names and shapes fit {base.path}"
    return Checked(lines=(first, summed.words()), total=summed.total)
