"""Proximal policy optimisation of a language model against a scorer, with a learned critic.

    L = L_policy + vf_coef * L_value

Schulman et al. 2017 (arXiv:1707.06347); score normalisation and clipping by running moments, value clipping and separate
critic settings: Zheng et al. 2023 (arXiv:2307.04964). Means are over sampled tokens of the optimizer step, over every
microbatch and rank. `logp_old` is recomputed by the training forward; the sampler's own log-probs are compared with it and
gaps are counted. docs/algorithms/ppo.md lists every detail and where we differ.

    ppo_config     every switch, its bounds and its help
    ppo_prepare    a round of scored rollouts becomes a batch: processed scores, per-token rewards, advantages, facts
    ppo_loss       the batch and the terms of the objective on it
    ppo_rounds     the loop, and the state that a round hands to the next
    ppo            models, data and loop joined to a job (here)
"""

from pathlib import Path

from rewarden.algos.actors import build_actors, load_prompt_rollouts
from rewarden.algos.closing import ppo_closing
from rewarden.algos.ppo_config import PPO
from rewarden.algos.ppo_rounds import State, train
from rewarden.algos.rows import within
from rewarden.algos.selection import BestWeights
from rewarden.models.load import save_model, template_of, trainable
from rewarden.models.parts import ModelPart
from rewarden.runtime.job import Job
from rewarden.runtime.optim import Group, Optimizer
from rewarden.runtime.ranks import Ranks
from rewarden.scoring import notes_of
from rewarden.types import Rollout


def build(cfg: PPO, ranks: Ranks) -> Job:
    """Load models and prompts and return the job that trains them."""
    actors = build_actors(
        policy=cfg.policy,
        reward=cfg.reward,
        critic=cfg.critic,
        critic_head=cfg.critic_head,
        with_critic=True,
        sampling=cfg.sampling,
        head_seed=cfg.seed,
        ranks=ranks,
    )
    assert actors.critic is not None
    cfg = cfg.resolved()
    room = actors.sampler.num_positions  # a prompt must leave some for the answer
    longest = within(cfg.max_prompt_length, None if room is None else room - 1)
    prompts = load_prompt_rollouts(cfg.data, actors.template, longest)
    notes = [*(f"reward: {note}" for note in notes_of(actors.scorer)), f"prompts: {prompts.summary()}"]
    eval_prompts: tuple[Rollout, ...] = ()
    if cfg.eval_data is not None:
        selection = load_prompt_rollouts(cfg.eval_data, actors.template, longest)
        eval_prompts = selection.rollouts
        notes.append(f"selection prompts: {selection.summary()}")
    else:
        notes.append("no eval_data: the last step is exported, unguarded")
    updates = cfg.max_steps * cfg.num_ppo_epochs * cfg.num_minibatches
    optimizer = Optimizer(
        [
            Group("policy", trainable(actors.policy), cfg.optim),
            Group("critic", trainable(actors.critic.model), cfg.critic_optim),
        ],
        updates,
        made_of=f"{cfg.max_steps} rounds of {cfg.num_ppo_epochs * cfg.num_minibatches}",
    )
    best = BestWeights(actors.policy)

    def export(folder: Path) -> None:
        best.put_back()
        save_model(
            actors.policy,
            actors.template.tokenizer,
            folder / "model",
            extra={
                "role": "policy",
                "template": template_of(cfg.policy),
                "exported_step": best.step if best.kept else cfg.max_steps,
            },
        )

    return Job(
        title="PPO",
        steps=cfg.max_steps,
        start=State(),
        train=lambda state: train(actors, prompts.rollouts, eval_prompts, optimizer, best, ranks, cfg, state),
        parts={
            "policy": ModelPart(actors.policy),
            "critic": ModelPart(actors.critic.model),
            "optimizer": optimizer,
            "best": best,
        },
        export=export,
        notes=notes,
        closing=lambda state, report: ppo_closing(
            state.step, state.best_step if state.start else state.step, state.start, state.best, report
        ),
        restore_state=State.restore,
        dump_state=State.dump,
    )
