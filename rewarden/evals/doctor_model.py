"""Checks of a model's folder: do tokenizer, config, weights and template fit together. No weights are loaded."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from rewarden.errors import ConfigError
from rewarden.evals.doctor_findings import Findings
from rewarden.models.folder import INPUT_EMBEDDINGS, find, is_adapter, read_object, tensor_shapes, weight_files
from rewarden.models.load import Model, open_tokenizer, template_of, tokens_beyond
from rewarden.models.source import base_model, load_config, locate, num_positions
from rewarden.text.chat import PROBE
from rewarden.text.layout import UnusableTemplate
from rewarden.text.probe import THINKS
from rewarden.text.render import Template, load_template
from rewarden.types import Conversation

SOURCE = "model"
EMBEDDING = re.compile(rf"(?:^|\.)(?:{'|'.join(INPUT_EMBEDDINGS)}|lm_head|embed_out)\.weight$")
"""How input and output embeddings are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """Tokenizer, config and template of a model. `generates` False: the template cannot be sampled from, only rendered."""

    path: str
    kind: str
    tokenizer: PreTrainedTokenizerBase
    vocabulary: int
    positions: int | None
    embeddings: dict[str, int]
    template: Template | None
    generates: bool

    def special_tokens(self) -> frozenset[str]:
        """The spelling of every special token, and of the template's end of turn."""
        own = set(map(str, self.tokenizer.all_special_tokens))
        added = {str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special}
        end = {self.name(self.template.end_of_turn_id)} if self.template else set()
        return frozenset(own | added | end)

    def stop_tokens(self) -> tuple[str, ...]:
        """The spelling of the tokens that end sampling."""
        return tuple(self.name(index) for index in sorted(self.template.stop_ids)) if self.template else ()

    def name(self, index: int | None) -> str:
        """A token's name in the vocabulary; "" for no token."""
        return "" if index is None else str(self.tokenizer.convert_ids_to_tokens(index))


def open_model(model: Model, findings: Findings) -> Opened:
    """The model's tokenizer and template; what does not fit becomes a finding.

    Errors: ConfigError when there is no config or tokenizer to look at, for an unknown template kind, or one that contradicts
    the folder's card.
    """
    path, kind = model.model_name_or_path, template_of(model)
    config, tokenizer = load_config(model), open_tokenizer(model)
    text = config.get_text_config()
    _vocabulary(path, tokenizer, text, findings)
    embeddings = _embeddings(model, text.vocab_size, findings)
    template, generates = _template(path, tokenizer, kind, findings)
    if template is not None:
        _stops(model, config, tokenizer, template, findings)
        _bos(path, tokenizer, template, findings)
    return Opened(
        path=path,
        kind=kind,
        tokenizer=tokenizer,
        vocabulary=text.vocab_size,
        positions=num_positions(config),
        embeddings=embeddings,
        template=template,
        generates=generates,
    )


def _vocabulary(path: str, tokenizer: PreTrainedTokenizerBase, text: PreTrainedConfig, findings: Findings) -> None:
    beyond = tokens_beyond(tokenizer, text.vocab_size)
    pad = tokenizer.pad_token_id
    if pad in beyond:
        said = f"the pad token {beyond.pop(pad)!r} has id {pad}, the model embeds ids below {text.vocab_size}"
        findings.add(SOURCE, "pad_without_id", path, said)
    elif text.pad_token_id is not None and not 0 <= text.pad_token_id < text.vocab_size:
        said = f"config.json has pad_token_id {text.pad_token_id}, the model embeds ids below {text.vocab_size}"
        findings.add(SOURCE, "pad_without_id", path, said)
    if beyond:
        largest, token = max(beyond.items())
        said = f"ids up to {largest} ({token!r}), the model embeds ids below {text.vocab_size}"
        findings.add(SOURCE, "vocabulary_beyond_embeddings", path, said, count=len(beyond))


def _embeddings(model: Model, vocabulary: int, findings: Findings) -> dict[str, int]:
    """Rows of every embedding in the weight files of a local folder, from their headers; a hub id is not downloaded for it."""
    path, gguf_file = locate(model)
    if gguf_file is not None or not Path(path).is_dir():
        return {}
    if is_adapter(path):
        return _embeddings(base_model(model), vocabulary, findings)
    try:
        shapes = tensor_shapes(weight_files(path))
    except ConfigError as error:
        findings.add(SOURCE, "weights_unreadable", path, str(error).removeprefix(f"{path} ").removeprefix(f"{path}: "))
        return {}
    rows = {name: shape[0] for name, shape in shapes.items() if EMBEDDING.search(name)}
    for name, count in rows.items():
        if count != vocabulary:
            findings.add(SOURCE, "embedding_mismatch", path, f"{name} has {count} rows, config.json says {vocabulary}")
    return rows


def _template(path: str, tokenizer: PreTrainedTokenizerBase, kind: str, findings: Findings) -> tuple[Template | None, bool]:
    """The template, if rows can be rendered with it at all, and whether it can be sampled from."""
    try:
        template = load_template(tokenizer, kind)
    except UnusableTemplate as error:
        findings.add(SOURCE, error.reason, path, str(error))
        try:
            return load_template(tokenizer, kind, generates=False), False
        except UnusableTemplate:
            return None, False
    for note in template.notes:
        findings.add(SOURCE, "thinking_prompt" if note.startswith(THINKS) else "unstable_history", path, note)
    return template, True


def _stops(
    model: Model, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, template: Template, findings: Findings
) -> None:
    path = locate(model)[0]
    file = None if is_adapter(path) else find(path, "generation_config.json", model.revision)
    named = {*_ids(config.eos_token_id), *(_ids(read_object(file).get("eos_token_id")) if file else ())}
    if named and template.end_of_turn_id not in named:
        end, others = tokenizer.convert_ids_to_tokens([template.end_of_turn_id, *sorted(named)])[0], sorted(named)
        said = f"eos_token_id is {', '.join(map(str, others))}; a turn ends with {template.end_of_turn_id} ({end!r})"
        findings.add(SOURCE, "eos_is_not_end_of_turn", path, said)


def _ids(value: Any) -> Iterator[int]:
    yield from (index for index in (value if isinstance(value, list) else [value]) if isinstance(index, int))


def _bos(path: str, tokenizer: PreTrainedTokenizerBase, template: Template, findings: Findings) -> None:
    """Whether the template writes the BOS that the tokenizer puts in front of ordinary text."""
    bos = tokenizer.bos_token_id
    if bos is None or list(tokenizer("Hello")["input_ids"])[:1] != [bos]:
        return
    ids = template.render(Conversation(id="probe", messages=PROBE[:2])).token_ids
    if ids[0] != bos:
        findings.add(SOURCE, "bos_missing", path, f"{tokenizer.bos_token!r} (id {bos})")
    elif template.name == "chat":
        findings.add(SOURCE, "bos_twice_elsewhere", path, f"{tokenizer.bos_token!r} (id {bos})")
