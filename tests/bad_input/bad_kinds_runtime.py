"""Bad run folders: in use, damaged, of another run, not writable, on a full disk."""

import json
from collections.abc import Callable
from pathlib import Path

from bad_desk import Desk, Kind

from rewarden.runtime.lock import FolderLock

RUN = "runs/sft"
STEP = f"{RUN}/checkpoints/step-00000001"


def stopped(name: str, change: Callable[[Desk], object], *words: str, command: str = "run sft.yaml", **more: object) -> Kind:
    """A run that was stopped after its first of two steps, with something wrong, run again."""

    def make(desk: Desk) -> None:
        desk.copy("stopped", RUN)
        change(desk)

    return Kind(name, command, words, make=make, **more)


def fresh(name: str, change: Callable[[Desk], object], *words: str, command: str = "run sft.yaml", **more: object) -> Kind:
    """A run that begins where something is in the way."""
    return Kind(name, command, words, make=change, **more)


def garbled(file: str) -> Callable[[Desk], object]:
    """A file of the same size that holds nothing but zeros."""
    return lambda desk: (desk.path / file).write_bytes(bytes((desk.path / file).stat().st_size))


def cut(file: str) -> Callable[[Desk], object]:
    return lambda desk: (desk.path / file).write_bytes((desk.path / file).read_bytes()[:-7])


def gone(file: str) -> Callable[[Desk], object]:
    return lambda desk: (desk.path / file).unlink()


def holding(file: str, content: str | bytes) -> Callable[[Desk], object]:
    return lambda desk: desk.write(file, content)


def edited(file: str, **changes: object) -> Callable[[Desk], object]:
    return lambda desk: desk.edit(file, **changes)


def in_use(folder: str) -> Callable[[Desk], object]:
    """Somebody holds the folder's lock until the test is over."""

    def make(desk: Desk) -> None:
        path = desk.path / folder
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(path)
        lock.acquire()
        desk.later.append(lock.release)

    return make


def closed(folder: str, mode: int = 0o555) -> Callable[[Desk], object]:
    """A folder or file without permission."""

    def make(desk: Desk) -> None:
        path = desk.path / folder
        if not path.exists():
            path.mkdir(parents=True)
        path.chmod(mode)
        desk.later.append(lambda: path.chmod(0o755))

    return make


def without_package(name: str) -> Callable[[Desk], object]:
    """A package that is not installed: Python finds no module of that name."""

    def make(desk: Desk) -> None:
        import importlib.util

        found = importlib.util.find_spec
        desk.monkeypatch.setattr(
            importlib.util, "find_spec", lambda asked, *more: None if asked == name else found(asked, *more)
        )

    return make


def other_model(desk: Desk) -> None:
    """The policy that the run started from is another one now."""
    desk.copy("stopped", RUN)
    desk.copy("policy", "m")
    desk.edit("m/generation_config.json", transformers_version="other")


def finished_chain(desk: Desk) -> None:
    desk.copy("chain", "runs/chain")


def changed_data(desk: Desk) -> None:
    """The run was begun on a copy of the dialogues, of which one is gone since."""
    desk.copy("stopped_here", RUN)
    lines = Path(desk.world.names["dialogues"]).read_text().splitlines(keepends=True)
    desk.write("mine.jsonl", "".join(lines[1:]))


def long_metrics(desk: Desk) -> None:
    """A line of metrics beyond what the disk still takes."""
    file = desk.path / RUN / "metrics.jsonl"
    file.write_text(json.dumps({"step": 1, "x" * 200_000: 1.0}) + "\n")


OTHER = json.dumps({"step": 1, "loss/nll": 2.0}) + "\n"

RUNTIME = [
    stopped("two runs in one folder", in_use(f"{RUN}/lock"), "runs/sft is in use by pid", "stop it, or choose another folder"),
    fresh("two runs of one chain", in_use("runs/chain/.lock"), "runs/chain is in use by pid", command="run chain.yaml"),
    fresh(
        "nothing to resume",
        lambda desk: None,
        "holds no checkpoint, and resume is 'must'",
        command="run sft.yaml --resume must",
    ),
    fresh(
        "no chain to resume",
        lambda desk: None,
        "runs/chain holds no stage of this recipe that is finished or has a checkpoint",
        command="run chain.yaml --resume must",
    ),
    stopped(
        "a checkpoint of another recipe",
        lambda desk: None,
        "step-00000001 was made by another recipe",
        "optim.learning_rate: 0.001 -> 0.5",
        "--resume never",
        command="run sft.yaml optim.learning_rate=0.5",
        lines=3,
    ),
    Kind(
        "a checkpoint of another model",
        "run sft.yaml model.model_name_or_path=m",
        ("was made by another recipe", "model.model_name_or_path", "-> 'm'"),
        make=other_model,
        lines=3,
    ),
    Kind(
        "a checkpoint on other data",
        "run sft.yaml data.path=mine.jsonl",
        ("a run of the same recipe on other inputs", "mine.jsonl", "--resume never"),
        make=changed_data,
    ),
    stopped(
        "a truncated checkpoint",
        cut(f"{STEP}/policy/trainable.safetensors"),
        "trainable.safetensors: got",
        "bytes were written",
        f"Move {STEP} away",
    ),
    stopped(
        "a checkpoint without a file", gone(f"{STEP}/optimizer/optimizer.pt"), "optimizer.pt: got nothing", f"Move {STEP} away"
    ),
    stopped(
        "weights of zeros in a checkpoint",
        garbled(f"{STEP}/policy/trainable.safetensors"),
        "trainable.safetensors",
        "truncated or damaged",
    ),
    stopped(
        "an optimizer of zeros in a checkpoint",
        garbled(f"{STEP}/optimizer/optimizer.pt"),
        f"{STEP}/optimizer cannot be read",
        f"Move {STEP} away",
    ),
    stopped(
        "generators of zeros in a checkpoint", garbled(f"{STEP}/rng.pt"), f"{STEP}/rng.pt cannot be read", f"Move {STEP} away"
    ),
    stopped(
        "a checkpoint without description", gone(f"{STEP}/checkpoint.json"), "it has no checkpoint.json", f"Move {STEP} away"
    ),
    stopped("a broken checkpoint.json", holding(f"{STEP}/checkpoint.json", "{"), f"{STEP}/checkpoint.json cannot be read"),
    stopped(
        "a checkpoint of another version", edited(f"{STEP}/checkpoint.json", format=9), "has format 9, this version reads 1"
    ),
    stopped("a checkpoint.json without a key", edited(f"{STEP}/checkpoint.json", state=...), "checkpoint.json lacks state"),
    stopped(
        "a checkpoint.json with a list of files", edited(f"{STEP}/checkpoint.json", files=[]), "checkpoint.json lacks files"
    ),
    stopped(
        "a loop state that is a number",
        edited(f"{STEP}/checkpoint.json", state=3),
        STEP,
        "its loop state is not that of this job",
    ),
    stopped(
        "a loop state of another job",
        edited(f"{STEP}/checkpoint.json", state={"round": 3}),
        "its loop state is not that of this job",
    ),
    stopped(
        "parts of another job",
        edited(f"{STEP}/checkpoint.json", parts=["critic"]),
        "holds the parts ['critic']",
        "this run has ['optimizer', 'policy']",
    ),
    stopped("a damaged done.json", holding(f"{RUN}/done.json", "{"), "runs/sft/done.json is damaged", "remove it"),
    stopped("a done.json that is a list", holding(f"{RUN}/done.json", "[]"), "runs/sft/done.json is damaged"),
    stopped(
        "a done.json without its exports",
        holding(f"{RUN}/done.json", '{"step": 2, "fingerprint": "x", "recipe": {}, "exported": 3}'),
        "runs/sft/done.json is damaged",
    ),
    stopped(
        "a damaged line of metrics",
        holding(f"{RUN}/metrics.jsonl", "{\n" + OTHER),
        "runs/sft/metrics.jsonl:1: not JSON",
        "remove the line",
    ),
    stopped(
        "a line of metrics without its step",
        holding(f"{RUN}/metrics.jsonl", '{"loss": 1}\n'),
        "metrics.jsonl:1: a line holds an object with a whole 'step'",
    ),
    stopped(
        "metrics of broken bytes",
        holding(f"{RUN}/metrics.jsonl", b"\xff\xfe\n"),
        "metrics.jsonl cannot be read",
        "move it away",
    ),
    stopped(
        "damaged samples", holding(f"{RUN}/samples.parquet", "none"), "runs/sft/samples.parquet cannot be read", "move it away"
    ),
    stopped(
        "a damaged tail of samples", holding(f"{RUN}/samples.tail.jsonl", "[1]\n"), "runs/sft/samples.tail.jsonl cannot be read"
    ),
    stopped("a damaged env.json", holding(f"{RUN}/env.json", "{"), "runs/sft/env.json is damaged", "move it away"),
    fresh("a run folder that is a file", holding(RUN, "mine"), "cannot write runs/sft", "File exists"),
    fresh("an output folder that is a file", holding("runs", "mine"), "cannot write runs/sft", "Not a directory"),
    fresh("a lock that is a folder", holding(f"{RUN}/lock/x", ""), "cannot write runs/sft/lock", "Is a directory"),
    fresh(
        "checkpoints that are a file",
        holding(f"{RUN}/checkpoints", "mine"),
        "cannot write runs/sft/checkpoints/step-00000001",
        "File exists",
    ),
    fresh("metrics that are a folder", holding(f"{RUN}/metrics.jsonl/x", ""), "runs/sft", "metrics.jsonl"),
    fresh(
        "a folder of somebody else",
        holding(f"{RUN}/metrics.jsonl", OTHER),
        "runs/sft holds metrics.jsonl and no recipe.yaml",
        "choose another name",
    ),
    fresh("a model of somebody else", holding(f"{RUN}/model/weights", "mine"), "runs/sft holds model and no recipe.yaml"),
    stopped(
        "a chain where a single job ran",
        lambda desk: None,
        "runs/sft holds the run of a single job, and chain.yaml is a chain",
        command="run chain.yaml name=sft",
    ),
    fresh(
        "a single job where a chain ran",
        finished_chain,
        "runs/chain holds the stages of a chain (sft, start)",
        command="run sft.yaml name=chain",
    ),
    fresh(
        "a bad value in the last stage of a finished chain",
        finished_chain,
        "stage sft: max_steps is 0",
        command="run chain.yaml sft.max_steps=0",
    ),
    fresh(
        "bad data in the last stage of a finished chain",
        finished_chain,
        "gone.jsonl: no such file",
        command="run chain.yaml sft.data.path=gone.jsonl",
    ),
    fresh(
        "a tracker that is not installed",
        without_package("trackio"),
        "report_to asks for 'trackio', which is not installed",
        "pip install trackio",
        command="run sft.yaml report_to=trackio",
    ),
    stopped(
        "a read-only run folder", closed(RUN), "cannot write runs/sft", "Permission denied", "must be writable", powerless=True
    ),
    fresh("a read-only output folder", closed("runs"), "cannot write runs/sft", "Permission denied", powerless=True),
    fresh(
        "a read-only output of samples",
        closed("there"),
        "cannot write there/a.jsonl",
        "Permission denied",
        command="sample $policy Hello --output there/a.jsonl",
        powerless=True,
    ),
    fresh("a recipe that may not be read", closed("sft.yaml", 0), "sft.yaml", "read", lines=5, powerless=True),
    fresh(
        "data that may not be read",
        lambda desk: (desk.write("a.jsonl", "x"), closed("a.jsonl", 0)(desk)),
        "a.jsonl: ",
        "Permission denied",
        command="run sft.yaml data.path=a.jsonl",
        powerless=True,
    ),
    fresh(
        "weights that may not be read",
        lambda desk: (desk.copy("policy", "m"), closed("m/model.safetensors", 0)(desk)),
        "m/model.safetensors",
        "Permission denied",
        command="run sft.yaml model.model_name_or_path=m",
        powerless=True,
    ),
    stopped(
        "a disk full while saving a checkpoint",
        lambda desk: None,
        "cannot write runs/sft/checkpoints/step-00000002",
        "File too large",
        "run the same command again to resume",
        largest=200_000,
    ),
    fresh(
        "a disk full while exporting the model",
        lambda desk: desk.copy("saved", RUN),
        "cannot write runs/sft",
        "File too large",
        "free some space",
        largest=200_000,
    ),
    fresh("a disk full at the start", lambda desk: None, "cannot write runs/sft/", "File too large", largest=1000),
    stopped(
        "a disk full while writing metrics",
        long_metrics,
        "cannot write runs/sft/metrics.jsonl",
        "File too large",
        largest=100_000,
    ),
    fresh(
        "a disk full while writing samples",
        lambda desk: None,
        "cannot write a.jsonl",
        "File too large",
        command="sample $policy Hello --n 40 --output a.jsonl",
        largest=4000,
    ),
    fresh(
        "weights that blow up",
        lambda desk: None,
        "weights hold NaN or inf",
        "is not saved",
        "lower learning_rate",
        command="run sft.yaml optim.learning_rate=1e39",
    ),
]
"""Every kind of bad run folder."""
