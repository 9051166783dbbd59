"""When one rank fails or is killed, all end soon, one of them says why, and the run goes on from where it was."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from launching import assert_same_numbers, command, environment, largest_gap, metrics, rewarden, samples

from rewarden.collect.world import WorldPairs, WorldStart
from rewarden.errors import ConfigError
from rewarden.models.load import Model
from rewarden.recipe.run import run_recipe
from rewarden.rollout.hf import Sampling
from rewarden.runtime.ranks import Ranks, timeout_minutes

REWARDS = """
import os
import time


def plain(prompts, completions, **columns):
    return [0.1 * len(answer[-1]["content"].split()) for answer in completions]


def slow(prompts, completions, **columns):
    time.sleep(0.3)
    return plain(prompts, completions)


def nan_on_rank_1(prompts, completions, **columns):
    return [float("nan")] * len(completions) if os.environ["RANK"] == "1" else plain(prompts, completions)


def bug_on_rank_1(prompts, completions, **columns):
    return {}["absent"] if os.environ["RANK"] == "1" else plain(prompts, completions)


def hang_on_rank_1(prompts, completions, **columns):
    if os.environ["RANK"] == "1":
        time.sleep(600)
    return plain(prompts, completions)
"""

RECIPE = """
kind: ppo
name: ppo
policy: {model_name_or_path: start/model}
reward: {kind: function, path: "rewards.py:slow"}
data: {path: pairs/prompts.jsonl}
eval_data: {path: pairs/selection.jsonl}
optim: {learning_rate: 1.0e-4, eps: 1.0e-5}
critic_optim: {learning_rate: 1.0e-4, eps: 1.0e-5}
sampling: {max_completion_length: 8}
rollout_batch_size: 7
mini_batch_size: 3
max_steps: 6
save_steps: 2
view: plain
"""

SOON_S = 60
"""Far below any timeout of a process group; the machine may be busy."""


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("world")
    for name in ("start", "pairs"):
        (root / name).mkdir()
    WorldStart(num_dialogues=4, num_heldout=1).run(root / "start")
    WorldPairs(
        policy=Model(model_name_or_path=str(root / "start/model")),
        num_pairs=0,
        num_test_pairs=0,
        num_prompts=11,
        num_selection=3,
        num_heldout=0,
        sampling=Sampling(max_completion_length=6),
    ).run(root / "pairs")
    (root / "rewards.py").write_text(REWARDS, encoding="utf-8")
    (root / "ppo.yaml").write_text(RECIPE, encoding="utf-8")
    return root


@pytest.fixture
def here(world, tmp_path) -> Path:
    return Path(shutil.copytree(world, tmp_path / "here"))


@pytest.fixture(scope="module")
def unbroken(world, tmp_path_factory) -> Path:
    """The same run on one process, never stopped."""
    root = Path(shutil.copytree(world, tmp_path_factory.mktemp("unbroken") / "here"))
    with contextlib.chdir(root):
        run_recipe(Path("ppo.yaml"))
    return root / "runs/ppo"


def exit_codes(err: str) -> list[int]:
    """Of every rank, from the launcher's summary."""
    return [int(code) for code in re.findall(r"exitcode\s+: (-?\d+)", err)]


def test_an_error_on_one_rank_ends_both_with_its_message_once(here):
    done = rewarden(2, "run", "ppo.yaml", "reward.path=rewards.py:nan_on_rank_1", cwd=here)
    (message,) = done.errors()
    assert "reward function nan_on_rank_1: got nan for pairs/selection.jsonl:2" in message
    assert exit_codes(done.err) == [2, 2]
    assert "PeerError" not in done.err
    # the one traceback is the launcher's own, and its summary ends with our message
    assert done.err.count("Traceback") == 1
    assert done.err.split("Root Cause")[1].count("got nan") == 1
    assert not (here / "runs/ppo/lock").exists()


@pytest.mark.slow
def test_a_misspelt_key_is_said_once(here, record_property):
    record_property("point", "5 errors: a misspelt key under the launcher is said once, exit code 2 on every rank")
    done = rewarden(2, "run", "ppo.yaml", "rewrd=1", cwd=here)
    assert done.errors() == ["error: ppo.yaml: unknown key 'rewrd'; did you mean 'reward'?"]
    assert set(exit_codes(done.err)) <= {2}
    assert not (here / "runs").exists()


@pytest.mark.slow
def test_a_bug_on_one_rank_shows_one_traceback_of_it(here, record_property):
    record_property("point", "5 errors: a bug in a reward function on one rank is shown once")
    done = rewarden(2, "run", "ppo.yaml", "reward.path=rewards.py:bug_on_rank_1", cwd=here)
    assert done.err.count("bug_on_rank_1") >= 1
    assert done.err.count("Traceback") <= 2  # the defect's, where it is shown with one, and the launcher's
    assert "Connection closed" not in done.err
    assert done.code != 0


@pytest.mark.slow
def test_a_rank_that_never_comes_is_waited_for_as_long_as_the_environment_says(here, record_property):
    record_property("point", "5 a rank that hangs ends the run after REWARDEN_TIMEOUT_MINUTES, with words")
    began = time.monotonic()
    done = rewarden(
        2, "run", "ppo.yaml", "reward.path=rewards.py:hang_on_rank_1", cwd=here, timeout=200, REWARDEN_TIMEOUT_MINUTES="0.2"
    )
    record_property("seconds", round(time.monotonic() - began))
    (message,) = done.errors()
    assert "rank 0 of 2 waited 0.2 minutes for the other ranks" in message
    assert "REWARDEN_TIMEOUT_MINUTES" in message


def start_and_kill(here: Path, ranks: list[int]) -> tuple[str, float]:
    """Start two ranks, kill some with SIGKILL after the first checkpoint; stderr, and how long the rest took to end."""
    with (here / "err").open("w") as err, (here / "out").open("w") as out:
        launcher = subprocess.Popen(command(2, "run", "ppo.yaml"), cwd=here, env=environment(), stdout=out, stderr=err)
        try:
            await_checkpoint(here, launcher)
            workers = children(launcher.pid)
            assert len(workers) == 2
            for rank in ranks:
                os.kill(workers[rank], signal.SIGKILL)
            began = time.monotonic()
            launcher.wait(timeout=SOON_S)
        finally:
            launcher.kill()
    took = time.monotonic() - began
    assert not [pid for pid in workers if alive(pid)]
    return (here / "err").read_text(), took


def await_checkpoint(here: Path, launcher: subprocess.Popen) -> None:
    checkpoint = here / "runs/ppo/checkpoints/step-00000002"
    for _ in range(1200):
        if checkpoint.exists():
            return
        assert launcher.poll() is None, (here / "err").read_text()
        time.sleep(0.1)
    raise AssertionError("no checkpoint within two minutes")


def children(pid: int) -> list[int]:
    """The ranks that a launcher started, in the order it started them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, IndexError):
            continue
        if parent == pid and b"rewarden.cli" in path.with_name("cmdline").read_bytes():
            found.append(int(path.parent.name))
    return sorted(found)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("killed", [[0], [1], [0, 1]], ids=["rank 0", "rank 1", "both"])
def test_a_run_whose_ranks_were_killed_goes_on_with_as_many_or_with_one(here, unbroken, record_property, killed, processes):
    record_property("point", f"5 kill -9 of rank(s) {killed} of two, resumed by {processes}: as if never stopped")
    err, took = start_and_kill(here, killed)
    record_property("seconds until all had ended", round(took, 1))
    said = [line for line in err.splitlines() if line.startswith("error: ")]
    if len(killed) == 1:
        (message,) = said
        assert "the same command goes on from the last checkpoint" in message
        assert sorted(exit_codes(err)) == [-9, 2]
    done = rewarden(processes, "run", "ppo.yaml", "--resume", "must", cwd=here)
    assert done.code == 0, done.err
    assert "resuming after step" in done.out
    assert ("written by 2 ranks, resumed by 1: the steps are the same up to rounding" in done.out) == (processes == 1)
    ours, theirs = here / "runs/ppo", unbroken
    assert_same_numbers(metrics(ours), metrics(theirs))
    assert_same_numbers(samples(ours), samples(theirs))
    assert largest_gap(ours / "checkpoints", theirs / "checkpoints") <= 1e-5
    starts = json.loads((ours / "env.json").read_text(encoding="utf-8"))
    assert [starts["num_ranks"], *(start["num_ranks"] for start in starts["earlier_starts"])] == [processes, 2]


def test_several_processes_asked_for_and_one_started_is_refused_with_the_flag_that_is_missing(monkeypatch):
    # what `accelerate launch --cpu --num_processes 2` sets for the one process it starts
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError, match=r"started one, as it does on CPUs\. Add --multi_gpu"):
        Ranks.start()


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf"])
def test_a_timeout_that_is_no_time_is_refused(monkeypatch, text):
    monkeypatch.setenv("REWARDEN_TIMEOUT_MINUTES", text)
    with pytest.raises(ConfigError, match=f"REWARDEN_TIMEOUT_MINUTES is '{text}'; give a number of minutes above 0"):
        timeout_minutes()
