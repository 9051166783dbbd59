"""Names that lead nowhere: the message tells a missing folder, a run that is still to come and a hub out of reach apart."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rewarden.data.read import read_rows
from rewarden.errors import ConfigError, DataError
from rewarden.models.folder import find

ROOT = Path(__file__).parents[2]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("models/smollm2", "runs/demo", "recipes"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "recipes" / "sft_hh.yaml").write_text("kind: sft\n")
    return tmp_path


def said(path: str) -> str:
    with pytest.raises(ConfigError) as error:
        find(path, "config.json")
    return str(error.value)


def test_a_misspelt_folder_is_told_the_nearest_one(here):
    assert said("models/smolm2") == "models/smolm2: no such folder; did you mean 'models/smollm2'?"
    assert "did you mean 'models/smollm2/inner'?" in said("models/smolm2/inner")
    assert "models holds smollm2" in said("models/qwen")
    assert "'models' is a folder here" in said("models/qwen")


def test_the_model_of_a_run_that_has_not_been_is_told_its_recipe(here):
    expected = (
        "runs/sft_hh/model: no such folder; run recipes/sft_hh.yaml first, which writes it (rewarden run recipes/sft_hh.yaml)"
    )
    assert said("runs/sft_hh/model") == expected
    (here / "runs" / "sft_hh" / "checkpoints").mkdir(parents=True)  # a run that was stopped
    assert said("runs/sft_hh/model") == expected
    (here / "runs" / "sft_hh" / "model").mkdir()
    assert "did you mean 'runs/sft_hh/model'?" in said("runs/sft_hh/modle")


def test_a_missing_folder_of_data_is_not_taken_for_a_hub_id(here):
    with pytest.raises(DataError, match="models/smolm2: no such file or folder; did you mean 'smollm2'"):
        list(read_rows("models/smolm2"))


def test_a_missing_file_is_told_what_the_folder_holds_without_hidden_names(here):
    (here / ".git").mkdir()
    with pytest.raises(DataError, match=r"nowhere.jsonl: no such file or folder; this folder holds models, recipes, runs$"):
        list(read_rows("nowhere.jsonl"))


def test_a_subset_of_a_folder_without_subfolders_is_told_to_be_left_out(here):
    with pytest.raises(DataError, match=r"subset='helpful-base' is no subfolder; there are none: write data.subset=null"):
        list(read_rows("models/smollm2", subset="helpful-base"))


ASK = """
import json, sys, time
from rewarden.data.read import read_rows
from rewarden.errors import RewardenError
from rewarden.models.load import Model, load_policy

found = {}
for name, ask in {
    "model": lambda: load_policy(Model(model_name_or_path="someone/other")),
    "data": lambda: list(read_rows("someone/rows")),
    "again": lambda: load_policy(Model(model_name_or_path="someone/third")),
}.items():
    began = time.monotonic()
    try:
        ask()
    except RewardenError as error:
        found[name] = (str(error), time.monotonic() - began)
print(json.dumps(found))
"""


def test_a_hub_out_of_reach_is_said_at_once_and_what_to_do(tmp_path):
    """Port 9 of this machine refuses connections, as a network that is down does; nothing else is asked."""
    keep = {key: value for key, value in os.environ.items() if "offline" not in key.lower() and "proxy" not in key.lower()}
    env = {**keep, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", ASK], env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    asked = {"model": "someone/other", "data": "someone/rows", "again": "someone/third"}
    for name, (message, _) in found.items():
        assert f"{asked[name]!r} is not on this machine" in message
        assert "the hub (http://127.0.0.1:9) cannot be reached" in message
        assert "give a folder" in message
        assert "HF_HUB_OFFLINE=1" in message
    assert found["again"][1] < 1.0  # the first failure is remembered
    assert "Retrying" not in done.stderr
