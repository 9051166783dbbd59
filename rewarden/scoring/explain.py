"""Why a conversation got its score: the text, the tokens, the position that is read, and what the end-of-turn token is worth.

A reward model is causal, so its score at any position is the score of the text up to there; all scores here come from the same
forward pass that scores a file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rewarden.scoring.answer import split_answer
from rewarden.scoring.reward_model import RewardModelScorer
from rewarden.text.trace import Piece
from rewarden.types import Conversation, Span

AS_SCORED = "as_scored"
AT_END_OF_TURN = "at_end_of_turn"
WITHOUT_END_OF_TURN = "without_end_of_turn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The scores read at a position of the row: one per member, their aggregate, and how far the members are apart.

    `std` is the population standard deviation of the members as the aggregate's rule sees them.
    """

    position: int
    scores: tuple[float, ...]
    value: float
    std: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One conversation as the reward model reads it.

    text: the exact string of the template. pieces: its tokens. spans: which of them belong to whom. readings: the scores
    "as_scored" (read at the last token), "at_end_of_turn" (where the template writes something behind that token) and
    "without_end_of_turn" (read at the last token of the answer); none when the status is not "ok". spelled: special tokens
    that the messages spell, which are read as plain text.
    """

    conversation: Conversation
    text: str
    pieces: tuple[Piece, ...]
    spans: tuple[Span, ...]
    readings: Mapping[str, Reading]
    spelled: int
    status: str = "ok"

    @property
    def scored_position(self) -> int:
        """Where the score is read: the last token."""
        return len(self.pieces) - 1

    @property
    def end_of_turn_position(self) -> int:
        """The end-of-turn token of the last answer."""
        return next(span for span in reversed(self.spans) if span.role == "assistant").stop - 1

    def span_at(self, position: int) -> Span:
        """The span that holds a token."""
        return next(span for span in self.spans if span.start <= position < span.stop)


def explain(scorer: RewardModelScorer, conversation: Conversation) -> Explanation:
    """The explanation of one conversation that ends with the assistant; one beyond the model's limit has no readings.

    Errors: ScoreError for a conversation that does not end with the assistant; DataError where the template refuses it.
    """
    split_answer(conversation)
    traced = scorer.template.trace(conversation)
    rollout = traced.rollout
    explanation = Explanation(
        conversation=conversation,
        text=traced.text,
        pieces=traced.pieces,
        spans=rollout.spans,
        readings={},
        spelled=traced.spelled,
        status="ok" if scorer.fits(rollout.token_ids) else "too_long",
    )
    if explanation.status != "ok":
        return explanation
    last, end = explanation.scored_position, explanation.end_of_turn_position
    positions = {AS_SCORED: last, AT_END_OF_TURN: end, WITHOUT_END_OF_TURN: end - 1}
    kept = {name: at for name, at in positions.items() if at >= 0 and not (name == AT_END_OF_TURN and end == last)}
    score_BK = scorer.member_scores([rollout.token_ids[: at + 1] for at in kept.values()])
    value_B, std_B = scorer.aggregated(score_BK, [conversation] * len(kept))
    read = zip(kept.items(), score_BK.tolist(), value_B.tolist(), std_B.tolist(), strict=True)
    readings = {
        name: Reading(position=at, scores=tuple(score_K), value=value, std=std) for (name, at), score_K, value, std in read
    }
    return replace(explanation, readings=readings)
