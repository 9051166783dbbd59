"""One string, one tokenisation, in which text that spells a special token stays text.

Tokenizers look for special tokens anywhere in a string, also where a user typed "<|im_end|>". Such a string is tokenised in
runs: the template's own special tokens become their ids, and each run of text between two of them is tokenised by a copy of
the tokenizer that does not know the special tokens' names. That this equals the joint tokenisation is checked on the same
text with the spelled tokens overwritten; a tokenizer for which it does not hold is refused for that row.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from rewarden.errors import ConfigError, DataError
from rewarden.text.layout import Region

Hit = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Ids with the characters [start, stop) each came from; `spelled` counts special tokens that were kept as text."""

    ids: tuple[int, ...]
    starts: tuple[int, ...]
    stops: tuple[int, ...]
    spelled: int = 0


class JointTokenizer:
    """Tokenises whole layouts with a private copy of a fast tokenizer, so padding or truncation set elsewhere cannot matter.

    `control_ids` are the ids that content must never become: the special tokens and, once known, the end of turn.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise ConfigError(
                f"the tokenizer {type(tokenizer).__name__} has no fast backend, so where a token lies in the text is "
                "unknown; load it with AutoTokenizer and use_fast=True, or convert it to a tokenizer.json"
            )
        self._backend = _copy(backend.to_str())
        self.added_ids = frozenset(tokenizer.added_tokens_decoder)
        special = (index for index, token in tokenizer.added_tokens_decoder.items() if token.special)
        self.control_ids = frozenset(special) | frozenset(tokenizer.all_special_ids)
        self._unknown = (tokenizer.unk_token_id, tokenizer.unk_token)
        sample = "Hello there, what is this?\n\nYes."
        expected = tokenizer(sample, add_special_tokens=False)["input_ids"]
        if list(self._encode(self._backend, sample).ids) != list(expected):
            raise ConfigError(
                f"the tokenizer {type(tokenizer).__name__} does not give what its own tokenizer.json gives; save it again with "
                "save_pretrained, or use the class that tokenizer_config.json names"
            )

    @property
    def definition(self) -> str:
        """The whole tokenizer as text: vocabulary, merges, normalisation."""
        return self._backend.to_str()

    def is_control(self, text: str, tokens: Tokens, index: int) -> bool:
        """Whether a token is a special one; an unknown word is not, though it shares the id of the unknown token."""
        if tokens.ids[index] not in self.control_ids:
            return False
        unknown_id, unknown = self._unknown
        return tokens.ids[index] != unknown_id or text[tokens.starts[index] : tokens.stops[index]].strip() == unknown

    def encode(self, text: str, regions: Sequence[Region], place: str) -> Tokens:
        """The ids of `text`; inside the regions no special token is recognised. Errors: DataError if that cannot be done."""
        tokens = self._encode(self._backend, text)
        hits = self._spelled(text, tokens, regions)
        return self._in_runs(text, regions, hits, place) if hits else tokens

    def _encode(self, backend: Tokenizer, text: str, offset: int = 0) -> Tokens:
        encoding = backend.encode(text, add_special_tokens=False)
        starts, stops = zip(*encoding.offsets, strict=True) if encoding.ids else ((), ())
        return Tokens(ids=tuple(encoding.ids), starts=tuple(s + offset for s in starts), stops=tuple(s + offset for s in stops))

    def _spelled(self, text: str, tokens: Tokens, regions: Sequence[Region]) -> list[Hit]:
        """Characters of special tokens that lie, at least partly, inside a content."""
        hits = []
        for index, token in enumerate(tokens.ids):
            if token not in self.control_ids or not self.is_control(text, tokens, index):
                continue
            # A special token may swallow whitespace around it (lstrip, rstrip); that alone is not a spelling of it.
            piece = text[tokens.starts[index] : tokens.stops[index]]
            start = tokens.starts[index] + len(piece) - len(piece.lstrip())
            stop = start + len(piece.strip())
            if any(start < region.stop and stop > region.start for region in regions):
                hits.append((start, stop))
        return hits

    def _in_runs(self, text: str, regions: Sequence[Region], hits: list[Hit], place: str) -> Tokens:
        plain, spelled = text, 0
        while hits:
            before = plain
            plain = _overwrite(plain, hits, regions)
            spelled += len(hits)
            if plain == before:
                raise DataError(f"{place}: the text {text[hits[0][0] : hits[0][1]]!r} is read as a special token; remove it")
            hits = self._spelled(plain, self._encode(self._backend, plain), regions)
        joint = self._encode(self._backend, plain)
        cuts = [index for index in range(len(joint.ids)) if self.is_control(plain, joint, index)]
        if self._rebuild(plain, joint, cuts).ids != joint.ids:
            raise DataError(
                f"{place}: the text spells a special token, and this tokenizer gives other ids for the same text when special "
                "tokens are read as text, so it cannot be kept as text safely; remove the special token from the text"
            )
        tokens = self._rebuild(text, joint, cuts)
        return Tokens(ids=tokens.ids, starts=tokens.starts, stops=tokens.stops, spelled=spelled)

    def _rebuild(self, text: str, joint: Tokens, cuts: Sequence[int]) -> Tokens:
        ids: list[int] = []
        starts: list[int] = []
        stops: list[int] = []
        done = 0
        for cut in (*cuts, None):
            until = len(text) if cut is None else joint.starts[cut]
            if until > done:
                backend = self._first_run if done == 0 else self._later_run
                run = self._encode(backend, text[done:until], done)
                ids += run.ids
                starts += run.starts
                stops += run.stops
            if cut is not None:
                ids.append(joint.ids[cut])
                starts.append(joint.starts[cut])
                stops.append(joint.stops[cut])
                done = joint.stops[cut]
        return Tokens(ids=tuple(ids), starts=tuple(starts), stops=tuple(stops))

    @cached_property
    def _first_run(self) -> Tokenizer:
        return _copy(json.dumps(self._nameless()))

    @cached_property
    def _later_run(self) -> Tokenizer:
        """For runs that do not start the text: a Metaspace that marks only the start of a text must not mark theirs."""
        definition = self._nameless()
        splitters = [definition.get("pre_tokenizer") or {}]
        splitters += splitters[0].get("pretokenizers", [])
        for splitter in splitters:
            if splitter.get("type") == "Metaspace" and splitter.get("prepend_scheme") == "first":
                splitter["prepend_scheme"] = "never"
        return _copy(json.dumps(definition))

    def _nameless(self) -> dict[str, Any]:
        """The tokenizer with its control tokens renamed to what no text holds, in the model too: some models contain them."""
        definition = json.loads(self.definition)
        model = definition["model"]
        names = {word for word in map(self._backend.id_to_token, sorted(self.control_ids)) if word is not None}
        renamed = {name: f"\0{name}\0" for name in names}
        for token in definition["added_tokens"]:
            token["content"] = renamed.get(token["content"], token["content"])
        if isinstance(model["vocab"], dict):
            model["vocab"] = {renamed.get(word, word): index for word, index in model["vocab"].items()}
        else:
            model["vocab"] = [[renamed.get(word, word), score] for word, score in model["vocab"]]
        if "merges" in model:
            # A merge that makes a control token has no target any more.
            model["merges"] = [merge for merge in model["merges"] if names.isdisjoint(_made_of(merge))]
        if model.get("unk_token") is not None:
            model["unk_token"] = renamed.get(model["unk_token"], model["unk_token"])
        return definition


def _made_of(merge: str | list[str]) -> set[str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return {left, right, left + right}


def _copy(definition: str) -> Tokenizer:
    backend = Tokenizer.from_str(definition)
    backend.no_padding()
    backend.no_truncation()
    # A post-processor adds BOS, which we never ask for, and trims blanks off the offsets, which we need whole.
    backend.post_processor = None
    return backend


def _overwrite(text: str, hits: Sequence[Hit], regions: Sequence[Region]) -> str:
    characters = list(text)
    for start, stop in hits:
        for region in regions:
            for index in range(max(start, region.start), min(stop, region.stop)):
                characters[index] = "x"
    return "".join(characters)
