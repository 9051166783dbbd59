"""A policy of a world that was never trained, and a few prompts."""

import pytest

from rewarden.collect.world import WorldStart
from rewarden.data.write import prompt_row, write_jsonl
from rewarden.worlds import TripDesk, seed_range
from tests.collect.stores import NUM_PROMPTS, Desk


@pytest.fixture(scope="session")
def desk(tmp_path_factory) -> Desk:
    root = tmp_path_factory.mktemp("desk")
    WorldStart(num_dialogues=4, num_heldout=2).run(root)
    world = TripDesk()
    write_jsonl(root / "prompts.jsonl", [prompt_row(world.start(seed)) for seed in seed_range("rl", 0)[:NUM_PROMPTS]])
    return Desk(policy=root / "model", prompts=root / "prompts.jsonl")
