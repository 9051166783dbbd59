"""Every switch of reward modelling, its bounds and its help."""

from typing import Literal

from pydantic import Field, model_validator

from rewarden.algos.reward_strength import Strength
from rewarden.algos.rows import check_dropout
from rewarden.data.sources import Data
from rewarden.models.ensemble_folder import Family
from rewarden.models.load import Model
from rewarden.runtime.job import Job
from rewarden.runtime.optim import Optim
from rewarden.runtime.ranks import Ranks
from rewarden.runtime.seed import seed_of
from rewarden.spec import Spec


class Reward(Spec):
    """A reward model from pairwise preferences."""

    model: Model
    """The model to start from (usually the SFT model); a scalar head replaces its LM head."""
    data: Data
    """Preference pairs: TRL's explicit or implicit prompt, or any format the reader knows."""
    eval_data: Data | None = None
    """Held-out pairs: accuracy with ties as half, its interval, and the longer-answer rule beside it."""
    optim: Optim = Optim(learning_rate=1e-5, lr_scheduler_type="cosine", warmup_steps=10)
    """Optimizer and schedule."""
    num_train_epochs: int = Field(1, ge=1)
    """Passes over the pairs."""
    max_steps: int | None = Field(None, ge=1)
    """Stop after this many optimizer steps, of each member."""
    train_batch_size: int = Field(32, ge=1)
    """Pairs per optimizer step, over all ranks."""
    per_device_train_batch_size: int = Field(32, ge=1)
    """Pairs per forward and backward pass on one rank."""
    length_window: int = Field(1, ge=1)
    """Pairs of similar length share a step inside windows of this many batches; 1 is a plain shuffle."""
    max_length: int | None = Field(1024, ge=2)
    """Longest side in tokens; both sides must fit."""
    overlength: Literal["drop", "error"] = "drop"
    """What happens to longer pairs: drop (counted) or error. Cutting would judge answers without their end."""
    num_heads: int = Field(1, ge=1)
    """Scores per text; more than one is a linear ensemble: K heads on one trunk, all trained together."""
    num_members: int = Field(1, ge=1)
    """Members of an ensemble, each trained by itself: K whole models one after another, or, with lora_r, K adapters and heads
    on one frozen trunk, in turn."""
    head: Literal["fresh", "saved"] = "fresh"
    """Draw the heads, or go on with those of the checkpoint: member k with head k of the linear ensemble it holds."""
    head_seed: int = 0
    """Seed of the fresh head, or of the fresh heads of a linear ensemble; members have their own."""
    member_seeds: tuple[int, ...] | None = None
    """A seed for each member, for its head, adapter, order of pairs and bootstrap (of a linear ensemble: its head). None makes
    them from `seed`."""
    bootstrap: bool = False
    """Train each member on as many pairs as there are, drawn from them with replacement."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Share of label mass moved to the other side."""
    margin_scale: float = Field(1.0, ge=0)
    """Factor on the data's `margin` column, or on the margin of `strength`; 0 ignores it."""
    margin_clip: tuple[float, float] | None = None
    """Lowest and highest margin, after scaling; margins far above the scores may make training unstable."""
    strength: Strength | None = None
    """What the preference strength of a vote does to the training pairs: turned labels, soft labels, margins."""
    lm_coef: float = Field(0.0, ge=0)
    """Weight of the LM loss: the negative log-likelihood of the chosen answer, by the LM head of the model to start from."""
    diversity_coef: float = Field(0.0, ge=0)
    """Weight of the diversity of a LoRA ensemble's adapters, which is made large."""
    diversity_scale_free: bool = False
    """Measure that diversity without the size of the adapters."""
    center_rewards_coefficient: float = Field(0.0, ge=0)
    """Weight of (r_chosen + r_rejected)^2, which pins the free offset of rewards near 0."""
    feature_cache_dir: str | None = None
    """Folder for the frozen lower layers' activations, computed once per row; needs lora_layers or trainable_layers."""
    disable_dropout: bool = True
    """Train without dropout, as TRL's RewardTrainer does by default."""
    eval_steps: int | None = Field(None, ge=1)
    """Optimizer steps between evaluations; None evaluates at the end only."""
    seed: int = 0
    """Order of the pairs."""

    @model_validator(mode="after")
    def _dropout_acts(self) -> "Reward":
        check_dropout(self.model, disable_dropout=self.disable_dropout)
        return self

    @model_validator(mode="after")
    def _one_kind_of_ensemble(self) -> "Reward":
        if self.num_heads > 1 and self.num_members > 1:
            raise ValueError(
                f"num_heads is {self.num_heads} and num_members is {self.num_members}; heads share one trunk, members are "
                "trained apart: set one of them"
            )
        if self.bootstrap and self.num_heads > 1:
            raise ValueError(
                f"bootstrap is set with num_heads {self.num_heads}; the heads of a linear ensemble learn from the same "
                "batches: use num_members, or leave bootstrap out"
            )
        if self.member_seeds is not None:
            wanted = max(self.num_heads, self.num_members)
            if len(self.member_seeds) != wanted:
                raise ValueError(f"member_seeds has {len(self.member_seeds)} seeds for {wanted} member(s); give one for each")
            if len(set(self.member_seeds)) < wanted:
                raise ValueError(
                    f"member_seeds is {list(self.member_seeds)}, in which a seed is repeated: those members would be the same "
                    "model; give each its own"
                )
        return self

    @model_validator(mode="after")
    def _objectives_can_act(self) -> "Reward":
        if self.margin_clip is not None and self.margin_clip[0] > self.margin_clip[1]:
            raise ValueError(f"margin_clip is {list(self.margin_clip)}; write the lower bound first")
        if self.lm_coef and self.model.trainable_layers == 0:
            raise ValueError(
                f"lm_coef is {self.lm_coef:g} and model.trainable_layers is 0: the scalar head alone trains, which the LM loss "
                "cannot change; train a layer or more, or set lm_coef: 0"
            )
        if self.diversity_coef and self.family != "lora":
            raise ValueError(
                f"diversity_coef is {self.diversity_coef:g} and the family is {self.family}; it compares the adapters of LoRA "
                "members: set num_members and model.lora_r, or diversity_coef: 0"
            )
        return self

    @property
    def family(self) -> Family:
        """How the members share weights; it follows from num_heads, num_members and lora_r."""
        if self.num_members > 1:
            return "lora" if self.model.lora_r else "independent"
        return "linear" if self.num_heads > 1 else "single"

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seed of each member that is trained by itself."""
        if self.member_seeds is not None:
            return self.member_seeds
        return tuple(seed_of(self.seed, "member", member) % 2**31 for member in range(self.num_members))

    def order_seed(self, member: int) -> int:
        """The seed of the order of pairs of a member, and of its bootstrap; the heads of a linear ensemble share one order."""
        alone = self.family == "single" and self.member_seeds is None
        return self.seed if alone or self.family == "linear" else self.seeds[member]

    def build(self, ranks: Ranks) -> Job:
        """Load model and data; see `rewarden.algos.reward.build`."""
        from rewarden.algos.reward import build  # every file of the algorithm reads this config, so it loads them last

        return build(self, ranks)
