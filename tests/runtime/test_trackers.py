"""TensorBoard, W&B and Trackio get the numbers that metrics.jsonl has; each is read back from its own files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rewarden.errors import ConfigError
from rewarden.runtime import trackers as trackers_module
from rewarden.runtime.trackers import Trackers, flatten

# In a process of its own: trackers start threads and services, and warn while they are imported.
TRACKED = """
import sys
from pathlib import Path
from toy_job import make_job
from rewarden.errors import RewardenError
from rewarden.runtime.job import Drive, drive
from rewarden.runtime.ranks import Ranks
from rewarden.runtime.report import RunFolder

ranks = Ranks.single("cpu")
cfg = Drive(save_steps=4, view="off", report_to=tuple(sys.argv[2:]), project="toys")
for stop_at in (6, -1):
    job, _, _ = make_job(8, ranks, stop_at=stop_at)
    try:
        drive(job, RunFolder(sys.argv[1]), ranks, cfg=cfg, recipe={"toy": {"beta": 0.5, "list": [1, 2]}})
    except RewardenError as error:
        assert "on purpose" in str(error)
"""


def tracked(folder: Path, *names: str) -> str:
    env = {
        **os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true", "TRACKIO_DIR": str(folder.parent / "trackio"),
        "WANDB_CACHE_DIR": str(folder.parent / "cache"), "WANDB_CONFIG_DIR": str(folder.parent / "config"),
    }  # fmt: skip
    command = [sys.executable, "-W", "ignore", "-c", TRACKED, str(folder), *names]
    done = subprocess.run(command, env=env, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def logged(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["score/mean"] for line in lines}


@pytest.fixture(scope="module")
def everything(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tracked") / "run-a"
    tracked(folder, "tensorboard", "wandb", "trackio")
    return folder


READ_TENSORBOARD = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1], purge_orphaned_data=True).Reload()
print(json.dumps([[e.step, e.value] for e in events.Scalars("score/mean")]))
"""


def test_tensorboard_event_files_hold_every_step_once(everything):
    folder = everything / "tensorboard"
    assert list(folder.glob("events.out.tfevents.*"))
    command = [sys.executable, "-W", "ignore", "-c", READ_TENSORBOARD, str(folder)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    events = json.loads(out.splitlines()[-1])
    expected = logged(everything)
    assert [step for step, _ in events] == list(range(1, 9)) == list(expected)
    assert [value for _, value in events] == pytest.approx(list(expected.values()), rel=1e-6)


READ_WANDB = """
import json, struct, sys
from wandb.proto import wandb_internal_pb2


def records(data):
    # A LevelDB log after 7 bytes of header: blocks of 32 KiB of (crc, length, kind), kind 1 whole, 2 first, 3 middle, 4 last.
    at, message = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if kind == 0:  # the writer was stopped here
            return
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield message
            message = b""


rows, config = [], {}
for path in sys.argv[1:]:
    for message in records(open(path, "rb").read()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(message)
        config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        if items:
            rows.append([items["_step"], items["score/mean"]])
print(json.dumps([rows, config]))
"""


def test_wandb_offline_files_hold_every_step(everything):
    files = sorted(map(str, everything.glob("wandb/offline-run-*/*.wandb")))
    assert len(files) == 2  # before the stop and after
    assert len({name.rsplit("-", 1)[1] for name in files}) == 1  # one run: the same id
    command = [sys.executable, "-W", "ignore", "-c", READ_WANDB, *files]
    out = subprocess.run(command, capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr
    rows, config = json.loads(out.stdout.splitlines()[-1])
    assert dict(rows) == logged(everything)
    assert config["toy"] == {"beta": 0.5, "list": [1, 2]}


def test_trackio_database_holds_every_step(everything):
    import sqlite3

    database = next((everything.parent / "trackio").glob("toys*.db"))
    with sqlite3.connect(database) as connection:
        stored = connection.execute("select run_name, step, metrics from metrics order by step").fetchall()
    connection.close()
    assert {name for name, _, _ in stored} == {"run-a"}
    assert {step: json.loads(metrics)["score/mean"] for _, step, metrics in stored} == logged(everything)


def test_a_tracker_that_is_not_installed_is_refused_with_the_install_line(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"'wandb', which is not installed; run `pip install wandb`.*rewarden\[trackers\]"):
        Trackers(["wandb"], tmp_path, project="p", run_name="r", config={})


def test_a_recipe_is_flattened_by_dotted_path():
    assert flatten({"a": {"b": 1, "c": None}, "d": [1, 2], "e": True}) == {"a.b": 1, "a.c": "None", "d": "[1, 2]", "e": True}
