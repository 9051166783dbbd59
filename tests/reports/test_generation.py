"""User reports 3.6: generation, and the distance between the policy that speaks and the one that learns."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch

from rewarden.algos.actors import load_prompt_rollouts
from rewarden.algos.evaluation import sample_and_score
from rewarden.algos.ppo_prepare import prepare
from rewarden.errors import RewardenError
from rewarden.maths import Moments
from rewarden.models.adapters import copy_frozen
from rewarden.models.forward import sequence_logp
from rewarden.models.load import Model, load_policy, trainable
from rewarden.recipe.env import extras
from rewarden.rollout.hf import HFSampler
from rewarden.text.collate import collate, role_mask
from rewarden.types import Rollout
from tests.reports.short_runs import ALONE, ppo_actors, ppo_config, prepared, scored_rollouts, ticks


def test_a_sampler_with_other_weights_shows_in_the_log_from_the_first_round(world_files):
    """Row 73 (trl#4159): the log-probs of sampler and trainer are compared token by token, every round."""
    cfg = ppo_config(world_files)
    actors = ppo_actors(cfg)
    scored = scored_rollouts(cfg, actors)
    _, _, facts = prepare(actors, scored, Moments(), cfg, ALONE)
    assert facts["rollout/logp_gap_tokens"] == 0
    assert facts["rollout/logp_gap_max"] < 1e-4
    with torch.no_grad():
        for p in actors.policy.parameters():
            p.mul_(1.05)
    _, _, drifted = prepare(actors, scored, Moments(), cfg, ALONE)
    assert drifted["rollout/logp_gap_tokens"] > 0
    tokens = collate([item.rollout.token_ids for item in scored])
    mask_BT = role_mask([item.rollout.spans for item in scored], tokens.ids_BT.shape[1], sampled=True)
    logp = sequence_logp(actors.policy, tokens, mask_BT, temperature=1.0)[mask_BT].tolist()
    sampled = [value for item in scored for value in item.rollout.logp_sampler]
    assert drifted["rollout/logp_gap_max"] == pytest.approx(
        max(abs(a - b) for a, b in zip(logp, sampled, strict=True)), abs=1e-6
    )


class Engine(HFSampler):
    """A sampler with a copy of the weights, and the version of that copy on every answer, as an inference server has."""

    version = 0

    def sample(self, rollouts: Sequence[Rollout], *, seeds: Sequence[int], policy_version: int = 0) -> list[Rollout]:
        return super().sample(rollouts, seeds=seeds, policy_version=self.version)


def test_answers_of_old_weights_stop_the_round(world_files):
    """Row 75 (trl#4772): every answer carries the version of the weights that wrote it, and a stale one is an error."""
    cfg = ppo_config(world_files)
    actors = ppo_actors(cfg)
    prompts = load_prompt_rollouts(cfg.data, actors.template, None).rollouts[:2]
    engine = Engine(copy_frozen(actors.policy), actors.template, cfg.sampling)
    actors = dataclasses.replace(actors, sampler=engine)
    fresh = sample_and_score(actors, prompts, seeds=[1, 2], policy_version=0)
    assert [item.rollout.policy_version for item in fresh] == [0, 0]
    with pytest.raises(RewardenError, match="2 of 2 answers were sampled from policy version 0, the policy is at 2; give the"):
        sample_and_score(actors, prompts, seeds=[1, 2], policy_version=2)


def test_one_call_of_the_sampler_serves_a_whole_round(world_files, monkeypatch):
    """Row 79 (trl#3195): generation happens once a round, not once a minibatch or microbatch."""
    calls: list[int] = []
    sample = HFSampler.sample

    def counted(self, rollouts, **rest):
        calls.append(len(rollouts))
        return sample(self, rollouts, **rest)

    monkeypatch.setattr(HFSampler, "sample", counted)
    ticks(ppo_config(world_files, num_ppo_epochs=2, mini_batch_size=4, per_device_train_batch_size=2, max_steps=1))
    assert calls == [8]


def test_a_lora_run_holds_one_copy_of_the_weights(world_files):
    """Row 80 (orlhf#835): the reference is the policy with its adapter off; its log-probs are those of the base, to the bit."""
    cfg = ppo_config(world_files, policy=Model(model_name_or_path=str(world_files.policy), lora_r=4))
    actors, scored, _, _ = prepared(cfg)
    assert actors.reference is None
    with torch.no_grad():
        for name, p in trainable(actors.policy):
            if "lora_B" in name:
                p.normal_()
    tokens = collate([item.rollout.token_ids for item in scored])
    mask_BT = role_mask([item.rollout.spans for item in scored], tokens.ids_BT.shape[1], sampled=True)
    base = load_policy(Model(model_name_or_path=str(world_files.policy)))
    expected = sequence_logp(base, tokens, mask_BT, temperature=1.0)
    assert torch.equal(actors.reference_logp(tokens, mask_BT, temperature=1.0), expected)
    assert not torch.allclose(sequence_logp(actors.policy, tokens, mask_BT, temperature=1.0), expected, atol=1e-3)


def test_the_env_command_prints_versions_device_and_extras():
    """Row 81 (orlhf#211): what a bug report needs, as JSON; nothing but the core is needed to install."""
    done = subprocess.run(
        [sys.executable, "-m", "rewarden.cli", "env"], capture_output=True, encoding="utf-8", timeout=120, check=True
    )
    found = json.loads(done.stdout)
    assert found["versions"]["torch"] == torch.__version__
    assert {"python", "platform", "device", "num_threads", "num_cpus", "num_ranks", "commit"} <= found.keys()
    assert {"trackers", "gguf"} <= found["extras"].keys()


def test_an_extra_that_is_not_installed_is_shown_as_absent():
    """Row 81: optional packages by extra, None where there is none."""
    lines = ["torch>=2.9", 'surely-not-there>=1; extra == "judge"', 'pytest>=8.3; extra == "judge"']
    assert extras(lines) == {"judge": {"surely-not-there": None, "pytest": pytest.__version__}}
