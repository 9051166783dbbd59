"""Who trains in each step, for each way in which the members of an ensemble share their weights.

    Together     one model, or K heads on one trunk: every step trains all of them
    InTurn       K adapters and heads on one frozen trunk: members take steps in turn, each with an optimizer of its own
    OneByOne     K whole models, one after another: only the current one is in memory, finished ones lie in the run folder

A step is one optimizer step of one member. Members never meet: each depends on its own seed and on the data alone.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from peft import PeftModel
from torch import Tensor

from rewarden.algos.reward_config import Reward
from rewarden.algos.reward_evaluation import Exam
from rewarden.algos.reward_parts import Optimizers, Scores
from rewarden.algos.reward_start import load_member
from rewarden.errors import ConfigError, ResumeError
from rewarden.models.adapters import select_adapter
from rewarden.models.ensemble_folder import save_adapted_members, save_independent
from rewarden.models.features import FeatureCache
from rewarden.models.folder import CARD
from rewarden.models.load import save_model, template_of, trainable
from rewarden.models.members import member_name, start_heads, trunk_hash
from rewarden.models.parts import ModelPart
from rewarden.models.reward import RewardModel
from rewarden.protocols import Part
from rewarden.runtime.optim import Group, Optimizer
from rewarden.runtime.ranks import Ranks


@runtime_checkable
class Team(Protocol):
    """The members of a run.

    model: what is in use now. features: its cached activations. num_turns: members that are trained by themselves.
    """

    model: RewardModel
    features: FeatureCache | None
    num_turns: int

    def enter(self, folder: Path) -> None:
        """A folder in which finished members may be kept."""
        ...

    def turn(self, step: int) -> tuple[int, int]:
        """(member, step of that member) of a step of the run."""
        ...

    def take(self, member: int, inner: int) -> Optimizer:
        """Put a member in use for its step `inner`; returns its optimizer."""
        ...

    def finish(self, member: int) -> Float[Tensor, "N 2 K"]:
        """After a member's last step: keep what is needed of it; returns its scores of the exam."""
        ...

    def scores(self) -> Float[Tensor, "N 2 K"]:
        """The scores of the exam by all members, once all have finished."""
        ...

    def parts(self) -> dict[str, Part]:
        """What a checkpoint holds."""
        ...

    def export(self, folder: Path) -> None:
        """Write the checkpoint of all members to `folder`."""
        ...


def optimizer_of(model: RewardModel, cfg: Reward, steps: int) -> Optimizer:
    """AdamW over what trains now."""
    return Optimizer([Group("reward", trainable(model.model), cfg.optim)], steps)


def features_of(model: RewardModel, cfg: Reward) -> FeatureCache | None:
    """The cache of frozen lower layers, where the recipe wants one."""
    return FeatureCache(cfg.feature_cache_dir, model.model) if cfg.feature_cache_dir else None


class Together:
    """A single model, or a linear ensemble."""

    num_turns = 1

    def __init__(self, cfg: Reward, model: RewardModel, exam: Exam, steps: int) -> None:
        self.cfg, self.model, self.exam = cfg, model, exam
        self.optimizer = optimizer_of(model, cfg, steps)
        self.features = features_of(model, cfg)
        self._part = ModelPart(model.model)
        self._scores: Tensor | None = None

    def enter(self, folder: Path) -> None:
        """Every member stays in memory."""

    def turn(self, step: int) -> tuple[int, int]:
        """There is one member, or all are trained at once."""
        return 0, step

    def take(self, member: int, inner: int) -> Optimizer:
        """The one optimizer."""
        self._scores = None
        return self.optimizer

    def finish(self, member: int) -> Float[Tensor, "N 2 K"]:
        """The scores by all heads."""
        return self.scores()

    def scores(self) -> Float[Tensor, "N 2 K"]:
        """The scores by all heads, computed once after the last step."""
        if self._scores is None:
            self._scores = self.exam.score(self.model, self.features)
        return self._scores

    def parts(self) -> dict[str, Part]:
        """Model and optimizer."""
        return {"reward": self._part, "optimizer": self.optimizer}

    def export(self, folder: Path) -> None:
        """An ordinary Hugging Face or PEFT folder."""
        extra = {"role": "reward", "template": template_of(self.cfg.model), "num_heads": self.cfg.num_heads}
        save_model(self.model.model, self.model.tokenizer, folder, extra={**extra, **self.exam.card(self.scores())})


class InTurn:
    """A LoRA ensemble: step n is step n // K of member n % K. The trunk must be what it was when all is done."""

    def __init__(self, cfg: Reward, model: RewardModel, exam: Exam, steps: int) -> None:
        assert isinstance(model.model, PeftModel)
        self.cfg, self.model, self.exam = cfg, model, exam
        self.peft = model.model
        self.num_turns = cfg.num_members
        self._trunk = trunk_hash(self.peft)
        optimizers, names = [], list[str]()
        for member in range(self.num_turns):
            self._use(member)
            optimizers.append(optimizer_of(model, cfg, steps))
            names += [name for name, _ in trainable(self.peft)]
        self._use(0)
        self._optimizers = Optimizers(optimizers)
        self._part = ModelPart(self.peft, names=names)
        self._scores: Tensor | None = None
        self.features = features_of(model, cfg)

    def _use(self, member: int) -> None:
        select_adapter(self.peft, member_name(member), trains=True)

    def enter(self, folder: Path) -> None:
        """Every member stays in memory."""

    def turn(self, step: int) -> tuple[int, int]:
        """Members take turns."""
        inner, member = divmod(step, self.num_turns)
        return member, inner

    def take(self, member: int, inner: int) -> Optimizer:
        """Switch to the member's adapter and head."""
        self._scores = None
        self._use(member)
        return self._optimizers.members[member]

    def finish(self, member: int) -> Float[Tensor, "N 2 K"]:
        """The scores by the member's adapter and head."""
        self._use(member)
        return self.exam.score(self.model, self.features)

    def scores(self) -> Float[Tensor, "N 2 K"]:
        """The scores by every member, computed once after the last step: all are in memory."""
        if self._scores is None:
            self._scores = torch.cat([self.finish(member) for member in range(self.num_turns)], dim=2)
        return self._scores

    def parts(self) -> dict[str, Part]:
        """All adapters and heads, and an optimizer for each member."""
        return {"reward": self._part, "optimizer": self._optimizers}

    def export(self, folder: Path) -> None:
        """One folder: the trunk, the members beside it.

        Errors: ConfigError when the frozen trunk has changed, which nothing may do.
        """
        if trunk_hash(self.peft) != self._trunk:
            raise ConfigError("the trunk of the LoRA ensemble changed while its members were trained; it must stay frozen")
        scores = self.scores()
        member_cards = [self.exam.card(scores[:, :, member : member + 1]) for member in range(self.num_turns)]
        save_adapted_members(
            self.peft,
            self.model.tokenizer,
            folder,
            seeds=self.cfg.seeds,
            extra=self.exam.card(scores),
            member_extra=member_cards,
        )


class OneByOne:
    """An independent ensemble: step n is step n % S of member n // S, where a member takes S steps.

    One model object serves all members in turn: at a member's first step its trained weights are read from the start again,
    its head is set, its optimizer begins anew. A finished member is written into the run folder before the step that finished
    it counts, so a checkpoint never knows of a member that is not on disk.
    """

    def __init__(self, cfg: Reward, model: RewardModel, exam: Exam, steps: int, ranks: Ranks) -> None:
        self.cfg, self.model, self.exam, self.ranks = cfg, model, exam, ranks
        self.num_turns, self.steps = cfg.num_members, steps
        self._heads_KD = start_heads(cfg.model, head=cfg.head, seeds=cfg.seeds)
        self._optimizer = optimizer_of(model, cfg, steps)
        self._part = ModelPart(model.model)
        self._finished = Scores()
        self._untouched = True
        self.features = features_of(model, cfg)
        self.folder: Path | None = None

    def enter(self, folder: Path) -> None:
        """Finished members are kept in `folder`."""
        self.folder = folder

    def turn(self, step: int) -> tuple[int, int]:
        """One member after the other."""
        return divmod(step, self.steps)

    def take(self, member: int, inner: int) -> Optimizer:
        """Begin a member at its first step; later steps find it in use."""
        if inner == 0 and not (member == 0 and self._untouched):
            self._begin(member)
        self._untouched = False
        return self._optimizer

    def _begin(self, member: int) -> None:
        fresh = dict(load_member(self.cfg, self._heads_KD[member : member + 1], self.ranks).model.named_parameters())
        with torch.no_grad():
            for name, parameter in trainable(self.model.model):
                parameter.copy_(fresh[name])
        self._optimizer.restart()

    def finish(self, member: int) -> Float[Tensor, "N 2 K"]:
        """Score the exam, and write the member to disk."""
        scores = self.exam.score(self.model, self.features)
        self._finished.put(member, scores)
        card = {"role": "reward", "template": template_of(self.cfg.model), "num_heads": 1, **self.exam.card(scores)}
        place = self._place(member)
        self.ranks.on_main(lambda: save_model(self.model.model, self.model.tokenizer, place, extra=card))
        return scores

    def _place(self, member: int) -> Path:
        if self.folder is None:
            raise ConfigError("an independent ensemble keeps finished members in its run folder; drive the job with one")
        return self.folder / member_name(member)

    def scores(self) -> Float[Tensor, "N 2 K"]:
        """The scores that each member gave when it was finished."""
        return self._finished.all()

    def parts(self) -> dict[str, Part]:
        """The member in use, its optimizer, and the scores of those that are finished."""
        return {"reward": self._part, "optimizer": self._optimizer, "finished": self._finished}

    def export(self, folder: Path) -> None:
        """One folder with a folder for each member.

        Errors: ResumeError when a finished member is no longer in the run folder.
        """
        places = [self._place(member) for member in range(self.num_turns)]
        if missing := [place.name for place in places if not (place / CARD).exists()]:
            raise ResumeError(
                f"{self.folder}: {', '.join(missing)} is gone, which this run had finished; start over with --resume never"
            )
        extra = {"template": template_of(self.cfg.model), **self.exam.card(self.scores())}
        save_independent(places, self.model.tokenizer, folder, seeds=self.cfg.seeds, extra=extra)


def make_team(cfg: Reward, model: RewardModel, exam: Exam, steps: int, ranks: Ranks) -> Team:
    """The team of a family; `steps` is the number of steps of each member."""
    if cfg.family == "lora":
        return InTurn(cfg, model, exam, steps)
    return OneByOne(cfg, model, exam, steps, ranks) if cfg.family == "independent" else Together(cfg, model, exam, steps)


def write_evaluation(folder: Path, card: Mapping[str, Any]) -> None:
    """evaluation.json: the evaluation in a card."""
    (folder / "evaluation.json").write_text(json.dumps(card["evaluation"], indent=2), encoding="utf-8")
