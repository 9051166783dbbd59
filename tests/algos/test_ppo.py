import dataclasses
import json
import shutil

import pytest
import torch

from rewarden.algos import ppo
from rewarden.algos.facts import self_check
from rewarden.algos.ppo_config import PPO
from rewarden.algos.ppo_loss import loss
from rewarden.algos.ppo_prepare import prepare
from rewarden.algos.ppo_rounds import State
from rewarden.algos.scores import process_scores
from rewarden.data.sources import Data
from rewarden.errors import ScoreError
from rewarden.maths import Moments
from rewarden.models.load import Model
from rewarden.rollout.hf import Sampling
from rewarden.types import Score
from tests.reports.short_runs import ALONE, ppo_config, prepared


def config(files, **changes) -> PPO:
    return ppo_config(files, **{"reward": {"kind": "reward_model", "path": str(files.reward)}, **changes})


def with_config(source, target, **changes):
    """A copy of a model folder with other config values."""
    shutil.copytree(source, target)
    path = target / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return target


VARIANTS = ["plain", "dropout", "pad_is_eos", "lora"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_ratio_is_one_and_kl_zero_before_the_first_step(world_files, tmp_path, variant):
    policy, lora = world_files.policy, {}
    if variant == "dropout":
        policy = with_config(policy, tmp_path / "policy", attention_dropout=0.5)
    if variant == "pad_is_eos":
        policy = tmp_path / "policy"
        shutil.copytree(world_files.policy, policy)
        path = policy / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "pad_token": "<|end|>"}))
    if variant == "lora":
        lora = {"lora_r": 4}
    cfg = config(world_files, policy=Model(model_name_or_path=str(policy), **lora))
    actors, scored, batch, facts = prepared(cfg)
    if variant == "pad_is_eos":
        assert actors.template.tokenizer.pad_token_id == actors.template.tokenizer.eos_token_id
    check = self_check(actors, [batch], ALONE)
    assert check["check/log_ratio_max"] <= 1e-5
    assert check["check/kl_max"] <= 1e-5
    assert abs(facts["kl/k3"]) <= 1e-5
    terms = loss(actors, batch, cfg)
    mask = terms["policy/ratio"].mask_BT
    assert int(mask.sum()) == sum(len(item.rollout.logp_sampler) for item in scored)
    torch.testing.assert_close(terms["policy/ratio"].value_BT[mask], torch.ones(int(mask.sum())), atol=1e-5, rtol=0)
    torch.testing.assert_close(terms["policy"].value_BT[mask], -batch.advantage_BT[mask], atol=1e-4, rtol=0)
    assert not terms["policy/clip_fraction"].value_BT.any()


def test_the_sampler_and_the_trainer_agree_on_log_probs(world_files):
    _, _, _, facts = prepared(config(world_files))
    assert facts["rollout/logp_gap_max"] <= 1e-4
    assert facts["rollout/logp_gap_tokens"] == 0


def test_rewards_and_returns_of_a_round_match_a_scalar_loop(world_files):
    """Scores, KL, GAE and whitening redone token by token in float64 from logits of plain forward passes."""
    cfg = config(world_files, beta=0.3, lam=0.9, gamma=0.97, reward_clip=1.0)
    actors, scored, batch, _ = prepared(cfg)
    with torch.no_grad():
        for p in actors.policy.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    batch, _, facts = prepare(actors, scored, Moments(), cfg, ALONE)
    raw = [item.score.value for item in scored]
    mean = sum(raw) / len(raw)
    std = (sum((x - mean) ** 2 for x in raw) / (len(raw) - 1)) ** 0.5
    advantages, returns = [], []
    for item, score in zip(scored, raw, strict=True):
        ids = torch.tensor([item.rollout.token_ids])
        n = len(item.rollout.logp_sampler)
        first = len(item.rollout.token_ids) - n
        with torch.no_grad():
            logits = actors.policy(ids).logits[0].double()
            ref_logits = actors.reference(ids).logits[0].double()
            trunk = actors.critic.model.model(ids).last_hidden_state[0].double()
            values = (trunk @ actors.critic.model.score.weight.double().T)[:, 0].tolist()
        logp = [float(logits[t - 1].log_softmax(-1)[ids[0, t]]) for t in range(first, first + n)]
        ref = [float(ref_logits[t - 1].log_softmax(-1)[ids[0, t]]) for t in range(first, first + n)]
        value = [values[t - 1] for t in range(first, first + n)]
        reward = [-0.3 * (a - b) for a, b in zip(logp, ref, strict=True)]
        reward[-1] += max(-1.0, min(1.0, (score - mean) / std))
        delta = [reward[t] + (0.97 * value[t + 1] if t + 1 < n else 0.0) - value[t] for t in range(n)]
        for t in range(n):
            advantage = sum((0.97 * 0.9) ** k * delta[t + k] for k in range(n - t))
            advantages.append(advantage)
            returns.append(advantage + value[t])
    advantages = torch.tensor(advantages, dtype=torch.float64)
    whitened = (advantages - advantages.mean()) / advantages.std(correction=0)
    torch.testing.assert_close(
        batch.return_BT[batch.mask_BT].double(), torch.tensor(returns, dtype=torch.float64), atol=2e-4, rtol=1e-4
    )
    torch.testing.assert_close(batch.advantage_BT[batch.mask_BT].double(), whitened, atol=5e-4, rtol=1e-3)
    assert facts["score/mean"] == pytest.approx(mean, abs=1e-5)
    assert facts["score/clip_fraction"] == pytest.approx(sum(abs((x - mean) / std) > 1.0 for x in raw) / len(raw))


def test_a_score_that_does_not_apply_leaves_its_rollout_out(world_files):
    cfg = config(world_files)
    actors, scored, _, _ = prepared(cfg)
    some = [
        dataclasses.replace(item, score=Score(value=float("nan"), status="not_applicable")) if i % 2 else item
        for i, item in enumerate(scored)
    ]
    mixed, moments, facts = prepare(actors, some, Moments(), cfg, ALONE)
    alone, moments_alone, facts_alone = prepare(
        actors, [item for i, item in enumerate(scored) if i % 2 == 0], Moments(), cfg, ALONE
    )
    assert facts["score/unscored"] == len(scored) // 2
    assert moments == moments_alone
    assert len(mixed) == len(scored) - len(scored) // 2
    torch.testing.assert_close(mixed.advantage_BT[mixed.mask_BT], alone.advantage_BT[alone.mask_BT], atol=1e-5, rtol=0)
    for key in ("score/mean", "kl/k1", "entropy/mean", "value/mean"):
        assert facts[key] == pytest.approx(facts_alone[key], abs=1e-6)


def test_microbatches_and_row_order_do_not_change_the_loss(world_files):
    cfg = config(world_files)
    actors, _, batch, _ = prepared(cfg)

    def total(parts):
        value = count = 0.0
        for part in parts:
            term = loss(actors, part, cfg)["policy"]
            value += float((term.value_BT.detach() * term.mask_BT).sum())
            count += float(term.mask_BT.sum())
        return value / count

    whole = total([batch])
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(0))
    assert total([batch.rows(order)]) == pytest.approx(whole, abs=1e-6)
    assert total([batch.rows(index) for index in order.split(3)]) == pytest.approx(whole, abs=1e-6)


def test_scores_of_no_spread_are_divided_by_one():
    """MOSS-RLHF specification T9: its code divides by infinity or 3e-12 here."""
    for values in ([3.0], [3.0, 3.0]):
        raw = torch.tensor(values)
        moments = Moments().update(raw)
        score, clipped = process_scores(raw, moments, normalize=True, clip=None)
        torch.testing.assert_close(score, torch.zeros(len(values)))
        assert not clipped.any()


def test_training_reaches_the_planted_reward(world_files):
    """A rule that pays for short answers, no KL: the mean score must rise and the KL must become positive."""
    cfg = config(
        world_files,
        reward={"kind": "function", "path": "tests.algos.test_ppo:brevity"},
        max_steps=6,
        rollout_batch_size=24,
        mini_batch_size=12,
        num_ppo_epochs=2,
        beta=0.0,
        optim={"learning_rate": 3e-3},
        critic_optim={"learning_rate": 3e-3},
        sampling=Sampling(max_completion_length=12),
    )
    ticks = list(run(cfg))
    assert ticks[-1].report["score/mean"] > ticks[0].report["score/mean"] + 1.0
    assert ticks[-1].report["kl/k3"] > 0
    assert [tick.state.step for tick in ticks] == [1, 2, 3, 4, 5, 6]


def test_the_same_seed_gives_the_same_run(world_files):
    cfg = config(world_files)
    first, second = ([{k: v for k, v in t.report.items() if not k.startswith("time/")} for t in run(cfg)] for _ in range(2))
    assert first == second


def brevity(completions, **_):
    return [-float(len(text[0]["content"].split())) for text in completions]


def undefined(completions, **_):
    return [float("nan")] * len(completions)


def run(cfg):
    job = ppo.build(cfg, ALONE)
    return job.train(job.start)


def test_a_nan_reward_stops_with_the_row_shown(world_files):
    with pytest.raises(ScoreError, match="nan"):
        list(run(config(world_files, reward={"kind": "function", "path": "tests.algos.test_ppo:undefined"})))


def test_impossible_batch_sizes_are_refused_with_both_numbers(world_files):
    with pytest.raises(ValueError, match=r"mini_batch_size is 16.*rollout_batch_size=8"):
        config(world_files, mini_batch_size=16)


def test_state_survives_json(world_files):
    state = State(step=3, moments=Moments().update(torch.tensor([1.0, 2.0])), start={"eval/score": 0.5}, best_criterion=0.25)
    assert State.restore(json.loads(json.dumps(state.dump()))) == state


def mostly_silent(completions, **_):
    return [1.0 if i == 0 else None for i in range(len(completions))]


def test_one_scored_rollout_of_a_round_is_enough_to_go_on(world_files):
    cfg = config(world_files, reward={"kind": "function", "path": "tests.algos.test_ppo:mostly_silent"}, max_steps=1)
    report = next(iter(run(cfg))).report
    assert report["score/unscored"] == 7
    assert report["score/num_not_applicable"] == 7
    assert report["policy_version"] == 1


def silent(completions, **_):
    return [None] * len(completions)


def test_a_round_without_any_score_is_refused(world_files):
    with pytest.raises(ScoreError, match="none of the"):
        list(run(config(world_files, reward={"kind": "function", "path": "tests.algos.test_ppo:silent"})))


def test_temperature_zero_is_refused_when_the_recipe_is_read(world_files):
    with pytest.raises(ValueError, match="temperature 0 has no probabilities"):
        config(world_files, sampling=Sampling(max_completion_length=6, temperature=0.0))


def test_prompts_that_leave_no_room_for_an_answer_are_dropped_at_the_start(world_files, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("Hello", "cheap " * 330)))
    job = ppo.build(config(world_files, data=Data(path=str(file)), max_prompt_length=None), ALONE)
    assert "prompts: 1 prompts, 1 longer than 319 tokens dropped" in job.notes
