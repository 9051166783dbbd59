"""Names that lead nowhere on this machine: a folder that is not there, or an id on a hub that may be out of reach."""

import difflib
import functools
from pathlib import Path

TIMEOUT_S = 10.0
"""How long the hub may take to answer at all."""

SHOWN = 20
"""Names of a folder that are listed."""


def means_folder(path: str) -> bool:
    """Whether a path that does not exist is one of this machine: no hub id begins so, or its first part is a folder here."""
    parts = Path(path).parts
    return path.startswith((".", "/", "~")) or len(parts) > 2 or (len(parts) == 2 and Path(parts[0]).is_dir())


def no_folder(path: str) -> str:
    """What to say of a path that does not exist: the nearest name, or the recipe whose run writes it.

    A recipe counts when it lies in `recipes/` and is called as a part of the path is: runs/sft_hh/model, recipes/sft_hh.yaml.
    """
    place = Path(path).expanduser()
    if place.exists():
        return f"{path}: the home folder is not filled in here; write {place}"
    here = next(parent for parent in place.parents if parent.is_dir())
    missing = place.relative_to(here).parts[0]
    names = sorted(entry.name for entry in here.iterdir())
    close = difflib.get_close_matches(missing, names, n=1)
    writes = next((file for part in place.parts if (file := Path("recipes") / f"{part}.yaml").is_file()), None)
    if writes is not None and not (close and here == place.parent):
        return f"{path}: no such folder; run {writes} first, which writes it (rewarden run {writes})"
    if close:
        return f"{path}: no such folder; did you mean {str(here / close[0] / Path(*place.relative_to(here).parts[1:]))!r}?"
    owner = place.parts[0] if len(place.parts) == 2 else ""
    asked = f". The hub is not asked, since {owner!r} is a folder here" if owner and Path(owner).is_dir() else ""
    return f"{path}: no such folder; {holds(here)}{asked}"


def neighbors(place: Path) -> str:
    """A hint for a file that is not there: the nearest name in its folder, or what that folder holds."""
    if not place.parent.is_dir():
        return f"folder {place.parent} does not exist either"
    near = difflib.get_close_matches(place.name, [entry.name for entry in place.parent.iterdir()], n=1)
    return f"did you mean {near[0]!r}?" if near else holds(place.parent)


def holds(folder: Path) -> str:
    """What a folder holds, in words, without hidden names."""
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    where = "this folder" if folder == Path() else str(folder)
    more = " and more" if len(names) > SHOWN else ""
    return f"{where} holds {', '.join(names[:SHOWN])}{more}" if names else f"{where} is empty"


def unreachable() -> str | None:
    """Why the hub cannot be asked: its address and what the system says; None where it answers, or HF_HUB_OFFLINE is set.

    One request per process and without retries: libraries that ask for file after file try each of them six times.
    """
    from huggingface_hub import constants

    return None if constants.HF_HUB_OFFLINE else _probe(constants.ENDPOINT)


def cannot_reach(name: str, why: str) -> str:
    """The error for a name that is not on this machine while the hub is out of reach."""
    return (
        f"{name!r} is not on this machine, and {why}; check the network (HF_ENDPOINT, HTTPS_PROXY), or give a folder. "
        "HF_HUB_OFFLINE=1 uses what was loaded before without asking"
    )


@functools.cache
def _probe(endpoint: str) -> str | None:
    from huggingface_hub.utils import get_session

    try:
        get_session().head(endpoint, timeout=TIMEOUT_S)
    except Exception as error:  # noqa: BLE001 - the library's http client, and so its errors' type, changes with its version
        words = str(error).strip() or type(error).__name__
        return f"the hub ({endpoint}) cannot be reached: {words}"
    return None
