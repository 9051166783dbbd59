"""Rewarden from Python, without recipes: make a policy, imitate, sample, score, and take PPO steps by hand.

    python examples/library_use.py                    # about two minutes on two CPU cores
    python examples/library_use.py --dialogues 64 --rounds 1 --prompts 8

Everything happens in the built-in world, so nothing is downloaded; for a real model give its folder or hub id to `Model`.
docs/tour.md explains the steps one by one.
"""

import argparse
import tempfile
from pathlib import Path

from rewarden.algos.actors import build_actors, load_prompt_rollouts
from rewarden.algos.evaluation import sample_and_score
from rewarden.algos.ppo_config import PPO
from rewarden.algos.ppo_loss import loss
from rewarden.algos.ppo_prepare import prepare
from rewarden.algos.ppo_rounds import minibatches
from rewarden.algos.sft import SFT
from rewarden.data.sources import Data
from rewarden.data.write import conversation_row, prompt_row, write_jsonl
from rewarden.maths import Moments
from rewarden.models.load import Model, save_model, trainable
from rewarden.rollout.hf import Sampling
from rewarden.runtime.optim import Group, Optim, Optimizer
from rewarden.runtime.ranks import Ranks
from rewarden.runtime.seed import seed_of
from rewarden.runtime.step import split_batch, summarize, update
from rewarden.worlds import TripDesk, seed_range
from rewarden.worlds.tokenizer import build_policy


def imitate(folder: Path, num_dialogues: int) -> Model:
    """Supervised fine-tuning: a job is a generator of reports, and whoever iterates over it drives it."""
    world = TripDesk()
    model, tokenizer = build_policy(world, seed=0)
    save_model(model, tokenizer, folder / "start", extra={"role": "policy", "template": "chat"})
    write_jsonl(folder / "sft.jsonl", map(conversation_row, world.sft_dialogues(num_dialogues, seed=0)))
    config = SFT(
        model=Model(model_name_or_path=str(folder / "start")),
        data=Data(path=str(folder / "sft.jsonl")),
        optim=Optim(learning_rate=4e-3, lr_scheduler_type="cosine", warmup_steps=20),
        max_length=320,
    )
    job = config.build(Ranks.single())
    for number, tick in enumerate(job.train(job.start), start=1):
        if number % 20 == 0 or number == job.steps:
            print(f"sft {number}/{job.steps}: loss {tick.report['loss/nll']:.3f}")
    job.export(folder / "sft")
    return Model(model_name_or_path=str(folder / "sft" / "model"))


def improve(policy: Model, folder: Path, rounds: int, num_prompts: int) -> list[float]:
    """PPO against the world's own gold reward; returns the mean score of each round."""
    world, ranks = TripDesk(), Ranks.single()
    users = seed_range("rl", 0)[:num_prompts]
    write_jsonl(folder / "prompts.jsonl", [prompt_row(world.start(user)) for user in users])
    config = PPO(
        policy=policy,
        reward={"kind": "gold"},
        data=Data(path=str(folder / "prompts.jsonl")),
        sampling=Sampling(max_completion_length=60),
        rollout_batch_size=num_prompts,
        mini_batch_size=max(num_prompts // 4, 1),
    )
    actors = build_actors(
        policy=config.policy,
        reward=config.reward,
        critic=None,
        critic_head=None,
        with_critic=True,
        sampling=config.sampling,
        head_seed=0,
        ranks=ranks,
    )
    assert actors.critic is not None
    prompts = load_prompt_rollouts(config.data, actors.template, config.max_prompt_length).rollouts
    rate = Optim(learning_rate=1e-3)
    groups = [
        Group("policy", trainable(actors.policy), rate),
        Group("critic", trainable(actors.critic.model), rate),
    ]
    optimizer = Optimizer(groups, total_steps=4 * rounds)
    moments, means = Moments(), []
    for number in range(rounds):
        seeds = [seed_of("tour", number, place) for place in range(len(prompts))]
        scored = sample_and_score(actors, prompts, seeds=seeds, policy_version=4 * number)
        batch, moments, facts = prepare(actors, scored, moments, config, ranks)
        reports = [
            update(optimizer, split_batch(mini, 32), lambda part: loss(actors, part, config), ranks=ranks)
            for mini in minibatches(batch, 4, seed=number)
        ]
        learnt = summarize(reports)
        means.append(facts["score/mean"])
        print(
            f"ppo {number + 1}/{rounds}: gold {facts['score/mean']:+.3f}, KL {facts['kl/sequence']:.3f}, "
            f"value loss {learnt['loss/value']:.3f}"
        )
        print(f"  the policy says: {scored[0].rollout.conversation.messages[-1].text}")
    return means


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--dialogues", type=int, default=2000, help="scripted dialogues to imitate")
    arguments.add_argument("--rounds", type=int, default=5, help="rounds of PPO")
    arguments.add_argument("--prompts", type=int, default=64, help="prompts per round, at least 8")
    chosen = arguments.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        policy = imitate(Path(scratch), chosen.dialogues)
        improve(policy, Path(scratch), chosen.rounds, chosen.prompts)


if __name__ == "__main__":
    main()
