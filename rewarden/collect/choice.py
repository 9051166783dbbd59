"""Choosing among the answers to a prompt: a scorer, and how its members become one score."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor

from rewarden.collect.sample_store import Samples, Scores
from rewarden.errors import ConfigError, DataError
from rewarden.scoring.aggregate import Aggregate, combine
from rewarden.spec import Spec


class Choice(Spec):
    """Who chooses among the answers to a prompt."""

    scorer: str = Field(min_length=1)
    """A scorer of the score_samples run."""
    aggregate: Aggregate | None = None
    """How its members become one score; null: as the scorer's own config or registry entry says, else their mean."""

    def __str__(self) -> str:
        """In a few words."""
        return self.scorer if self.aggregate is None else f"{self.scorer}, {self.aggregate}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxy:
    """One score for every answer; where there is none, `scored_PN` is False and the score NaN."""

    score_PN: Float[Tensor, "P N"]
    scored_PN: Bool[Tensor, "P N"]
    aggregate: Aggregate

    def first(self, n: int) -> "Proxy":
        """The same for the first n answers."""
        return replace(self, score_PN=self.score_PN[:, :n], scored_PN=self.scored_PN[:, :n])

    @property
    def some_P(self) -> Bool[Tensor, " P"]:
        """Which prompts have an answer with a score."""
        return self.scored_PN.any(dim=1)

    @property
    def tied_P(self) -> Bool[Tensor, " P"]:
        """Which prompts have two or more answers with a score, all of them equal: there is nothing to choose."""
        most_P = torch.where(self.scored_PN, self.score_PN, -torch.inf).amax(dim=1)
        least_P = torch.where(self.scored_PN, self.score_PN, torch.inf).amin(dim=1)
        return (self.scored_PN.sum(dim=1) > 1) & (most_P == least_P)


def proxy_of(scores: Scores, aggregate: Aggregate | None = None) -> Proxy:
    """The aggregate of a scorer's members for every answer.

    aggregate: None takes what the scorer's config says. "auto" and "group" center each member on its mean over all N answers to
    the prompt, also where fewer than N are looked at.

    Errors: ConfigError for an aggregate that these members do not allow, or whose numbers are not stored.
    """
    own = scores.facts.get("aggregate")
    rule = aggregate if aggregate is not None else Aggregate.model_validate(own) if own else Aggregate()
    num_prompts, num, num_members = scores.score_PNK.shape
    prompt_B = torch.arange(num_prompts).repeat_interleave(num)
    reference_BK = None if scores.reference_PK is None else scores.reference_PK[prompt_B]
    try:
        value_B = combine(
            scores.score_PNK.reshape(-1, num_members).double(),
            rule,
            calibration=scores.calibration,
            group_B=prompt_B,
            reference_BK=None if reference_BK is None else reference_BK.double(),
        )
    except ConfigError as error:
        raise ConfigError(f"scorer {scores.name!r}: {error}") from error
    value_PN = value_B.view(num_prompts, num)
    return Proxy(score_PN=value_PN, scored_PN=value_PN.isfinite(), aggregate=rule)


def check_n(n: int, samples: Samples, key: str = "n") -> None:
    """Errors: ConfigError for an n that the samples do not allow."""
    if not 1 <= n <= samples.num_generations:
        raise ConfigError(
            f"{key}: {n} with {samples.num_generations} answers to each prompt in {samples.folder}; use 1 to "
            f"{samples.num_generations}, or draw more (num_generations, with `extends` to keep these)"
        )


def check_some_scored(proxy: Proxy, scores: Scores) -> None:
    """Errors: DataError when no answer at all has a score."""
    if not bool(proxy.scored_PN.any()):
        counts = ", ".join(f"{count} {status}" for status, count in scores.facts.get("status", {}).items())
        raise DataError(f"scorer {scores.name!r} has no score for any answer ({counts}); nothing can be chosen by it")
