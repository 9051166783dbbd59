"""The memory estimate counts every member of an ensemble, and finds rewards through a registry."""

from pathlib import Path

import pytest

from rewarden.algos.ppo_config import PPO
from rewarden.data.sources import Data
from rewarden.errors import ConfigError
from rewarden.models.ensemble import load_ensemble
from rewarden.models.ensemble_folder import save_adapted_members, save_independent
from rewarden.models.load import Model, load_tokenizer
from rewarden.models.members import load_adapted_members
from rewarden.recipe.memory import estimate
from rewarden.rollout.hf import Sampling
from rewarden.scoring.registry import register


def reward_bytes(files, reward: dict) -> int:
    spec = PPO(
        policy=Model(model_name_or_path=str(files.policy)),
        reward=reward,
        data=Data(path=str(files.prompts)),
        sampling=Sampling(max_completion_length=4),
        rollout_batch_size=4,
        mini_batch_size=4,
    )
    found = estimate(spec)
    assert found is not None
    return found.phases[0].parts["reward model"]


def held(folder: Path) -> int:
    """Bytes of the parameters of a loaded ensemble, each once."""
    ensemble = load_ensemble(Model(model_name_or_path=str(folder)))
    tensors = {id(p): p.numel() * p.element_size() for module in ensemble.modules() for p in module.parameters()}
    return sum(tensors.values())


def test_every_member_counts(world_files, tmp_path):
    tokenizer = load_tokenizer(Model(model_name_or_path=str(world_files.policy)))
    alone = reward_bytes(world_files, {"kind": "reward_model", "path": str(world_files.reward)})
    save_independent([world_files.reward] * 2, tokenizer, tmp_path / "two", seeds=[0, 1], extra={"template": "chat"})
    two = {"kind": "reward_model", "path": str(tmp_path / "two")}
    assert reward_bytes(world_files, two) == 2 * alone
    register(tmp_path / "models.yaml", "two", two)
    registered = {"kind": "registered", "registry": str(tmp_path / "models.yaml"), "name": "two"}
    assert reward_bytes(world_files, registered) == 2 * alone
    both = {"kind": "sum", "scorers": [{"scorer": registered}, {"scorer": {"kind": "gold"}}]}
    assert reward_bytes(world_files, both) == 2 * alone


def test_adapters_share_their_trunk(world_files, tmp_path):
    policy = Model(model_name_or_path=str(world_files.policy), lora_r=2)
    trunk = load_ensemble(Model(model_name_or_path=str(world_files.reward))).models[0].model
    heads = trunk.score.weight.detach().repeat(3, 1) * 0.5
    adapted = load_adapted_members(policy, heads_KD=heads, seeds=[0, 1, 2], device=None)
    folder = tmp_path / "lora"
    save_adapted_members(
        adapted.model, adapted.tokenizer, folder, seeds=[0, 1, 2], extra={"template": "chat"}, member_extra=[{}] * 3
    )
    found = reward_bytes(world_files, {"kind": "reward_model", "path": str(folder)})
    assert found == pytest.approx(held(folder), rel=0.02)


def test_a_registry_that_an_earlier_stage_will_write_has_no_estimate_yet(world_files):
    with pytest.raises(ConfigError, match="no such registry"):
        reward_bytes(world_files, {"kind": "registered", "registry": "runs/later/models.yaml", "name": "reward"})
