"""What a bug report needs: versions, device, threads, and which optional packages are there."""

import importlib.metadata
import json
import re
from collections.abc import Iterable

from rewarden.runtime.ranks import Ranks
from rewarden.runtime.report import environment

EXTRA = re.compile(r"""extra == ['"](.+?)['"]""")
"""How package metadata names the extra that a requirement belongs to."""


def show_env() -> None:
    """Print the environment as JSON: what a run writes to env.json, and optional packages by extra (null: not installed)."""
    print(json.dumps({**environment(Ranks.single()), "extras": extras(requirements())}, indent=2))


def requirements() -> list[str]:
    """The requirements of the installed package; none when it runs from a folder that was never installed."""
    try:
        return importlib.metadata.requires("rewarden") or []
    except importlib.metadata.PackageNotFoundError:
        return []


def extras(required: Iterable[str]) -> dict[str, dict[str, str | None]]:
    """By extra: its packages and the version that is installed, or None."""
    found: dict[str, dict[str, str | None]] = {}
    for line in required:
        extra = EXTRA.search(line)
        name = re.match(r"[A-Za-z0-9._-]+", line)
        if extra and name:
            found.setdefault(extra[1], {})[name[0]] = _version(name[0])
    return found


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
