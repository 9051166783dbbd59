"""Hub data sets whose loader script is not run: their files are read by name from a local hub cache made here."""

import json
from pathlib import Path

import pytest

from rewarden.data.read import read_rows
from rewarden.data.sources import Data, load_comparisons, load_prompts
from rewarden.errors import DataError

FARM = "tatsu-lab/alpaca_farm"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def pairs(*preferences: object, **more: object) -> list[dict]:
    both = {"output_2": "second", "output_1": "first", "input": "", "instruction": "Say hi."}
    return [{"preference": preference, **more, **both} for preference in preferences]


FILES = {
    "alpaca_noisy_multi_preference.json": pairs(1, 2),
    "alpaca_human_preference.json": pairs(2, 1, raw_preference=3),
    "alpaca_gpt4_preference.json": pairs(1),
    "alpaca_instructions/sft.json": [{"instruction": "Add.", "input": "1 2", "output": "3"}],
    "alpaca_instructions/preference.json": [{"instruction": "P", "input": "", "output": "p"}],
    "alpaca_instructions/unlabeled.json": [{"instruction": "U", "input": "", "output": "u"}],
    "alpaca_instructions/val.json": [{"instruction": "V", "input": "", "output": "v"}],
    "alpaca_farm_evaluation.json": [
        {"instruction": "E", "input": "", "output": "e", "generator": "g", "dataset": "koala", "datasplit": "eval"}
    ],
}


@pytest.fixture
def farm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The id of a hub data set with AlpacaFarm's file names and a loader script, in a fresh local hub cache."""
    import datasets.config
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    root = tmp_path / "hub" / "datasets--tatsu-lab--alpaca_farm"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT)
    snapshot = root / "snapshots" / COMMIT
    for name, rows in FILES.items():
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).write_text(json.dumps(rows, indent=1), encoding="utf-8")
    (snapshot / "alpaca_farm.py").write_text("raise RuntimeError('never run')")
    return FARM


@pytest.mark.parametrize(
    ("subset", "split", "file"),
    [
        ("alpaca_noisy_multi_preference", "preference", "alpaca_noisy_multi_preference.json"),
        ("alpaca_human_preference", "preference", "alpaca_human_preference.json"),
        ("alpaca_gpt4_preference", "train", "alpaca_gpt4_preference.json"),
        ("alpaca_instructions", "sft", "alpaca_instructions/sft.json"),
        ("alpaca_instructions", "preference", "alpaca_instructions/preference.json"),
        ("alpaca_instructions", "unlabeled", "alpaca_instructions/unlabeled.json"),
        ("alpaca_instructions", "val", "alpaca_instructions/val.json"),
        ("alpaca_farm_evaluation", "eval", "alpaca_farm_evaluation.json"),
    ],
)
def test_a_configuration_is_read_from_the_file_of_its_name(farm, subset, split, file):
    rows = list(read_rows(farm, subset=subset, split=split))
    assert [row.fields for row in rows] == FILES[file]
    assert rows[0].name == f"{FARM}/{file}:2[0]"


def test_columns_are_read_by_name_and_a_preference_names_the_better_output(farm):
    data = Data(path=farm, subset="alpaca_human_preference", split="preference", format="alpaca_farm")
    second, first = load_comparisons(data).rows
    assert (second.chosen[0].text, second.rejected[0].text) == ("second", "first")
    assert (first.chosen[0].text, first.rejected[0].text) == ("first", "second")
    assert first.meta["raw_preference"] == 3  # the human configuration has a column more; it travels along


@pytest.mark.parametrize("preference", [3, "1", True, 0.5])
def test_any_other_preference_is_refused_with_its_file_and_line(farm, tmp_path, preference):
    file = next((tmp_path / "hub").rglob("alpaca_gpt4_preference.json"))
    file.write_text(json.dumps(pairs(1, preference)))
    with pytest.raises(DataError, match=r"alpaca_gpt4_preference.json:1\[1\].*preference is"):
        load_comparisons(Data(path=farm, subset="alpaca_gpt4_preference", format="alpaca_farm"))


def test_the_evaluation_prompts_keep_their_data_set(farm):
    (prompt,) = load_prompts(Data(path=farm, subset="alpaca_farm_evaluation", split="eval", format="alpaca_farm")).rows
    assert (prompt.messages[0].text, prompt.meta["dataset"]) == ("E", "koala")


@pytest.mark.parametrize(
    ("subset", "split", "said"),
    [
        ("alpaca_humane_preference", "preference", "did you mean 'alpaca_human_preference'"),
        (None, "train", "no file is named after subset None; allowed: alpaca_farm_evaluation"),
        ("alpaca_instructions", "train", "no file of split 'train'; allowed: preference, sft, unlabeled, val"),
        ("alpaca_gpt4_preference", "test", "alpaca_gpt4_preference.json is one split; leave split out"),
    ],
)
def test_what_is_not_there_is_said_with_what_is(farm, subset, split, said):
    with pytest.raises(DataError) as caught:
        list(read_rows(farm, subset=subset, split=split))
    assert said in str(caught.value)


def test_a_data_set_that_is_nowhere_is_reported_as_the_library_reports_it(farm):
    with pytest.raises(DataError, match=r"nobody/nothing, split 'train'.*check name, subset and split"):
        list(read_rows("nobody/nothing"))
