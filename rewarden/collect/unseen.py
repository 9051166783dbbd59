"""Whether a reward model was trained without a fold: what the recipe beside it says of its data."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rewarden.data.sources import Data
from rewarden.data.yaml_text import load_yaml
from rewarden.errors import ConfigError

RECIPE = "recipe.yaml"
"""What a run folder holds beside its model."""


def check_unseen(name: str, raw: Mapping[str, Any], *, fold: int, folds: int, data: Data) -> bool:
    """Whether it could be checked that a scorer has not seen the fold; False where no recipe lies beside it.

    Errors: ConfigError when its recipe says that it was trained on the fold, or by other folds.
    """
    trained = _trained_on(raw)
    if trained is None:
        return False
    wanted = {"folds": folds, "fold": fold, "part": "train", "split_seed": data.split_seed}
    found = {key: trained.get(key, getattr(Data(path="-"), key)) for key in wanted}
    if found != wanted:
        raise ConfigError(
            f"unseen: {name} is said not to have seen fold {fold}, and its {RECIPE} says data: {_words(found)}; it needs "
            f"{_words(wanted)}: train it so, or mend unseen, folds or data.split_seed"
        )
    return True


def _trained_on(raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The `data` of the run that made a reward model."""
    if raw.get("kind") != "reward_model" or not isinstance(raw.get("path"), str):
        return None
    file = Path(raw["path"]).parent / RECIPE
    if not file.is_file():
        return None
    try:
        recipe = load_yaml(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read ({error}); copy the run folder again, or remove the file") from error
    data = recipe.get("data") if isinstance(recipe, dict) and recipe.get("kind") == "reward" else None
    return data if isinstance(data, dict) else None


def _words(fields: Mapping[str, Any]) -> str:
    return "{" + ", ".join(f"{key}: {'null' if value is None else value}" for key, value in fields.items()) + "}"
