"""Writes that happen completely or not at all, and a full or read-only disk explained in words."""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rewarden.errors import RewardenError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_CLOSED = {errno.EROFS, errno.EACCES, errno.EPERM}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the system refuses while writing `path` into a RewardenError that says what to do."""
    try:
        yield
    except Exception as error:
        refused = None if isinstance(error, RewardenError) else refusal(error)
        if refused is None:
            raise
        raise RewardenError(explain(path, refused)) from error


def refusal(error: BaseException) -> OSError | None:
    """The OSError that an error is, or stands for: safetensors and torch report a full disk as errors of their own."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return cause
        if found := re.search(r"os error (\d+)", str(cause)):
            return OSError(int(found[1]), os.strerror(int(found[1])))
        cause = cause.__cause__ or cause.__context__
    return None


def explain(path: Path, error: OSError) -> str:
    """What went wrong at `path`, and what to do about it."""
    if error.errno in _FULL:
        todo = "free some space (or raise the quota or file-size limit), then run the same command again to resume"
    elif error.errno in _CLOSED:
        todo = "the folder must be writable: change its permissions or choose another one"
    else:
        todo = "check the path and the disk, then run the same command again"
    return f"cannot write {path}: {error.strerror or error}; {todo}. Nothing written before this is lost"


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable: a renamed file is only safe from a power cut once its folder is synced."""
    if os.name == "nt":  # Windows cannot open a folder, and renames through its own journal
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> dict[str, int]:
    """Make every file below `folder` durable; returns their sizes by relative path."""
    sizes = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            with path.open("rb") as file:
                os.fsync(file.fileno())
            sizes[path.relative_to(folder).as_posix()] = path.stat().st_size
        sync_folder(Path(parent))
    return dict(sorted(sizes.items()))


def write_atomic(path: Path, data: bytes | str) -> None:
    """Replace `path` by `data`: a reader, or a crash, sees the old content or the new, never a part of it."""
    temporary = path.with_name(f".tmp-{path.name}")
    with writing(path):
        try:
            with temporary.open("wb") as file:
                file.write(data.encode("utf-8") if isinstance(data, str) else data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def append(path: Path, data: bytes) -> None:
    """Add `data` to the end of `path` in one piece: what a full disk takes only in part is taken back."""
    with writing(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            before = os.fstat(descriptor).st_size
            try:
                written = os.write(descriptor, data)
                while written < len(data):
                    written += os.write(descriptor, data[written:])
            except OSError:
                os.ftruncate(descriptor, before)
                raise
        finally:
            os.close(descriptor)


def sync_file(path: Path) -> None:
    """Make the content of `path` durable; does nothing when it does not exist."""
    if path.exists():
        with writing(path), path.open("rb") as file:
            os.fsync(file.fileno())


def swap_in(source: Path, target: Path) -> None:
    """Rename the finished `source` to `target`; an older `target` steps aside first and is removed last.

    A crash in between leaves the old one as `.swap-NAME`, which `clean` puts back when `target` is missing.
    """
    aside = target.with_name(f".swap-{target.name}")
    if target.exists():
        target.rename(aside)
    source.rename(target)
    sync_folder(target.parent)
    if aside.exists():
        remove(aside)


def clean(folder: Path) -> list[str]:
    """Remove what a run that did not finish left half done in `folder`; returns one line for each thing removed or put back."""
    lines: list[str] = []
    if not folder.is_dir():
        return lines
    for path in sorted(folder.iterdir()):
        kept = path.with_name(path.name.removeprefix(".swap-"))
        if path.name.startswith(".swap-") and not kept.exists():
            path.rename(kept)
            lines.append(f"put back {kept}: the last run did not finish replacing it")
        elif path.name.startswith((".tmp-", ".prune-", ".swap-")):
            remove(path)
            lines.append(f"removed {path}: the last run did not finish writing or deleting it")
    return lines


def remove(path: Path) -> None:
    """Delete a file or a whole folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
