"""A checkpoint is whole or absent, and says in words what is wrong with it."""

import errno
import math
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from rewarden.errors import ResumeError, RewardenError
from rewarden.runtime.checkpoint import (
    check_same_run,
    decide_resume,
    differences,
    fingerprint_of,
    latest,
    load_checkpoint,
    read_checkpoint,
    save_checkpoint,
)
from rewarden.runtime.codec import decode, encode
from rewarden.runtime.disk import clean, write_atomic
from rewarden.runtime.seed import capture_rng, generator, restore_rng, seed_global, seed_of


class Blob:
    """A part that is one number of bytes; `fail` is called half way through a save."""

    def __init__(self, value: bytes, fail=None) -> None:
        self.value, self.fail = value, fail

    def save(self, folder: Path) -> None:
        (folder / "a.bin").write_bytes(self.value)
        if self.fail:
            raise self.fail
        (folder / "b.bin").write_bytes(self.value * 2)

    def load(self, folder: Path) -> None:
        self.value = (folder / "a.bin").read_bytes()
        assert (folder / "b.bin").read_bytes() == self.value * 2


@dataclass(frozen=True)
class Inner:
    mean: float
    items: tuple[int, ...]


@dataclass(frozen=True)
class State:
    step: int
    inner: Inner | None
    table: dict
    tensor: torch.Tensor


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_was_saved_is_loaded(tmp_path):
    parts = {"policy": Blob(b"abc"), "critic": Blob(b"xyz")}
    path = save_checkpoint(
        tmp_path, 10, parts, {"cursor": (1, 2)}, fingerprint="f", recipe={"a": Path("b")}, rng=[capture_rng()]
    )
    assert path == tmp_path / "step-00000010" == latest(tmp_path)
    again = {"policy": Blob(b""), "critic": Blob(b"")}
    saved = load_checkpoint(path, again)
    assert (saved.step, saved.state, saved.fingerprint, saved.recipe) == (10, {"cursor": (1, 2)}, "f", {"a": "b"})
    assert (again["policy"].value, again["critic"].value) == (b"abc", b"xyz")


def test_only_the_newest_are_kept(tmp_path):
    for keep, expected in [(2, [3, 4]), (1, [4]), (None, [1, 2, 3, 4])]:
        folder = tmp_path / str(keep)
        for step in (1, 2, 3, 4):
            save_checkpoint(folder, step, {"p": Blob(b"x")}, {}, keep=keep)
        assert names(folder) == [f"step-{step:08d}" for step in expected]


def test_the_newest_is_the_one_with_the_largest_step_not_the_last_name(tmp_path):
    for step in (99_999_999, 100_000_000):
        save_checkpoint(tmp_path, step, {}, {}, keep=None)
    assert latest(tmp_path) == tmp_path / "step-100000000"


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("unexpected pos 64 vs 0"), KeyboardInterrupt()]
)
def test_a_save_that_fails_leaves_the_older_checkpoint_and_nothing_half_done(tmp_path, error):
    save_checkpoint(tmp_path, 1, {"p": Blob(b"old")}, {"n": 1})
    expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else RewardenError
    with pytest.raises(expected) as caught:
        save_checkpoint(tmp_path, 2, {"p": Blob(b"new", fail=error)}, {"n": 2})
    if isinstance(error, OSError):
        assert "No space left on device; free some space" in str(caught.value)
        assert "run the same command again" in str(caught.value)
    elif isinstance(error, RuntimeError):
        assert "part 'p' could not be saved: unexpected pos" in str(caught.value)
    assert names(tmp_path) == ["step-00000001"]
    part = Blob(b"")
    assert load_checkpoint(latest(tmp_path), {"p": part}).state == {"n": 1}
    assert part.value == b"old"


FULL_DISK = """
import resource, sys
from pathlib import Path
import torch
from rewarden.errors import RewardenError
from rewarden.runtime.checkpoint import save_checkpoint
from rewarden.runtime.metrics import Metrics
from rewarden.runtime.samples import Samples


class Part:
    size = 10

    def save(self, folder):
        torch.save(torch.zeros(self.size), folder / "x.pt")


folder, part = Path(sys.argv[1]), Part()
metrics, samples = Metrics(folder / "metrics.jsonl"), Samples(folder / "samples.parquet")
save_checkpoint(folder / "checkpoints", 1, {"part": part}, {})
metrics.append(1, {"a": 1.0})
samples.append(1, [{"text": "x"}])
part.size = 100_000
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))  # the kernel now refuses larger files, like a full disk
for attempt in (
    lambda: save_checkpoint(folder / "checkpoints", 2, {"part": part}, {}),
    lambda: metrics.append(2, {f"name/{i}": 1.0 for i in range(5000)}),
    lambda: samples.append(2, [{"text": "y" * 100_000}]),
):
    try:
        attempt()
    except RewardenError as error:
        print(error)
metrics.append(2, {"a": 2.0})
"""


def test_a_full_disk_is_an_error_in_words_and_loses_nothing(tmp_path):
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("cannot write ") and "Nothing written before this is lost" in line for line in lines)
    assert all("free some space" in line for line in lines[1:])
    assert names(tmp_path / "checkpoints") == ["step-00000001"]
    read_checkpoint(tmp_path / "checkpoints" / "step-00000001")
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "a": 1.0}\n{"step": 2, "a": 2.0}\n'
    assert (tmp_path / "samples.tail.jsonl").read_text() == '{"n": 0, "row": {"step": 1, "text": "x"}}\n'


READ_ONLY = """
import os, sys
from rewarden.errors import RewardenError
from rewarden.runtime.report import RunFolder
if os.geteuid() == 0:
    os.setuid(65534)  # root may write anywhere: be nobody
try:
    RunFolder(sys.argv[1] + "/run").open()
except RewardenError as error:
    print(error)
"""


def test_a_folder_that_may_not_be_written_is_an_error_in_words(tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    done = subprocess.run([sys.executable, "-c", READ_ONLY, str(closed)], capture_output=True, text=True, check=False)
    assert "cannot write" in done.stdout, done.stderr
    assert "must be writable: change its permissions or choose another one" in done.stdout


def test_temporary_folders_of_a_killed_writer_do_not_count_and_are_cleaned_with_a_line(tmp_path):
    save_checkpoint(tmp_path, 3, {"p": Blob(b"x")}, {})
    for name in (".tmp-step-00000004", ".prune-step-00000001"):
        (tmp_path / name / "p").mkdir(parents=True)
    write_atomic(tmp_path / "note.txt", "kept")
    assert latest(tmp_path) == tmp_path / "step-00000003"
    lines = clean(tmp_path)
    assert len(lines) == 2
    assert all(line.startswith("removed ") for line in lines)
    assert names(tmp_path) == ["note.txt", "step-00000003"]
    assert clean(tmp_path) == []
    assert clean(tmp_path / "absent") == []


def test_a_checkpoint_killed_while_being_replaced_is_put_back(tmp_path):
    path = save_checkpoint(tmp_path, 3, {"p": Blob(b"x")}, {})
    path.rename(tmp_path / ".swap-step-00000003")
    assert clean(tmp_path) == [f"put back {path}: the last run did not finish replacing it"]
    assert read_checkpoint(path).step == 3
    save_checkpoint(tmp_path, 3, {"p": Blob(b"y")}, {})
    part = Blob(b"")
    load_checkpoint(path, {"p": part})
    assert part.value == b"y"
    assert names(tmp_path) == ["step-00000003"]


def test_damaged_and_foreign_checkpoints_are_refused_in_words(tmp_path):
    path = save_checkpoint(tmp_path, 3, {"p": Blob(b"abc")}, {})
    (path / "p" / "b.bin").write_bytes(b"abc")
    with pytest.raises(
        ResumeError, match=r"p/b.bin: got 3 bytes, 6 bytes were written; the checkpoint is damaged. Move .*step-00000003 away"
    ):
        load_checkpoint(path, {"p": Blob(b"")})
    (path / "p" / "b.bin").unlink()
    with pytest.raises(ResumeError, match="got nothing, 6 bytes were written"):
        load_checkpoint(path, {"p": Blob(b"")})
    (path / "checkpoint.json").write_text('{"format": 1, "st')
    with pytest.raises(ResumeError, match=r"checkpoint\.json cannot be read"):
        read_checkpoint(path)
    (path / "checkpoint.json").write_text('{"format": 99}')
    with pytest.raises(ResumeError, match="has format 99, this version reads 1"):
        read_checkpoint(path)
    (path / "checkpoint.json").unlink()
    with pytest.raises(ResumeError, match="is not a Rewarden checkpoint"):
        read_checkpoint(path)


def test_other_parts_are_refused_before_any_is_touched(tmp_path):
    path = save_checkpoint(tmp_path, 3, {"p": Blob(b"abc")}, {})
    part = Blob(b"mine")
    with pytest.raises(ResumeError, match=r"holds the parts \['p'\], this run has \['p', 'q'\]"):
        load_checkpoint(path, {"p": part, "q": Blob(b"")})
    assert part.value == b"mine"


def test_resume_modes(tmp_path):
    assert decide_resume(tmp_path / "absent", "auto") is None
    assert decide_resume(tmp_path, "auto") is None
    with pytest.raises(ResumeError, match="holds no checkpoint, and resume is 'must'"):
        decide_resume(tmp_path, "must")
    path = save_checkpoint(tmp_path, 3, {}, {})
    assert decide_resume(tmp_path, "auto") == decide_resume(tmp_path, "must") == path
    assert decide_resume(tmp_path, "never") is None


def test_another_recipe_is_refused_with_the_keys_that_differ(tmp_path):
    before = {"ppo": {"beta": 0.05, "seed": 0}, "data": {"path": "a"}, "same": [1, 2]}
    after = {"ppo": {"beta": 0.1, "seed": 0}, "data": {"path": "a", "split": "test"}, "same": (1, 2)}
    assert differences(before, after) == ["data.split: '(absent)' -> 'test'", "ppo.beta: 0.05 -> 0.1"]
    assert fingerprint_of(before) != fingerprint_of(after)
    assert fingerprint_of({"a": 1, "b": {"c": 2, "d": 3}}) == fingerprint_of({"b": {"d": 3, "c": 2}, "a": 1})
    with pytest.raises(
        ResumeError, match=r"made by another recipe:\n  data.split: .*\n  ppo.beta: 0.05 -> 0.1\n.*--resume never"
    ):
        check_same_run(tmp_path, (fingerprint_of(before), before), (fingerprint_of(after), after))
    check_same_run(tmp_path, (fingerprint_of(before), before), (fingerprint_of(before), before))


def test_a_state_comes_back_equal_to_the_last_bit():
    values = {
        "third": 1 / 3,
        "tiny": 5e-324,
        "large": 2**63 - 1,
        "inf": -math.inf,
        "none": None,
        "flag": True,
        "list": [1, (2,)],
    }
    tensor = torch.randn(2, 3, generator=generator(0)).to(torch.bfloat16)
    state = State(step=4, inner=Inner(mean=0.1 + 0.2, items=(1, 2)), table=values, tensor=tensor)
    back = decode(encode(state))
    assert (back.step, back.inner, back.table) == (state.step, state.inner, state.table)
    assert type(back.inner.items) is tuple
    assert torch.equal(back.tensor, tensor)
    assert back.tensor.dtype == torch.bfloat16


def test_a_state_that_cannot_be_written_names_the_field():
    with pytest.raises(RewardenError, match=r"state\.table\.path is .* \(PosixPath\)"):
        encode(State(step=1, inner=None, table={"path": Path("x")}, tensor=torch.zeros(1)))
    with pytest.raises(RewardenError, match="keys of a saved dict are strings"):
        encode({"a": {1: 2}})


def test_a_state_of_unknown_or_changed_classes_is_refused():
    raw = encode(Inner(mean=1.0, items=()))
    with pytest.raises(ResumeError, match="does not know"):
        decode({**raw, "__class__": "os:system"})
    with pytest.raises(ResumeError, match="with other fields"):
        decode({**raw, "fields": {"median": 1.0}})


def test_global_generators_come_back(tmp_path):
    import random

    seed_global("x", 3)
    path = save_checkpoint(tmp_path, 1, {}, {}, rng=[capture_rng()])

    def draw() -> tuple:
        return (torch.rand(3).tolist(), np.random.rand(3).tolist(), np.random.randn(), random.random(), random.gauss(0, 1))

    random.gauss(0, 1)
    expected = None
    for _ in range(2):
        restore_rng(read_checkpoint(path).rng()[0])
        got = draw()
        expected = expected or got
        assert got == expected


def test_seeds_are_63_bits_and_depend_on_every_part():
    seeds = {seed_of(a, b) for a in range(50) for b in ("x", "y", None, 1.5, True, (1, 2))}
    assert len(seeds) == 300
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seed_of("a", "b") != seed_of("ab")
    # blake2b-64 of repr(("run", 0)) by `b2sum -l 64`, shifted right by one bit
    assert seed_of("run", 0) == 0x4E19AA5576936257 >> 1
    assert torch.equal(torch.rand(3, generator=generator(1, "a")), torch.rand(3, generator=generator(1, "a")))
    with pytest.raises(TypeError, match="the same everywhere"):
        seed_of(object())
    with pytest.raises(TypeError, match="float64"):
        seed_of(np.float64(1.0))


def test_a_description_without_its_entries_is_refused_in_words(tmp_path):
    path = tmp_path / "step-00000003"
    path.mkdir()
    (path / "checkpoint.json").write_text('{"format": 1, "step": 3}')
    with pytest.raises(ResumeError, match=r"lacks files, fingerprint, parts, recipe, state; .* Move .*step-00000003 away"):
        read_checkpoint(path)
