"""Playing conversations: policy and user in turn, on one growing list of tokens per dialogue."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from rewarden.errors import DataError
from rewarden.protocols import Sampler, User
from rewarden.rollout.ask import Answer, ask
from rewarden.rollout.hf import TurnTemplate
from rewarden.runtime.seed import seed_of
from rewarden.types import Rollout

SeedOf = Callable[[str, int, int], int]


def turn_seed(role: str, seed: int, turn: int) -> int:
    """Seed of one turn of one side ("assistant" or "user") of the dialogue whose own seed is `seed`."""
    return seed_of("play", role, seed, turn)


def play(
    rollouts: Sequence[Rollout],
    *,
    sampler: Sampler,
    template: TurnTemplate,
    user: User,
    turns: Sequence[int],
    seeds: Sequence[int],
    policy_version: int = 0,
    seed_of_turn: SeedOf = turn_seed,
) -> list[Rollout]:
    """From each open rollout through assistant turn `turns[i]` (0-based), in the order given.

    All dialogues are sampled together, turn by turn; finished ones leave. Ids only grow: what was sampled is never rendered
    anew. `stop` of a result: "turns" (turn `turns[i]` was played), "user" (the user left), "length" (the next turn would not
    fit the sampler's `num_positions`; the result ends with the last complete assistant turn), "error" (the user could not
    answer; `conversation.meta["user_failed"]` says why in a word). A turn cut by the length limit does not end a dialogue: its
    span says so and the user answers it.
    """
    if not len(rollouts) == len(turns) == len(seeds):
        raise DataError(
            f"got {len(rollouts)} rollouts, {len(turns)} turns and {len(seeds)} seeds; give one of each per dialogue"
        )
    for rollout, turn in zip(rollouts, turns, strict=True):
        if turn < next_turn(rollout):
            raise DataError(
                f"conversation {rollout.conversation.id!r}: asked to play through assistant turn {turn}, but its next is turn "
                f"{next_turn(rollout)}; turns count from 0 and must lie ahead"
            )
    current = list(rollouts)
    active = list(range(len(rollouts)))
    while active:
        turn_seeds = [seed_of_turn("assistant", seeds[i], next_turn(current[i])) for i in active]
        sampled = sampler.sample([current[i] for i in active], seeds=turn_seeds, policy_version=policy_version)
        for i, rollout in zip(active, sampled, strict=True):
            current[i] = rollout if next_turn(rollout) <= turns[i] else replace(rollout, stop="turns")
        waiting = [i for i in active if current[i].stop != "turns"]
        user_seeds = [seed_of_turn("user", seeds[i], next_turn(current[i]) - 1) for i in waiting]
        answers = ask(user, [current[i].conversation for i in waiting], user_seeds)
        for i, answer in zip(waiting, answers, strict=True):
            current[i] = _answered(current[i], answer, sampler, template)
        active = [i for i in active if current[i].stop == "open"]
    return current


def next_turn(rollout: Rollout) -> int:
    """Index of the assistant turn that an open rollout waits for."""
    return sum(message.role == "assistant" for message in rollout.conversation.messages)


def _answered(rollout: Rollout, answer: Answer, sampler: Sampler, template: TurnTemplate) -> Rollout:
    """The rollout with the user's answer, open again; or the rollout itself with the reason why it ends here."""
    if answer.failed:
        meta = {**rollout.conversation.meta, "user_failed": answer.failed}
        return replace(rollout, conversation=replace(rollout.conversation, meta=meta), stop="error")
    if answer.message is None:
        return replace(rollout, stop="user")
    longer = template.extend(rollout, answer.message)
    limit = getattr(sampler, "num_positions", None)
    return replace(rollout, stop="length") if limit is not None and len(longer.token_ids) >= limit else longer


class DialoguePlayer:
    """`play` with its parts chosen; satisfies `protocols.Player`."""

    def __init__(self, sampler: Sampler, template: TurnTemplate, user: User) -> None:
        self.sampler = sampler
        self.template = template
        self.user = user

    def play(
        self, rollouts: Sequence[Rollout], *, turns: Sequence[int], seeds: Sequence[int], policy_version: int = 0
    ) -> list[Rollout]:
        """See `play`."""
        return play(
            rollouts,
            sampler=self.sampler,
            template=self.template,
            user=self.user,
            turns=turns,
            seeds=seeds,
            policy_version=policy_version,
        )
