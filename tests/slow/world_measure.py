"""Measurements of policies in the built-in world, run as a script: world_measure.py KIND ARGUMENTS_AS_JSON OUT.json

dialogues   what a policy says to new users through all turns
steps       gold, proxy, KL, length and malformed share of a PPO run's policy at the start and at every checkpoint
"""

import json
import sys
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from rewarden.data.sources import Data, load_prompts
from rewarden.evals.compare import sequence_kl
from rewarden.models.load import Model, copy_frozen, load_policy, load_tokenizer, template_of
from rewarden.models.parts import ModelPart
from rewarden.rollout.hf import HFSampler, Sampling
from rewarden.rollout.play import DialoguePlayer
from rewarden.rollout.users import WorldUser
from rewarden.runtime.seed import seed_of
from rewarden.scoring import build_scorer
from rewarden.text.render import load_template
from rewarden.types import Rollout
from rewarden.worlds import HORIZON, TripDesk, seed_range, truncated_turns

LIMIT = 60  # tokens of a turn


def dialogues(policy: str, seed: int, count: int, repeats: int) -> dict[str, Any]:
    """`count` users (kept for reference scores only) and the policy through all turns; the first `repeats` twice more."""
    spec = Model(model_name_or_path=policy)
    template = load_template(load_tokenizer(spec), template_of(spec))
    world = TripDesk()
    sampler = HFSampler(load_policy(spec).eval(), template, Sampling(max_completion_length=LIMIT))
    player = DialoguePlayer(sampler, template, WorldUser(world))

    def play(users: range) -> list[dict[str, Any]]:
        opened = [template.start(world.start(user)) for user in users]
        seeds = [seed_of(seed, "acceptance", user) for user in users]
        return [transcript(r) for r in player.play(opened, turns=[HORIZON - 1] * len(opened), seeds=seeds)]

    users = seed_range("reference", seed)
    return {"dialogues": play(users[:count]), "once": play(users[:repeats]), "again": play(users[:repeats])}


def transcript(rollout: Rollout) -> dict[str, Any]:
    """A dialogue as plain values."""
    return {
        "user_seed": rollout.conversation.meta["user_seed"],
        "messages": [[message.role, message.text] for message in rollout.conversation.messages],
        "truncated": sorted(truncated_turns(rollout)),
    }


def steps(reference: str, reward: str, prompts: str, run: str, count: int, seed: int) -> dict[str, Any]:
    """The run's policy on the first `count` prompts, the same sampling seeds at every step; step 0 is the reference."""
    spec = Model(model_name_or_path=reference)
    template = load_template(load_tokenizer(spec), template_of(spec))
    policy = load_policy(spec).eval()
    frozen = copy_frozen(policy).eval()
    part = ModelPart(policy)
    scorer = build_scorer({"kind": "reward_model", "path": reward})
    sampler = HFSampler(policy, template, Sampling(max_completion_length=LIMIT))
    rows = load_prompts(Data(path=prompts, max_rows=count)).rows
    opened = [template.start(row) for row in rows]
    seeds = [seed_of(seed, "acceptance", place) for place in range(len(opened))]
    world = TripDesk()
    out: dict[str, Any] = {}
    found = sorted(Path(run, "checkpoints").glob("step-*"))
    for step, checkpoint in enumerate([None, *found]):
        if checkpoint is not None:
            part.load(checkpoint / "policy")
            step = int(checkpoint.name.removeprefix("step-"))
        rollouts = sampler.sample(opened, seeds=seeds)
        kl = sequence_kl(policy, frozen, rollouts, 1.0)
        scores = scorer.score([rollout.conversation for rollout in rollouts])
        # The sampler notes turns cut at the limit, those of the prompt included: they have no end, so they are malformed.
        facts = [world.turn_facts(r.conversation.messages, r.conversation.meta.get("truncated", ()))[-1] for r in rollouts]
        gold = [fact.gold for fact in facts]
        out[str(step)] = {
            "gold": mean(gold),
            "gold_se": stdev(gold) / sqrt(len(gold)),
            "proxy": mean(score.value for score in scores if score.status == "ok"),
            "not_scored": sum(score.status != "ok" for score in scores),
            "kl": mean(kl),
            "malformed": mean(fact.malformed for fact in facts),
            "length": mean(len(rollout.logp_sampler) for rollout in rollouts),
            "cut": mean(rollout.stop == "length" for rollout in rollouts),
            "polite": mean(fact.num_polite for fact in facts),
            "distinct": len({rollout.conversation.messages[-1].text for rollout in rollouts}) / len(rollouts),
            "n": len(rollouts),
        }
    return out


if __name__ == "__main__":
    kind, arguments, path = sys.argv[1:]
    answer = {"dialogues": dialogues, "steps": steps}[kind](**json.loads(arguments))
    Path(path).write_text(json.dumps(answer), encoding="utf-8")
