"""Every kind of job a recipe can name, and what a stage of it may say."""

from collections.abc import Mapping
from typing import Any

from rewarden.algos import ALGORITHMS
from rewarden.collect import COLLECTORS
from rewarden.errors import ConfigError
from rewarden.evals import EVALUATORS
from rewarden.recipe.read import Recipe, Stage
from rewarden.runtime.job import Drive
from rewarden.scoring import parse_scorer
from rewarden.spec import Spec, check, nearest, outside, parse
from rewarden.worlds import WORLDS

JOBS: Mapping[str, type[Spec]] = {**ALGORITHMS, **COLLECTORS, **EVALUATORS}
"""Algorithms, collectors and evaluators by kind."""

DRIVE_KEYS = tuple(name for name in Drive.model_fields if name != "seed")
"""Keys of a stage that say how it is driven, not what it computes."""


def parse_stage(stage: Stage, where: str) -> tuple[Spec, Drive]:
    """The stage's config, and how it is driven; parts that the config keeps as mappings are parsed too.

    Errors: ConfigError naming the key, with the nearest allowed name.
    """
    if "kind" not in stage.raw:
        raise ConfigError(f"{where}: no `kind:`; one of {', '.join(sorted(JOBS))}")
    spec_class = _spec_class(stage.raw["kind"], where)
    driven = hasattr(spec_class, "build")
    allowed = {*spec_class.model_fields, *(DRIVE_KEYS if driven else ())}
    unknown = [key for key in stage.raw if key != "kind" and key not in allowed]
    if unknown:
        raise ConfigError("\n".join(f"{where}: unknown key {key!r}; {nearest(key, allowed)}" for key in unknown))
    drive = {key: value for key, value in stage.raw.items() if key in DRIVE_KEYS and driven}
    if isinstance(drive.get("report_to"), str):
        drive["report_to"] = [] if drive["report_to"] == "none" else [drive["report_to"]]
    spec = parse(JOBS, {key: value for key, value in stage.raw.items() if key not in drive}, where)
    for name, raw in mappings(spec):
        parse_part(name, raw, where)
    how = check(Drive, {"seed": getattr(spec, "seed", 0), **getattr(spec_class, "drive_defaults", {}), **drive}, where)
    assert isinstance(how, Drive)
    return spec, how


def parse_recipe(recipe: Recipe) -> list[tuple[Spec, Drive]]:
    """Every stage parsed, in order: a misspelt key in the last stage is found before the first one runs."""
    return [
        parse_stage(stage, f"{recipe.path}: stage {stage.name}" if recipe.is_chain else str(recipe.path))
        for stage in recipe.stages
    ]


def mappings(spec: Spec) -> list[tuple[str, Mapping[str, Any]]]:
    """(dotted name, {kind: ..., ...}) of the parts that a config keeps as mappings: rewards, scorers, worlds."""
    found = []
    for name in type(spec).model_fields:
        value = getattr(spec, name)
        if isinstance(value, Mapping) and ("kind" in value or name == "world"):
            found.append((name, value))
        elif isinstance(value, Mapping):
            found += [
                (f"{name}.{key}", inner) for key, inner in value.items() if isinstance(inner, Mapping) and "kind" in inner
            ]
    return found


def parse_part(name: str, raw: Mapping[str, Any], where: str) -> Spec:
    """The config of a reward, scorer or world."""
    place = f"{where}: {name}" if where else name
    if name == "world":
        return parse(WORLDS, raw, place)
    spec = parse_scorer(raw, place)
    assert isinstance(spec, Spec)
    return spec


def _spec_class(kind: Any, where: str) -> type[Spec]:
    """The config class of a kind; ConfigError for one that is neither known nor a Spec with build() or run()."""
    if isinstance(kind, str) and ":" in kind and kind not in JOBS:
        named = outside(kind, where)
        if not (isinstance(named, type) and issubclass(named, Spec) and (hasattr(named, "build") or hasattr(named, "run"))):
            raise ConfigError(f"{where}: kind {kind!r} is no Spec with build(ranks) or run(folder); see docs/extending.md")
        return named
    if not isinstance(kind, str) or kind not in JOBS:
        raise ConfigError(f"{where}: kind is {kind!r}; {nearest(str(kind), JOBS)}, or 'my_file.py:MyJob' for your own")
    return JOBS[kind]
