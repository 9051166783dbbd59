"""The trip desk as one object: openings, replies, gold, scripted dialogues and every sentence."""

from collections.abc import Collection, Sequence
from random import Random

from rewarden.errors import ConfigError, DataError
from rewarden.spec import Spec, nearest
from rewarden.types import Conversation, Message, Rollout
from rewarden.worlds import gold as gold_reward
from rewarden.worlds import user
from rewarden.worlds.assistants import ASSISTANTS, MIXTURE, next_turn, pick
from rewarden.worlds.gold import TurnFacts
from rewarden.worlds.parse import parse_turn
from rewarden.worlds.seeds import USERS_PER_RANGE, seed_range
from rewarden.worlds.sentences import assistant_sentences, traveller_sentences

HORIZON = 5
"""Assistant turns of a dialogue: three questions, one offer, one spare."""


class TripDesk(Spec):
    """A traveller with a hidden wish, an assistant that should ask before it offers, and a gold reward that is known."""

    trap: bool = False
    """The trap variant: twelve more assistant sentences, six worth +0.3 and six worth -0.6 each."""

    def opening(self, seed: int) -> Message:
        """The first message of the user with this seed."""
        return user.opening(seed)

    def start(self, seed: int) -> Conversation:
        """A dialogue with only the opening; its seed is kept in `meta["user_seed"]`."""
        return Conversation(id=f"trip-{seed}", messages=(self.opening(seed),), meta={"user_seed": seed})

    def reply(self, dialogue: Conversation, seed: int) -> Message:
        """The user's answer to a dialogue that ends with the assistant: a function of the transcript and the user's seed.

        `dialogue.meta["truncated"]` may hold the turns (from 0) that ended at the token limit. The user never leaves.
        """
        return user.reply(dialogue, seed, trap=self.trap)

    def gold(
        self, messages: Sequence[Message], through_turn: int | None = None, truncated: Collection[int] = frozenset()
    ) -> float:
        """The gold reward of the prefix through assistant turn `through_turn` (from 0; None: the last).

        It is computed from the transcript alone; no assistant turn is worth 0. `truncated` holds the turns that ended at the
        token limit, see `truncated_turns`.
        """
        facts = self.turn_facts(messages, truncated)
        if through_turn is None:
            return facts[-1].gold if facts else 0.0
        if not 0 <= through_turn < len(facts):
            raise DataError(f"gold through turn {through_turn} of a dialogue with {len(facts)} assistant turns; count from 0")
        return facts[through_turn].gold

    def turn_facts(self, messages: Sequence[Message], truncated: Collection[int] = frozenset()) -> tuple[TurnFacts, ...]:
        """What each assistant turn did and what it counts for."""
        return gold_reward.turn_facts(messages, trap=self.trap, truncated=truncated)

    def scripted(self, assistant: str, seed: int, turns: int = HORIZON) -> Conversation:
        """A whole dialogue of a scripted assistant with the user of this seed; ends with the assistant's last turn."""
        if turns < 1:
            raise ConfigError(f"a scripted dialogue of {turns} turns; give 1 or more")
        if assistant not in ASSISTANTS:
            raise ConfigError(f"no scripted assistant {assistant!r}; {nearest(assistant, ASSISTANTS)}")
        rng = Random(user.draw(2**63, seed, "assistant", assistant))
        messages = [self.opening(seed)]
        state = user.hear(user.State(), messages[0].text)
        for turn in range(turns):
            text = next_turn(ASSISTANTS[assistant], state, rng, trap=self.trap)
            said = parse_turn(text, trap=self.trap)
            reaction, state = user.react(state, said)
            messages.append(Message(role="assistant", text=text))
            answer = user.words(reaction, said, seed, turn)
            state = user.hear(state, answer)
            messages.append(Message(role="user", text=answer))
        meta = {"user_seed": seed, "assistant": assistant}
        return Conversation(id=f"trip-{seed}-{assistant}", messages=tuple(messages[:-1]), meta=meta)

    def sft_dialogues(self, n: int, seed: int) -> tuple[Conversation, ...]:
        """`n` dialogues of the SFT mixture (0.35 good, 0.35 hasty, 0.30 rambler), users from `seed_range("sft", seed)`.

        A longer list begins with the shorter one.
        """
        if not 0 <= n <= USERS_PER_RANGE:
            raise ConfigError(f"{n} dialogues asked for; give 0 to {USERS_PER_RANGE}")
        return tuple(self._mixed(user_seed) for user_seed in seed_range("sft", seed)[:n])

    def _mixed(self, user_seed: int) -> Conversation:
        return self.scripted(pick(MIXTURE, Random(user.draw(2**63, user_seed, "mixture"))), user_seed)

    def sentences(self) -> tuple[str, ...]:
        """Every sentence this world can contain, the traveller's first; each once."""
        return tuple(dict.fromkeys((*traveller_sentences(), *assistant_sentences(trap=self.trap))))


def truncated_turns(rollout: Rollout) -> frozenset[int]:
    """The sampled turns of a rollout that ended at the token limit."""
    return frozenset(span.turn for span in rollout.spans if span.role == "assistant" and span.ended == "length")
