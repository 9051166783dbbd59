"""User reports 3.5: dialogues of several turns."""

import dataclasses

import pytest
import torch

from rewarden.algos.actors import load_prompt_rollouts
from rewarden.algos.ppo_loss import loss
from rewarden.algos.ppo_prepare import prepare
from rewarden.errors import DataError
from rewarden.maths import Moments, gae
from rewarden.models.load import trainable
from rewarden.rollout.play import DialoguePlayer
from rewarden.rollout.users import RecordedUser
from rewarden.runtime.optim import Group, Optimizer
from rewarden.runtime.step import split_batch, update
from rewarden.text.collate import role_mask
from tests.reports.short_runs import ALONE, ppo_actors, ppo_config, prepared, scored_rollouts


def test_an_early_turn_gets_credit_across_what_the_user_said():
    """Row 68 (verl#6376): returns and advantages jump the gap as if it were not there."""
    mask_BT = torch.tensor([[False, True, True, False, False, False, True, True]])
    reward_BT = torch.tensor([[0.0, 0.1, 0.2, 9.0, 9.0, 9.0, 0.0, 4.0]])
    value_BT = torch.tensor([[5.0, 0.5, 0.4, 7.0, 7.0, 7.0, 0.3, 0.2]])
    kept = mask_BT[0]
    with_gap, return_gap = gae(reward_BT, value_BT, mask_BT, gamma=0.9, lam=0.8)
    alone = torch.ones(1, int(kept.sum()), dtype=torch.bool)
    without_gap, return_alone = gae(reward_BT[:, kept], value_BT[:, kept], alone, gamma=0.9, lam=0.8)
    torch.testing.assert_close(with_gap[:, kept], without_gap)
    torch.testing.assert_close(return_gap[:, kept], return_alone)
    assert not with_gap[~mask_BT].any()
    late = torch.zeros_like(reward_BT)
    late[0, -1] = 1.0
    credit, _ = gae(late, torch.zeros_like(value_BT), mask_BT, gamma=0.9, lam=1.0)
    assert credit[0, kept].tolist() == pytest.approx([0.9**3, 0.9**2, 0.9, 1.0])


def test_what_stands_at_masked_positions_reaches_no_number(world_files):
    """Row 69 (slime#1370): old log-probs, values, advantages and returns are NaN wherever the policy did not write; nothing changes."""
    cfg = ppo_config(world_files)
    actors, _, batch, _ = prepared(cfg)
    poisoned = dataclasses.replace(
        batch,
        **{
            name: torch.where(batch.mask_BT, getattr(batch, name), torch.nan)
            for name in ("logp_old_BT", "value_old_BT", "advantage_BT", "return_BT")
        },
    )
    found = []
    for each in (batch, poisoned):
        weights = {id(p): p.detach().clone() for model in (actors.policy, actors.critic.model) for p in model.parameters()}
        groups = [
            Group("policy", trainable(actors.policy), cfg.optim),
            Group("critic", trainable(actors.critic.model), cfg.critic_optim),
        ]
        report = update(Optimizer(groups, 1), split_batch(each, 3), lambda part: loss(actors, part, cfg), ranks=ALONE)
        found.append(
            (report, [p.detach().clone() for model in (actors.policy, actors.critic.model) for p in model.parameters()])
        )
        with torch.no_grad():
            for model in (actors.policy, actors.critic.model):
                for p in model.parameters():
                    p.copy_(weights[id(p)])
    (clean, after), (dirty, after_dirty) = found
    assert dirty == clean
    assert clean["skipped_steps"] == 0
    assert all(torch.equal(a, b) for a, b in zip(after, after_dirty, strict=True))


@pytest.mark.parametrize("change", [-1, 1])
def test_log_probs_that_are_not_one_a_token_are_refused_with_the_row(world_files, change):
    """Row 69 (oat#67): a sampler that loses or adds one entry would shift all that follows."""
    cfg = ppo_config(world_files)
    actors = ppo_actors(cfg)
    scored = scored_rollouts(cfg, actors)
    rollout = scored[2].rollout
    logp = rollout.logp_sampler[:-1] if change < 0 else (*rollout.logp_sampler, 0.0)
    scored[2] = dataclasses.replace(scored[2], rollout=dataclasses.replace(rollout, logp_sampler=logp))
    with pytest.raises(
        DataError, match=rf"{rollout.conversation.id}': {len(logp)} log-probs for {len(logp) - change} sampled tokens"
    ):
        prepare(actors, scored, Moments(), cfg, ALONE)


def test_the_users_words_are_never_learned(world_files):
    """Row 71 (trl#1595): in a dialogue with a recorded user, only what the policy wrote is in the mask of the loss."""
    cfg = ppo_config(world_files)
    actors = ppo_actors(cfg)
    opened = load_prompt_rollouts(cfg.data, actors.template, None).rollouts[:2]
    recorded = []
    for rollout in opened:
        user = [message.text for message in rollout.conversation.messages if message.role == "user"]
        meta = {**rollout.conversation.meta, "user_turns": (*user, "cheap", "Hello")}
        recorded.append(dataclasses.replace(rollout, conversation=dataclasses.replace(rollout.conversation, meta=meta)))
    before = [sum(m.role == "assistant" for m in rollout.conversation.messages) for rollout in recorded]
    player = DialoguePlayer(actors.sampler, actors.template, RecordedUser())
    played = player.play(recorded, turns=[turn + 2 for turn in before], seeds=[1, 2])
    mask_BT = role_mask([rollout.spans for rollout in played], max(len(rollout.token_ids) for rollout in played), sampled=True)
    for row, rollout in enumerate(played):
        assert int(mask_BT[row].sum()) == len(rollout.logp_sampler)
        said = [span for span in rollout.spans if span.role == "user"]
        assert len(said) >= 3
        assert not any(mask_BT[row, span.start : span.stop].any() for span in said)
        assert [span.turn for span in rollout.spans if span.ended is not None] == [
            before[row],
            before[row] + 1,
            before[row] + 2,
        ]
