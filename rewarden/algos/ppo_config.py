"""What a PPO recipe says: every switch of the algorithm with its bounds, and which of them exclude each other."""

from typing import Any

from pydantic import Field, field_validator, model_validator

from rewarden.algos.actors import Head
from rewarden.algos.rows import check_dropout
from rewarden.algos.scores import RewardNorm, calibration
from rewarden.algos.selection import Selection
from rewarden.data.sources import Data
from rewarden.errors import ConfigError
from rewarden.models.load import Model
from rewarden.rollout.hf import Sampling
from rewarden.runtime.job import Job
from rewarden.runtime.optim import Optim
from rewarden.runtime.ranks import Ranks
from rewarden.scoring import parse_scorer
from rewarden.spec import Spec


class PPO(Spec):
    """PPO with a critic, a frozen reference and any scorer."""

    policy: Model
    """The SFT model. With lora_r > 0 the reference is the policy with its adapter off; else a frozen copy."""
    reward: dict[str, Any]
    """A scorer: {kind: reward_model, path: ...}, {kind: function, ...}, rules, or "my_file.py:MyReward"."""
    data: Data
    """Prompts; other columns are passed on to the scorer."""
    eval_data: Data | None = None
    """Separate prompts on which steps are compared; without them the last step is exported."""
    critic: Model | None = None
    """What the critic starts from; None takes the reward model (same tokenizer) or else the policy with a fresh head."""
    critic_head: Head | None = None
    """Whether the critic's head is read from its checkpoint, drawn (fresh) or zero; None reads it where there is one."""
    optim: Optim = Optim(learning_rate=3e-6)
    """Optimizer and schedule of the policy."""
    critic_optim: Optim = Optim(learning_rate=9e-6)
    """Optimizer and schedule of the critic; its gradient is clipped on its own."""
    sampling: Sampling = Sampling(max_completion_length=128)
    """How answers are drawn; the policy that is optimised is the one at this temperature, without filters."""
    max_prompt_length: int | None = Field(512, ge=1)
    """Longer prompts are dropped and counted."""
    max_steps: int = Field(20, ge=1)
    """Rounds of sampling and learning."""
    rollout_batch_size: int = Field(128, ge=2)
    """Prompts per round, over all ranks."""
    mini_batch_size: int = Field(32, ge=1)
    """Rollouts per optimizer step, over all ranks."""
    num_ppo_epochs: int = Field(2, ge=1)
    """Passes over each round's rollouts."""
    per_device_train_batch_size: int = Field(32, ge=1)
    """Rollouts per forward and backward pass on one rank; changes memory, never the gradient."""
    beta: float = Field(0.05, ge=0)
    """Weight of the per-token KL penalty to the reference, relative to processed scores."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount per token."""
    lam: float = Field(0.95, ge=0, le=1)
    """GAE lambda."""
    cliprange: float | None = Field(0.2, gt=0, lt=1)
    """Lower (and, unless cliprange_high is set, upper) clip of the ratio; None does not clip."""
    cliprange_high: float | None = Field(None, gt=0)
    """Upper clip of the ratio."""
    cliprange_value: float | None = Field(0.2, gt=0)
    """How far the value may move from its old value; None does not clip."""
    vf_coef: float = Field(1.0, ge=0)
    """Weight of the value loss."""
    reward_norm: RewardNorm = "running"
    """Scores less a mean, over a std: of all scores so far (running), of `reward_moments` (fixed), or as they are (none)."""
    reward_moments: tuple[float, float] | None = None
    """Mean and std for reward_norm: fixed; None takes those of the reward model's own evaluation."""
    reward_clip: float | None = Field(3.0, gt=0)
    """Processed scores are cut to +- this (counted); None does not cut."""
    whiten_advantages: bool = True
    """Advantages get mean 0 and std 1 over all sampled tokens of the round."""
    missing_eos_penalty: float | None = Field(None, ge=0)
    """Subtracted from the raw score of an answer that was cut by the token limit."""
    eval_steps: int = Field(1, ge=1)
    """Rounds between evaluations on eval_data."""
    selection: Selection = Selection()
    """How the exported step is chosen."""
    num_sample_generations: int = Field(4, ge=0)
    """Transcripts kept per round in samples.parquet."""
    seed: int = 0
    """Order of prompts, sampling and minibatches."""

    @field_validator("sampling")
    @classmethod
    def _a_distribution(cls, sampling: Sampling) -> Sampling:
        if sampling.temperature <= 0:
            raise ValueError("temperature 0 has no probabilities to take a ratio of; use a temperature above 0")
        return sampling

    @field_validator("policy", "critic")
    @classmethod
    def _no_dropout(cls, model: Model | None) -> Model | None:
        if model is not None:
            check_dropout(model, disable_dropout=True)  # the ratio of an unchanged policy must be 1
        return model

    @field_validator("reward_norm", mode="before")
    @classmethod
    def _switch(cls, value: Any) -> Any:
        return {True: "running", False: "none"}[value] if isinstance(value, bool) else value

    @field_validator("reward_moments")
    @classmethod
    def _has_a_spread(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        if value is not None and value[1] <= 0:
            raise ValueError("the std must be above 0")
        return value

    @field_validator("reward")
    @classmethod
    def _known_scorer(cls, raw: dict[str, Any]) -> dict[str, Any]:
        parse_scorer(raw, "reward")
        return raw

    @model_validator(mode="after")
    def _minibatches_fit(self) -> "PPO":
        if self.mini_batch_size > self.rollout_batch_size:
            got, most = self.mini_batch_size, self.rollout_batch_size
            raise ConfigError(f"mini_batch_size is {got}; give at most rollout_batch_size={most}")
        if self.reward_moments is not None and self.reward_norm != "fixed":
            raise ConfigError(f"reward_moments is set and reward_norm is {self.reward_norm}; they belong to reward_norm: fixed")
        return self

    @property
    def num_minibatches(self) -> int:
        """Optimizer steps of one pass over a round; the last one may be smaller."""
        return -(-self.rollout_batch_size // self.mini_batch_size)

    def resolved(self) -> "PPO":
        """With the mean and std that a fixed normalisation takes from the reward model's card written out.

        Errors: ConfigError when reward_norm is fixed and there are none to take.
        """
        if self.reward_norm != "fixed" or self.reward_moments is not None:
            return self
        return self.model_copy(update={"reward_moments": calibration(self.reward)})

    def build(self, ranks: Ranks) -> Job:
        """Load models and prompts; see `rewarden.algos.ppo.build`."""
        from rewarden.algos.ppo import build  # every file of the algorithm reads this config, so it loads them last

        return build(self, ranks)
