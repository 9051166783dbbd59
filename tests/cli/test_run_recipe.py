"""Stages in order: skipped, resumed, moved aside, refused."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rewarden.errors import ConfigError, ResumeError
from rewarden.recipe.run import run_recipe
from rewarden.runtime.lock import FolderLock
from rewarden.runtime.report import RunFolder

TWO = """
letter: b
stages:
  - {stage: first, kind: "jobs.py:Write", text: a}
  - {stage: second, kind: "jobs.py:Write", text: "${letter}", path: "${first}/out.txt"}
  - {stage: apart, kind: "jobs.py:Write", text: z}
"""

SFT = """
kind: sft
name: tiny
model: {{model_name_or_path: {model}}}
data: {{path: {data}}}
optim: {{learning_rate: 1.0e-3}}
train_batch_size: 4
max_steps: 3
save_steps: 1
view: "off"
"""


def ran() -> str:
    """The texts of the jobs that ran since the last call, in order."""
    count = Path("count.txt")
    text = count.read_text() if count.exists() else ""
    count.write_text("")
    return text


def out(stage: str) -> str:
    return Path("runs/recipe", stage, "out.txt").read_text()


@pytest.fixture
def sft(write, world_files):
    return write(SFT.format(model=world_files.policy, data=world_files.dialogues))


def metrics(folder: str = "runs/tiny") -> list[dict]:
    return [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


def test_stages_run_in_order_and_read_one_another(write):
    assert run_recipe(write(TWO)) == Path("runs/recipe")
    assert ran() == "abz"
    assert out("second") == "ab"
    assert json.loads(Path("runs/recipe/second/facts.json").read_text()) == {"length": 1.0}
    assert "text: b" in Path("runs/recipe/second/recipe.yaml").read_text()
    assert json.loads(Path("runs/recipe/second/env.json").read_text())["num_ranks"] == 1


def test_finished_and_unchanged_stages_are_skipped(write, capsys):
    run_recipe(write(TWO))
    ran()
    run_recipe(Path("recipe.yaml"))
    assert ran() == ""
    assert capsys.readouterr().out.count("finished and unchanged, skipped") == 3


def test_a_changed_stage_and_those_that_read_it_are_made_anew_and_the_old_ones_kept(write, capsys):
    run_recipe(write(TWO))
    ran()
    run_recipe(Path("recipe.yaml"), ["first.text=c"])
    assert ran() == "cb"
    assert out("second") == "cb"
    assert Path("runs/recipe/second.1/out.txt").read_text() == "ab"
    assert "old results are kept in runs/recipe/first.1" in capsys.readouterr().out
    run_recipe(Path("recipe.yaml"), ["first.text=d"])
    assert Path("runs/recipe/first.2/out.txt").read_text() == "c"


def test_a_changed_value_reruns_only_the_stages_that_use_it(write):
    run_recipe(write(TWO))
    ran()
    run_recipe(Path("recipe.yaml"), ["letter=x"])
    assert ran() == "x"


def test_a_changed_input_file_reruns_the_stage_and_touching_it_does_not(write):
    Path("input.txt").write_text("1")
    path = write(TWO.replace("text: a}", "text: a, path: input.txt}"))
    run_recipe(path)
    ran()
    os.utime("input.txt", (1, 1))
    run_recipe(path)
    assert ran() == ""
    Path("input.txt").write_text("2")
    run_recipe(path)
    assert ran() == "ab"
    assert out("second") == "2ab"


def test_changed_code_of_your_own_job_reruns_its_stages(write):
    run_recipe(write(TWO))
    ran()
    Path("jobs.py").write_text(Path("jobs.py").read_text() + "\n# changed\n")
    run_recipe(Path("recipe.yaml"))
    assert ran() == "abz"


def test_deleted_results_are_made_again(write):
    run_recipe(write(TWO))
    ran()
    Path("runs/recipe/first/out.txt").unlink()
    run_recipe(Path("recipe.yaml"))
    assert ran() == "a"


def test_a_stage_that_stopped_is_run_again_and_those_before_it_are_skipped(write):
    path = write(TWO.replace("text: z", "text: z, path: missing.txt"))
    with pytest.raises(FileNotFoundError):
        run_recipe(path)
    assert ran() == "abz"
    assert not Path("runs/recipe/apart/done.json").exists()
    Path("missing.txt").write_text("now ")
    run_recipe(path)
    assert ran() == "z"
    assert out("apart") == "now z"


def test_nothing_runs_when_the_last_stage_is_misspelt(write):
    with pytest.raises(ConfigError, match=r"stage apart: unknown key 'txet'; did you mean 'text'\?"):
        run_recipe(write(TWO.replace("text: z", "txet: z")))
    assert ran() == ""
    assert not Path("runs").exists()


def test_never_starts_every_stage_anew_and_keeps_the_old_results_beside(write):
    run_recipe(write(TWO))
    ran()
    run_recipe(Path("recipe.yaml"), resume="never")
    assert ran() == "abz"
    assert Path("runs/recipe/first/earlier-1/out.txt").read_text() == "a"


def test_must_wants_something_to_resume(write):
    path = write(TWO)
    with pytest.raises(ResumeError, match="no stage of this recipe that is finished or has a checkpoint, and resume is 'must'"):
        run_recipe(path, resume="must")
    assert ran() == ""
    run_recipe(path)
    run_recipe(path, resume="must")
    assert ran() == "abz"
    Path("runs/recipe/apart/done.json").unlink()  # as if it had not been reached
    run_recipe(path, resume="must")
    assert ran() == "z"
    single = write("kind: 'jobs.py:Write'\ntext: a\n", "single.yaml")
    with pytest.raises(ResumeError, match="no finished run, and resume is 'must'"):
        run_recipe(single, resume="must")


def test_an_unknown_resume_mode_is_refused(write):
    with pytest.raises(ConfigError, match="resume is 'maybe'; use one of auto, must, never"):
        run_recipe(write(TWO), resume="maybe")


def test_a_chain_that_is_running_refuses_a_second_run(write):
    path = write(TWO)
    run_recipe(path)
    ran()
    lock = FolderLock(Path("runs/recipe/.lock"))
    lock.acquire()
    with pytest.raises(ResumeError, match="runs/recipe is in use by pid"):
        run_recipe(path, ["apart.text=c"])
    lock.release()
    assert ran() == ""


def test_a_stage_that_is_run_on_its_own_is_not_moved_aside(write):
    path = write(TWO)
    run_recipe(path)
    folder = RunFolder("runs/recipe/first")
    folder.open()
    try:
        with pytest.raises(ResumeError, match="runs/recipe/first is in use by pid"):
            run_recipe(path, ["first.text=c"])  # would move it aside
    finally:
        folder.close()
    assert Path("runs/recipe/first/out.txt").read_text() == "a"


def test_a_single_recipe_of_another_config_is_refused_with_the_keys_that_differ(write):
    path = write("kind: 'jobs.py:Write'\ntext: a\n", "single.yaml")
    run_recipe(path)
    with pytest.raises(ResumeError, match=r"(?s)made by another recipe:\n  text: 'a' -> 'b'\n.*--resume never"):
        run_recipe(path, ["text=b"])
    run_recipe(path, ["text=b"], resume="never")
    assert Path("runs/single/out.txt").read_text() == "b"
    assert Path("runs/single/earlier-1/out.txt").read_text() == "a"


def test_a_single_recipe_on_changed_inputs_is_refused_with_their_names(write):
    Path("input.txt").write_text("1")
    path = write("kind: 'jobs.py:Write'\ntext: a\npath: input.txt\n", "single.yaml")
    run_recipe(path)
    Path("input.txt").write_text("2")
    with pytest.raises(ResumeError, match=r"same recipe on other inputs; one of these has changed: input.txt, jobs.py"):
        run_recipe(path)


def test_training_resumes_after_its_newest_checkpoint(sft, capsys):
    run_recipe(sft, ["save_total_limit=null"])
    whole, weights = metrics(), Path("runs/tiny/model/model.safetensors").read_bytes()
    assert [row["step"] for row in whole] == [1, 2, 3]
    shutil.rmtree("runs/tiny/checkpoints/step-00000003")  # as if it had been killed in its last step
    shutil.rmtree("runs/tiny/model")
    Path("runs/tiny/done.json").unlink()
    run_recipe(sft, ["view=plain"])
    assert "resuming after step 2" in capsys.readouterr().out
    again = metrics()
    assert [(row["step"], row["loss/nll"]) for row in again] == [(row["step"], row["loss/nll"]) for row in whole]
    assert Path("runs/tiny/model/model.safetensors").read_bytes() == weights


def test_a_run_whose_last_step_is_saved_only_exports_and_another_config_is_refused(sft):
    run_recipe(sft)
    done = Path("runs/tiny/done.json")
    weights = Path("runs/tiny/model/model.safetensors").read_bytes()
    done.unlink()  # as if it had been killed after its last checkpoint
    Path("runs/tiny/model/model.safetensors").unlink()
    run_recipe(sft, ["save_steps=50"], resume="must")  # how often it saves makes no other run of it
    assert done.exists()
    assert Path("runs/tiny/model/model.safetensors").read_bytes() == weights
    with pytest.raises(ResumeError, match=r"(?s)another recipe:\n  optim.learning_rate: 0.001 -> 0.002"):
        run_recipe(sft, ["optim.learning_rate=2e-3"])
    done.unlink()
    with pytest.raises(ResumeError, match=r"(?s)checkpoint in .*optim.learning_rate: 0.001 -> 0.002"):
        run_recipe(sft, ["optim.learning_rate=2e-3"])
    with pytest.raises(ResumeError, match="no checkpoint, and resume is 'must'"):
        run_recipe(sft, ["name=other"], resume="must")


def test_every_number_of_a_run_is_written_down_again_as_a_recipe(sft):
    run_recipe(sft)
    again = Path("again.yaml")
    again.write_text("name: again\nview: 'off'\n" + Path("runs/tiny/recipe.yaml").read_text())
    run_recipe(again)
    assert [row["loss/nll"] for row in metrics("runs/again")] == [row["loss/nll"] for row in metrics()]


def test_a_run_stopped_by_ctrl_c_says_so_in_one_line_and_frees_its_folder(write):
    path = write("stages:\n  - {stage: a, kind: 'jobs.py:Sleep'}\n")
    code = "import sys; from rewarden.cli import main; sys.argv = ['rewarden', 'run', 'recipe.yaml']; main()"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + 120
        while not Path("running").exists() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        with pytest.raises(ResumeError, match=f"runs/recipe is in use by pid {process.pid}"):
            run_recipe(path)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, errors) == (130, "interrupted\n")
    assert not Path("runs/recipe/.lock").exists()


def test_a_job_and_a_chain_do_not_share_a_folder_and_neither_loses_anything(write, sft):
    """A stage named `model` lies where a single job exports its model."""
    run_recipe(sft)
    single = sorted(str(path) for path in Path("runs/tiny").rglob("*"))
    chain = write('name: tiny\nstages:\n  - {stage: model, kind: "jobs.py:Write", text: a}\n', "chain.yaml")
    for resume in ("auto", "never"):
        with pytest.raises(ResumeError, match=r"runs/tiny holds the run of a single job, and chain.yaml is a chain"):
            run_recipe(chain, resume=resume)
    assert sorted(str(path) for path in Path("runs/tiny").rglob("*")) == single
    run_recipe(chain, ["name=other"])
    for resume in ("auto", "never"):
        with pytest.raises(
            ResumeError, match=r"runs/other holds the stages of a chain \(model\), and recipe.yaml is a single job"
        ):
            run_recipe(sft, ["name=other"], resume=resume)
    assert out_of("runs/other/model") == "a"


def out_of(folder: str) -> str:
    return Path(folder, "out.txt").read_text()
