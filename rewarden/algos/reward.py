"""Pairwise reward modelling: a scalar head on a language model, trained so that better answers score higher.

    d   = r(x, y_chosen) - r(x, y_rejected) - margin
    L   = (1 - e) * softplus(-d) + e * softplus(d)  +  c * (r_chosen + r_rejected)^2
    e   = (1 - preference) * (1 - label_smoothing) + preference * label_smoothing

Bradley and Terry 1952; margin: Touvron et al. 2023 (arXiv:2307.09288) eq. 2; centring term c: Eisenstein et al. 2023
(arXiv:2312.09244). `preference` is the probability that `chosen` is better: 1 for a hard label, 0.5 for a tie. With K heads
the loss is the mean over heads. Scores are read at the last real token in float32; ties count as half in the accuracy
(TRL counts them as errors). Dropout is off unless `disable_dropout` is false.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor

from rewarden.algos.length_bias import length_facts
from rewarden.algos.rows import check_dropout, data_notes, template_notes, within
from rewarden.data.batches import length_batches
from rewarden.data.sources import Data, load_comparisons
from rewarden.errors import DataError
from rewarden.maths import bradley_terry, expected_calibration_error, reward_centering, wilson_interval
from rewarden.models.features import FeatureCache
from rewarden.models.forward import sequence_scores
from rewarden.models.load import Model, save_model, template_of, trainable
from rewarden.models.parts import ModelPart
from rewarden.models.reward import RewardModel, load_reward_model
from rewarden.models.trunk import position_limit
from rewarden.runtime.job import Job, Tick
from rewarden.runtime.optim import Group, Optim, Optimizer
from rewarden.runtime.ranks import Ranks
from rewarden.runtime.step import split_batch, update
from rewarden.spec import Spec
from rewarden.text.collate import collate
from rewarden.text.render import Template, load_template
from rewarden.types import Comparison, Conversation, Term, TokenBatch


class Reward(Spec):
    """A reward model from pairwise preferences."""

    model: Model
    """The model to start from (usually the SFT model); a scalar head replaces its LM head."""
    data: Data
    """Preference pairs: TRL's explicit or implicit prompt, or any format the reader knows."""
    eval_data: Data | None = None
    """Held-out pairs: accuracy with ties as half, its interval, and the longer-answer rule beside it."""
    optim: Optim = Optim(learning_rate=1e-5, lr_scheduler_type="cosine", warmup_steps=10)
    """Optimizer and schedule."""
    num_train_epochs: int = Field(1, ge=1)
    """Passes over the pairs."""
    max_steps: int | None = Field(None, ge=1)
    """Stop after this many optimizer steps."""
    train_batch_size: int = Field(32, ge=1)
    """Pairs per optimizer step, over all ranks."""
    per_device_train_batch_size: int = Field(32, ge=1)
    """Pairs per forward and backward pass on one rank."""
    length_window: int = Field(1, ge=1)
    """Pairs of similar length share a step inside windows of this many batches; 1 is a plain shuffle."""
    max_length: int | None = Field(1024, ge=2)
    """Longest side in tokens; both sides must fit."""
    overlength: Literal["drop", "error"] = "drop"
    """What happens to longer pairs: drop (counted) or error. Cutting would judge answers without their end."""
    num_heads: int = Field(1, ge=1)
    """Scores per text; more than one is a linear-head ensemble."""
    head_seed: int = 0
    """Seed of the fresh head."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Share of label mass moved to the other side."""
    margin_scale: float = Field(1.0, ge=0)
    """Factor on the data's `margin` column; 0 ignores it."""
    center_rewards_coefficient: float = Field(0.0, ge=0)
    """Weight of (r_chosen + r_rejected)^2, which pins the free offset of rewards near 0."""
    feature_cache_dir: str | None = None
    """Folder for the frozen lower layers' activations, computed once per row; needs lora_layers or trainable_layers."""
    disable_dropout: bool = True
    """Train without dropout, as TRL's RewardTrainer does by default."""
    eval_steps: int | None = Field(None, ge=1)
    """Optimizer steps between evaluations; None evaluates at the end only."""
    seed: int = 0
    """Order of the pairs."""

    @model_validator(mode="after")
    def _dropout_acts(self) -> "Reward":
        check_dropout(self.model, disable_dropout=self.disable_dropout)
        return self

    def build(self, ranks: Ranks) -> Job:
        """Load model and data; see `build`."""
        return build(self, ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPair:
    """One comparison as ids; lengths are of the last assistant message, in tokens."""

    id: str
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]
    chosen_length: int
    rejected_length: int
    preference: float
    margin: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """B pairs as 2B rows, the chosen sides first."""

    tokens: TokenBatch
    preference_B: Float[Tensor, " B"]
    margin_B: Float[Tensor, " B"]
    num_heads: int

    def __len__(self) -> int:
        return len(self.preference_B)

    def counts(self) -> dict[str, Tensor]:
        """Pairs times heads for every term; pairs labelled as ties have no right side to be accurate about."""
        pairs = torch.tensor(len(self) * self.num_heads, device=self.preference_B.device)
        return dict.fromkeys(("preference", "centering", "reward/accuracy", "reward/margin", "reward/tie_rate"), pairs)

    def rows(self, index_b: Tensor) -> "Batch":
        """The sub-batch of these pairs."""
        return Batch(
            tokens=self.tokens.rows(torch.cat([index_b, index_b + len(self)])),
            preference_B=self.preference_B[index_b],
            margin_B=self.margin_B[index_b],
            num_heads=self.num_heads,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What the loop carries from step to step."""

    step: int = 0


def encode_pairs(
    comparisons: Sequence[Comparison], template: Template, max_length: int | None, overlength: Literal["drop", "error"]
) -> tuple[tuple[EncodedPair, ...], dict[str, int]]:
    """Render both sides; a pair is kept when both fit. Returns the pairs and what was dropped, by reason."""
    pairs: list[EncodedPair] = []
    dropped: Counter[str] = Counter()
    for row in comparisons:
        ids: list[tuple[int, ...]] = []
        answer: list[int] = []
        for side in (row.chosen, row.rejected):
            rollout = template.render(Conversation(id=row.id, messages=(*row.prompt, *side), meta=row.meta))
            spans = [span for span in rollout.spans if span.role == "assistant"]
            ids.append(rollout.token_ids)
            answer.append(spans[-1].stop - spans[-1].start if spans else 0)
        if max_length is not None and max(len(side) for side in ids) > max_length:
            if overlength == "error":
                where = row.meta.get("where", row.id)
                raise DataError(
                    f"{where}: {max(map(len, ids))} tokens on one side; at most max_length={max_length}. Raise it, or use "
                    "overlength: drop"
                )
            dropped[f"longer than {max_length} tokens dropped"] += 1
            continue
        if ids[0] == ids[1]:
            dropped["same tokens on both sides dropped"] += 1
            continue
        pairs.append(
            EncodedPair(
                id=row.id,
                chosen_ids=ids[0],
                rejected_ids=ids[1],
                chosen_length=answer[0],
                rejected_length=answer[1],
                preference=row.preference,
                margin=row.margin or 0.0,
            )
        )
    return tuple(pairs), dict(dropped)


def prepare(pairs: Sequence[EncodedPair], device: torch.device, *, margin_scale: float, num_heads: int) -> Batch:
    """Encoded pairs -> tensors."""
    ids = [pair.chosen_ids for pair in pairs] + [pair.rejected_ids for pair in pairs]
    return Batch(
        tokens=collate(ids).to(device),
        preference_B=torch.tensor([pair.preference for pair in pairs], dtype=torch.float32, device=device),
        margin_B=torch.tensor([margin_scale * pair.margin for pair in pairs], dtype=torch.float32, device=device),
        num_heads=num_heads,
    )


def loss(model: RewardModel, batch: Batch, cfg: Reward, features: FeatureCache | None) -> dict[str, Term]:
    """The pair loss per pair and head, the centring term, and statistics."""
    score_NK = sequence_scores(model.model, batch.tokens, features=features)
    chosen_BK, rejected_BK = score_NK.chunk(2)
    ones_BK = torch.ones_like(chosen_BK, dtype=torch.bool)
    smoothing_B = (1 - batch.preference_B) * (1 - cfg.label_smoothing) + batch.preference_B * cfg.label_smoothing
    pair_BK = torch.stack(
        [
            bradley_terry(chosen_B, rejected_B, margin=batch.margin_B, label_smoothing=smoothing_B)
            for chosen_B, rejected_B in zip(chosen_BK.T, rejected_BK.T, strict=True)
        ],
        dim=1,
    )
    center_BK = reward_centering(chosen_BK.flatten(), rejected_BK.flatten()).view_as(chosen_BK)
    difference_BK = (chosen_BK - rejected_BK).detach()
    sign_B1 = torch.where(batch.preference_B >= 0.5, 1.0, -1.0).unsqueeze(1)
    decided_BK = (batch.preference_B != 0.5).unsqueeze(1) & ones_BK
    return {
        "preference": Term(value_BT=pair_BK, mask_BT=ones_BK),
        "centering": Term(value_BT=center_BK, mask_BT=ones_BK, weight=cfg.center_rewards_coefficient),
        "reward/accuracy": Term(value_BT=_half_tie_accuracy(difference_BK * sign_B1), mask_BT=decided_BK, weight=0.0),
        "reward/margin": Term(value_BT=difference_BK, mask_BT=ones_BK, weight=0.0),
        "reward/tie_rate": Term(value_BT=(difference_BK == 0).float(), mask_BT=ones_BK, weight=0.0),
    }


def _half_tie_accuracy(difference: Tensor) -> Tensor:
    return (difference > 0).float() + 0.5 * (difference == 0).float()


@torch.no_grad()
def evaluate(model: RewardModel, pairs: Sequence[EncodedPair], ranks: Ranks, batch_size: int) -> dict[str, float]:
    """Held-out accuracy (ties half, 95 % Wilson interval), log loss, calibration, and how much of it is length.

    Pairs labelled as ties (preference 0.5) are left out of accuracies and counted. With several heads the mean score decides.
    """
    mine = list(range(len(pairs)))[ranks.rank :: ranks.world]
    rows: list[tuple[int, float, float, float]] = []
    for start in range(0, len(mine), batch_size):
        index = mine[start : start + batch_size]
        batch = prepare([pairs[i] for i in index], ranks.device, margin_scale=0.0, num_heads=1)
        chosen_B, rejected_B = sequence_scores(model.model, batch.tokens).mean(1).chunk(2)
        rows += list(zip(index, (chosen_B - rejected_B).tolist(), chosen_B.tolist(), rejected_B.tolist(), strict=True))
    rows = sorted(row for part in ranks.gather_objects(rows) for row in part)
    difference_B = torch.tensor([row[1] for row in rows], dtype=torch.float64)
    score_N = torch.tensor([value for row in rows for value in row[2:]], dtype=torch.float64)
    label_B = torch.tensor([pairs[row[0]].preference for row in rows], dtype=torch.float64)
    length_B2 = torch.tensor([(pairs[row[0]].chosen_length, pairs[row[0]].rejected_length) for row in rows]).double()
    longer_B = length_B2[:, 0] - length_B2[:, 1]
    decided_B = label_B != 0.5
    sign_B = torch.where(label_B > 0.5, 1.0, -1.0)
    hit_B = _half_tie_accuracy(difference_B * sign_B).double()
    right_B = hit_B[decided_B]
    by_length_B = _half_tie_accuracy(longer_B * sign_B)[decided_B].double()
    n = int(decided_B.sum())
    accuracy = float(right_B.mean()) if n else 0.5
    low, high = wilson_interval(float(right_B.sum()), n, confidence=0.95) if n else (0.0, 1.0)
    smoothing_B = 1 - label_B
    log_loss = bradley_terry(difference_B, torch.zeros_like(difference_B), margin=0.0, label_smoothing=smoothing_B).mean()
    return {
        "eval/accuracy": accuracy,
        "eval/accuracy_low": float(low),
        "eval/accuracy_high": float(high),
        "eval/longer_wins_accuracy": float(by_length_B.mean()) if n else 0.5,
        "eval/loss": float(log_loss),
        "eval/num_pairs": float(n),
        "eval/num_tied_labels": float(len(rows) - n),
        "eval/score_mean": float(score_N.mean()),
        "eval/score_std": float(score_N.std(correction=0)),
        "eval/margin": float((difference_B * sign_B)[decided_B].mean()) if n else 0.0,
        "eval/calibration_error": expected_calibration_error(difference_B.abs().sigmoid()[decided_B], right_B) if n else 0.0,
        **length_facts(score_N.view(-1, 2), length_B2, hit_B, decided_B, sign_B > 0),
    }


def train(
    model: RewardModel,
    pairs: Sequence[EncodedPair],
    measure: Callable[[], dict[str, float]],
    optimizer: Optimizer,
    features: FeatureCache | None,
    ranks: Ranks,
    cfg: Reward,
    steps: int,
    state: State,
) -> Iterator[Tick]:
    """One tick per optimizer step; `measure` evaluates the model as it is, in eval mode."""
    lengths = [len(pair.chosen_ids) + len(pair.rejected_ids) for pair in pairs]
    per_epoch = math.ceil(len(pairs) / cfg.train_batch_size)
    plan_epoch, plan = -1, []
    while state.step < steps:
        epoch, index = divmod(state.step, per_epoch)
        if epoch != plan_epoch:
            plan_epoch = epoch
            plan = length_batches(
                lengths, batch_size=cfg.train_batch_size, window=cfg.length_window, seed=cfg.seed, epoch=epoch
            )
        chosen = plan[index][ranks.rank :: ranks.world]
        batch = prepare([pairs[row] for row in chosen], ranks.device, margin_scale=cfg.margin_scale, num_heads=cfg.num_heads)
        model.model.train(not cfg.disable_dropout)
        learnt = update(
            optimizer,
            split_batch(batch, cfg.per_device_train_batch_size),
            lambda b: loss(model, b, cfg, features),
            ranks=ranks,
        )
        model.model.eval()
        state = State(step=state.step + 1)
        facts = {"epoch": state.step / per_epoch, "num_tokens": float(sum(lengths[row] for row in plan[index]))}
        if state.step == steps or (cfg.eval_steps and state.step % cfg.eval_steps == 0):
            facts |= measure()
        yield Tick(state=state, report={**learnt, **facts}, samples=[])


def build(cfg: Reward, ranks: Ranks) -> Job:
    """Load model and pairs and return the job that trains them."""
    model = load_reward_model(cfg.model, num_heads=cfg.num_heads, head="fresh", head_seed=cfg.head_seed, device=ranks.device)
    model.model.to(ranks.device)
    template = load_template(model.tokenizer, template_of(cfg.model))
    loaded = load_comparisons(cfg.data)
    max_length = within(cfg.max_length, position_limit(model.model))
    pairs, dropped = encode_pairs(loaded.rows, template, max_length, cfg.overlength)
    notes = [*template.notes, *data_notes(loaded), f"encoding: {len(pairs)} pairs kept{_reasons(dropped)}"]
    if not pairs:
        hint = "raise max_length (up to the model's positions) or check the data"
        raise DataError(f"{cfg.data.path}: no pair is left to train on{_reasons(dropped)}; {hint}")
    eval_pairs: tuple[EncodedPair, ...] = ()
    if cfg.eval_data is not None:
        eval_pairs, eval_dropped = encode_pairs(load_comparisons(cfg.eval_data).rows, template, max_length, cfg.overlength)
        if not eval_pairs:
            why = _reasons(eval_dropped)
            raise DataError(f"{cfg.eval_data.path}: no held-out pair is left{why}; raise max_length or leave eval_data out")
        notes.append(f"held-out: {len(eval_pairs)} pairs kept{_reasons(eval_dropped)}")
    notes += template_notes(template)
    per_epoch = math.ceil(len(pairs) / cfg.train_batch_size)
    steps = min(per_epoch * cfg.num_train_epochs, cfg.max_steps or per_epoch * cfg.num_train_epochs)
    optimizer = Optimizer([Group("reward", trainable(model.model), cfg.optim)], steps)
    features = FeatureCache(cfg.feature_cache_dir, model.model) if cfg.feature_cache_dir else None

    latest: dict[str, float] = {}

    def measure() -> dict[str, float]:
        found = evaluate(model, eval_pairs, ranks, cfg.per_device_train_batch_size) if eval_pairs else {}
        latest.update(found)
        return found

    def export(folder: Path) -> None:
        model.model.eval()
        final = latest or measure()
        extra = {"role": "reward", "template": template_of(cfg.model), "num_heads": cfg.num_heads, "evaluation": final}
        if ranks.is_main:
            save_model(model.model, model.tokenizer, folder / "model", extra=extra)
            (folder / "evaluation.json").write_text(json.dumps(final, indent=2), encoding="utf-8")

    return Job(
        title="Reward model",
        steps=steps,
        start=State(),
        train=lambda state: train(model, pairs, measure, optimizer, features, ranks, cfg, steps, state),
        parts={"reward": ModelPart(model.model), "optimizer": optimizer},
        export=export,
        notes=notes,
        restore_state=lambda raw: State(**raw),
        dump_state=asdict,
    )


def _reasons(dropped: dict[str, int]) -> str:
    return "".join(f", {count} {reason}" for reason, count in sorted(dropped.items()))
