"""TensorBoard, Weights & Biases and Trackio, through accelerate's trackers; metrics.jsonl is written with or without them."""

import importlib.util
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import chain, count
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from rewarden.errors import ConfigError

Tracker = Literal["tensorboard", "wandb", "trackio"]


class Trackers:
    """The trackers of one run, opened on rank 0 only.

    TensorBoard writes event files into RUN/tensorboard; W&B keeps its files in RUN/wandb and obeys WANDB_MODE; Trackio is a
    local database (`trackio show`). A resumed run goes on in the same place.
    """

    def __init__(
        self,
        names: Sequence[Tracker],
        folder: Path,
        *,
        project: str,
        run_name: str,
        config: Mapping[str, Any],
        first_step: int = 1,
    ) -> None:
        """config: the resolved recipe, stored with the run. first_step: above 1 when the run is resumed."""
        for name in names:
            if importlib.util.find_spec(name) is None:
                raise ConfigError(
                    f"report_to asks for {name!r}, which is not installed; run `pip install {name}` "
                    "(all trackers: `pip install 'rewarden[trackers]'`), or take it out of report_to"
                )
        # A run that starts over in the same folder is a run of its own to a tracker.
        earlier = len(list(folder.glob("earlier-*")))
        run_name = f"{run_name}-{earlier + 1}" if earlier else run_name
        openers = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio}
        self._names: dict[str, str] = {}
        self._open = [openers[name](folder, project, run_name, config, first_step) for name in dict.fromkeys(names)]

    def log(self, step: int, report: Mapping[str, float]) -> None:
        """Send one report; numbers that are not finite are left out (metrics.jsonl has them as null).

        Trackers get the names of `plain_names`; metrics.jsonl has them as they are.
        """
        self._names = plain_names(report, self._names)
        values = {self._names[name]: float(value) for name, value in report.items() if math.isfinite(value)}
        for tracker in self._open:
            tracker.log(values, step=step)

    def finish(self) -> None:
        """Write what is pending and close."""
        for tracker in self._open:
            tracker.finish()
        self._open = []


def plain_names(names: Iterable[str], known: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """Name -> a name that every tracker takes: letters, digits, "_", "-", "." and single slashes inside.

    Parts of a reward are named by users, and trackers differ in what they refuse or split at. Names that would become one
    get a number; one that is plain already keeps its form. known: what names were called before; they keep that.
    """
    out = dict(known)
    taken = set(known.values())
    for name in sorted(set(names) - known.keys(), key=lambda name: (_plain(name) != name, name)):
        plain = _plain(name)
        out[name] = next(new for new in chain([plain], (f"{plain}_{n}" for n in count(2))) if new not in taken)
        taken.add(out[name])
    return out


def _plain(name: str) -> str:
    parts = (re.sub(r"[^A-Za-z0-9_.-]+", "_", part) for part in name.split("/"))
    return "/".join(part for part in parts if part) or "_"


def flatten(config: Mapping[str, Any], path: str = "") -> dict[str, bool | int | float | str]:
    """A nested recipe as {"a.b": scalar}; what is not a scalar becomes text."""
    flat: dict[str, bool | int | float | str] = {}
    for key, value in config.items():
        name = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping):
            flat |= flatten(value, name)
        else:
            flat[name] = value if isinstance(value, bool | int | float | str) else str(value)
    return flat


def _tensorboard(folder: Path, project: str, run_name: str, config: Mapping[str, Any], first_step: int) -> Any:
    from accelerate.tracking import TensorBoardTracker

    resumed = first_step > 1
    # purge_step hides what a killed run wrote beyond its last checkpoint.
    tracker = TensorBoardTracker("tensorboard", folder, **({"purge_step": first_step} if resumed else {}))
    tracker.start()
    if config and not resumed:
        tracker.store_init_configuration(flatten(config))
    return tracker


def _wandb(folder: Path, project: str, run_name: str, config: Mapping[str, Any], first_step: int) -> Any:
    from accelerate.tracking import WandBTracker

    # One id per run: W&B then continues it, and ignores steps it has already seen (they are equal).
    identity = blake2b(f"{folder.resolve()}/{run_name}".encode(), digest_size=8).hexdigest()
    tracker = WandBTracker(project, name=run_name, id=identity, resume="allow", dir=str(folder), config=dict(config))
    tracker.start()
    return tracker


def _trackio(folder: Path, project: str, run_name: str, config: Mapping[str, Any], first_step: int) -> Any:
    from accelerate.tracking import TrackioTracker

    tracker = TrackioTracker(
        project, name=run_name, resume="allow", config=flatten(config), embed=False, auto_log_gpu=False, auto_log_cpu=False
    )
    tracker.start()
    return tracker
