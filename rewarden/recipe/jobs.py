"""Every kind of job a recipe can name."""

from collections.abc import Mapping
from typing import Any

from rewarden.algos import ALGORITHMS
from rewarden.collect import COLLECTORS
from rewarden.errors import ConfigError
from rewarden.evals import EVALUATORS
from rewarden.recipe.read import Stage
from rewarden.spec import Spec, parse

JOBS: Mapping[str, type[Spec]] = {**ALGORITHMS, **COLLECTORS, **EVALUATORS}
"""Algorithms, collectors and evaluators by kind."""

DRIVE_KEYS = ("save_steps", "report_to")
"""Keys of a stage that say how it is driven, not what it computes."""


def parse_stage(stage: Stage, where: str) -> tuple[Spec, dict[str, Any]]:
    """The stage's config, and how it is driven.

    Errors: ConfigError naming the key, with the nearest allowed name.
    """
    drive = {key: stage.raw[key] for key in DRIVE_KEYS if key in stage.raw}
    fields = {key: value for key, value in stage.raw.items() if key not in DRIVE_KEYS}
    if "kind" not in fields:
        raise ConfigError(f"{where}: no `kind:`; one of {', '.join(sorted(JOBS))}")
    return parse(JOBS, fields, where), drive
