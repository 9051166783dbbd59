"""A user played by a model in this process: the policy itself, or another with its own tokenizer and template."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from rewarden.errors import ConfigError
from rewarden.models.load import Model, load_policy, load_tokenizer, template_of
from rewarden.protocols import Sampler
from rewarden.rollout.hf import HFSampler, Sampling
from rewarden.rollout.simulated import SimulatedUser, Spoken
from rewarden.rollout.user_prompt import Simulator
from rewarden.spec import Spec
from rewarden.text.render import Template, load_template
from rewarden.types import Conversation, Message, Rollout


class ModelSimulator(Spec):
    """A user played by a model on this machine."""

    model: Model | None = None
    """The user's own model, with its own tokenizer and template; None takes the policy as it stands."""
    sampling: Sampling = Sampling(max_completion_length=1024, temperature=0.8)
    """How the user speaks, apart from how the policy does."""
    simulator: Simulator = Simulator()
    """How the model plays the user."""

    def build(self, *, policy: HFSampler | None = None, folder: Path | None = None) -> SimulatedUser:
        """The user. Errors: ConfigError without a model and without a policy to stand in."""
        if self.model is None and policy is None:
            raise ConfigError(
                "user: model is missing and no policy is at hand to play the user; name one by model_name_or_path"
            )
        if self.model is None:
            assert policy is not None
            assert isinstance(policy.template, Template)
            # A template of its own: `facts` of the policy's counts the policy's rows.
            template = load_template(policy.template.tokenizer, policy.template.name)
            return SimulatedUser(SamplerVoice(HFSampler(policy.model, template, self.sampling), template), self.simulator)
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        template = load_template(load_tokenizer(self.model), template_of(self.model))
        model = load_policy(self.model, device=device).to(device).eval()
        return SimulatedUser(SamplerVoice(HFSampler(model, template, self.sampling), template), self.simulator)


@runtime_checkable
class PromptTemplate(Protocol):
    """What a voice needs of a `text.Template`."""

    def start(self, conversation: Conversation) -> Rollout:
        """The conversation and a generation prompt."""
        ...


class SamplerVoice:
    """Prompts to a sampler, all in one batch, rendered by the sampler's own template; satisfies `Voice`."""

    def __init__(self, sampler: Sampler, template: PromptTemplate) -> None:
        self.sampler = sampler
        self.template = template

    def speak(self, prompts: Sequence[str], seeds: Sequence[int], ids: Sequence[str]) -> list[Spoken]:
        """One output per prompt: "truncated" when the token limit or the context cut it, "too_long" when nothing fits."""
        opened = [
            self.template.start(Conversation(id=name, messages=(Message(role="user", text=prompt),)))
            for name, prompt in zip(ids, prompts, strict=True)
        ]
        most = getattr(self.sampler, "num_positions", None)
        fitting = [i for i, rollout in enumerate(opened) if most is None or len(rollout.token_ids) < most]
        sampled = self.sampler.sample([opened[i] for i in fitting], seeds=[seeds[i] for i in fitting]) if fitting else []
        spoken = dict(zip(fitting, map(_spoken, sampled), strict=True))
        return [spoken.get(i, Spoken(status="too_long")) for i in range(len(prompts))]


def _spoken(rollout: Rollout) -> Spoken:
    status = "truncated" if rollout.stop == "length" else "ok"
    return Spoken(status=status, text=rollout.conversation.messages[-1].text)
