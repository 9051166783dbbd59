"""Making a diff."""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor as Values

from rewarden.models.diff.carry import carry
from rewarden.models.diff.combine import Trace, diff_dtype, make_rows
from rewarden.models.diff.manifest import DIFF, MANIFEST, Base, File, Manifest, Tensor, digest, to_json
from rewarden.models.diff.read import DTYPE_NAMES, Checkpoint
from rewarden.models.diff.rules import RULES, Rule, Step, known_rule, plan
from rewarden.models.diff.sums import SUM_FILE
from rewarden.models.diff.write import Draft, Planned, refuse_existing, shard_name, write_text
from rewarden.models.folder import FULL


def silent(line: str) -> None:
    """A report to nobody."""


def make_diff(
    raw: str | Path, tuned: str | Path, diff: str | Path, *, rule: str = "exact", report: Callable[[str], None] = silent
) -> Manifest:
    """Write the difference between a tuned model and its base `raw` into the folder `diff`, with a manifest (`diff.json`).

    One file per weight file of `tuned`, in safetensors; config and tokenizer of `tuned` come along. With the rule "exact",
    `recover` gives the tuned model back bit for bit. With "moss" and "alpaca_farm" the published scripts can read the diff, and
    the manifest counts the entries that float32 does not give back. Killed, a second call goes on after the last file.

    Errors: ConfigError for an existing folder, and for models that do not fit each other, naming the tensor.
    """
    chosen = known_rule(rule)
    refuse_existing(Path(diff))
    with Checkpoint(tuned) as source, Checkpoint(raw) as base:
        steps = {step.key: step for step in plan(chosen, source, base)}
        cast = sum(step.mode == "xor" and source.entries[key].dtype != _base_dtype(step, base) for key, step in steps.items())
        if cast:
            report(f"{cast} tensors of the base are of another type; they are rounded to the tuned type first")
        stem = DIFF if chosen == "exact" else FULL
        with Draft(Path(diff), ["make", chosen, inputs(source, base)]) as draft:
            files: dict[str, File] = {}
            records: dict[str, Tensor] = {}
            names: dict[str, str] = {}
            for index, keys in enumerate(source.names().values()):
                name = shard_name(stem, index, len(source.files))
                ordered = sorted(keys, key=partial(place, steps, base))
                shard = _shard(draft, name, [steps[key] for key in ordered], source, base, report)
                files[name] = File(sha256=shard["sha256"], size=shard["size"])
                records |= {key: Tensor.model_validate(facts) for key, facts in shard["facts"].items()}
                names |= dict.fromkeys(keys, name)
            draft.index(stem, names)
            carried, left = carry(source.path, draft.path)
            if left:
                report(f"not carried over: {', '.join(left)}")
            manifest = _manifest(chosen, records, files, carried, source, Path(raw).name)
            write_text(draft.path / MANIFEST, to_json(manifest))
            if chosen == "alpaca_farm":
                write_text(draft.path / SUM_FILE, f"{manifest.total!r}\n")
            draft.publish()
    inexact = sum(record.inexact for record in manifest.tensors.values())
    if not_finite := sum(record.not_finite for record in manifest.tensors.values()):
        report(f"{tuned}: {not_finite} entries are NaN or inf, and the diff keeps them")
    if inexact:
        report(
            f"rule {chosen}: {inexact} entries will not come back bit for bit (float32 subtraction); the rule exact loses none"
        )
    return manifest


def inputs(*checkpoints: Checkpoint) -> list[Any]:
    """What identifies the files that are read: a draft of others is not continued."""
    found = [file.resolve() for checkpoint in checkpoints for file in checkpoint.files]
    return [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in found]


def place(steps: Mapping[str, Step], base: Checkpoint, key: str) -> tuple[str, str]:
    """A sort key: an order in which every file of the base is opened once."""
    base_key = steps[key].base_key
    return (str(base.entries[base_key].file) if base_key else "", key)


def _base_dtype(step: Step, base: Checkpoint) -> Any:
    return base.entries[step.base_key].dtype if step.base_key else None


def _shard(
    draft: Draft, name: str, steps: list[Step], source: Checkpoint, base: Checkpoint, report: Callable[[str], None]
) -> dict[str, Any]:
    facts: dict[str, Any] = {}

    def rows(step: Step) -> Iterator[Values]:
        trace = Trace()
        yield from make_rows(step, source, base, trace)
        facts[step.key] = _record(step, trace, source, base).model_dump(mode="json")

    planned = [
        Planned(
            key=step.key,
            shape=source.entries[step.key].shape,
            dtype=diff_dtype(step, source.entries[step.key].dtype, _base_dtype(step, base)),
            rows=partial(rows, step),
        )
        for step in steps
    ]
    return draft.shard(name, planned, lambda: facts, report)


def _record(step: Step, trace: Trace, source: Checkpoint, base: Checkpoint) -> Tensor:
    entry = source.entries[step.key]
    own: dict[str, Any] = {}
    if step.mode != "full" and step.base_key is not None:
        other = base.entries[step.base_key]
        own = {
            "base_key": step.base_key,
            "base_shape": other.shape,
            "base_dtype": DTYPE_NAMES[other.dtype],
            "base_sha256": trace.base.hexdigest(),
            "added_rows": step.added_rows,
        }
    return Tensor(
        mode=step.mode,
        shape=entry.shape,
        dtype=DTYPE_NAMES[entry.dtype],
        sha256=trace.tuned.hexdigest(),
        diff_dtype=DTYPE_NAMES[diff_dtype(step, entry.dtype, _base_dtype(step, base))],
        diff_sha256=trace.diff.hexdigest(),
        total=trace.total,
        inexact=trace.inexact,
        not_finite=trace.not_finite,
        **own,
    )


def _manifest(
    rule: Rule, records: dict[str, Tensor], files: dict[str, File], carried: dict[str, str], source: Checkpoint, name: str
) -> Manifest:
    read = [
        (record.base_key, record.base_dtype or "", record.base_shape or (), record.base_sha256 or "")
        for record in records.values()
        if record.base_key
    ]
    tuned = [(key, record.dtype, record.shape, record.sha256) for key, record in records.items()]
    return Manifest(
        rule=rule,
        rule_text=RULES[rule],
        base=Base(name=name, sha256=digest(read)),
        tuned_sha256=digest(tuned),
        total=math.fsum(record.total for record in records.values()),
        tensors=dict(sorted(records.items())),
        files=files,
        carried=carried,
        skipped=tuple(sorted(source.skipped)),
    )
