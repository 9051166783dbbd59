"""Hub data sets without a network: the cache is made here by the `datasets` library itself."""

import json
import sys
from pathlib import Path

import pytest

from rewarden.data.read import read_rows
from rewarden.data.sources import Data, load_comparisons
from rewarden.errors import DataError

PAIRS = [
    {"prompt": "Name a colour.", "chosen": "Blue.", "rejected": "Soup.", "margin": 1.5, "note": "first"},
    {"prompt": "Name a river.", "chosen": "The Elbe.", "rejected": "No.", "margin": None, "note": "second"},
]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The id of a data set that lies in a fresh local hub cache, with the configurations default and hard."""
    import datasets.config
    from datasets.packaged_modules.json.json import Json

    cache = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache))
    for config, rows in (("default", PAIRS), ("hard", PAIRS[1:])):
        for split in ("train", "test"):
            kept = rows if split == "train" else rows[:1]
            (tmp_path / f"{config}-{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        builder = Json(
            cache_dir=str(tmp_path / "prepared"),
            dataset_name="tiny_pairs",
            config_name=config,
            hash="0123456789abcdef",
            data_files={split: str(tmp_path / f"{config}-{split}.jsonl") for split in ("train", "test")},
        )
        builder.download_and_prepare()
        # Where the library keeps a data set of the hub: owner___name/configuration/version/hash.
        target = cache / "rewarden-test___tiny_pairs" / config / "0.0.0" / "0123456789abcdef"
        target.parent.mkdir(parents=True)
        Path(builder.cache_dir).rename(target)
    return "rewarden-test/tiny_pairs"


def test_a_hub_data_set_is_read_from_the_local_cache_without_a_network(hub: str) -> None:
    rows = list(read_rows(hub, subset="default"))
    assert [row.fields for row in rows] == PAIRS
    assert [row.where for row in rows] == [f"{hub}[default]/train:1", f"{hub}[default]/train:2"]
    assert [row.fields["note"] for row in read_rows(hub, subset="hard", split="train")] == ["second"]
    assert [row.fields["note"] for row in read_rows(hub, subset="default", split="test")] == ["first"]


def test_a_hub_data_set_becomes_comparisons(hub: str) -> None:
    loaded = load_comparisons(Data(path=hub, subset="default"))
    assert [pair.margin for pair in loaded.rows] == [1.5, None]
    assert [pair.chosen[0].text for pair in loaded.rows] == ["Blue.", "The Elbe."]
    assert loaded.rows[1].id == f"{hub}[default]/train:2"
    assert loaded.rows[0].meta == {"note": "first", "where": f"{hub}[default]/train:1"}


def test_a_missing_hub_data_set_split_or_subset_is_a_data_error(hub: str) -> None:
    with pytest.raises(DataError, match=r"rewarden-test/absent, split 'train'.*check name, subset and split"):
        list(read_rows("rewarden-test/absent"))
    with pytest.raises(DataError, match="split 'validation'"):
        list(read_rows(hub, subset="default", split="validation"))
    with pytest.raises(DataError, match="absent"):
        list(read_rows(hub, subset="absent"))


def test_a_folder_written_by_save_to_disk_is_read(tmp_path: Path) -> None:
    import datasets

    table = datasets.Dataset.from_list(PAIRS)
    datasets.DatasetDict({"train": table, "test": table.select([1])}).save_to_disk(str(tmp_path / "both"))
    table.save_to_disk(str(tmp_path / "one"))
    assert [row.fields["note"] for row in read_rows(tmp_path / "both", split="test")] == ["second"]
    assert [row.name for row in read_rows(tmp_path / "one")] == ["one:1", "one:2"]
    with pytest.raises(DataError, match="no split 'dev'; there are train, test"):
        list(read_rows(tmp_path / "both", split="dev"))
    with pytest.raises(DataError, match="this folder holds one split"):
        list(read_rows(tmp_path / "one", split="test"))


def test_without_the_datasets_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="pip install datasets"):
        list(read_rows("rewarden-test/tiny_pairs"))
