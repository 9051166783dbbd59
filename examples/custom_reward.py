"""A reward of your own, in two forms: a plain function, and a config that builds a scorer.

python examples/custom_reward.py       # score three answers with both

After `make demo`, whose policy and prompts this recipe takes:

rewarden run recipes/ppo_world.yaml reward.kind=function reward.path=examples/custom_reward.py:brief
rewarden run recipes/ppo_world.yaml "reward={kind: 'examples/custom_reward.py:Keywords', words: [thank, please]}"
"""

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from rewarden.protocols import Scorer
from rewarden.scoring import build_scorer
from rewarden.spec import Spec
from rewarden.types import Conversation, Message, Score


def brief(prompts: list[Any], completions: list[Any], **columns: list[Any]) -> list[float | None]:
    """Minus 0.1 per word beyond twelve; an answer without words is not judged. The signature is TRL's."""
    texts = [answer if isinstance(answer, str) else answer[-1]["content"] for answer in completions]
    return [0.0 - 0.1 * max(len(text.split()) - 12, 0) if text.split() else None for text in texts]


class Keywords(Spec):
    """Points for every listed word that the last answer holds."""

    words: list[str] = Field(min_length=1)
    """Words to look for; capital and small letters are the same."""
    points: float = 1.0
    """For each word found."""

    def build(self) -> Scorer:
        """What a recipe, or `build_scorer`, calls."""
        return KeywordScorer(self.words, self.points)


class KeywordScorer:
    """Anything with this method is a scorer; there is no class to inherit from."""

    def __init__(self, words: Sequence[str], points: float) -> None:
        self.words, self.points = [word.lower() for word in words], points

    def score(self, conversations: Sequence[Conversation]) -> list[Score]:
        """One score per conversation, in order; `parts` is logged beside the value."""
        scores = []
        for conversation in conversations:
            found = [word for word in self.words if word in conversation.messages[-1].text.lower()]
            parts = {word: float(word in found) for word in self.words}
            scores.append(Score(value=self.points * len(found), parts=parts))
        return scores


def main() -> None:
    question = Message(role="user", text="Could you tell me when the library opens?")
    answers = ["At nine. Thank you for asking!", "At nine, " + "and then again at nine, " * 5 + "every day.", ""]
    rows = [
        Conversation(id=str(place), messages=(question, Message(role="assistant", text=text)))
        for place, text in enumerate(answers)
    ]
    rewards: list[dict[str, Any]] = [
        {"kind": "function", "path": f"{__file__}:brief"},
        {"kind": f"{__file__}:Keywords", "words": ["thank", "please"]},
    ]
    for raw in rewards:
        for answer, score in zip(answers, build_scorer(raw).score(rows), strict=True):
            value = f"{score.value:+.2f}" if score.status == "ok" else score.status
            print(f"{raw['kind'].rpartition(':')[2]:10} {value:>14}  {answer[:50]!r}")


if __name__ == "__main__":
    main()
