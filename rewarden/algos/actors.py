"""The models of a policy-gradient run: who samples, who scores, who is compared with whom."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rewarden.data.sources import Data, load_prompts
from rewarden.errors import ConfigError, DataError
from rewarden.models.ensemble import critic_folder
from rewarden.models.forward import sequence_logp
from rewarden.models.load import (
    Model,
    adapter_off,
    copy_frozen,
    load_policy,
    load_tokenizer,
    read_card,
    same_ids,
    template_of,
)
from rewarden.models.reward import RewardModel, load_reward_model
from rewarden.protocols import Scorer
from rewarden.rollout.hf import HFSampler, Sampling
from rewarden.runtime.ranks import Ranks
from rewarden.scoring import build_scorer
from rewarden.scoring.registry import resolve
from rewarden.text.render import Template, load_template
from rewarden.types import Rollout, TokenBatch

Head = Literal["saved", "fresh", "zero"]
"""A critic's head: that of its checkpoint, drawn, or all zeros, so that the first values are 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Actors:
    """Policy, reference, critic, scorer and sampler. `reference` is None when it is the policy with its adapter off."""

    policy: nn.Module
    reference: nn.Module | None
    critic: RewardModel | None
    scorer: Scorer
    sampler: HFSampler
    template: Template

    @torch.no_grad()
    def reference_logp(self, tokens: TokenBatch, mask_BT: Tensor, *, temperature: float) -> Tensor:
        """log pi_ref [B, T] of the masked tokens, 0 elsewhere."""
        if self.reference is not None:
            return sequence_logp(self.reference, tokens, mask_BT, temperature=temperature)
        with adapter_off(self.policy):
            return sequence_logp(self.policy, tokens, mask_BT, temperature=temperature)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Open rollouts that wait for the policy, and what was left out (reason -> count)."""

    rollouts: tuple[Rollout, ...]
    dropped: Mapping[str, int]
    where: str = ""

    def summary(self) -> str:
        """One line."""
        why = "".join(f", {n} {why}" for why, n in sorted(self.dropped.items()))
        return f"{len(self.rollouts)} prompts{why}" + (f" ({self.where})" if self.where else "")


def load_prompt_rollouts(data: Data, template: Template, max_prompt_length: int | None) -> Prompts:
    """Read prompts and render each once; prompts over the limit are dropped and counted, never cut."""
    loaded = load_prompts(data)
    dropped = Counter(loaded.dropped)
    kept = []
    for conversation in loaded.rows:
        rollout = template.start(conversation)
        if max_prompt_length is not None and len(rollout.token_ids) > max_prompt_length:
            dropped[f"longer than {max_prompt_length} tokens dropped"] += 1
        else:
            kept.append(rollout)
    if not kept:
        hint = "raise max_prompt_length, take a model with more positions, or check the data"
        raise DataError(f"{data.path}: no prompt is left ({dict(dropped)}); {hint}")
    return Prompts(rollouts=tuple(kept), dropped=dict(dropped), where=loaded.where())


def build_actors(
    *,
    policy: Model,
    reward: Mapping[str, Any],
    critic: Model | None,
    critic_head: Head | None,
    with_critic: bool,
    sampling: Sampling,
    head_seed: int,
    ranks: Ranks,
) -> Actors:
    """Load everything once, in eval mode (no dropout: the ratio of an unchanged policy is 1).

    The reference is the policy before training: the adapter-off policy when it has an adapter, else a frozen copy. The critic
    starts, when not given, from the reward model if that has the policy's tokenizer, else from the policy with a fresh head.
    """
    tokenizer = load_tokenizer(policy)
    template = load_template(tokenizer, template_of(policy))
    model = load_policy(policy, device=ranks.device, seed=head_seed).to(ranks.device)
    scorer = build_scorer(reward, "reward")
    critic_model = None
    if with_critic:
        spec, head = critic_start(policy, reward, critic, critic_head, tokenizer)
        if critic is not None and not same_ids(tokenizer, load_tokenizer(critic)):
            raise ConfigError(
                f"critic: {critic.model_name_or_path} has another tokenizer than the policy, whose tokens it has to read; "
                "give a critic of the policy's tokenizer, or leave critic out"
            )
        critic_model = load_reward_model(
            spec,
            num_heads=1,
            head="saved" if head == "saved" else "fresh",
            head_seed=head_seed,
            head_std=0.0 if head == "zero" else None,
            device=ranks.device,
        )
        critic_model.model.to(ranks.device)
    return Actors(
        policy=model,
        reference=None if policy.lora_r else copy_frozen(model),
        critic=critic_model,
        scorer=scorer,
        sampler=HFSampler(model, template, sampling),
        template=template,
    )


def critic_start(
    policy: Model,
    reward: Mapping[str, Any],
    critic: Model | None,
    critic_head: Head | None,
    tokenizer: Any,
) -> tuple[Model, Head]:
    """Which weights and head the critic starts from: (model, "saved", "fresh" or "zero")."""
    if critic is not None:
        return critic, critic_head or "saved"
    reward = resolve(reward)
    if reward.get("kind") == "reward_model":
        start = critic_folder(reward["path"])
        spec = policy.model_copy(update={"model_name_or_path": start, "gguf_file": None, "revision": None})
        if load_tokenizer(spec).get_vocab() == tokenizer.get_vocab():
            # A critic has one head; the body of an ensemble with several is a start all the same.
            one_head = int(read_card(start).get("num_heads", 1)) == 1
            return spec, critic_head or ("saved" if one_head else "fresh")
    if critic_head == "saved":
        raise ConfigError("critic_head is 'saved' but no critic with a head is given; set critic: {model_name_or_path: ...}")
    return policy, critic_head or "fresh"
