"""`rewarden diff` and `rewarden import` as a shell sees them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from rewarden.cli import app
from rewarden.worlds import TripDesk
from rewarden.worlds.tokenizer import build_tokenizer

SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """raw, tuned (eight rows more), and a reward model as MOSS-RLHF keeps it, each with the world's tokenizer."""
    root = tmp_path_factory.mktemp("models")
    tokenizer = build_tokenizer(TripDesk())
    for seed, (name, rows) in enumerate({"raw": 0, "tuned": 8, "moss": 8}.items()):
        torch.manual_seed(seed)
        config = LlamaConfig(vocab_size=len(tokenizer) + rows, **SHAPE)
        LlamaForCausalLM(config).save_pretrained(root / name, max_shard_size="30KB")
        tokenizer.save_pretrained(root / name)
    file = sorted((root / "moss").glob("*.safetensors"))[-1]
    save_file({**load_file(file), "reward_head.weight": torch.ones(1, 16)}, file, metadata={"format": "pt"})
    index = root / "moss" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["reward_head.weight"] = file.name
    index.write_text(json.dumps(content))
    return root


@pytest.fixture
def shell(shell, tmp_path, monkeypatch):
    """`shell` in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return shell


@pytest.mark.parametrize("words", [("diff",), ("diff", "make"), ("diff", "recover"), ("diff", "check"), ("import",)])
def test_every_command_has_help(words):
    result = CliRunner().invoke(app, [*words, "--help"])
    assert result.exit_code == 0
    assert f"rewarden {' '.join(words)}" in result.output


def test_make_check_and_recover_give_the_model_back(models, shell):
    code, _, said = shell("diff", "make", models / "raw", models / "tuned", "diff")
    assert (code, "rule exact" in said) == (0, True)
    code, found, _ = shell("diff", "check", "diff", "--raw", models / "raw")
    assert (code, "base + diff is the tuned model by every hash" in found) == (0, True)
    code, _, said = shell("diff", "recover", models / "raw", "diff", "out")
    assert (code, "sha256 of all" in said) == (0, True)
    files = sorted(path.name for path in (models / "tuned").glob("*.safetensors"))
    assert sorted(path.name for path in Path("out").glob("*.safetensors")) == files
    for name in files:
        own, back = load_file(models / "tuned" / name), load_file(Path("out", name))
        assert own.keys() == back.keys()
        assert all(torch.equal(own[key], back[key]) for key in own)
    assert sorted(path.name for path in Path().iterdir()) == ["diff", "out"]


def test_an_imported_reward_model_scores(models, shell, tmp_path):
    code, _, said = shell("import", models / "moss", "reward", "--template", "chat")
    assert (code, "a Rewarden reward model" in said) == (0, True)
    dialogue = TripDesk().scripted("good", 0).messages[:2]
    row = {"messages": [{"role": message.role, "content": message.text} for message in dialogue]}
    Path("rows.jsonl").write_text(json.dumps(row) + "\n")
    code, scores, said = shell("score", "--reward", "reward", "rows.jsonl", "--json")
    assert code == 0, said
    assert isinstance(json.loads(scores)["score"], float)


def truncated(root: Path) -> None:
    file = sorted((root / "diff").glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-8])


def changed(root: Path) -> None:
    file = sorted((root / "diff").glob("*.safetensors"))[0]
    data = bytearray(file.read_bytes())
    data[-3] ^= 4
    file.write_bytes(bytes(data))


def without(root: Path) -> None:
    file = sorted((root / "diff").glob("*.safetensors"))[0]
    tensors = dict(list(load_file(file).items())[1:])
    save_file({key: value.clone() for key, value in tensors.items()}, file)


def more(root: Path) -> None:
    file = sorted((root / "diff").glob("*.safetensors"))[0]
    tensors = {key: value.clone() for key, value in load_file(file).items()}
    save_file({**tensors, "model.more": torch.ones(1)}, file)


@pytest.mark.parametrize(
    ("hurt", "base", "message"),
    [
        (truncated, "raw", "is truncated or damaged"),
        (changed, "raw", "was changed: its sha256 is"),
        (without, "raw", "missing '"),
        (more, "raw", "holds 'model.more', which the index does not name"),
        (lambda root: None, "moss", "is not the base of this diff (raw): the sha256 of model."),
        (lambda root: None, "nowhere", "'nowhere' is not a folder"),
    ],
    ids=["truncated", "changed byte", "missing key", "extra key", "wrong base", "no base"],
)
def test_damage_is_one_message_and_exit_code_2(models, shell, hurt, base, message):
    shell("diff", "make", models / "raw", models / "tuned", "diff")
    hurt(Path())
    place = models / base if (models / base).exists() else base
    commands = [("diff", "recover", place, "diff", "out"), ("diff", "check", "diff", "--raw", place)]
    for words in commands:
        code, _, said = shell(*words)
        assert code == 2
        assert message in said
        assert said.startswith("error: ")
        assert "Traceback" not in said
    assert sorted(path.name for path in Path().iterdir()) == ["diff"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("diff", "make", "{raw}", "{tuned}", "{raw}"), "raw exists already"),
        (("diff", "make", "{raw}", "{tuned}", "new", "--rule", "other"), "rule is 'other'"),
        (("diff", "recover", "{raw}", "{tuned}", "new"), "has no manifest, as published diffs have none"),
        (("diff", "recover", "{raw}", "{tuned}", "new", "--template", "mos"), "template 'mos' is unknown"),
        (("diff", "check", "{tuned}", "--raw", "{raw}", "--rule", "moss", "--sum", "many"), "expected sum is 'many'"),
        (("import", "{raw}", "new"), "holds no reward_head.weight"),
    ],
)
def test_wrong_words_are_one_message_and_exit_code_2(models, shell, words, message):
    filled = [word.format(raw=models / "raw", tuned=models / "tuned") for word in words]
    code, _, said = shell(*filled)
    assert (code, message in said) == (2, True)
    assert list(Path().iterdir()) == []


def test_a_second_command_on_the_same_folder_is_refused(models, tmp_path, shell):
    from rewarden.runtime.lock import FolderLock

    draft = tmp_path / ".diff.writing"
    draft.mkdir()
    # Another process, since a process may lock its own file twice.
    hold = (
        "import sys, time\nfrom pathlib import Path\nfrom rewarden.runtime.lock import FolderLock\n"
        "FolderLock(Path(sys.argv[1])).acquire()\nprint('held', flush=True)\ntime.sleep(60)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", hold, str(draft / "lock")]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        code, _, said = shell("diff", "make", models / "raw", models / "tuned", "diff")
        assert (code, f"in use by pid {holder.pid}" in said) == (2, True)
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    assert isinstance(FolderLock(draft / "lock").path, Path)
    code, _, _ = shell("diff", "make", models / "raw", models / "tuned", "diff")
    assert code == 0
