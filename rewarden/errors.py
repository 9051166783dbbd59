"""Errors a caller may catch. Each keeps a stdlib parent, so `except ValueError` still works.

A message says what was got, where (file and line, key, row), what is allowed and what to do.
"""

import os
from traceback import walk_tb


class RewardenError(Exception):
    """Anything Rewarden raises on purpose; the command line prints its text without a traceback."""


class ConfigError(RewardenError, ValueError):
    """A recipe or a config value cannot be used."""


class DataError(RewardenError, ValueError):
    """A file, a row or a conversation cannot be used."""


class ScoreError(RewardenError, ValueError):
    """A scorer returned something that is not a score."""


class ResumeError(RewardenError, RuntimeError):
    """A checkpoint is missing, incomplete, or belongs to another run."""


class EndpointError(RewardenError, RuntimeError):
    """A server that answers chat requests is down, or fails again and again."""


class UserError(RewardenError, RuntimeError):
    """A user could not answer; `status` says why in a word ("timeout", "no_label"). The dialogue ends, the others go on."""

    def __init__(self, message: str, status: str) -> None:
        super().__init__(message)
        self.status = status


def in_words(error: BaseException, file: str | None = None) -> str:
    """What somebody else's code raised, and where: "ZeroDivisionError: division by zero (mine.py, line 7)".

    file: the line is the deepest one in this file; without it, or when the error never passed through it, the deepest of all.
    """
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    words = f"{type(error).__name__}: {' '.join(text.split())}".removesuffix(": ")
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{words} ({_near(error.filename)}, line {error.lineno})"
    frames = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    frames = [frame for frame in frames if not frame[0].startswith("<frozen")]  # the import system itself
    own = [frame for frame in frames if frame[0] == file] or frames
    return f"{words} ({_near(own[-1][0])}, line {own[-1][1]})" if own else words


def shortened(text: str, most: int) -> str:
    """The text, cut to `most` characters of which the last three are dots where it is longer."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _near(file: str) -> str:
    """The file as seen from the working directory, when it lies below it."""
    return os.path.relpath(file) if file.startswith(os.getcwd() + os.sep) else file
