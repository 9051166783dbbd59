"""The prompt by which a language model plays the user, and the reading of what it writes.

Follows REFUEL's user simulator (arXiv:2410.04612 and its code): one message that shows the dialogue so far, each message as
`### role: text`, and asks for a justification and then, under the label `Question:`, for the user's next words alone. What
stands behind the last label is the reply. The wording is ours. Where we differ: a reply without label or without text is
refused and asked for again, instead of being used whole; a system message, which no user sees, is not shown; a persona and
a signal to leave can be added.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from pydantic import Field, field_validator

from rewarden.errors import ConfigError
from rewarden.runtime.seed import seed_of
from rewarden.spec import Spec
from rewarden.types import Conversation, Message

REASON, LABEL = "Justification:", "Question:"


class Simulator(Spec):
    """How a language model plays the user."""

    personas: list[str] = Field(default_factory=list)
    """Who the user is, in words ("You are twelve and impatient."). Of several, each row draws one and keeps it."""
    persona_column: str | None = None
    """Column of the data with the persona of each row; it goes before `personas`."""
    max_turns: int | None = Field(None, ge=1)
    """Most messages of the user in a dialogue, the opening included; then the user leaves. None: as long as it is played."""
    stop_signal: str | None = Field(None, min_length=1)
    """Word such as [DONE] by which the model ends the dialogue; the prompt then says so. None: it never leaves by itself."""
    max_asks: int = Field(3, ge=1, le=20)
    """How often it is asked for a reply that can be used, each time with another seed, before the dialogue ends as failed."""
    on_missing_label: Literal["reject", "whole"] = "reject"
    """Without the label: ask again, or take the whole output, justification and all, as the reference code does."""
    on_truncated: Literal["reject", "keep"] = "reject"
    """A reply that hits the token limit: ask again, or use what is there, as the reference code does."""
    seed: int = Field(0, ge=0)
    """Which row draws which persona."""

    @field_validator("personas")
    @classmethod
    def _personas_have_words(cls, personas: list[str]) -> list[str]:
        if not all(persona.strip() for persona in personas):
            raise ConfigError("personas holds an empty one; describe it or leave it out")
        return personas

    def persona_of(self, dialogue: Conversation) -> str | None:
        """The persona of a dialogue: the same at every turn and in every branch of a row.

        Errors: ConfigError when `persona_column` is set and the row has no text there.
        """
        if self.persona_column is not None:
            persona = dialogue.meta.get(self.persona_column)
            if not isinstance(persona, str) or not persona.strip():
                raise ConfigError(
                    f"conversation {dialogue.id!r}: persona_column is {self.persona_column!r}, where this row has {persona!r}; "
                    "give every row a text there, or use personas"
                )
            return persona
        if not self.personas:
            return None
        return self.personas[seed_of("persona", self.seed, dialogue.id) % len(self.personas)]

    def prompt(self, dialogue: Conversation) -> str:
        """What the model is asked, for a dialogue that ends with the assistant."""
        return user_prompt(dialogue.messages, persona=self.persona_of(dialogue), stop_signal=self.stop_signal)

    def read(self, text: str, *, truncated: bool = False) -> "Said":
        """What the model's output says."""
        if truncated and self.on_truncated == "reject":
            return Said("truncated", "")
        return parse_question(text, on_missing_label=self.on_missing_label, stop_signal=self.stop_signal)


class Said(NamedTuple):
    """What a simulated user said: status "ok" with its text, "left", or "no_label", "empty", "truncated" without."""

    status: str
    text: str


def user_prompt(messages: Sequence[Message], *, persona: str | None = None, stop_signal: str | None = None) -> str:
    """The prompt that asks for the user's next message."""
    shown = "".join(f"### {message.role}: {message.text}\n\n" for message in messages if message.role != "system")
    parts = ["Below is a dialogue between a user and an assistant. Play the user, and write what the user asks or says next."]
    if persona:
        parts.append(f"This is the user you play: {persona.strip()}")
    parts.append(shown.rstrip())
    task = (
        "Answer with two fields. First say why the user would go on like this; then write, on a new line, only the user's next "
        "message, and nothing after it:"
    )
    form = f"{REASON} the reason\n{LABEL} the next message of the user"
    if stop_signal:
        form += f", or {stop_signal} if the user has nothing more to ask or say"
    return "\n\n".join([*parts, task, form])


def parse_question(text: str, *, on_missing_label: str = "reject", stop_signal: str | None = None) -> Said:
    """The user's words in a model's output: what follows the last `Question:`, without blanks around it.

    No label: "no_label", or with "whole" all of the text. Nothing there: "empty". The stop signal anywhere in it: "left".
    """
    _, label, question = text.rpartition(LABEL)
    if not label and on_missing_label == "reject":
        return Said("no_label", "")
    question = question.strip()
    if stop_signal and stop_signal in question:
        return Said("left", "")
    return Said("ok", question) if question else Said("empty", "")
