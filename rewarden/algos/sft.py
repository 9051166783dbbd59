"""Supervised fine-tuning: maximise the likelihood of what the assistant said.

    L = - mean over target tokens t of log pi(x_t | x_<t)

Target tokens are the assistant's messages and their end-of-turn tokens; a prompt-completion row counts only its completion.
The mean is over all target tokens of the optimizer step, over every microbatch and rank.
Packing is not needed: rows of similar length share a step and are bucketed inside it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from jaxtyping import Bool
from pydantic import Field, model_validator
from torch import Tensor, nn

from rewarden.algos.closing import sft_closing
from rewarden.algos.rows import EncodedRow, OnEmpty, Overlength, check_dropout, data_notes, encode_rows, template_notes, within
from rewarden.data.batches import length_batches
from rewarden.data.sources import Data, load_conversations
from rewarden.errors import DataError
from rewarden.models.forward import sequence_logp
from rewarden.models.load import Model, load_policy, load_tokenizer, save_model, template_of, trainable
from rewarden.models.parts import ModelPart
from rewarden.models.trunk import position_limit
from rewarden.runtime.job import Job, Tick
from rewarden.runtime.optim import Group, Optim, Optimizer
from rewarden.runtime.ranks import Ranks
from rewarden.runtime.step import split_batch, update
from rewarden.spec import Spec
from rewarden.text.collate import collate, role_mask
from rewarden.text.render import load_template
from rewarden.types import Term, TokenBatch


class SFT(Spec):
    """Supervised fine-tuning on conversations or prompt-completion rows."""

    model: Model
    """The model to train, with LoRA or layer choice."""
    data: Data
    """Conversations that end with the assistant, or TRL language-modelling / prompt-completion rows."""
    eval_data: Data | None = None
    """Held-out rows; their loss is reported every `eval_steps` and at the end."""
    optim: Optim = Optim(learning_rate=2e-5, lr_scheduler_type="cosine")
    """Optimizer and schedule."""
    num_train_epochs: int = Field(1, ge=1)
    """Passes over the data."""
    max_steps: int | None = Field(None, ge=1)
    """Stop after this many optimizer steps, even inside an epoch."""
    train_batch_size: int = Field(16, ge=1)
    """Rows per optimizer step, over all ranks."""
    per_device_train_batch_size: int = Field(16, ge=1)
    """Rows per forward and backward pass on one rank; changes memory, never the gradient."""
    length_window: int = Field(16, ge=1)
    """Rows of similar length share a step inside windows of this many batches; 1 is a plain shuffle."""
    max_length: int | None = Field(1024, ge=2)
    """Longest row in tokens; None takes any length."""
    overlength: Overlength = "drop"
    """What happens to longer rows: drop (counted), truncate the end (counted), or error."""
    on_empty: OnEmpty = "drop"
    """What happens to rows without a token to learn: drop (counted, the first ones named), or error."""
    disable_dropout: bool = True
    """Train without dropout; false switches on lora_dropout and the dropout of the model's own config."""
    eval_steps: int | None = Field(None, ge=1)
    """Optimizer steps between evaluations; None evaluates at the end only."""
    seed: int = 0
    """Order of the rows."""

    @model_validator(mode="after")
    def _dropout_acts(self) -> "SFT":
        check_dropout(self.model, disable_dropout=self.disable_dropout)
        return self

    def build(self, ranks: Ranks) -> Job:
        """Load model and data; see `build`."""
        return build(self, ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows as tensors; `target_BT` marks the tokens the loss counts."""

    tokens: TokenBatch
    target_BT: Bool[Tensor, "B T"]

    def __len__(self) -> int:
        return len(self.target_BT)

    def counts(self) -> dict[str, Tensor]:
        """Target tokens."""
        return {"nll": self.target_BT.sum()}

    def rows(self, index_b: Tensor) -> "Batch":
        """The sub-batch of these rows."""
        tokens = self.tokens.rows(index_b)
        return Batch(tokens=tokens, target_BT=self.target_BT[index_b, : tokens.ids_BT.shape[1]])


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What the loop carries from step to step."""

    step: int = 0


def prepare(rows: Sequence[EncodedRow], device: torch.device) -> Batch:
    """Encoded rows -> tensors."""
    tokens = collate([row.token_ids for row in rows]).to(device)
    target_BT = role_mask([row.spans for row in rows], tokens.ids_BT.shape[1]).to(device)
    return Batch(tokens=tokens, target_BT=target_BT)


def loss(policy: nn.Module, batch: Batch) -> dict[str, Term]:
    """Negative log-likelihood per target token, in nats."""
    logp_BT = sequence_logp(policy, batch.tokens, batch.target_BT, temperature=1.0)
    return {"nll": Term(value_BT=-logp_BT, mask_BT=batch.target_BT)}


@torch.no_grad()
def evaluate(policy: nn.Module, rows: Sequence[EncodedRow], ranks: Ranks, batch_size: int) -> dict[str, float]:
    """Mean negative log-likelihood and perplexity of held-out rows, over target tokens of all ranks."""
    total = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    mine = rows[ranks.rank :: ranks.world]
    for start in range(0, len(mine), batch_size):
        batch = prepare(mine[start : start + batch_size], ranks.device)
        term = loss(policy, batch)["nll"]
        total += torch.stack([(term.value_BT * term.mask_BT).sum(), term.mask_BT.sum()]).double()
    total = ranks.sum(total)
    nll = float(total[0] / total[1].clamp(min=1))
    return {"eval/nll": nll, "eval/perplexity": math.exp(min(nll, 700.0))}


def train(
    policy: nn.Module,
    rows: Sequence[EncodedRow],
    eval_rows: Sequence[EncodedRow],
    optimizer: Optimizer,
    ranks: Ranks,
    cfg: SFT,
    steps: int,
    state: State,
) -> Iterator[Tick]:
    """One tick per optimizer step."""
    lengths = [len(row.token_ids) for row in rows]
    per_epoch = math.ceil(len(rows) / cfg.train_batch_size)
    plan_epoch, plan = -1, []
    while state.step < steps:
        epoch, index = divmod(state.step, per_epoch)
        if epoch != plan_epoch:
            plan_epoch = epoch
            plan = length_batches(
                lengths, batch_size=cfg.train_batch_size, window=cfg.length_window, seed=cfg.seed, epoch=epoch
            )
        chosen = plan[index]
        batch = prepare([rows[row] for row in chosen[ranks.rank :: ranks.world]], ranks.device)
        policy.train(not cfg.disable_dropout)
        learnt = update(optimizer, split_batch(batch, cfg.per_device_train_batch_size), lambda b: loss(policy, b), ranks=ranks)
        policy.eval()
        state = State(step=state.step + 1)
        facts = {
            "epoch": state.step / per_epoch,
            "num_tokens": float(sum(lengths[row] for row in chosen)),
            "perplexity": math.exp(min(learnt["loss/nll"], 700.0)),
        }
        if eval_rows and (state.step == steps or (cfg.eval_steps and state.step % cfg.eval_steps == 0)):
            facts |= evaluate(policy, eval_rows, ranks, cfg.per_device_train_batch_size)
        yield Tick(state=state, report={**learnt, **facts}, samples=[])


def build(cfg: SFT, ranks: Ranks) -> Job:
    """Load model and data and return the job that trains them."""
    tokenizer = load_tokenizer(cfg.model)
    template = load_template(tokenizer, template_of(cfg.model))
    policy = load_policy(cfg.model, device=ranks.device, seed=cfg.seed).to(ranks.device)
    loaded = load_conversations(cfg.data)
    max_length = within(cfg.max_length, position_limit(policy))
    train_set = encode_rows(loaded.rows, template, max_length, cfg.overlength, cfg.on_empty)
    notes = [*template.notes, *data_notes(loaded), f"encoding: {train_set.summary()}"]
    if not train_set.rows:
        raise DataError(
            f"{cfg.data.path}: no row is left to train on ({train_set.summary()}); "
            "raise max_length (up to the model's positions) or check the data"
        )
    eval_rows: tuple[EncodedRow, ...] = ()
    if cfg.eval_data is not None:
        eval_set = encode_rows(load_conversations(cfg.eval_data).rows, template, max_length, cfg.overlength, cfg.on_empty)
        eval_rows = eval_set.rows
        if not eval_rows:
            raise DataError(
                f"{cfg.eval_data.path}: no held-out row is left ({eval_set.summary()}); raise max_length or leave it out"
            )
        notes.append(f"held-out: {eval_set.summary()}")
    notes += template_notes(template)
    per_epoch = math.ceil(len(train_set.rows) / cfg.train_batch_size)
    steps = min(per_epoch * cfg.num_train_epochs, cfg.max_steps or per_epoch * cfg.num_train_epochs)
    optimizer = Optimizer([Group("policy", trainable(policy), cfg.optim)], steps)

    def export(folder: Path) -> None:
        save_model(policy, tokenizer, folder / "model", extra={"role": "policy", "template": template_of(cfg.model)})

    return Job(
        title="SFT",
        steps=steps,
        start=State(),
        train=lambda state: train(policy, train_set.rows, eval_rows, optimizer, ranks, cfg, steps, state),
        parts={"policy": ModelPart(policy), "optimizer": optimizer},
        export=export,
        notes=notes,
        closing=lambda state, report: sft_closing(report),
        restore_state=lambda raw: State(**raw),
        dump_state=asdict,
    )
