"""The desk at which bad inputs are made, the recipes that meet them, and what a shell sees of the command."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

import pytest
import yaml

from rewarden.cli import main

RECIPES = {
    "sft.yaml": """
kind: sft
model: {model_name_or_path: $policy}
data: {path: $dialogues}
optim: {learning_rate: 1.0e-3}
train_batch_size: 4
max_steps: 2
save_steps: 1
view: "off"
""",
    "reward.yaml": """
kind: reward
model: {model_name_or_path: $policy}
data: {path: $pairs}
optim: {learning_rate: 1.0e-3}
train_batch_size: 4
max_steps: 1
view: "off"
""",
    "ppo.yaml": """
kind: ppo
policy: {model_name_or_path: $policy}
reward: {kind: length, target: 10, penalty: 0.1}
data: {path: $prompts}
sampling: {max_completion_length: 4}
max_steps: 1
rollout_batch_size: 4
mini_batch_size: 4
num_ppo_epochs: 1
view: "off"
""",
    "compare.yaml": """
kind: compare
before: {model_name_or_path: $policy}
after: {model_name_or_path: $policy}
data: {path: $prompts}
sampling: {max_completion_length: 4}
""",
    "vote.yaml": """
kind: vote
data: {path: $pairs}
scorers: {mine: {kind: reward_model, path: $ensemble}}
""",
    "average.yaml": """
kind: average
models: [{model_name_or_path: $reward}, {model_name_or_path: $reward}]
view: "off"
""",
    "chain.yaml": """
stages:
  - {stage: start, kind: world_start, num_dialogues: 2, num_heldout: 1}
  - stage: sft
    kind: sft
    model: {model_name_or_path: "${start}/model"}
    data: {path: "${start}/sft.jsonl"}
    train_batch_size: 2
    max_steps: 1
    view: "off"
""",
}
"""One of each job, small enough to run in a second."""


@dataclass(frozen=True)
class World:
    """Files of the world in miniature."""

    root: Path

    @property
    def names(self) -> dict[str, str]:
        """What recipes and commands may name with a dollar sign."""
        runs = {name: f"runs/{name}" for name in ("stopped", "stopped_here", "saved", "chain")}
        files = {"dialogues": "sft.jsonl", "pairs": "pairs.jsonl", "prompts": "prompts.jsonl"}
        folders = {"policy": "model", "reward": "reward", "ensemble": "ensemble"}
        return {name: str(self.root / file) for name, file in {**files, **folders, **runs}.items()}


Content = str | bytes | list[Any]


class Desk:
    """The folder in which a command runs."""

    def __init__(self, path: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.world, self.monkeypatch = path, world, monkeypatch
        self.later: list[Callable[[], object]] = []
        """What is undone when the test is over."""
        for name, text in RECIPES.items():
            self.write(name, self.filled(text))

    def filled(self, text: str) -> str:
        """A text with $policy, $reward and the like replaced; ${start} and other names stay."""
        return Template(text).safe_substitute(self.world.names)

    def write(self, name: str, content: Content) -> Path:
        """A file: text or bytes as they are, a list as JSON Lines."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif isinstance(content, str):
            path.write_text(content, encoding="utf-8")
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in content), encoding="utf-8")
        return path

    def copy(self, what: str, name: str) -> Path:
        """A copy of something of the world, to be damaged."""
        source, target = Path(self.world.names[what]), self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copy(source, target)
        return target

    def edit(self, file: str, **changes: Any) -> None:
        """Set keys of a JSON file; `...` takes a key out."""
        path = self.path / file
        kept = {**json.loads(path.read_text(encoding="utf-8")), **changes}
        path.write_text(json.dumps({key: value for key, value in kept.items() if value is not ...}), encoding="utf-8")


@dataclass(frozen=True)
class Kind:
    """One kind of bad input: what is made at the desk, the command, and the words its one message must hold."""

    name: str
    command: str
    words: tuple[str, ...]
    files: Mapping[str, Content] = field(default_factory=dict)
    make: Callable[[Desk], object] | None = None
    powerless: bool = False
    """Permissions hold for the command, even if the tests run as root."""
    largest: int | None = None
    """The most bytes a file may have while the command runs, as on a full disk."""
    lines: int = 1
    """Most lines of the message; a message beyond one line is a list of differing keys, or a row that is shown."""


@dataclass(frozen=True)
class Outcome:
    """What a shell sees."""

    code: int
    out: str
    err: str


def run_here(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Outcome:
    """`rewarden WORDS` through the installed command's entry point; what is not an exit would be a traceback."""
    monkeypatch.setattr("sys.argv", ["rewarden", *words])
    capfd.readouterr()
    code = 0
    try:
        main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    captured = capfd.readouterr()
    return Outcome(code, captured.out, captured.err)


def split(command: str) -> tuple[str, ...]:
    """The words of a command line; a value in braces or brackets is one word, spaces and all, without quotes around it."""
    words: list[str] = []
    depth, quoted, fresh = 0, False, True
    for letter in command:
        depth += (letter in "{[") - (letter in "}]")
        if letter == "'" and not depth:
            quoted = not quoted
            words += [""] if fresh else []
            fresh = False
        elif letter == " " and not depth and not quoted:
            fresh = True
        else:
            words += [""] if fresh else []
            words[-1] += letter
            fresh = False
    return tuple(words)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with what it holds, or with its permissions where it may not be read."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())
    return {str(path.relative_to(folder)): held(path) for path in files}


def held(path: Path) -> bytes:
    """What a file holds."""
    try:
        return path.read_bytes()
    except PermissionError:
        return oct(path.stat().st_mode).encode()


WHOLE = ("env.json", "recipe.yaml", "metrics.jsonl")
"""What a run writes anew at every start; a new version must be whole."""


def lost(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> list[str]:
    """Files that are neither as they were, nor moved elsewhere, nor replaced by a whole newer version."""
    kept = set(after.values())
    return [name for name, data in before.items() if after.get(name) != data and data not in kept and not _newer(name, after)]


def _newer(name: str, after: Mapping[str, bytes]) -> bool:
    if Path(name).name not in WHOLE or name not in after:
        return False
    text = after[name].decode("utf-8")
    if name.endswith(".yaml"):
        return isinstance(yaml.safe_load(text), dict)
    return all(isinstance(json.loads(part), dict) for part in (text.splitlines() if name.endswith(".jsonl") else [text]))
