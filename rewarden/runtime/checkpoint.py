"""Checkpoints that are whole or absent: weights, optimizer, schedule, loop state, data cursor and random generators.

    checkpoints/step-00000010/checkpoint.json     step, state, fingerprint, recipe, size of every file
                              rng.pt              global generators of every rank
                              PART/...            what each part's `save` wrote

A checkpoint is written into a hidden temporary folder, synced, and renamed; only then are older ones removed. A process killed
anywhere in between leaves the older checkpoint untouched and a hidden folder that `disk.clean` removes at the next start.
"""

import json
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError

from rewarden.errors import ResumeError, RewardenError
from rewarden.protocols import Part
from rewarden.runtime.codec import decode, encode
from rewarden.runtime.disk import explain, refusal, remove, swap_in, sync_tree, writing

FORMAT = 1
Resume = Literal["auto", "must", "never"]

KEYS = {"step": int, "state": object, "fingerprint": str, "recipe": dict, "parts": list, "files": dict}
"""What checkpoint.json holds beside its format."""

_NAME = re.compile(r"step-(\d{8,})")
_UNREADABLE = (
    OSError,
    EOFError,
    RuntimeError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    pickle.UnpicklingError,
    SafetensorError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint on disk; `state` is the loop's state after `step` steps."""

    path: Path
    step: int
    state: Any
    fingerprint: str
    recipe: Mapping[str, Any]
    parts: tuple[str, ...]

    def rng(self) -> list[dict[str, Any]]:
        """The global generators of every rank that wrote it, for `seed.restore_rng`."""
        return _read(self.path / "rng.pt", lambda path: torch.load(path, map_location="cpu", weights_only=True))


def save_checkpoint(
    folder: Path,
    step: int,
    parts: Mapping[str, Part],
    state: Any,
    *,
    keep: int | None = 1,
    fingerprint: str = "",
    recipe: Mapping[str, Any] | None = None,
    rng: Sequence[dict[str, Any]] = (),
) -> Path:
    """Write `folder`/step-N and then remove all but the `keep` newest (None keeps all).

    state: anything `codec.encode` takes. rng: `seed.capture_rng()` of every rank.
    RewardenError when the disk is full or read-only; the checkpoints that were there stay.
    """
    final = folder / f"step-{step:08d}"
    temporary = folder / f".tmp-{final.name}"
    body = {
        "format": FORMAT,
        "step": step,
        "fingerprint": fingerprint,
        "recipe": json.loads(json.dumps(dict(recipe or {}), default=str)),
        "state": encode(state),
        "parts": sorted(parts),
    }
    with writing(final):
        folder.mkdir(parents=True, exist_ok=True)
        if temporary.exists():
            remove(temporary)
        try:
            _write(temporary, body, parts, list(rng))
            swap_in(temporary, final)
        except BaseException:
            if temporary.exists():
                remove(temporary)
            raise
        prune(folder, keep)
    return final


def prune(folder: Path, keep: int | None) -> None:
    """Remove all but the `keep` newest checkpoints, each renamed first so that half of one never looks whole."""
    for path in _complete(folder)[: -keep if keep else None] if keep is not None else []:
        doomed = path.with_name(f".prune-{path.name}")
        path.rename(doomed)
        remove(doomed)


def latest(folder: Path) -> Path | None:
    """The newest checkpoint in `folder`, or None. Temporary folders of killed writers do not count."""
    found = _complete(folder)
    return found[-1] if found else None


def decide_resume(folder: Path, mode: Resume) -> Path | None:
    """The checkpoint to start from, or None to start from the beginning.

    auto: the newest if there is one. must: the newest, or ResumeError. never: always from the beginning.
    """
    if mode == "never":
        return None
    found = latest(folder)
    if found is None and mode == "must":
        raise ResumeError(
            f"{folder} holds no checkpoint, and resume is 'must'; check the run folder, or use --resume auto to start"
        )
    return found


def read_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint and check that every file is there at its full size; parts are not loaded.

    ResumeError says which file is missing or cut, or that the folder is not one of our checkpoints.
    """
    description = path / "checkpoint.json"
    if not description.is_file():
        raise ResumeError(f"{path} is not a Rewarden checkpoint: it has no checkpoint.json. {_away(path)}")
    body = _read(description, lambda file: json.loads(file.read_text(encoding="utf-8")))
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        version = body.get("format") if isinstance(body, dict) else None
        raise ResumeError(f"{description} has format {version!r}, this version reads {FORMAT}. {_away(path)}")
    if absent := sorted(key for key, kind in KEYS.items() if key not in body or not isinstance(body[key], kind)):
        raise ResumeError(f"{description} lacks {', '.join(absent)}; the checkpoint is damaged. {_away(path)}")
    for name, size in body["files"].items():
        file = path / name
        if not file.is_file() or file.stat().st_size != size:
            got = f"{file.stat().st_size} bytes" if file.is_file() else "nothing"
            raise ResumeError(f"{file}: got {got}, {size} bytes were written; the checkpoint is damaged. {_away(path)}")
    return Checkpoint(
        path=path,
        step=body["step"],
        state=decode(body["state"]),
        fingerprint=body["fingerprint"],
        recipe=body["recipe"],
        parts=tuple(body["parts"]),
    )


def load_checkpoint(path: Path, parts: Mapping[str, Part]) -> Checkpoint:
    """Check the checkpoint, then restore every part in place.

    ResumeError when its parts are not exactly `parts`, before any of them is touched, or when one cannot be restored.
    """
    saved = read_checkpoint(path)
    if set(saved.parts) != set(parts):
        raise ResumeError(
            f"{path} holds the parts {sorted(saved.parts)}, this run has {sorted(parts)}; resume with the recipe that wrote it"
        )
    for name, part in parts.items():
        _read(path / name, part.load)
    return saved


def fingerprint_of(recipe: Mapping[str, Any]) -> str:
    """A short hash of a resolved recipe; equal recipes, in any key order, have equal fingerprints."""
    text = json.dumps(recipe, sort_keys=True, default=str)
    return blake2b(text.encode("utf-8"), digest_size=16).hexdigest()


def check_same_run(
    where: Path, saved: tuple[str, Mapping[str, Any]], now: tuple[str, Mapping[str, Any]], *, label: str = "checkpoint"
) -> None:
    """Compare (fingerprint, recipe) of what is on disk with those of this run; ResumeError lists the keys that differ."""
    if saved[0] == now[0]:
        return
    changed = differences(saved[1], now[1])
    shown = "\n".join(f"  {line}" for line in changed[:20]) or "  (the recipes look alike; only their fingerprints differ)"
    more = f"\n  and {len(changed) - 20} more" if len(changed) > 20 else ""
    raise ResumeError(
        f"the {label} in {where} was made by another recipe:\n{shown}{more}\n"
        "undo the change, choose another run folder, or start over with --resume never (what is there is moved aside)"
    )


def differences(before: Any, after: Any, path: str = "") -> list[str]:
    """One line "a.b: before -> after" for each place where two nested values differ, in key order."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        keys = sorted({*before, *after}, key=str)
        absent = "(absent)"
        lines = []
        for key in keys:
            lines += differences(before.get(key, absent), after.get(key, absent), f"{path}.{key}" if path else str(key))
        return lines
    plain = [json.loads(json.dumps(value, default=str)) for value in (before, after)]
    return [] if plain[0] == plain[1] else [f"{path}: {plain[0]!r} -> {plain[1]!r}"]


def _write(folder: Path, body: dict[str, Any], parts: Mapping[str, Part], rng: list[dict[str, Any]]) -> None:
    folder.mkdir()
    for name, part in parts.items():
        (folder / name).mkdir()
        try:
            part.save(folder / name)
        except (RuntimeError, SafetensorError) as error:
            if isinstance(error, RewardenError):
                raise
            refused = refusal(error) or OSError(None, f"part {name!r} could not be saved: {error}")
            raise RewardenError(explain(folder.with_name(folder.name.removeprefix(".tmp-")) / name, refused)) from error
    with (folder / "rng.pt").open("wb") as file:
        torch.save(rng, file)
    files = sync_tree(folder)
    (folder / "checkpoint.json").write_text(json.dumps({**body, "files": files}, indent=1), encoding="utf-8")
    sync_tree(folder)


def _read(path: Path, reader: Any) -> Any:
    try:
        return reader(path)
    except _UNREADABLE as error:
        if isinstance(error, RewardenError):
            raise
        # torch's own words advise to load the file in a way that runs code it holds.
        words = "it is damaged, or torch did not write it" if "weights_only" in str(error) else error
        raise ResumeError(f"{path} cannot be read: {words}. {_away(path)}") from error


def _away(path: Path) -> str:
    folder = next((p for p in (path, *path.parents) if _NAME.fullmatch(p.name)), path)
    return f"Move {folder} away to go on from an older checkpoint, or from the beginning"


def _complete(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]
