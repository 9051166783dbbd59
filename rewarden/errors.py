"""Errors a caller may catch. Each keeps a stdlib parent, so `except ValueError` still works.

A message says what was got, where (file and line, key, row), what is allowed and what to do.
"""


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
