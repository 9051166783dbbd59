"""User reports 3.3: what PPO does, says and survives."""

import dataclasses
import json
import logging
import math
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rewarden.algos import ppo
from rewarden.algos.actors import load_prompt_rollouts
from rewarden.algos.facts import self_check
from rewarden.algos.health import alarms, first_facts, text_facts
from rewarden.algos.ppo_config import PPO
from rewarden.algos.ppo_loss import loss
from rewarden.algos.ppo_prepare import prepare
from rewarden.algos.ppo_rounds import State, consider, minibatches
from rewarden.algos.selection import Selection, criterion
from rewarden.algos.shares import Held, shuffled_parts
from rewarden.data.sources import Data
from rewarden.data.stream import Cursor, Stream
from rewarden.errors import ConfigError, ResumeError
from rewarden.maths import Moments, gae
from rewarden.models.adapters import copy_frozen
from rewarden.models.folder import read_card
from rewarden.models.forward import sequence_logp, sequence_scores
from rewarden.models.load import Model, load_policy, trainable
from rewarden.models.reward import load_reward_model
from rewarden.models.trunk import decoder_layers, score_head
from rewarden.rollout.hf import Sampling
from rewarden.runtime.job import Drive, drive
from rewarden.runtime.metrics import read_metrics
from rewarden.runtime.optim import Group, Optim, Optimizer
from rewarden.runtime.report import RunFolder
from rewarden.runtime.seed import seed_of
from rewarden.runtime.step import split_batch, update
from rewarden.scoring import FunctionScorer
from rewarden.text.collate import collate
from rewarden.types import ScoredRollout
from tests.reports.short_runs import ALONE, ppo_actors, ppo_config, prepared, scored_rollouts, ticks, without_times, write_rows
from tests.reports.test_tokens_and_templates import QUIET, turn

ROOT = Path(__file__).parents[2]


def test_a_negative_kl_names_its_estimator_and_the_cause_that_was_measured(world_files):
    """Row 36 (trl#351): answers of the old weights, log-probs of the new ones: k1 < 0 <= k3, and the line says where it comes from."""
    cfg = ppo_config(world_files)
    actors = ppo_actors(cfg)
    scored = scored_rollouts(cfg, actors)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in actors.policy.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=generator))
    _, _, facts = prepare(actors, scored, Moments(), cfg, ALONE)
    assert facts["kl/k1"] < -0.05 < 0 < facts["kl/k3"]
    text = alarms(facts, {}, cfg.sampling, cfg.selection)["negative_kl"]
    shown = f"is {facts['kl/k1']:.3f} (kl/k3, never negative, is {facts['kl/k3']:.3f})"
    assert text.startswith(f"kl/k1, the mean of log pi - log pi_ref over sampled tokens, {shown}")
    assert f"disagree by up to {facts['rollout/logp_gap_max']:.2g} nats" in text
    assert text.endswith("or a sampler with other weights")


@pytest.mark.parametrize(
    ("measured", "cause"),
    [
        (
            {"rollout/behavior_gap": 0.3},
            "0.300 nats per token away from the policy (rollout/behavior_gap; top_p 0.9, top_k 0, repetition_penalty 1.0)",
        ),
        ({"rollout/logp_gap_max": 0.5}, "look for dropout, low precision, or a sampler with other weights"),
        ({}, "see whether the reference is the policy before training"),
    ],
)
def test_each_cause_of_a_negative_kl_is_told_from_the_others(measured, cause):
    """Row 36: what was measured decides which cause is named."""
    facts = {**QUIET, "kl/k1": -0.1, "kl/k3": 0.1, **measured}
    found = alarms(facts, QUIET, Sampling(max_completion_length=4, top_p=0.9), Selection())
    assert found.keys() == {"negative_kl"}
    assert cause in found["negative_kl"]
    assert not alarms({**facts, "kl/k1": -0.01}, QUIET, Sampling(max_completion_length=4), Selection())


def test_repetition_and_variety_by_hand():
    """Row 37 (trl#204): distinct-n over the round, and repeated runs of three tokens inside an answer."""
    facts = text_facts([turn((5, 6, 5, 6, 5, 6, 2), "eos"), turn((7, 8), "length"), turn((2,), "eos")], ALONE)
    assert facts["text/distinct_1"] == pytest.approx(4 / 8)  # 5 6 7 8 of 8 tokens
    assert facts["text/distinct_2"] == pytest.approx(3 / 6)  # 56 65 78 of 5 + 1 pairs
    assert facts["text/repetition"] == pytest.approx((1 - 2 / 4) / 3)  # 565 656 of 4 runs; the others have none
    assert facts["eos_first_rate"] == pytest.approx(1 / 3)


FIRST = {"length/mean": 20.0, "eos_rate": 0.9, "entropy/mean": 2.0, "text/distinct_2": 0.6, "score/disagreement": 0.1}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"length/mean": 31.0}, "length_mean"),
        ({"eos_rate": 0.4}, "eos_rate"),
        ({"entropy/mean": 0.5}, "entropy_mean"),
        ({"text/distinct_2": 0.2}, "text_distinct_2"),
        ({"text/repetition": 0.5}, "text_repetition"),
        ({"score/disagreement": 0.3}, "score_disagreement"),
        ({"kl/sequence": 11.0}, "far_from_reference"),
    ],
)
def test_each_sign_of_collapse_is_said_with_its_numbers(change, name):
    """Row 37 (lf#1694): length, endings, entropy, variety, repetition, KL and disagreement, compared with the first round."""
    facts, sampling = {**QUIET, **FIRST}, Sampling(max_completion_length=4)
    first = first_facts(facts)
    assert alarms(facts, first, sampling, Selection()) == {}
    found = alarms({**facts, **change}, first, sampling, Selection())
    assert found.keys() == {name}
    assert next(iter(change)) in found[name]


SHOUT = "def f(completions, **_):\n    return [float(len(c[0]['content'])) for c in completions]\n"


def runaway(files, path: str, **changes: object) -> PPO:
    """A reward for length, a huge learning rate, no KL."""
    return ppo_config(
        files,
        reward={"kind": "function", "path": path},
        eval_data=Data(path=str(files.selection)),
        sampling=Sampling(max_completion_length=12),
        optim={"learning_rate": 3e-2},
        beta=0.0,
        max_steps=8,
        **changes,
    )


def test_a_run_beyond_its_limits_stops_and_exports_the_last_sound_policy(world_files, reward_file, tmp_path, caplog, capsys):
    """Row 37 (moss#2): with `selection.patience` a collapsed run ends, rolls back to the best step, and says why."""
    cfg = runaway(world_files, reward_file(SHOUT), selection=Selection(max_kl=0.5, max_length_ratio=1.05, patience=2))
    with caplog.at_level(logging.WARNING, logger="rewarden"):
        drive(cfg.build(ALONE), RunFolder(tmp_path / "run"), ALONE, cfg=Drive(save_steps=0, view="plain"))
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(rows) < 8
    assert [row["selection/refused"] for row in rows[-2:]] == [1.0, 1.0]
    assert rows[-1]["alarms"] >= 1
    assert len(caplog.messages) == len(set(caplog.messages)) >= 1
    best = int(rows[-1]["selection/best_step"])
    assert best <= len(rows) - 2
    state = json.loads(next((tmp_path / "run" / "checkpoints").glob("step-*/checkpoint.json")).read_text())["state"]
    assert state["refused_in_a_row"] == 2
    exported = load_policy(Model(model_name_or_path=str(tmp_path / "run" / "model")))
    start = load_policy(Model(model_name_or_path=str(world_files.policy)))
    same = all(torch.equal(a, b) for (_, a), (_, b) in zip(trainable(exported), trainable(start), strict=True))
    assert same == (best == 0)
    assert read_card(tmp_path / "run" / "model")["exported_step"] == best
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"PPO: exported round {best} of {len(rows)}: ")


def test_a_run_that_gave_up_has_nothing_more_to_do_when_resumed(world_files, reward_file):
    """Row 37: the count of refused evaluations is part of the state, so a resumed run ends at the same round."""
    cfg = runaway(world_files, reward_file(SHOUT), selection=Selection(patience=2))
    state = State(step=3, refused_in_a_row=2, start={"eval/score": 0.0}, best_step=0, best_criterion=0.0)
    assert ticks(cfg, state) == []


def test_the_first_check_names_dropout_and_a_foreign_reference(world_files, tmp_path, caplog):
    """Row 38 (trl#4): ratio 1 and KL 0 before the first step, or a warning with the cause that can be seen."""
    folder = tmp_path / "policy"
    shutil.copytree(world_files.policy, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.5}))
    cfg = ppo_config(world_files, policy=Model(model_name_or_path=str(folder)))
    actors, _, batch, _ = prepared(cfg)
    with caplog.at_level(logging.WARNING, logger="rewarden"):
        fine = self_check(actors, [batch], ALONE)
    assert max(fine.values()) <= 1e-5
    assert caplog.messages == []
    actors.policy.train()
    broken = self_check(actors, [batch], ALONE)
    assert broken["check/log_ratio_max"] > 1e-3
    assert "dropout may be on, the policy is in training mode" in caplog.messages[-1]
    actors.policy.eval()
    with torch.no_grad():
        next(actors.reference.parameters()).mul_(1.5)
    moved = self_check(actors, [batch], ALONE)
    assert moved["check/log_ratio_max"] <= 1e-5 < 1e-3 < moved["check/kl_max"]
    assert caplog.messages[-1].endswith("both should be 0: the reference is not the starting policy")


def test_the_policy_of_another_batch_size_is_still_the_same_policy(world_files):
    """Row 38 (trlx#508): scoring in one batch and training in parts of one row gives ratio 1, since nothing depends on the batch."""
    cfg = ppo_config(world_files)
    actors, _, batch, _ = prepared(cfg)
    for part in split_batch(batch, 1):
        term = loss(actors, part, cfg)["policy/ratio"]
        ratio = term.value_BT[term.mask_BT]
        torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-5, rtol=0)


def test_generate_score_advantages_and_update_are_four_public_calls(world_files):
    """Row 41 (trl#2576): a loop of one's own, any callable as reward, any sampling; it equals a round of `train`."""

    def loud(completions, **_):
        return [float(len(c[0]["content"])) for c in completions]

    sampling = Sampling(max_completion_length=6, top_p=0.9, temperature=0.8, repetition_penalty=1.1)
    cfg = ppo_config(world_files, sampling=sampling, mini_batch_size=8, max_steps=1)
    actors = dataclasses.replace(ppo_actors(cfg), scorer=FunctionScorer(loud))
    rates = [("policy", actors.policy, cfg.optim), ("critic", actors.critic.model, cfg.critic_optim)]
    optimizer = Optimizer([Group(name, trainable(model), optim) for name, model, optim in rates], 1)
    job = ppo.build(cfg, ALONE)
    prompts = load_prompt_rollouts(cfg.data, actors.template, cfg.max_prompt_length).rollouts
    order, _ = Stream(len(prompts), seed=cfg.seed).take(Cursor(), cfg.rollout_batch_size)
    opened = [prompts[row] for row in order]
    seeds = [seed_of(cfg.seed, "ppo", 0, place, rollout.conversation.id) for place, rollout in enumerate(opened)]

    rollouts = actors.sampler.sample(opened, seeds=seeds)  # generate
    scores = actors.scorer.score([rollout.conversation for rollout in rollouts])  # score
    scored = [ScoredRollout(rollout=r, score=s, through_turn=0) for r, s in zip(rollouts, scores, strict=True)]
    batch, _, facts = prepare(actors, scored, Moments(), cfg, ALONE)  # advantages
    mini = next(minibatches(batch, 1, seed_of(cfg.seed, "minibatch", 0, 0)))
    learnt = update(optimizer, split_batch(mini, 3), lambda part: loss(actors, part, cfg), ranks=ALONE)  # update

    assert learnt["skipped_steps"] == 0
    assert facts["score/mean"] == sum(len(r.conversation.messages[-1].text) for r in rollouts) / len(rollouts)
    ours = next(iter(job.train(job.start))).report
    assert facts["length/mean"] == ours["length/mean"]
    assert facts["entropy/mean"] == pytest.approx(ours["entropy/mean"], abs=1e-6)


def test_the_step_with_the_best_guarded_score_is_the_one_exported(world_files):
    """Rows 44 and 90 (trl#504, nemo#2519): the best evaluation wins; a higher score beyond a limit does not; a tie keeps the earlier step."""
    cfg = ppo_config(
        world_files, beta=0.5, selection=Selection(beta=0.5, max_kl=5.0), eval_data=Data(path=str(world_files.selection))
    )
    start = {"eval/score": 1.0, "eval/kl_sequence": 0.0, "eval/length": 10.0, "eval/truncated": 0.0}
    state = State(start=start, best_step=0, best_criterion=1.0)
    picks = []
    for step, (score, kl) in enumerate([(2.0, 1.0), (9.0, 6.0), (2.5, 2.0), (3.0, 2.0), (3.5, 3.0)], start=1):
        state = dataclasses.replace(state, step=step)
        measured = {**start, "eval/score": score, "eval/kl_sequence": kl}
        state, report = consider(state, measured, cfg)
        picks.append((int(report["selection/best_step"]), report["selection/refused"]))
    # criteria 1.5, refused, 1.5 (a tie), 2.0, 2.0 (a tie)
    assert picks == [(1, 0.0), (1, 1.0), (1, 0.0), (4, 0.0), (4, 0.0)]
    assert criterion({**start, "eval/truncated": 0.2}, start, Selection(), beta=0.0)[0] == -math.inf


def test_a_run_without_a_critic_builds_one_and_a_wrong_critic_is_refused_in_words(world_files, tmp_path):
    """Row 45 (trl#3292): from the reward model when it reads the policy's tokens, else from the policy with a fresh head."""
    learned = ppo_actors(ppo_config(world_files, reward={"kind": "reward_model", "path": str(world_files.reward)})).critic
    saved = load_reward_model(Model(model_name_or_path=str(world_files.reward)))
    assert torch.equal(score_head(learned.model).weight, score_head(saved.model).weight)
    ruled = ppo_actors(ppo_config(world_files)).critic
    assert ruled.num_heads == 1
    assert score_head(ruled.model).weight.std() > 0
    with pytest.raises(ConfigError, match="has no scalar head"):
        ppo_actors(ppo_config(world_files, critic={"model_name_or_path": str(world_files.policy)}))
    with pytest.raises(ConfigError, match="no critic with a head is given"):
        ppo_actors(ppo_config(world_files, critic_head="saved"))
    with pytest.raises(ValueError, match="unknown key 'penalti'; did you mean 'penalty'"):
        ppo_config(world_files, reward={"kind": "length", "target": 1, "penalti": 1.0})


def test_the_critics_head_starts_from_the_reward_drawn_or_zero(world_files):
    """Row 46 (trlx#345): three starts by name; with a zero head every first value is 0 and learning still moves it."""
    reward = {"kind": "reward_model", "path": str(world_files.reward)}
    cfg = ppo_config(world_files, reward=reward, critic_head="zero", max_steps=1, critic_optim={"learning_rate": 1e-2})
    actors, _, batch, facts = prepared(cfg)
    assert not score_head(actors.critic.model).weight.any()
    assert not batch.value_old_BT.any()
    assert facts["value/explained_variance"] == pytest.approx(0.0, abs=1e-6)
    saved = load_reward_model(Model(model_name_or_path=str(world_files.reward)))
    for (name, ours), (_, theirs) in zip(actors.critic.model.named_parameters(), saved.model.named_parameters(), strict=True):
        assert torch.equal(ours, theirs) or "score" in name
    report = ticks(cfg)[0].report
    assert report["grad_norm/critic"] > 0
    weights = {
        head: score_head(ppo_actors(ppo_config(world_files, reward=reward, critic_head=head)).critic.model).weight
        for head in ("saved", "fresh")
    }
    assert torch.equal(weights["saved"], score_head(saved.model).weight)
    assert not torch.equal(weights["fresh"], weights["saved"])


def test_the_schedule_moves_policy_and_value_head_alike(world_files):
    """Row 47 (nemo#2530): both groups follow their own schedule, and the value head is in the critic's group."""
    cfg = ppo_config(
        world_files,
        max_steps=4,
        mini_batch_size=8,
        optim={"learning_rate": 1e-3, "lr_scheduler_type": "linear"},
        critic_optim={"learning_rate": 4e-3, "lr_scheduler_type": "linear"},
    )
    reports = [tick.report for tick in ticks(cfg)]
    assert [report["lr/policy"] for report in reports] == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])
    assert [report["lr/critic"] for report in reports] == pytest.approx([4e-3, 3e-3, 2e-3, 1e-3])
    critic = ppo_actors(cfg).critic.model
    optimizer = Optimizer([Group("critic", trainable(critic), Optim(learning_rate=1e-2, lr_scheduler_type="linear"))], 4)
    head = score_head(critic).weight
    moved = []
    for _ in range(4):
        before = head.detach().clone()
        sequence_scores(critic, collate([(5, 6, 7)])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        moved.append(float((head.detach() - before).abs().max()))
    assert moved == sorted(moved, reverse=True)
    assert moved[3] < 0.5 * moved[0]


def test_the_value_of_the_end_of_turn_is_learned_and_nothing_follows_it(world_files):
    """Row 49 (verl#1850): the state before the end of turn has a value of its own; only what comes after it is 0."""
    value_BT = torch.tensor([[0.0, 0.5, 0.25, 0.75]])
    reward_BT = torch.tensor([[0.0, 0.0, 0.0, 2.0]])
    mask_BT = torch.tensor([[False, True, True, True]])
    advantage_BT, return_BT = gae(reward_BT, value_BT, mask_BT, gamma=1.0, lam=0.5)
    # delta: .25 - .5, .75 - .25, 2 - .75;  advantage: backwards with factor .5
    assert advantage_BT.tolist() == [[0.0, -0.25 + 0.5 * 1.125, 0.5 + 0.5 * 1.25, 1.25]]
    assert return_BT.tolist() == [[0.0, 0.8125, 1.375, 2.0]]
    cfg = ppo_config(world_files, sampling=Sampling(max_completion_length=40))
    _, scored, batch, _ = prepared(cfg)
    ended = [row for row, item in enumerate(scored) if item.rollout.stop == "eos"]
    assert ended
    for row in ended:
        last = len(scored[row].rollout.token_ids) - 1
        assert bool(batch.mask_BT[row, last])
        assert float(batch.value_old_BT[row, last]) != 0.0
    assert not batch.value_old_BT[~batch.mask_BT].any()


def test_metrics_do_not_depend_on_how_a_batch_is_cut(world_files):
    """Row 50 (verl#2259): KL, ratio and losses are means over tokens, whatever the microbatches."""
    whole, cut = (
        [
            tick.report
            for tick in ticks(ppo_config(world_files, num_ppo_epochs=2, max_steps=1, per_device_train_batch_size=each))
        ]
        for each in (8, 3)
    )
    for one, other in zip(whole, cut, strict=True):
        assert one.keys() == other.keys()
        assert without_times(one) == pytest.approx(without_times(other), abs=2e-5, rel=1e-4)


def test_dropout_touches_neither_log_probs_nor_values(world_files, tmp_path):
    """Row 51 (verl#4708): with a dropout of one half in both models, two passes agree to the bit."""
    folders = {}
    for name, source in (("policy", world_files.policy), ("reward", world_files.reward)):
        folders[name] = tmp_path / name
        shutil.copytree(source, folders[name])
        config = json.loads((folders[name] / "config.json").read_text())
        (folders[name] / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.5}))
    cfg = ppo_config(
        world_files,
        policy=Model(model_name_or_path=str(folders["policy"])),
        critic=Model(model_name_or_path=str(folders["reward"])),
    )
    actors = ppo_actors(cfg)
    scored = scored_rollouts(cfg, actors)
    one, _, _ = prepare(actors, scored, Moments(), cfg, ALONE)
    two, _, _ = prepare(actors, scored, Moments(), cfg, ALONE)
    assert actors.policy.config.attention_dropout == actors.critic.model.config.attention_dropout == 0.5
    assert torch.equal(one.logp_old_BT, two.logp_old_BT)
    assert torch.equal(one.value_old_BT, two.value_old_BT)
    actors.policy.train()
    assert not torch.equal(prepare(actors, scored, Moments(), cfg, ALONE)[0].logp_old_BT, one.logp_old_BT)


@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.integers(1, 23),
    batch=st.integers(1, 17),
    mini=st.integers(1, 17),
    micro=st.integers(1, 9),
    world=st.integers(1, 5),
)
def test_every_sample_that_goes_in_comes_out_once(num_rows, batch, mini, micro, world):
    """Row 55 (orlhf#1296): rows -> rounds -> ranks -> minibatches -> microbatches, for sizes that do not divide."""
    mini = min(mini, batch)
    stream, cursor, taken = Stream(num_rows, seed=3), Cursor(), []
    while len(taken) < 2 * num_rows:
        rows, cursor = stream.take(cursor, batch)
        taken += rows
        shares = [Held(numbers=tuple(range(batch))[rank::world], total=batch) for rank in range(world)]
        learned: Counter[int] = Counter()
        for share in shares:
            for index_b in shuffled_parts(share, -(-batch // mini), 7):
                parts = index_b.split(micro)
                learned.update(share.numbers[i] for part in parts for i in part.tolist())
        assert learned == Counter(range(batch))
    assert Counter(taken[:num_rows]) == Counter(range(num_rows))
    assert Counter(taken[: 2 * num_rows]) == Counter(dict.fromkeys(range(num_rows), 2))


def test_a_run_whose_sizes_divide_nowhere_keeps_every_rollout(world_files, tmp_path):
    """Rows 55 and 84 (orlhf#1300, verl#331): 7 rollouts in minibatches of 3 and parts of 2, from 5 prompts."""
    rows = [{"id": f"p{i}", "prompt": [{"role": "user", "content": "cheap " * (i + 1)}]} for i in range(5)]
    file = write_rows(tmp_path / "prompts.jsonl", rows)
    cfg = ppo_config(
        world_files,
        data=Data(path=str(file)),
        rollout_batch_size=7,
        mini_batch_size=3,
        per_device_train_batch_size=2,
        num_sample_generations=7,
        max_steps=5,
    )
    run = ticks(cfg)
    ids = [row["id"] for tick in run for row in tick.samples]
    assert len(ids) == 35
    assert Counter(ids) == Counter({f"p{i}": 7 for i in range(5)})
    assert [tick.report["policy_version"] for tick in run] == [3, 6, 9, 12, 15]


def test_an_empty_checkpoint_folder_is_a_fresh_start_with_a_notice_or_an_error_under_must(world_files, tmp_path, capsys):
    """Row 56 (orlhf#1208): nothing to load is said, never a crash."""
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    cfg = ppo_config(world_files, max_steps=1)
    with pytest.raises(ResumeError, match=r"checkpoints holds no checkpoint, and resume is 'must'.*--resume auto"):
        drive(cfg.build(ALONE), RunFolder(folder), ALONE, resume="must", cfg=Drive(view="off"))
    outcome = drive(cfg.build(ALONE), RunFolder(folder), ALONE, cfg=Drive(view="plain"))
    assert "no checkpoint in" in capsys.readouterr().out
    assert (outcome.step, outcome.resumed_from) == (1, None)


@pytest.mark.parametrize("lora", [{}, {"lora_r": 4}])
def test_gradients_are_equal_with_layers_computed_twice(world_files, lora):
    """Row 57 (trl#5245): gradient checkpointing changes memory only; the reference keeps its own layers, sampling its own speed."""
    found = {}
    for again in (False, True):
        model = Model(model_name_or_path=str(world_files.policy), gradient_checkpointing=again, **lora)
        cfg = ppo_config(world_files, policy=model)
        actors, _, batch, _ = prepared(cfg)
        runs: Counter[bool] = Counter()
        hook = decoder_layers(actors.policy)[0].self_attn.register_forward_hook(
            lambda *_, runs=runs: runs.update([torch.is_grad_enabled()])
        )
        terms = loss(actors, batch, cfg)
        once = runs[True]
        (terms["policy"].value_BT * batch.mask_BT).sum().backward()
        hook.remove()
        found[again] = {name: p.grad for name, p in trainable(actors.policy)}
        assert runs[True] == (2 * once if again else once)
        if actors.reference is not None:
            assert all(layer.forward.__self__ is layer for layer in decoder_layers(actors.reference))
    assert found[False].keys() == found[True].keys()
    for name, gradient in found[False].items():
        torch.testing.assert_close(found[True][name], gradient, atol=1e-6, rtol=1e-5)


def test_a_copy_of_a_checkpointed_model_calls_its_own_layers(world_files):
    """Row 57: a frozen reference must not move when the policy does."""
    policy = load_policy(Model(model_name_or_path=str(world_files.policy), gradient_checkpointing=True))
    frozen = copy_frozen(policy)
    tokens = collate([(5, 6, 7, 8), (9, 10)])
    mask_BT = tokens.mask_BT.clone()
    mask_BT[:, 0] = False
    before = sequence_logp(frozen, tokens, mask_BT, temperature=1.0)
    with torch.no_grad():
        for p in decoder_layers(policy).parameters():
            p.mul_(1.5)
    assert torch.equal(sequence_logp(frozen, tokens, mask_BT, temperature=1.0), before)
    assert not torch.allclose(sequence_logp(policy, tokens, mask_BT, temperature=1.0), before, atol=1e-3)


def test_scaling_normalising_and_clipping_of_scores_all_act(world_files):
    """Row 59 (trl#560): a clip at half a running std cuts what lies beyond, and says what share."""
    _, scored, _, facts = prepared(ppo_config(world_files, reward_norm="running", reward_clip=0.5))
    raw = torch.tensor([item.score.value for item in scored], dtype=torch.float64)
    scaled = (raw - raw.mean()) / raw.std(correction=1)
    assert facts["score/processed_mean"] == pytest.approx(float(scaled.clamp(-0.5, 0.5).mean()), abs=1e-5)
    assert facts["score/clip_fraction"] == pytest.approx(float((scaled.abs() > 0.5).double().mean()))
    assert 0 < facts["score/clip_fraction"] < 1
