"""What only real processes can show: two runs at once, a kill, and an output that nobody reads."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

COMMAND = Path(sys.executable).parent / "rewarden"
STEPS = 12


def start(*words: str, **more: object) -> subprocess.Popen[str]:
    return subprocess.Popen([str(COMMAND), *words], stderr=subprocess.PIPE, text=True, **more)


def test_a_second_run_is_refused_and_a_killed_one_goes_on_and_loses_nothing(desk, rewarden):
    words = ("run", "sft.yaml", f"max_steps={STEPS}", "num_train_epochs=100")
    first = start(*words, stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 120
        while not list(Path("runs/sft/checkpoints").glob("step-*")) and first.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        first.send_signal(signal.SIGSTOP)  # it must not be done before the second one looks
        second = rewarden(*words)
        assert (first.poll(), second.code) == (None, 2), second.err
        assert second.err.startswith(f"error: runs/sft is in use by pid {first.pid} on ")
        first.send_signal(signal.SIGKILL)
        first.wait()
    finally:
        first.kill()
        first.communicate()
    lines = Path("runs/sft/metrics.jsonl").read_text().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    steps = sorted(int(path.name[5:]) for path in Path("runs/sft/checkpoints").glob("step-*"))
    assert steps, "the run was killed before its first checkpoint"
    done = rewarden(*words, "--resume", "must")
    assert done.code == 0, done.err
    after = Path("runs/sft/metrics.jsonl").read_text().splitlines(keepends=True)
    assert [json.loads(line)["step"] for line in after] == list(range(1, STEPS + 1))
    assert after[: steps[-1]] == whole[: steps[-1]]
    assert (desk.path / "runs/sft/model/model.safetensors").exists()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_disk_under_standard_output_is_said():
    with open("/dev/full", "w") as full:
        _, errors = (process := start("--help", stdout=full)).communicate(timeout=120)
    assert process.returncode == 2
    assert (
        errors
        == "error: standard output takes no more (No space left on device); use --output FILE, or write to a disk with room\n"
    )


def test_a_closed_standard_output_is_said():
    reader, writer = os.pipe()
    os.close(reader)
    try:
        _, errors = (process := start("--help", stdout=writer)).communicate(timeout=120)
    finally:
        os.close(writer)
    assert process.returncode == 2
    assert (
        errors == "error: standard output was closed before all was written; use --output FILE, or write to a disk with room\n"
    )
