"""Pairwise reward modelling: a scalar head on a language model, trained so that better answers score higher.

    d   = r(x, y_chosen) - r(x, y_rejected) - margin
    L   = (1 - e) * softplus(-d) + e * softplus(d)  +  c * (r_chosen + r_rejected)^2  [+ LM loss - diversity]
    e   = (1 - preference) * (1 - label_smoothing) + preference * label_smoothing

Bradley and Terry 1952; margin: Touvron et al. 2023 (arXiv:2307.09288) eq. 2; centring term c: Eisenstein et al. 2023
(arXiv:2312.09244). `preference` is the probability that `chosen` is better: 1 for a hard label, 0.5 for a tie. With K heads
the loss is the mean over heads. Scores are read at the last real token in float32; ties count as half in the accuracy
(TRL counts them as errors). Dropout is off unless `disable_dropout` is false. docs/algorithms/reward.md and
docs/algorithms/reward_ensembles.md list every detail and where we differ.

    reward_config       every switch, its bounds and its help
    reward_strength     labels and margins by the strength of a vote
    reward_plan         which pairs each step of a member takes
    reward_loss         the batch and the terms of the objective on it
    reward_start        the models it starts from
    reward_families     who trains in each step: all heads, members in turn, or one after another
    reward_parts        what a checkpoint holds of members that are not in use
    reward_evaluation   the members on held-out pairs
    reward              data, members and loop joined to a job (here)
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rewarden.algos.closing import reward_closing
from rewarden.algos.pairs import EncodedPair, encode_pairs
from rewarden.algos.reward_config import Reward
from rewarden.algos.reward_evaluation import Exam
from rewarden.algos.reward_families import Team, make_team, write_evaluation
from rewarden.algos.reward_loss import Batch, loss, prepare
from rewarden.algos.reward_plan import Plan, steps_per_member
from rewarden.algos.reward_start import load_start
from rewarden.algos.reward_strength import strengthened
from rewarden.algos.rows import data_notes, template_notes, within
from rewarden.data.sources import load_comparisons
from rewarden.errors import DataError
from rewarden.models.load import template_of
from rewarden.models.reward import RewardModel
from rewarden.models.reward_lm import LanguageHead, load_language_head
from rewarden.models.trunk import position_limit
from rewarden.runtime.job import Job, Tick
from rewarden.runtime.ranks import Ranks
from rewarden.runtime.step import split_batch, update
from rewarden.scoring.registry import REGISTRY, register
from rewarden.text.render import load_template

__all__ = ["Batch", "Reward", "State", "build", "loss", "prepare", "train"]


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What the loop carries from step to step."""

    step: int = 0


def train(
    team: Team,
    pairs: Sequence[EncodedPair],
    exam: Exam,
    ranks: Ranks,
    cfg: Reward,
    steps: int,
    state: State,
    *,
    language: LanguageHead | None = None,
) -> Iterator[Tick]:
    """One tick per optimizer step of one member; `steps` is the number of steps of each.

    Members are measured every `eval_steps` of their own steps and after their last one; the last tick is of all together.
    """
    plans = [Plan(cfg, pairs, member) for member in range(team.num_turns)]
    total = steps * team.num_turns
    while state.step < total:
        member, inner = team.turn(state.step)
        plan, optimizer = plans[member], team.take(member, inner)
        rows = plan.rows(inner)[ranks.rank :: ranks.world]
        batch = prepare(
            [pairs[row] for row in rows],
            ranks.device,
            margin_scale=cfg.margin_scale,
            num_heads=cfg.num_heads,
            margin_clip=cfg.margin_clip,
        )
        model = team.model.model
        model.train(not cfg.disable_dropout)
        learnt = update(
            optimizer,
            split_batch(batch, cfg.per_device_train_batch_size),
            lambda b: loss(team.model, b, cfg, team.features, language),
            ranks=ranks,
        )
        model.eval()
        state = State(step=state.step + 1)
        facts = {"epoch": (inner + 1) / plan.per_epoch, "num_tokens": float(plan.num_tokens(inner))}
        if team.num_turns > 1:
            facts["reward/member"] = float(member)
        if inner + 1 == steps:
            facts |= exam.facts(team.finish(member))
        elif cfg.eval_steps and (inner + 1) % cfg.eval_steps == 0 and exam.held_out:
            facts |= exam.facts(exam.score(team.model, team.features))
        if state.step == total and team.num_turns > 1:
            facts |= exam.facts(team.scores())
        yield Tick(state=state, report={**learnt, **facts}, samples=[])


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The pairs of a run, and lines for people on where they come from."""

    train: tuple[EncodedPair, ...]
    held_out: tuple[EncodedPair, ...]
    notes: tuple[str, ...]


def load_rows(cfg: Reward, model: RewardModel) -> Rows:
    """Read and encode training and held-out pairs; neither depends on a seed of a member.

    Errors: DataError when none is left.
    """
    template = load_template(model.tokenizer, template_of(cfg.model))
    loaded = load_comparisons(cfg.data)
    max_length = within(cfg.max_length, position_limit(model.model))
    learnt = None if cfg.strength is None else strengthened(loaded.rows, cfg.strength)
    pairs, dropped = encode_pairs(learnt.rows if learnt else loaded.rows, template, max_length, cfg.overlength)
    notes = [*template.notes, *data_notes(loaded), *([learnt.note] if learnt else [])]
    notes.append(f"encoding: {len(pairs)} pairs kept{_reasons(dropped)}")
    if not pairs:
        hint = "raise max_length (up to the model's positions) or check the data"
        raise DataError(f"{cfg.data.path}: no pair is left to train on{_reasons(dropped)}; {hint}")
    held_out: tuple[EncodedPair, ...] = ()
    if cfg.eval_data is not None:
        held_out, eval_dropped = encode_pairs(load_comparisons(cfg.eval_data).rows, template, max_length, cfg.overlength)
        if not held_out:
            why = _reasons(eval_dropped)
            raise DataError(f"{cfg.eval_data.path}: no held-out pair is left{why}; raise max_length or leave eval_data out")
        notes.append(f"held-out: {len(held_out)} pairs kept{_reasons(eval_dropped)}")
    return Rows(train=pairs, held_out=held_out, notes=(*notes, *template_notes(template)))


def build(cfg: Reward, ranks: Ranks) -> Job:
    """Load members and pairs and return the job that trains them."""
    model = load_start(cfg, ranks)
    rows = load_rows(cfg, model)
    exam = Exam.of(rows.train, rows.held_out, ranks, cfg.per_device_train_batch_size)
    steps = steps_per_member(cfg, len(rows.train))
    team = make_team(cfg, model, exam, steps, ranks)
    language = load_language_head(cfg.model, ranks.device) if cfg.lm_coef else None

    def export(folder: Path) -> None:
        card = exam.card(team.scores())
        if ranks.is_main:
            team.export(folder / "model")
            write_evaluation(folder, card)

    def publish(folder: Path) -> None:
        place = folder.resolve()
        register(place.parent / REGISTRY, place.name, {"kind": "reward_model", "path": str(place / "model")})

    members = f"{cfg.family}: {cfg.num_members} members of {steps} steps each, seeds {', '.join(map(str, cfg.seeds))}"
    return Job(
        title="Reward model",
        steps=steps * team.num_turns,
        start=State(),
        train=lambda state: train(team, rows.train, exam, ranks, cfg, steps, state, language=language),
        parts=team.parts(),
        export=export,
        enter=team.enter,
        publish=publish,
        notes=[*rows.notes, *([members] if team.num_turns > 1 else [])],
        closing=lambda state, report: reward_closing(report),
        restore_state=lambda raw: State(**raw),
        dump_state=asdict,
    )


def _reasons(dropped: dict[str, int]) -> str:
    return "".join(f", {count} {reason}" for reason, count in sorted(dropped.items()))
