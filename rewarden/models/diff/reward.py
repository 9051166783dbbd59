"""From the reward checkpoints of MOSS-RLHF and AlpacaFarm to ours: a sequence classifier with the head `score`.

MOSS-RLHF: a Llama language model with `reward_head.weight` [1, D] beside it, no bias. AlpacaFarm: the language model under
`backbone_model.`, and `reward_head` with weight and bias; its config holds nothing but the path of the backbone. The LM head
stays in the file, as extra tensor: a classifier does not load it, and an LM loss may want it back.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from rewarden.errors import ConfigError
from rewarden.models.diff.read import some
from rewarden.models.diff.rules import BACKBONE, HEADS
from rewarden.models.folder import INPUT_EMBEDDINGS, first_line

HEAD, BIAS, SCORE = "reward_head.weight", "reward_head.bias", "score.weight"
EMBEDDINGS = tuple(f"{name}.weight" for name in INPUT_EMBEDDINGS)


def is_reward(keys: Collection[str]) -> bool:
    """Whether a checkpoint has the head of one of the two libraries."""
    return HEAD in keys


def renamed(keys: Collection[str]) -> dict[str, str]:
    """Their name -> ours; the head's bias has none, since ours have no bias.

    Errors: ConfigError when two tensors would get one name.
    """
    names = {key: SCORE if key == HEAD else key.removeprefix(BACKBONE) for key in keys if key != BIAS}
    if len(set(names.values())) < len(names):
        raise ConfigError(
            f"the checkpoint holds {HEAD} and {SCORE}, or a tensor both with and without {BACKBONE!r}; it is mixed up"
        )
    return names


def embedding_rows(shapes: Mapping[str, tuple[int, ...]]) -> int | None:
    """The vocabulary of the input embeddings."""
    rows = [shape[0] for key, shape in shapes.items() if key.endswith(EMBEDDINGS)]
    return rows[0] if rows else None


def classifier_config(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A language model's config turned into that of a sequence classifier with one output.

    Errors: ConfigError when transformers has no such class for it.
    """
    kind = str(config.get("model_type"))
    classes = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    if kind not in classes:
        raise ConfigError(f"{where}: transformers has no sequence classifier for model_type {kind!r}; it cannot be imported")
    kept = {key: value for key, value in config.items() if key not in ("auto_map", "num_labels")}
    return {**kept, "architectures": [classes[kind]], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def with_dtype(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The config with the type of its weights; transformers loads in the type that the config names."""
    kept = {key: value for key, value in config.items() if key not in ("torch_dtype", "dtype")}
    return {**kept, "dtype": str(dtype).removeprefix("torch.")}


def with_vocabulary(config: Mapping[str, Any], rows: int | None, notes: list[str]) -> dict[str, Any]:
    """The config with the vocabulary that the embeddings have."""
    said = config.get("vocab_size")
    if rows is None or said == rows:
        return dict(config)
    notes.append(f"config.json: vocab_size {said} becomes {rows}, the rows of the embeddings")
    return {**config, "vocab_size": rows}


def check_fits(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Whether the tensors are those of the model that the config describes (built without memory); heads may be left over.

    Errors: ConfigError naming what is missing, left over, or of another shape.
    """
    kind = AutoModelForSequenceClassification if SCORE in shapes else AutoModelForCausalLM
    fields = {key: value for key, value in config.items() if key != "model_type"}
    try:
        with torch.device("meta"):
            model = kind.from_config(AutoConfig.for_model(str(config.get("model_type")), **fields))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{where}: config.json describes no model that transformers can build: {first_line(error)}"
        ) from error
    expected = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if model.config.tie_word_embeddings else set()
    if missing := sorted(set(expected) - set(shapes) - tied):
        raise ConfigError(
            f"{where} lacks {len(missing)} tensors of a {type(model).__name__}: {some(missing)}; it is incomplete"
        )
    if extra := sorted(set(shapes) - set(expected) - HEADS):
        raise ConfigError(
            f"{where} holds {len(extra)} tensors that a {type(model).__name__} with this config.json has not: {some(extra)}"
        )
    for key in sorted(set(expected) & set(shapes)):
        if expected[key] != shapes[key]:
            raise ConfigError(f"{where}: {key} has shape {list(shapes[key])}, config.json makes it {list(expected[key])}")
