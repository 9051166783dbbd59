"""Memory: a 2 GB model in shards of 250 MB is differenced and recovered within two shards and 100 MB, also when killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from diff_models import same_tensor
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[2]
MEGABYTE = 10**6
SHARD, SHARDS = 250 * MEGABYTE, 8
LIMIT = 2 * SHARD + 100 * MEGABYTE

WORK = """
import re, sys, threading, time
from rewarden.models.diff import check_diff, import_reward, make_diff, recover

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+) kB", open("/proc/self/status").read()).group(1)) * 1024

before, peak, done = anonymous(), 0, threading.Event()

def watch():
    global peak
    while not done.is_set():
        peak = max(peak, anonymous())
        time.sleep(0.002)

watcher = threading.Thread(target=watch)
watcher.start()
command, *paths = sys.argv[1:]
rule = {"rule": "moss"} if command == "moss" else {}
{"make": make_diff, "moss": make_diff, "recover": recover, "check": check_diff}[command](*paths, **rule)
done.set()
watcher.join()
print(peak - before)
"""


def shards(folder: Path, seed: int, *, dtype: torch.dtype, pickled: bool, rows: int) -> Path:
    """A Llama-like state dict of eight files of 250 MB, one of them an embedding with `rows` rows."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    width = 2000
    height = SHARD // dtype.itemsize // width
    for number in range(SHARDS):
        if number == 0:
            tensors = {"model.embed_tokens.weight": torch.rand(rows, width, generator=generator).to(dtype)}
        else:
            half = height // 2
            values = torch.rand(2, half, width, generator=generator).to(dtype)
            tensors = {f"model.layers.{number}.mlp.{name}.weight": values[i].clone() for i, name in enumerate(("up", "down"))}
        name = f"{'pytorch_model' if pickled else 'model'}-{number + 1:05d}-of-{SHARDS:05d}"
        if pickled:
            torch.save(tensors, folder / f"{name}.bin")
        else:
            save_file(tensors, folder / f"{name}.safetensors", metadata={"format": "pt"})
        del tensors
    write_index(folder, pickled)
    return folder


def write_index(folder: Path, pickled: bool) -> None:
    names = {}
    for file in sorted(folder.glob("*.bin" if pickled else "*.safetensors")):
        held = torch.load(file, weights_only=True, mmap=True) if pickled else load_file(file)
        names |= dict.fromkeys(held, file.name)
    stem = "pytorch_model.bin" if pickled else "model.safetensors"
    (folder / f"{stem}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def start(*words: object, **options) -> subprocess.Popen:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WORK, *map(str, words)]
    return subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, **options)


def peak(*words: object) -> int:
    """Peak anonymous memory of one call above the footprint after imports, in bytes."""
    process = start(*words)
    text, _ = process.communicate()
    assert process.returncode == 0
    return int(text)


def assert_equal_files(left: Path, right: Path) -> None:
    names = sorted(file.name for file in right.glob("*.safetensors"))
    assert sorted(file.name for file in left.glob("*.safetensors")) == names
    for name in names:
        ours, theirs = load_file(left / name), load_file(right / name)
        assert ours.keys() == theirs.keys()
        assert all(same_tensor(ours[key], theirs[key]) for key in ours)


@pytest.fixture
def large(tmp_path) -> Iterator[Path]:
    """A folder for gigabytes, which pytest would keep for three more runs."""
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="anonymous memory is read from /proc, which is not here")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_two_gigabytes_in_shards_of_250_megabytes_stay_within_two_shards_and_100_megabytes(large, dtype, record_property):
    record_property("point", "6 rewarden diff: anonymous memory above the footprint after imports, 2 GB model, 250 MB shards")
    rows = SHARD // dtype.itemsize // 2000
    raw = shards(large / "raw", 0, dtype=dtype, pickled=dtype == torch.float32, rows=rows - 100)
    tuned = shards(large / "tuned", 1, dtype=dtype, pickled=False, rows=rows)
    diff, out = large / "diff", large / "out"
    used = {
        "make": peak("make", raw, tuned, diff),
        "recover": peak("recover", raw, diff, out),
        "check": peak("check", diff, raw),
        "make by the rule moss": peak("moss", raw, tuned, large / "moss"),
    }
    for name, value in used.items():
        record_property(f"{name}, {dtype}, MB above imports (limit {LIMIT / MEGABYTE:.0f})", round(value / MEGABYTE, 1))
    assert_equal_files(out, tuned)
    assert max(used.values()) < LIMIT, used


@pytest.mark.slow
def test_killed_while_it_writes_a_second_call_finishes_with_the_same_bytes(large, record_property):
    record_property("point", "6 rewarden diff: killed with signal 9 while it recovers, then called again")
    rows = SHARD // 2 // 2000
    raw = shards(large / "raw", 0, dtype=torch.bfloat16, pickled=False, rows=rows)
    tuned = shards(large / "tuned", 1, dtype=torch.bfloat16, pickled=False, rows=rows)
    diff, out = large / "diff", large / "out"
    peak("make", raw, tuned, diff)
    draft = large / ".out.writing"
    kept = []
    for wanted in (1, 3, 6):
        with start("recover", raw, diff, out) as process:
            while len(list(draft.glob("model-*.safetensors"))) < wanted:
                assert process.poll() is None, "it was over before it could be killed"
                time.sleep(0.01)
            os.kill(process.pid, signal.SIGKILL)
        assert not out.exists()
        kept.append(len(list(draft.glob("model-*.safetensors"))))
    peak("recover", raw, diff, out)
    record_property("complete shards at each kill", kept)
    assert_equal_files(out, tuned)
    assert not draft.exists()
