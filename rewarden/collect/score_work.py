"""One scorer's scores of one sample store, step by step, each kept on disk once it is there."""

import hashlib
import io
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rewarden.collect.sample_store import CUT, Samples, answered
from rewarden.errors import ScoreError
from rewarden.models.calibration import calibration_card
from rewarden.protocols import Scorer
from rewarden.runtime.disk import write_atomic, writing
from rewarden.runtime.inputs import identity
from rewarden.runtime.ranks import Ranks
from rewarden.scoring import Aggregate, LearnedReward, RewardModelScorer, parse_scorer
from rewarden.scoring.answer import scores_of
from rewarden.spec import Spec
from rewarden.types import Conversation, Score


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Scores of the answers to a few prompts; K is 0 when none of them has a score."""

    score_pNK: np.ndarray
    reference_pK: np.ndarray
    status: Mapping[str, int]
    num_distinct: int


class Work:
    """One scorer's scores of one sample store, step by step, each kept in its cache folder once it is there."""

    def __init__(self, name: str, raw: Mapping[str, Any], samples: Samples, size: int, root: Path, ranks: Ranks) -> None:
        self.name, self.samples, self.size, self.ranks = name, samples, size, ranks
        self.spec = spec = parse_scorer(raw, f"scorers.{name}")
        assert isinstance(spec, Spec)
        self.config = {"kind": raw.get("kind"), **spec.model_dump(mode="json", exclude_defaults=True, exclude={"aggregate"})}
        # An aggregate is applied to raw scores later, so it changes nothing here.
        self.keeps_members = isinstance(spec, LearnedReward)
        self.aggregate = spec.aggregate if isinstance(spec, LearnedReward) else None
        key = repr((samples.fingerprint, identity(self.config), size))
        self.folder = root / hashlib.blake2b(key.encode(), digest_size=12).hexdigest()
        self._scorer: Scorer | None = None

    def num_known(self, steps: int) -> int:
        """Steps that an earlier run has left in the cache."""
        return sum(self._file(step).exists() for step in range(steps))

    def part(self, step: int) -> tuple[Part, bool]:
        """The scores of a step, and whether they were in the cache."""
        if self.ranks.on_main(lambda: self._file(step).exists()):
            return self.ranks.on_main(lambda: self._read(step)), True
        found = self._score(step)
        self.ranks.on_main(lambda: self._keep(step, found))
        return found, False

    def close(self) -> None:
        """Let go of the scorer."""
        self._scorer = None

    def export(self, folder: Path, steps: int) -> None:
        """Write NAME.npy and NAME.json; a step that is missing from the cache is scored again."""
        parts = [self.part(step)[0] for step in range(steps)]
        sizes = {part.score_pNK.shape[2] for part in parts} - {0}
        if len(sizes) > 1:
            raise ScoreError(
                f"scorer {self.name!r} gave {sorted(sizes)} members in different steps; it must give as many each time"
            )
        num_members = max(sizes, default=1)
        score = np.concatenate([_widened(part.score_pNK, num_members) for part in parts])
        reference = np.concatenate([_widened(part.reference_pK, num_members) for part in parts])
        status: Counter[str] = Counter()
        for part in parts:
            status.update(part.status)
        facts = {
            "samples": self.samples.fingerprint,
            "shape": list(score.shape),
            "status": {"ok": 0, **status},
            "distinct": sum(part.num_distinct for part in parts),
            "scorer": self.config,
            "aggregate": None if self.aggregate is None else self.aggregate.model_dump(mode="json"),
            **self.ranks.on_main(self._about),
        }
        with (folder / f"{self.name}.npy").open("wb") as file:
            np.save(file, score)
        if np.isfinite(reference).any():
            with (folder / f"{self.name}.reference.npy").open("wb") as file:
                np.save(file, reference)
        (folder / f"{self.name}.json").write_text(json.dumps(facts, indent=2, ensure_ascii=False), encoding="utf-8")

    def _score(self, step: int) -> Part:
        num = self.samples.num_generations
        prompts = range(step * self.size, min((step + 1) * self.size, len(self.samples.prompts)))
        texts = self.samples.texts.slice(prompts.start * num, len(prompts) * num).to_pylist()
        ended = self.samples.ended.slice(prompts.start * num, len(prompts) * num).to_pylist()
        keys = [(prompts[row // num], text, end == CUT) for row, (text, end) in enumerate(zip(texts, ended, strict=True))]
        distinct = {key: place for place, key in enumerate(dict.fromkeys(keys))}
        references = [(p, text, False) for p in prompts if (text := self._reference(p)) is not None]
        wanted = [*distinct, *(key for key in references if key not in distinct)]
        place_of = {key: place for place, key in enumerate(wanted)}
        scores = self._scores([answered(self.samples.prompts[p], text, cut=cut) for p, text, cut in wanted])
        table = self._table(scores)
        blank = np.full(table.shape[1], np.nan, dtype=np.float32)
        reference = {key[0]: table[place_of[key]] for key in references}
        return Part(
            score_pNK=table[[place_of[key] for key in keys]].reshape(len(prompts), num, -1),
            reference_pK=np.stack([reference.get(p, blank) for p in prompts]),
            status=Counter(_status(scores[place_of[key]]) for key in keys),
            num_distinct=len(distinct),
        )

    def _scores(self, conversations: Sequence[Conversation]) -> list[Score]:
        """Each rank scores a consecutive share."""
        if self._scorer is None:
            self._scorer = self._loaded()
        size = math.ceil(len(conversations) / self.ranks.world)
        mine = conversations[self.ranks.rank * size : (self.ranks.rank + 1) * size]
        found = scores_of(self._scorer, mine, f"scorer {self.name!r}") if mine else []
        return [score for part in self.ranks.gather_objects(found) for score in part]

    def _loaded(self) -> Scorer:
        spec = self.spec.model_copy(update={"aggregate": Aggregate()}) if isinstance(self.spec, LearnedReward) else self.spec
        scorer = spec.build()
        moments = scorer.members.calibration if isinstance(scorer, RewardModelScorer) else None
        about = {} if moments is None else {"calibration": calibration_card(moments, "those of the reward model's own card")}
        self.ranks.on_main(lambda: self._write("about.json", json.dumps(about).encode()))
        return scorer

    def _table(self, scores: Sequence[Score]) -> np.ndarray:
        """[rows, K] raw member scores; the value alone where members cannot be combined again."""
        rows = [(score.members if self.keeps_members and score.members else (score.value,)) for score in scores]
        sizes = {len(row) for row, score in zip(rows, scores, strict=True) if _status(score) == "ok"}
        if len(sizes) > 1:
            raise ScoreError(f"scorer {self.name!r} gave {sorted(sizes)} members in one call; it must give as many each time")
        table = np.full((len(rows), max(sizes, default=0)), np.nan, dtype=np.float32)
        for place, (row, score) in enumerate(zip(rows, scores, strict=True)):
            if _status(score) == "ok":
                table[place] = row
        return table

    def _reference(self, prompt: int) -> str | None:
        if not isinstance(self.spec, LearnedReward):
            return None
        text = self.samples.prompts[prompt].meta.get(self.spec.reference_column)
        return text if isinstance(text, str) else None

    def _file(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}.npz"

    def _keep(self, step: int, part: Part) -> None:
        buffer = io.BytesIO()
        facts = json.dumps({"status": part.status, "distinct": part.num_distinct})
        np.savez(buffer, score=part.score_pNK, reference=part.reference_pK, facts=np.array(facts))
        self._write(self._file(step).name, buffer.getvalue())

    def _read(self, step: int) -> Part:
        path = self._file(step)
        try:
            with np.load(path, allow_pickle=False) as stored:
                facts = json.loads(str(stored["facts"]))
                return Part(
                    score_pNK=stored["score"],
                    reference_pK=stored["reference"],
                    status=facts["status"],
                    num_distinct=facts["distinct"],
                )
        except (ValueError, OSError, EOFError, KeyError) as error:
            raise ScoreError(f"{path} cannot be read ({error!r}); remove it, then run again") from error

    def _write(self, name: str, data: bytes) -> None:
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self.folder / name, data)

    def _about(self) -> dict[str, Any]:
        path = self.folder / "about.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _status(score: Score) -> str:
    """A scorer of your own may say "ok" of what is no number, or of an ensemble one of whose members gave none."""
    if score.status == "ok" and not all(math.isfinite(number) for number in (score.value, *score.members)):
        return "not_finite"
    return score.status


def _widened(table: np.ndarray, num_members: int) -> np.ndarray:
    """A table of no scores at all, with the right number of members."""
    if table.shape[-1] == num_members:
        return table
    return np.full((*table.shape[:-1], num_members), np.nan, dtype=np.float32)
