"""A learned reward: a sequence classifier that reads the text in its own words.

The conversation is rendered from its text with the reward model's own tokenizer and template, so policy and reward model may
come from different families. A member's score is its head's output at the last real token of the render, the same ids that
reward training sees; an ensemble's is the aggregate of its members. Distinct renders are scored once, longest first, in
sub-batches of a bounded number of padded tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from rewarden.errors import ConfigError, ScoreError
from rewarden.maths import disagreement
from rewarden.models.ensemble import RewardEnsemble, load_ensemble
from rewarden.models.load import Model
from rewarden.scoring.aggregate import GROUP_NEEDED, NO_SCALE, Aggregate, comparable
from rewarden.scoring.answer import ok, refuse_not_finite, shown, split_answer, where_of, without_value
from rewarden.spec import Spec
from rewarden.text.collate import collate
from rewarden.text.render import load_template
from rewarden.types import Conversation, Message, Score

Ids = tuple[int, ...]


class LearnedReward(Spec):
    """A reward model on disk or on the hub, single or an ensemble, with its own tokenizer and template."""

    path: str
    """Folder or hub id of the reward model: a sequence classifier, a PEFT adapter of one, or an ensemble of Rewarden."""
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
    aggregate: Aggregate = Aggregate()
    """How the scores of an ensemble's members become one."""
    reference_column: str = "reference"
    """The column with the text of a reference answer, for aggregate.center: reference."""

    def build(self) -> "RewardModelScorer":
        """Load model, tokenizer and template, frozen.

        Errors: ConfigError for an aggregate that this model's members do not allow, or that needs more than one text at a time.
        """
        device = _device(self.device)
        members = load_ensemble(self.model(), device=device).to(device)
        return RewardModelScorer(
            members,
            max_length=self.max_length,
            max_tokens=self.max_tokens,
            aggregate=self.aggregate,
            reference_column=self.reference_column,
            device=device,
        )

    def model(self) -> Model:
        """The `model:` part that describes it."""
        fields = {"model_name_or_path": self.path, "revision": self.revision, "dtype": self.dtype}
        return Model.model_validate(fields if self.template is None else fields | {"template": self.template})


class RewardModelScorer:
    """Scores conversations with a reward model, single or an ensemble; dropout is switched off.

    `members` of a score are what each member gives, `value` is their aggregate, and `parts["std"]` the population standard
    deviation of the members as the rule sees them. A text longer than `max_length` (or than the model has positions) gets
    status "too_long"; nothing is cut.
    """

    def __init__(
        self,
        members: RewardEnsemble,
        *,
        max_length: int | None = None,
        max_tokens: int = 4096,
        aggregate: Aggregate | None = None,
        reference_column: str = "reference",
        device: torch.device | str = "cpu",
    ) -> None:
        self.members = members
        self.template = load_template(members.tokenizer, members.template_kind, generates=False)
        limits = (max_length, members.num_positions)
        self.max_length = min((limit for limit in limits if limit is not None), default=None)
        self.max_tokens = max_tokens
        self.aggregate = aggregate or Aggregate()
        self.reference_column = reference_column
        self.device = torch.device(device)
        self.notes = _notes(self.aggregate, members)
        for module in members.modules():
            module.eval()

    def score(self, conversations: Sequence[Conversation]) -> list[Score]:
        """One score per conversation, in order.

        Errors: ScoreError for a conversation that does not end with the assistant, or a score that is not finite.
        """
        rows = [self._rendered(row) for row in conversations]
        there = [all(self.fits(ids) for ids in row.renders) for row in rows]
        usable = [row for row, fit in zip(rows, there, strict=True) if fit]
        scores = self._score_distinct({ids for row in usable for ids in row.renders})
        for row in usable:
            for ids in row.renders:
                refuse_not_finite(scores[ids].tolist(), row.conversation, "reward model")
        found = iter(self._scores(usable, scores))
        return [next(found) if fit else without_value("too_long") for fit in there]

    def fits(self, ids: Ids) -> bool:
        """Whether a render is short enough to be scored."""
        return self.max_length is None or len(ids) <= self.max_length

    def member_scores(self, ids: Sequence[Ids]) -> Float[Tensor, "B K"]:
        """What each member gives for rendered texts, raw, in one pass; float32 on the CPU."""
        return self.members.score(collate(ids).to(self.device)).float().cpu()

    def aggregated(self, score_BK: Float[Tensor, "B K"], rows: Sequence[Conversation]) -> tuple[Tensor, Tensor]:
        """(values, spreads), both [B], of raw member scores of texts of these conversations.

        Errors: ScoreError where a reference answer is asked for and a row has none.
        """
        if self.aggregate.center != "reference":
            return self._aggregated(score_BK, None)
        references = [self.template.render(self._reference(row)).token_ids for row in rows]
        found = self._score_distinct(set(references))
        return self._aggregated(score_BK, torch.stack([found[ids] for ids in references]))

    def _aggregated(self, score_BK: Tensor, reference_BK: Tensor | None) -> tuple[Tensor, Tensor]:
        seen_BK = comparable(score_BK, self.aggregate, calibration=self.members.calibration, reference_BK=reference_BK)
        return self.aggregate.of_members()(seen_BK), disagreement(seen_BK)

    def _rendered(self, row: Conversation) -> "_Rendered":
        split_answer(row)
        rows = (row, self._reference(row)) if self.aggregate.center == "reference" else (row,)
        return _Rendered(row, tuple(self.template.render(one).token_ids for one in rows))

    def _reference(self, row: Conversation) -> Conversation:
        text = row.meta.get(self.reference_column)
        if not isinstance(text, str):
            raise ScoreError(
                f"{where_of(row)}: its column {self.reference_column!r} is {text!r}; aggregate.center: reference needs the "
                f"text of an answer there\n{shown(row)}"
            )
        return replace(row, messages=(*row.messages[:-1], Message(role="assistant", text=text)))

    @torch.no_grad()
    def _score_distinct(self, renders: set[Ids]) -> dict[Ids, Float[Tensor, " K"]]:
        scores: dict[Ids, Tensor] = {}
        for rows in sub_batches(renders, max_tokens=self.max_tokens):
            scores |= dict(zip(rows, self.member_scores(rows), strict=True))
        return scores

    def _scores(self, rows: Sequence["_Rendered"], scores: Mapping[Ids, Tensor]) -> list[Score]:
        """The scores of rows whose member scores are all finite."""
        if not rows:
            return []
        score_BK, *reference = (
            torch.stack([scores[ids] for ids in column]) for column in zip(*(row.renders for row in rows), strict=True)
        )
        value_B, std_B = self._aggregated(score_BK, reference[0] if reference else None)
        several = score_BK.shape[1] > 1
        return [
            ok(value, row.conversation, "reward model", members=members, parts={"std": std} if several else {})
            for row, members, value, std in zip(rows, score_BK.tolist(), value_B.tolist(), std_B.tolist(), strict=True)
        ]


class _Rendered(NamedTuple):
    """A conversation, its render, and that of the reference answer where the aggregate asks for it."""

    conversation: Conversation
    renders: tuple[Ids, ...]


def _notes(aggregate: Aggregate, members: RewardEnsemble) -> tuple[str, ...]:
    """What a user should know about the aggregate, before the first score.

    Errors: ConfigError for an aggregate that these members do not allow.
    """
    known = members.calibration is not None
    aggregate.check_members(members.num_members)
    center = aggregate.centering(members.num_members, has_group=False, has_calibration=known)
    if center == "group":
        raise ConfigError(GROUP_NEEDED)
    if aggregate.scale and not known:
        raise ConfigError(NO_SCALE)
    if aggregate.center == "auto" and aggregate.rule != "mean" and members.num_members > 1 and center == "none":
        return (
            f"its {members.num_members} members are not centered before {aggregate.rule}: the model holds no moments of its "
            "scores; where members differ by a constant, that constant decides",
        )
    return ()


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


def _device(name: str) -> torch.device:
    if name != "auto":
        try:
            torch.empty(0, device=name)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            problem = str(error).splitlines()[0]
            raise ConfigError(f"device is {name!r}, which cannot be used here ({problem}); use cpu, or auto") from error
        return torch.device(name)
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
