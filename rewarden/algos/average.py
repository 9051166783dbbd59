"""A weight-averaged reward model from members that were trained apart (WARM); see `rewarden.models.average`."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from rewarden.algos.pairs import encode_pairs
from rewarden.algos.reward_evaluation import Exam
from rewarden.algos.reward_families import write_evaluation
from rewarden.algos.rows import within
from rewarden.data.sources import Data, load_comparisons
from rewarden.errors import DataError
from rewarden.models.average import Averaged, average_members
from rewarden.models.load import Model, save_model
from rewarden.models.trunk import position_limit
from rewarden.runtime.job import Job, Tick
from rewarden.runtime.ranks import Ranks
from rewarden.scoring.registry import REGISTRY, register
from rewarden.spec import Spec
from rewarden.text.render import load_template

LOW_COSINE = 0.5
"""Heads below it did not start as one."""


class Average(Spec):
    """One reward model whose weights are the mean of those of several."""

    models: tuple[Model, ...] = Field(min_length=1)
    """Reward models and ensembles (independent or LoRA) that started from the same weights; every member counts once."""
    eval_data: Data | None = None
    """Held-out pairs, for accuracy and calibration as after training."""
    max_length: int | None = Field(1024, ge=2)
    """Longest side of a held-out pair in tokens; longer ones are left out and counted."""
    batch_size: int = Field(32, ge=1)
    """Held-out pairs per forward pass."""

    def build(self, ranks: Ranks) -> Job:
        """Average the members; see `build`."""
        return build(self, ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Whether it is done."""

    done: int = 0


def build(cfg: Average, ranks: Ranks) -> Job:
    """The job of one step: average, and measure on held-out pairs where there are any.

    Errors: ConfigError as `average_members`; DataError when no held-out pair is left.
    """
    averaged = average_members(cfg.models)
    averaged.model.model.to(ranks.device)
    exam, notes = _exam(cfg, averaged, ranks)

    @cache
    def scores() -> Float[Tensor, "N 2 K"]:
        assert exam is not None
        return exam.score(averaged.model, None)

    def train(state: State) -> Iterator[Tick]:
        if state.done == 0:
            facts = {"average/members": float(len(averaged.members)), "average/distance": averaged.distance}
            facts["average/head_cosine"] = averaged.head_cosine
            yield Tick(state=State(done=1), report=facts | (exam.facts(scores()) if exam else {}))

    def export(folder: Path) -> None:
        card = exam.card(scores()) if exam else {}
        if ranks.is_main:
            about = {"role": "reward", "template": averaged.model.template_kind, "num_heads": 1}
            about["averaged"] = list(averaged.members)
            save_model(averaged.model.model, averaged.model.tokenizer, folder / "model", extra={**about, **card})
            if card:
                write_evaluation(folder, card)

    def publish(folder: Path) -> None:
        place = folder.resolve()
        register(place.parent / REGISTRY, place.name, {"kind": "reward_model", "path": str(place / "model")})

    return Job(
        title="Averaged reward model",
        steps=1,
        start=State(),
        train=train,
        parts={},
        export=export,
        publish=publish,
        notes=notes,
        restore_state=lambda raw: State(**raw),
        dump_state=asdict,
    )


def _exam(cfg: Average, averaged: Averaged, ranks: Ranks) -> tuple[Exam | None, list[str]]:
    notes = [
        f"{len(averaged.members)} members averaged; the farthest is {averaged.distance:.3f} of the mean's size away, the "
        f"lowest cosine between two heads is {averaged.head_cosine:.3f}"
    ]
    if averaged.head_cosine < LOW_COSINE:
        notes.append("their heads did not start as one, as the method asks for: the mean of unlike heads is a smaller head")
    if cfg.eval_data is None:
        return None, [*notes, "without eval_data there is neither an accuracy nor a calibration"]
    model = averaged.model
    template = load_template(model.tokenizer, model.template_kind)
    limit = within(cfg.max_length, position_limit(model.model))
    pairs, dropped = encode_pairs(load_comparisons(cfg.eval_data).rows, template, limit, "drop")
    left_out = "".join(f", {count} {reason}" for reason, count in sorted(dropped.items()))
    if not pairs:
        raise DataError(f"{cfg.eval_data.path}: no held-out pair is left{left_out}; raise max_length")
    exam = Exam(pairs=pairs, held_out=True, ranks=ranks, batch_size=cfg.batch_size)
    return exam, [*notes, f"held-out: {len(pairs)} pairs kept{left_out}"]
