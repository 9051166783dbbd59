"""A world in miniature, made once; small recipes around it; and the command line run in this process as a user runs it."""

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from bad_desk import Desk, Outcome, World, run_here

from rewarden.collect.world import WorldStart
from rewarden.data.write import prompt_row, write_jsonl
from rewarden.models.load import Model, save_model
from rewarden.models.reward import load_reward_model
from rewarden.recipe.run import run_recipe
from rewarden.worlds import TripDesk


@pytest.fixture(scope="session")
def world(tmp_path_factory) -> World:
    """Policy, reward model, dialogues, pairs and prompts, all tiny."""
    root = tmp_path_factory.mktemp("bad_input_world")
    WorldStart(num_dialogues=8, num_heldout=2).run(root)
    desk = TripDesk()
    pairs = []
    for seed in range(6):
        sides = [desk.scripted(kind, seed).messages for kind in ("good", "hasty")]
        answers = [[{"role": "assistant", "content": side[1].text}] for side in sides]
        if answers[0] != answers[1]:
            opening = [{"role": "user", "content": sides[0][0].text}]
            pairs.append({"prompt": opening, "chosen": answers[0], "rejected": answers[1]})
    write_jsonl(root / "pairs.jsonl", pairs)
    write_jsonl(root / "prompts.jsonl", [prompt_row(desk.start(seed)) for seed in range(4)])
    for name, heads in (("reward", 1), ("ensemble", 2)):
        model = load_reward_model(Model(model_name_or_path=str(root / "model")), num_heads=heads, head="fresh", head_seed=3)
        save_model(model.model, model.tokenizer, root / name, extra={"num_heads": heads})
    made = World(root)
    with contextlib.chdir(tmp_path_factory.mktemp("bad_input_runs")), pytest.MonkeyPatch.context() as patch:
        make_runs(Desk(Path.cwd(), made, patch), root / "runs")
    return made


def make_runs(desk: Desk, runs: Path) -> None:
    """Runs in every state: stopped after the first step, stopped before the export, and a finished chain."""
    shutil.copy(desk.world.names["dialogues"], "mine.jsonl")
    every = ["save_total_limit=null"]
    for name, more in (("stopped", every), ("stopped_here", [*every, "data.path=mine.jsonl"]), ("saved", every)):
        folder = run_recipe(Path("sft.yaml"), more).rename(name)
        (folder / "done.json").unlink()
        shutil.rmtree(folder / "model")
        if name != "saved":
            shutil.rmtree(folder / "checkpoints" / "step-00000002")
        shutil.move(folder, runs / name)
    shutil.move(run_recipe(Path("chain.yaml")), runs / "chain")


@pytest.fixture
def desk(world, tmp_path, monkeypatch) -> Iterator[Desk]:
    """An empty folder to work in, with a recipe of every kind."""
    monkeypatch.chdir(tmp_path)
    desk = Desk(tmp_path, world, monkeypatch)
    yield desk
    for undo in desk.later:
        undo()


@dataclass(frozen=True)
class Runner:
    """Runs `rewarden ...` in this process and hands back what a shell would see."""

    monkeypatch: pytest.MonkeyPatch
    capfd: pytest.CaptureFixture[str]

    def __call__(self, *words: str) -> Outcome:
        return run_here(words, self.monkeypatch, self.capfd)


@pytest.fixture
def rewarden(monkeypatch, capfd) -> Callable[..., Outcome]:
    return Runner(monkeypatch, capfd)
