"""A learned reward: a sequence classifier that reads the text in its own words.

The conversation is rendered from its text with the reward model's own tokenizer and template, so policy and reward model may
come from different families. The score is the head's output at the last real token of the render, the same ids that
reward training sees. Distinct renders are scored once, longest first, in sub-batches of a bounded number of padded tokens.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from rewarden.errors import ConfigError
from rewarden.maths import mean
from rewarden.models.load import Model, freeze
from rewarden.models.reward import RewardModel, load_reward_model
from rewarden.models.trunk import position_limit
from rewarden.scoring.answer import ok, split_answer, without_value
from rewarden.spec import Spec
from rewarden.text.collate import collate
from rewarden.text.render import load_template
from rewarden.types import Conversation, Score, TokenBatch

Ids = tuple[int, ...]


class LearnedReward(Spec):
    """A reward model on disk or on the hub, with its own tokenizer and template."""

    path: str
    """Folder or hub id of the reward model: a sequence classifier, or a PEFT adapter of one."""
    revision: str | None = None
    """Hub revision."""
    template: str | None = None
    """How conversations are written for it; None takes what its rewarden.json says, or else its chat template."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Weights' type; auto is float32 on a CPU. Scores are float32 in any case."""
    max_length: int | None = Field(None, ge=2)
    """Longest render in tokens; a longer text gets status "too_long". None: as many as the model has positions for."""
    max_tokens: int = Field(4096, ge=1)
    """Padded tokens per forward pass; changes memory and speed, never the score."""
    device: str = "auto"
    """Where it runs; auto is this process's GPU when there is one, else the CPU."""

    def build(self) -> "RewardModelScorer":
        """Load model, tokenizer and template, frozen."""
        device = _device(self.device)
        reward_model = load_reward_model(self.model(), device=device)
        freeze(reward_model.model).to(device)
        return RewardModelScorer(reward_model, max_length=self.max_length, max_tokens=self.max_tokens)

    def model(self) -> Model:
        """The `model:` part that describes it."""
        fields = {"model_name_or_path": self.path, "revision": self.revision, "dtype": self.dtype}
        return Model.model_validate(fields if self.template is None else fields | {"template": self.template})


class RewardModelScorer:
    """Scores conversations with a reward model; dropout is switched off.

    `members` holds one score per head, `value` is their mean. A text longer than `max_length` (or than the model has
    positions) gets status "too_long"; nothing is cut.
    """

    def __init__(self, reward_model: RewardModel, *, max_length: int | None = None, max_tokens: int = 4096) -> None:
        self.reward_model = reward_model
        self.template = load_template(reward_model.tokenizer, reward_model.template_kind, generates=False)
        limits = (max_length, position_limit(reward_model.model))
        self.max_length = min((limit for limit in limits if limit is not None), default=None)
        self.max_tokens = max_tokens
        reward_model.model.eval()

    def score(self, conversations: Sequence[Conversation]) -> list[Score]:
        """One score per conversation, in order.

        Errors: ScoreError for a conversation that does not end with the assistant, or a score that is not finite.
        """
        renders = [self._render(row) for row in conversations]
        scores = self._score_distinct({ids for ids in renders if self.fits(ids)})
        return [
            self._score(row, scores[ids]) if self.fits(ids) else without_value("too_long")
            for row, ids in zip(conversations, renders, strict=True)
        ]

    def fits(self, ids: Ids) -> bool:
        """Whether a render is short enough to be scored."""
        return self.max_length is None or len(ids) <= self.max_length

    def _render(self, row: Conversation) -> Ids:
        split_answer(row)
        return self.template.render(row).token_ids

    @torch.no_grad()
    def _score_distinct(self, renders: set[Ids]) -> dict[Ids, Float[Tensor, " K"]]:
        scores: dict[Ids, Tensor] = {}
        for rows in sub_batches(renders, max_tokens=self.max_tokens):
            score_BK = self.reward_model.score(_on_device(collate(rows), self.reward_model.model)).float().cpu()
            scores |= dict(zip(rows, score_BK, strict=True))
        return scores

    def _score(self, row: Conversation, score_K: Float[Tensor, " K"]) -> Score:
        value = float(mean(score_K.unsqueeze(0))[0])
        return ok(value, row, "reward model", members=score_K.tolist())


def sub_batches(renders: set[Ids], *, max_tokens: int) -> Iterator[list[Ids]]:
    """Longest first, in groups whose row count times longest row stays within `max_tokens`; a longer row goes alone.

    Equal lengths are ordered by their ids, so the groups do not depend on the order in which texts came.
    """
    ordered = sorted(renders, key=lambda ids: (-len(ids), ids))
    start = 0
    while start < len(ordered):
        size = max(1, max_tokens // max(1, len(ordered[start])))
        yield ordered[start : start + size]
        start += size


def _on_device(tokens: TokenBatch, model: nn.Module) -> TokenBatch:
    device = next(model.parameters()).device
    return TokenBatch(ids_BT=tokens.ids_BT.to(device), mask_BT=tokens.mask_BT.to(device), length_B=tokens.length_B.to(device))


def _device(name: str) -> torch.device:
    if name != "auto":
        try:
            torch.empty(0, device=name)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            problem = str(error).splitlines()[0]
            raise ConfigError(f"device is {name!r}, which cannot be used here ({problem}); use cpu, or auto") from error
        return torch.device(name)
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
