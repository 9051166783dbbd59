"""Many answers a prompt, and what scorers said of them: how both lie on disk, and how they are read.

    prompts.jsonl          the prompts, one a line, in order (TRL prompt-only rows)
    samples.parquet        prompt, index, text, num_tokens, logp, ended, seed; in the order of (prompt, index)
    samples.json           who spoke and how; the number of prompts and of answers to each
    scores/NAME.npy        float32 [prompt, sample, member], NaN where there is no score
    scores/NAME.json       counts by status, the scorer, and which samples they are of

Texts stay in Arrow's memory, once; a `Conversation` is made when it is asked for.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rewarden.data.read import read_rows
from rewarden.errors import DataError
from rewarden.maths import Moments
from rewarden.models.calibration import read_calibration
from rewarden.spec import nearest
from rewarden.types import Conversation, Message

FORMAT = 1
COLUMNS = ("prompt", "index", "text", "num_tokens", "logp", "ended", "seed")
CUT = "length"
"""What `ended` says of an answer without an end of turn."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Samples:
    """N answers to each of P prompts; `texts` and `ended` are Arrow columns of P * N rows, prompt by prompt."""

    folder: Path
    facts: Mapping[str, Any]
    prompts: tuple[Conversation, ...]
    texts: pa.ChunkedArray
    ended: pa.ChunkedArray
    num_tokens_PN: Int[Tensor, "P N"]
    logp_PN: Float[Tensor, "P N"]

    @property
    def num_generations(self) -> int:
        """N, the answers to each prompt."""
        return self.num_tokens_PN.shape[1]

    @property
    def conversations(self) -> "Sequence[Sequence[Conversation]]":
        """[P][N] conversations, each made when it is looked at."""
        return _Table(self)

    def text(self, prompt: int, index: int) -> str:
        """One answer."""
        return str(self.texts[prompt * self.num_generations + index].as_py())

    def conversation(self, prompt: int, index: int) -> Conversation:
        """The prompt and one answer; a cut answer is named in `meta["truncated"]`, as the sampler does."""
        place = prompt * self.num_generations + index
        return answered(self.prompts[prompt], str(self.texts[place].as_py()), cut=self.ended[place].as_py() == CUT)

    def cut_PN(self) -> Bool[Tensor, "P N"]:
        """Which answers have no end of turn."""
        return self._shaped(pc.equal(self.ended, CUT))

    def empty_PN(self) -> Bool[Tensor, "P N"]:
        """Which answers say nothing, white space apart."""
        return self._shaped(pc.equal(pc.utf8_length(pc.utf8_trim_whitespace(self.texts)), 0))

    def characters_PN(self) -> Int[Tensor, "P N"]:
        """Characters of every answer."""
        return self._shaped(pc.utf8_length(self.texts)).long()

    def _shaped(self, column: pa.ChunkedArray) -> Tensor:
        return torch.from_numpy(column.to_numpy().copy()).view(self.num_tokens_PN.shape)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all prompts and answers: scores carry it, so that they cannot be read beside other samples."""
        found = hashlib.blake2b(digest_size=16)
        for prompt in self.prompts:
            _add(found, prompt.id, *(f"{message.role}:{message.text}" for message in prompt.messages))
        for texts, ended in zip(_pieces(self.texts), _pieces(self.ended), strict=True):
            _add(found, *texts, *ended)
        return found.hexdigest()


def answered(prompt: Conversation, text: str, *, cut: bool) -> Conversation:
    """A prompt with one answer; a cut one is named in `meta["truncated"]`."""
    turn = sum(message.role == "assistant" for message in prompt.messages)
    meta = {**prompt.meta, "truncated": (*prompt.meta.get("truncated", ()), turn)} if cut else prompt.meta
    return replace(prompt, messages=(*prompt.messages, Message(role="assistant", text=text)), meta=meta)


def read_samples(folder: str | Path) -> Samples:
    """The samples that a `sample_n` run wrote into its folder.

    Errors: DataError for a folder without samples, an unfinished run, or rows that are not N answers to each prompt in order.
    """
    folder = Path(folder)
    facts = _read_facts(folder)
    prompts = tuple(_prompts(folder / "prompts.jsonl"))
    num_prompts, num = len(prompts), int(facts["num_generations"])
    table = _read_table(folder / "samples.parquet")
    place = np.arange(num_prompts * num)
    wrong = table.num_rows != num_prompts * num or int(facts["num_prompts"]) != num_prompts
    if wrong or not _in_order(table, place // num, place % num):
        raise DataError(
            f"{folder}: samples.parquet holds {table.num_rows} rows; {num_prompts} prompts with {num} answers each, in order, "
            f"make {num_prompts * num}. The run was stopped or a file was edited: run it again (it resumes)"
        )
    return Samples(
        folder=folder,
        facts=facts,
        prompts=prompts,
        texts=table["text"],
        ended=table["ended"],
        num_tokens_PN=torch.from_numpy(table["num_tokens"].to_numpy().copy()).view(num_prompts, num),
        logp_PN=torch.from_numpy(table["logp"].to_numpy().astype(np.float64)).view(num_prompts, num),
    )


def _read_facts(folder: Path) -> dict[str, Any]:
    path = folder / "samples.json"
    if not path.is_file():
        there = "it holds an unfinished run; run it again (it resumes)" if (folder / "recipe.yaml").is_file() else "no such run"
        raise DataError(f"{folder}: no samples.json, {there}. Samples are the folder of a finished run of kind sample_n")
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        if facts["format"] != FORMAT:
            raise DataError(f"{path}: format is {facts['format']!r}; this version reads {FORMAT}: sample anew")
        return {**facts, "num_generations": int(facts["num_generations"]), "num_prompts": int(facts["num_prompts"])}
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} is damaged ({error!r}); sample anew with --resume never") from error


def _prompts(path: Path) -> Iterator[Conversation]:
    for row in read_rows(path):
        try:
            messages = tuple(Message(role=message["role"], text=message["content"]) for message in row.fields["prompt"])
            meta = {key: value for key, value in row.fields.items() if key not in ("id", "prompt")}
            yield Conversation(id=str(row.fields["id"]), messages=messages, meta={**meta, "where": row.where})
        except (TypeError, KeyError) as error:
            raise DataError(f"{row.where}: no prompt as sample_n writes it ({error!r}); sample anew") from error


def _read_table(path: Path) -> pa.Table:
    if not path.is_file():
        raise DataError(f"{path}: no such file; sample anew with --resume never")
    try:
        return pq.read_table(path, columns=list(COLUMNS))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read ({error}); sample anew with --resume never") from error


def _in_order(table: pa.Table, prompt: np.ndarray, index: np.ndarray) -> bool:
    return bool((table["prompt"].to_numpy() == prompt).all() and (table["index"].to_numpy() == index).all())


def _pieces(column: pa.ChunkedArray, size: int = 512) -> Iterator[list[Any]]:
    """The values as Python objects, a few at a time, whatever the chunks."""
    for start in range(0, len(column), size):
        yield column.slice(start, size).to_pylist()


def _add(found: Any, *texts: str) -> None:
    for text in texts:
        raw = text.encode("utf-8")
        found.update(len(raw).to_bytes(8, "big") + raw)


@dataclass(frozen=True, eq=False)
class _Row(Sequence[Conversation]):
    samples: Samples
    prompt: int

    def __len__(self) -> int:
        return self.samples.num_generations

    @overload
    def __getitem__(self, index: int) -> Conversation: ...
    @overload
    def __getitem__(self, index: slice) -> list[Conversation]: ...
    def __getitem__(self, index: int | slice) -> Conversation | list[Conversation]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self.samples.conversation(self.prompt, range(len(self))[index])


@dataclass(frozen=True, eq=False)
class _Table(Sequence[_Row]):
    samples: Samples

    def __len__(self) -> int:
        return len(self.samples.prompts)

    @overload
    def __getitem__(self, index: int) -> _Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[_Row]: ...
    def __getitem__(self, index: int | slice) -> _Row | list[_Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return _Row(self.samples, range(len(self))[index])


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """What one scorer said: raw scores of its K members, NaN in all of them where a sample has no score.

    facts: counts by status, the scorer's config and its own aggregate. reference_PK: its scores of the prompts' reference
    answers, where they have one. calibration: moments of each member's calibration scores.
    """

    name: str
    score_PNK: Float[Tensor, "P N K"]
    facts: Mapping[str, Any]
    reference_PK: Float[Tensor, "P K"] | None = None

    @property
    def calibration(self) -> tuple[Moments, ...] | None:
        """Moments of each member's calibration scores, where the reward model has them."""
        return read_calibration(self.facts, self.score_PNK.shape[2], self.name)


def score_names(folder: str | Path) -> list[str]:
    """The scorers whose scores a folder of `score_samples` holds."""
    facts = (Path(folder) / "scores").glob("*.json")
    return sorted(path.stem for path in facts if path.with_suffix(".npy").is_file())


def read_scores(folder: str | Path, name: str, samples: Samples | None = None) -> Scores:
    """The scores of one scorer.

    samples: the samples they must be of. Errors: DataError for a scorer that is not there, with the nearest name, for a damaged
    file, and for scores of other samples.
    """
    folder = Path(folder)
    path = folder / "scores" / f"{name}.npy"
    names = score_names(folder)
    if name not in names:
        hint = nearest(name, names) if names else "it holds none; give the folder of a finished run of kind score_samples"
        raise DataError(f"{folder}: no scores by {name!r}; {hint}")
    try:
        facts = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        score = torch.from_numpy(np.load(path, allow_pickle=False).astype(np.float32))
        beside = path.with_suffix(".reference.npy")
        reference = torch.from_numpy(np.load(beside, allow_pickle=False).astype(np.float32)) if beside.is_file() else None
        of, shape = str(facts["samples"]), tuple(facts["shape"])
    except (ValueError, OSError, EOFError, TypeError, KeyError) as error:
        raise DataError(f"{path} cannot be read ({error!r}); score anew with --resume never") from error
    if score.dim() != 3 or tuple(score.shape) != shape:
        raise DataError(f"{path}: its shape is {tuple(score.shape)}, its facts say {shape}; score anew with --resume never")
    if samples is not None and of != samples.fingerprint:
        raise DataError(
            f"{path}: these scores are of other samples than those in {samples.folder} (another policy, prompt file or number "
            "of answers); score those samples, or name the samples that were scored"
        )
    return Scores(name=name, score_PNK=score, facts=facts, reference_PK=reference)
