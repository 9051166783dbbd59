"""Data of a built-in world as ordinary files: an untrained model, scripted dialogues, preference pairs, prompts."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from pydantic import Field
from rich.console import Console

from rewarden.collect.label import noisy_preference
from rewarden.collect.pairs import Pair, play_prefixes, sample_pairs
from rewarden.data.write import conversation_row, prompt_row, write_jsonl
from rewarden.errors import DataError
from rewarden.models.load import Model, load_policy, load_tokenizer, save_model, template_of
from rewarden.rollout.hf import HFSampler, Sampling
from rewarden.rollout.play import DialoguePlayer
from rewarden.rollout.users import WorldUser
from rewarden.runtime.seed import seed_of
from rewarden.spec import Spec, parse
from rewarden.text.render import Template, load_template
from rewarden.types import Conversation, Message, Rollout
from rewarden.worlds import HORIZON, WORLDS, TripDesk, seed_range
from rewarden.worlds.tokenizer import build_policy


class WorldStart(Spec):
    """An untrained policy with its tokenizer, and dialogues of the scripted assistants to imitate."""

    world: dict[str, Any] = Field(default_factory=lambda: {"kind": "trip_desk"})
    """Which world; `rewarden worlds` lists them. {kind: trip_desk, trap: true} is the variant with facts and boasts."""
    num_dialogues: int = Field(5000, ge=1, le=1_000_000)
    """Scripted dialogues for SFT."""
    num_heldout: int = Field(200, ge=1, le=1_000_000)
    """Scripted dialogues of other users, to measure the loss on."""
    seed: int = Field(0, ge=0)
    """Weights, users and scripts."""

    def run(self, folder: Path) -> dict[str, float]:
        """Write `model/`, `sft.jsonl` and `sft_heldout.jsonl`."""
        world = load_world(self.world)
        model, tokenizer = build_policy(world, self.seed)
        save_model(model, tokenizer, folder / "model", extra={"role": "policy", "template": "chat", "world": self.world})
        dialogues = world.sft_dialogues(self.num_dialogues, self.seed)
        write_jsonl(folder / "sft.jsonl", [conversation_row(dialogue) for dialogue in dialogues])
        held = [world.scripted(*_scripted_user(user)) for user in seed_range("sft_eval", self.seed)[: self.num_heldout]]
        write_jsonl(folder / "sft_heldout.jsonl", [conversation_row(dialogue) for dialogue in held])
        return {"num_dialogues": float(len(dialogues)), "num_parameters": float(model.num_parameters())}


class WorldPairs(Spec):
    """What the SFT policy says to its users: preference pairs labelled from gold with noise, and prompts for RL."""

    policy: Model
    """The policy that plays; usually the SFT model."""
    world: dict[str, Any] = Field(default_factory=lambda: {"kind": "trip_desk"})
    """The world of its users."""
    num_pairs: int = Field(2000, ge=0, le=1_000_000)
    """Labelled pairs for the reward model, before pairs with equal texts are dropped."""
    num_test_pairs: int = Field(600, ge=0, le=1_000_000)
    """Pairs of other users; their label is the noiseless gold order, ties left out."""
    num_prompts: int = Field(2000, ge=0, le=1_000_000)
    """Prompts for RL."""
    num_selection: int = Field(256, ge=0, le=1_000_000)
    """Prompts on which steps of a run are compared."""
    num_heldout: int = Field(500, ge=0, le=1_000_000)
    """Prompts for the final comparison, used for nothing else."""
    slope: float = Field(4.0, gt=0)
    """How sharply labels follow gold: P(a) = sigmoid(slope * (gold_a - gold_b))."""
    flip: float = Field(0.25, ge=0, le=0.5)
    """Share of labels turned round."""
    sampling: Sampling = Sampling(max_completion_length=60)
    """How the policy speaks."""
    seed: int = Field(0, ge=0)
    """Users, turns, samples and labels."""

    def run(self, folder: Path) -> dict[str, float]:
        """Write pairs.jsonl, pairs_test.jsonl, prompts.jsonl, selection.jsonl and heldout.jsonl, each when any are asked for.

        Errors: DataError when all pairs that were asked for are ties; an empty file would stop a later stage instead.
        """
        world = load_world(self.world)
        tokenizer = load_tokenizer(self.policy)
        template = load_template(tokenizer, template_of(self.policy))
        sampler = HFSampler(load_policy(self.policy).eval(), template, self.sampling)
        facts: dict[str, float] = {}
        for name, purpose, count in (
            ("pairs", "pairs", self.num_pairs),
            ("pairs_test", "pairs_test", self.num_test_pairs),
            ("prompts", "rl", self.num_prompts),
            ("selection", "selection", self.num_selection),
            ("heldout", "evaluation", self.num_heldout),
        ):
            if count == 0:
                Console(highlight=False).print(f"{name}: none asked for, no file written")
                continue
            prefixes = world_prefixes(world, sampler, template, seed_range(purpose, self.seed)[:count], seed=self.seed)
            if name.startswith("pairs"):
                seeds = [
                    (seed_of(self.seed, purpose, place, "a"), seed_of(self.seed, purpose, place, "b"))
                    for place in range(len(prefixes))
                ]
                pairs, same = sample_pairs(prefixes, sampler=sampler, seeds=seeds)
                noisy = name == "pairs"
                rows, more = label_pairs(world, pairs, slope=self.slope, flip=self.flip, seed=self.seed, noisy=noisy)
                facts |= {f"{name}/{key}": value for key, value in more.items()} | {f"{name}/same_text_dropped": float(same)}
            else:
                rows = [prompt_row(prefix.conversation) for prefix in prefixes]
            if not rows:
                key, tied = "num_pairs" if noisy else "num_test_pairs", f"{more['tied_gold']:.0f}"
                raise DataError(
                    f"{name}: none of {count} pairs is left ({same} with equal texts, {tied} with equal gold); raise {key}, or "
                    "take a policy that says more than one thing"
                )
            write_jsonl(folder / f"{name}.jsonl", rows)
            facts[f"{name}/rows"] = float(len(rows))
            Console(highlight=False).print(f"{name}: {len(rows)} rows")
        return facts


def load_world(raw: dict[str, Any]) -> TripDesk:
    """The world a recipe names; ConfigError with the nearest name otherwise."""
    world = parse(WORLDS, raw, "world")
    assert isinstance(world, TripDesk)
    return world


def world_prefixes(
    world: TripDesk, sampler: HFSampler, template: Template, users: Sequence[int], *, seed: int
) -> list[Rollout]:
    """One prefix per user: the policy plays the turns before h, h uniform over the five turns."""
    openings = [template.start(world.start(user)) for user in users]
    turns = [Random(f"turn/{seed}/{user}").randrange(HORIZON) for user in users]
    user = WorldUser(world)
    return play_prefixes(
        openings,
        turns=turns,
        player=DialoguePlayer(sampler, template, user),
        user=user,
        user_seeds=list(users),
        seeds=[seed_of(seed, "prefix", user_seed) for user_seed in users],
        extend=template.extend,
    )


def label_pairs(
    world: TripDesk, pairs: Sequence[Pair], *, slope: float, flip: float, seed: int, noisy: bool
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Pairs as TRL preference rows, the gold of both prefixes beside them.

    noisy: labels drawn by `noisy_preference`; otherwise the gold order, with ties left out and counted. `agreement` is the
    share of labels that follow the gold order, ties left out.
    """
    rows: list[dict[str, Any]] = []
    agree = decided = ties = 0
    for place, pair in enumerate(pairs):
        gold = [_gold(world, side.conversation) for side in (pair.first, pair.second)]
        if gold[0] == gold[1]:
            ties += 1
            if not noisy:
                continue
        first_wins = gold[0] > gold[1]
        if noisy:
            label_seed = seed_of(seed, "label", place, pair.first.conversation.id)
            first_wins = noisy_preference(gold[0], gold[1], slope=slope, flip=flip, seed=label_seed)
        if gold[0] != gold[1]:
            decided += 1
            agree += first_wins == (gold[0] > gold[1])
        sides = (pair.first, pair.second) if first_wins else (pair.second, pair.first)
        better, worse = gold if first_wins else (gold[1], gold[0])
        rows.append(
            {
                **prompt_row(_without_last(pair.first.conversation)),
                "chosen": _last(sides[0]),
                "rejected": _last(sides[1]),
                "gold_chosen": better,
                "gold_rejected": worse,
                "turn": pair.turn,
            }
        )
    facts = {"agreement": agree / max(decided, 1), "tied_gold": float(ties), "decided": float(decided)}
    return rows, facts


def _gold(world: TripDesk, dialogue: Conversation) -> float:
    return world.gold(dialogue.messages, truncated=frozenset(dialogue.meta.get("truncated", ())))


def _without_last(conversation: Conversation) -> Conversation:
    return replace(conversation, messages=conversation.messages[:-1])


def _last(rollout: Rollout) -> list[dict[str, str]]:
    message: Message = rollout.conversation.messages[-1]
    return [{"role": message.role, "content": message.text}]


def _scripted_user(user: int) -> tuple[str, int]:
    kind = Random(f"heldout/{user}").choices(("good", "hasty", "rambler"), weights=(0.35, 0.35, 0.30))[0]
    return kind, user
