"""A world in miniature: an untrained policy, a reward model on it, dialogues, pairs and prompts as files."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from rewarden.collect.world import WorldPairs, WorldStart
from rewarden.models.load import Model, save_model
from rewarden.models.reward import load_reward_model
from rewarden.rollout.hf import Sampling


@dataclass(frozen=True)
class Files:
    policy: Path
    reward: Path
    dialogues: Path
    heldout: Path
    pairs: Path
    prompts: Path
    selection: Path


@pytest.fixture(scope="session")
def world_files(tmp_path_factory) -> Files:
    root = tmp_path_factory.mktemp("world")
    start, pairs, reward = root / "start", root / "pairs", root / "reward"
    for folder in (start, pairs, reward):
        folder.mkdir()
    WorldStart(num_dialogues=48, num_heldout=8).run(start)
    policy = Model(model_name_or_path=str(start / "model"))
    job = WorldPairs(
        policy=policy,
        num_pairs=40,
        num_test_pairs=0,
        num_prompts=24,
        num_selection=6,
        num_heldout=6,
        sampling=Sampling(max_completion_length=6),
    )
    job.run(pairs)
    model = load_reward_model(policy, num_heads=1, head="fresh", head_seed=3)
    save_model(model.model, model.tokenizer, reward / "model", extra={"role": "reward", "template": "chat", "num_heads": 1})
    return Files(
        policy=start / "model",
        reward=reward / "model",
        dialogues=start / "sft.jsonl",
        heldout=start / "sft_heldout.jsonl",
        pairs=pairs / "pairs.jsonl",
        prompts=pairs / "prompts.jsonl",
        selection=pairs / "selection.jsonl",
    )
