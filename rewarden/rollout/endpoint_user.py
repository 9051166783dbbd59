"""A user played by a model behind a chat endpoint."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from rewarden.rollout.simulated import SimulatedUser, Spoken
from rewarden.rollout.user_prompt import Simulator
from rewarden.runtime.endpoint import ChatRequest, Endpoint, EndpointClient
from rewarden.spec import Spec
from rewarden.types import Message


class EndpointSimulator(Spec):
    """A user played by a model behind an OpenAI-compatible chat endpoint."""

    endpoint: Endpoint
    """Where the model answers."""
    simulator: Simulator = Simulator()
    """How it plays the user."""
    max_completion_length: int = Field(1024, ge=1)
    """Most tokens of one output, the justification included."""
    temperature: float | None = Field(0.8, ge=0)
    """Of the user alone, not of the policy; 0.8 is what REFUEL's user was sampled with. None leaves it to the server."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Nucleus; None leaves it to the server."""

    def build(self, *, policy: Any = None, folder: Path | None = None) -> SimulatedUser:
        """The user. Replies are kept in `user_replies.jsonl` of `folder`, unless the endpoint names a file of its own."""
        return SimulatedUser(
            EndpointVoice(
                self.endpoint.build(cache=folder / "user_replies.jsonl" if folder else None),
                max_tokens=self.max_completion_length,
                temperature=self.temperature,
                top_p=self.top_p,
            ),
            self.simulator,
        )


class EndpointVoice:
    """Prompts to a chat endpoint, as many at once as it allows; satisfies `Voice`. `client.usage` counts what it did."""

    def __init__(
        self, client: EndpointClient, *, max_tokens: int, temperature: float | None = None, top_p: float | None = None
    ) -> None:
        self.client = client
        self.max_tokens = max_tokens
        self.temperature = temperature
        self.top_p = top_p

    def speak(self, prompts: Sequence[str], seeds: Sequence[int], ids: Sequence[str]) -> list[Spoken]:
        """One output per prompt; the status is that of the reply. Errors: as `EndpointClient.complete`."""
        requests = [
            ChatRequest(
                messages=(Message(role="user", text=prompt),),
                max_tokens=self.max_tokens,
                temperature=self.temperature,
                top_p=self.top_p,
                seed=seed,
            )
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        return [Spoken(status=reply.status, text=reply.text) for reply in self.client.complete(requests)]
