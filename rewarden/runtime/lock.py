"""One run per folder: a lock file that names its holder and cannot outlive it."""

import os
import socket
from pathlib import Path

from rewarden.errors import ResumeError
from rewarden.runtime.disk import writing

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


class FolderLock:
    """Holds `path` while a run is alive.

    The file holds pid and host. The kernel's file lock decides, so a holder that was killed never blocks anybody, even when
    its pid has been given to another process. Where there is no such lock (Windows) the pid decides.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def acquire(self) -> str | None:
        """Take the lock; returns a line for people when it was left by a dead run, raises ResumeError when it is held."""
        with writing(self.path):
            while True:
                descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
                left = os.pread(descriptor, 200, 0).decode("utf-8", "replace").strip() if fcntl else _text(self.path)
                if not _lock(descriptor, left):
                    os.close(descriptor)
                    raise ResumeError(
                        f"{self.path.parent} is in use by {left or 'a process'}; wait for it, stop it, or choose another folder"
                    )
                if _same_file(descriptor, self.path):
                    break
                os.close(descriptor)  # the holder let go and removed the file between our open and our lock
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"pid {os.getpid()} on {socket.gethostname()}\n".encode())
        self._descriptor = descriptor
        return f"took over the lock of {left}, which is no longer running" if left else None

    def release(self) -> None:
        """Let go; does nothing when not held."""
        if self._descriptor is not None:
            self.path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None


def _lock(descriptor: int, left: str) -> bool:
    if fcntl is None:
        return not _alive(left)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _alive(left: str) -> bool:
    words = left.split()
    if len(words) < 2 or not words[1].isdigit():
        return False
    try:
        os.kill(int(words[1]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8").strip()


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.fstat(descriptor).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False
