"""A world in miniature as files, and recipes that take seconds."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from rewarden.cli import main
from rewarden.collect.world import WorldStart
from rewarden.data.write import prompt_row, write_jsonl
from rewarden.models.load import Model, save_model
from rewarden.models.reward import load_reward_model
from rewarden.worlds import TripDesk

ROOT = Path(__file__).parents[2]

JOBS = '''
from pathlib import Path

from rewarden.spec import Spec


class Write(Spec):
    """Writes a text, after that of the file it reads, and counts how often it ran."""

    text: str
    path: str | None = None

    def run(self, folder: Path) -> dict[str, float]:
        count = Path("count.txt")
        count.write_text(count.read_text() + self.text if count.exists() else self.text)
        before = Path(self.path).read_text() if self.path else ""
        (folder / "out.txt").write_text(before + self.text)
        return {"length": float(len(self.text))}


class Interrupted(Spec):
    """Is stopped by Ctrl-C."""

    def run(self, folder: Path) -> dict[str, float]:
        raise KeyboardInterrupt


class Sleep(Spec):
    """Says that it runs, then waits to be stopped."""

    def run(self, folder: Path) -> dict[str, float]:
        import time

        Path("running").touch()
        time.sleep(60)
        return {}
'''
"""Jobs of one file outside the package."""


@dataclass(frozen=True)
class Files:
    policy: Path
    reward: Path
    dialogues: Path
    pairs: Path
    prompts: Path


@pytest.fixture(scope="session")
def world_files(tmp_path_factory) -> Files:
    root = tmp_path_factory.mktemp("world")
    WorldStart(num_dialogues=12, num_heldout=2).run(root)
    world = TripDesk()
    pairs = []
    for seed in range(8):
        good, hasty = world.scripted("good", seed), world.scripted("hasty", seed)
        answers = [[{"role": "assistant", "content": side.messages[1].text}] for side in (good, hasty)]
        if answers[0] != answers[1]:
            opening = [{"role": "user", "content": good.messages[0].text}]
            pairs.append({"id": f"pair-{seed}", "prompt": opening, "chosen": answers[0], "rejected": answers[1]})
    write_jsonl(root / "pairs.jsonl", pairs)
    write_jsonl(root / "prompts.jsonl", [prompt_row(world.start(seed)) for seed in range(4)])
    model = load_reward_model(Model(model_name_or_path=str(root / "model")), num_heads=1, head="fresh", head_seed=3)
    save_model(model.model, model.tokenizer, root / "reward", extra={"role": "reward", "template": "chat", "num_heads": 1})
    return Files(
        policy=root / "model",
        reward=root / "reward",
        dialogues=root / "sft.jsonl",
        pairs=root / "pairs.jsonl",
        prompts=root / "prompts.jsonl",
    )


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """An empty folder to work in, with `jobs.py`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs.py").write_text(JOBS)
    return tmp_path


@pytest.fixture
def write(here):
    """Write a recipe file and return its path."""

    def write(text: str, name: str = "recipe.yaml") -> Path:
        path = Path(name)
        path.write_text(text)
        return path

    return write


@pytest.fixture
def shell(monkeypatch, capsys):
    """(exit code, stdout, stderr) of `rewarden WORDS`, in this process."""

    def shell(*words: object) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["rewarden", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            main()
        captured = capsys.readouterr()
        return stop.value.code, captured.out, captured.err

    return shell


def json_lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]
