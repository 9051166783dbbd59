"""A user played by a language model, wherever that model runs."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from rewarden.errors import UserError
from rewarden.rollout.ask import Answer
from rewarden.rollout.user_prompt import Simulator
from rewarden.runtime.seed import seed_of
from rewarden.types import Conversation, Message

ASK_AGAIN = frozenset({"no_label", "empty", "truncated", "refused"})
"""What another draw may mend; the rest (a prompt that is too long, a server that fails) stays as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """The output of a model to one prompt: "ok", "truncated", or another status that says why there is no text."""

    status: str
    text: str = ""


@runtime_checkable
class Voice(Protocol):
    """A language model that continues prompts."""

    def speak(self, prompts: Sequence[str], seeds: Sequence[int], ids: Sequence[str]) -> list[Spoken]:
        """One output per prompt, in order; `ids` name the dialogues in messages."""
        ...


class SimulatedUser:
    """Plays the user through a `Voice` with the prompt of a `Simulator`; satisfies `protocols.User` and answers many at once.

    `counts` says over the life of the user how often it was asked ("asked", of which "again"), and how its dialogues went on:
    "replied", "left" by the stop signal, "turn_limit", or the failure.
    """

    def __init__(self, voice: Voice, simulator: Simulator) -> None:
        self.voice = voice
        self.simulator = simulator
        self.counts: Counter[str] = Counter()

    def reply(self, dialogue: Conversation, seed: int) -> Message | None:
        """The user's next message, or None to leave. Errors: UserError when no reply could be used."""
        (answer,) = self.replies([dialogue], [seed])
        if answer.failed:
            raise UserError(f"conversation {dialogue.id!r}: the simulated user gave no reply ({answer.failed})", answer.failed)
        return answer.message

    def replies(self, dialogues: Sequence[Conversation], seeds: Sequence[int]) -> list[Answer]:
        """One answer per dialogue, in order: those who still go on are asked together, failed replies again with new seeds."""
        answers = [Answer()] * len(dialogues)
        waiting = [i for i, dialogue in enumerate(dialogues) if not self._is_done(dialogue)]
        self.counts["turn_limit"] += len(dialogues) - len(waiting)
        for attempt in range(self.simulator.max_asks):
            if not waiting:
                break
            said = self._said([dialogues[i] for i in waiting], [_again(seeds[i], attempt) for i in waiting])
            self.counts["asked"] += len(waiting)
            self.counts["again"] += len(waiting) if attempt else 0
            answers = _with(answers, waiting, said)
            waiting = [i for i in waiting if answers[i].failed in ASK_AGAIN]
        for answer, dialogue in zip(answers, dialogues, strict=True):
            if answer.failed or answer.message:
                self.counts[answer.failed or "replied"] += 1
            elif not self._is_done(dialogue):
                self.counts["left"] += 1
        return answers

    def report(self, area: str = "user") -> dict[str, float]:
        """`counts` as numbers of a report, under `area/`."""
        return {f"{area}/{name}": float(count) for name, count in sorted(self.counts.items())}

    def _is_done(self, dialogue: Conversation) -> bool:
        most = self.simulator.max_turns
        return most is not None and sum(message.role == "user" for message in dialogue.messages) >= most

    def _said(self, dialogues: Sequence[Conversation], seeds: Sequence[int]) -> list[Answer]:
        prompts = [self.simulator.prompt(dialogue) for dialogue in dialogues]
        return [self._answer(spoken) for spoken in self.voice.speak(prompts, seeds, [dialogue.id for dialogue in dialogues])]

    def _answer(self, spoken: Spoken) -> Answer:
        if spoken.status not in ("ok", "truncated"):
            return Answer(failed=spoken.status)
        status, text = self.simulator.read(spoken.text, truncated=spoken.status == "truncated")
        if status == "left":
            return Answer()
        return Answer(message=Message(role="user", text=text)) if status == "ok" else Answer(failed=status)


def _again(seed: int, attempt: int) -> int:
    return seed if attempt == 0 else seed_of("ask again", seed, attempt)


def _with(answers: Sequence[Answer], places: Sequence[int], said: Sequence[Answer]) -> list[Answer]:
    at = dict(zip(places, said, strict=True))
    return [at.get(place, answer) for place, answer in enumerate(answers)]
