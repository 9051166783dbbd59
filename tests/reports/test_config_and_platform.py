"""User reports 3.7: configuration, command line, platform."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import get_args

import pytest

from rewarden.algos.reward import Reward
from rewarden.algos.sft import SFT
from rewarden.data.sources import Data
from rewarden.errors import ConfigError, DataError
from rewarden.models.load import Model
from rewarden.recipe.jobs import JOBS, parse_recipe
from rewarden.recipe.read import read_recipe
from rewarden.runtime.job import Drive, drive
from rewarden.runtime.metrics import read_metrics
from rewarden.runtime.ranks import Ranks
from rewarden.runtime.report import RunFolder
from rewarden.scoring import SCORERS
from rewarden.spec import Spec
from rewarden.worlds import WORLDS
from tests.reports.short_runs import ALONE, ppo_config, ticks, without_times, write_rows

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "rewarden"


@pytest.mark.parametrize("word", ["None", "null", "~", ""])
def test_none_on_the_command_line_is_none(world_files, tmp_path, word):
    """Row 85 (trl#5843): an override is read as YAML, so None never stays a text of four letters."""
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "kind: ppo\npolicy: {model_name_or_path: somewhere}\nreward: {kind: length, target: 1, penalty: 1.0}\n"
        "data: {path: prompts.jsonl}\ncliprange: 0.3\nreward_clip: 2.0\n",
        encoding="utf-8",
    )
    ((spec, _),) = parse_recipe(
        read_recipe(
            recipe, [f"cliprange={word}", f"reward_clip={word}", f"optim.max_grad_norm={word}", "optim.learning_rate=1e-5"]
        )
    )
    assert (spec.cliprange, spec.reward_clip, spec.optim.max_grad_norm) == (None, None, None)
    with pytest.raises(ConfigError, match="cliprange is 'none'"):
        parse_recipe(read_recipe(recipe, ["cliprange='none'"]))


def python_files() -> Iterator[tuple[Path, ast.Module]]:
    for top in ("rewarden", "tools", "examples", "bench"):
        for path in sorted((ROOT / top).rglob("*.py")):
            yield path, ast.parse(path.read_text(encoding="utf-8"))


def text_without_encoding(call: ast.Call) -> bool:
    """Whether a call opens, reads or writes text, or talks to a process in text, and leaves the encoding to the platform."""
    if any(keyword.arg == "encoding" for keyword in call.keywords):
        return False
    if isinstance(call.func, ast.Attribute):
        owner, name = ast.unparse(call.func.value), call.func.attr
        if owner in ("os", "gzip") or owner.endswith(("folder", "run", "part")):  # descriptors, bytes, our own classes
            return False
    else:
        owner, name = "", getattr(call.func, "id", "")
    if name in ("read_text", "write_text") and owner:
        return not (name == "write_text" and len(call.args) > 1) and not (name == "read_text" and call.args)
    if name == "open":
        place = 0 if owner else 1
        mode = call.args[place] if len(call.args) > place else next((k.value for k in call.keywords if k.arg == "mode"), None)
        return mode is None or (isinstance(mode, ast.Constant) and "b" not in str(mode.value))
    return any(keyword.arg == "text" and ast.unparse(keyword.value) == "True" for keyword in call.keywords)


def test_every_text_file_is_opened_as_utf8():
    """Row 86 (trl#5869): a platform with another default encoding reads and writes the same files."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, tree in python_files()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and text_without_encoding(node)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("code", "bad"),
    [
        ("open('a')", True),
        ("open('a', 'w')", True),
        ("open('a', 'rb')", False),
        ("path.open()", True),
        ("path.open('w', encoding='utf-8')", False),
        ("path.read_text()", True),
        ("path.write_text('x', 'utf-8')", False),
        ("subprocess.run(['x'], text=True)", True),
        ("os.open(path, 0)", False),
    ],
)
def test_the_search_for_unnamed_encodings_finds_them(code, bad):
    """Row 86: the check above sees what it is for."""
    assert text_without_encoding(ast.parse(code).body[0].value) is bad


def nested(spec: type[Spec]) -> Iterator[type[Spec]]:
    """A config class and all that its fields lead to."""
    yield spec
    for field in spec.model_fields.values():
        stack = [field.annotation]
        while stack:
            kind = stack.pop()
            stack += get_args(kind)
            if isinstance(kind, type) and issubclass(kind, Spec):
                yield from nested(kind)


def test_every_option_is_read_somewhere():
    """Row 87 (oi#1823): a key that no line of the package reads could not do anything; there is none."""
    read = {
        node.attr
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
    }
    roots = [*JOBS.values(), *SCORERS.values(), *WORLDS.values(), Drive]
    specs = {spec for root in roots for spec in nested(root)}
    unread = [f"{spec.__name__}.{name}" for spec in specs for name in spec.model_fields if name not in read]
    assert unread == []
    assert len(specs) >= 15


def outcome(spec: Spec) -> tuple:
    """All that a run of a job shows, but for the clock."""
    job = spec.build(ALONE)
    run = list(job.train(job.start))
    return job.steps, tuple(job.notes), [repr(sorted(without_times(t.report).items())) for t in run], [t.samples for t in run]


def changed(spec: Spec, path: str, value: object) -> Spec:
    """The config anew with one key changed; a dotted path leads into its parts."""
    raw = spec.model_dump()
    place = raw
    *parts, last = path.split(".")
    for part in parts:
        place = place[part]
    place[last] = value
    return type(spec)(**raw)


def options(spec: Spec, prefix: str = "", parts: Iterable[str] = ()) -> Iterator[str]:
    for name in type(spec).model_fields:
        value = getattr(spec, name)
        if isinstance(value, Spec):
            if name in parts:
                yield from options(value, f"{name}.")
        elif not isinstance(value, dict):
            yield prefix + name


OPTIM = {
    "learning_rate": 5e-4,
    "betas": (0.5, 0.6),
    "eps": 1e-2,
    "weight_decay": 0.9,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
    "min_lr_ratio": 0.5,
    "max_grad_norm": 1e-3,
}
NEUTRAL = {
    "per_device_train_batch_size": "memory only, by promise (rows 50 and 60)",
    "sampling.batch_size": "memory only: a row's text does not depend on the rows beside it",
    "critic_head": "tests/reports/test_ppo_behavior.py",
    "critic": "tests/reports/test_ppo_behavior.py",
    "reward_moments": "tests/reports/test_reward_models.py",
    "feature_cache_dir": "speed only; tests/models/test_model_features.py",
    "disable_dropout": "tests/algos/test_sft.py",
    "on_empty": "tests/reports/test_tokens_and_templates.py",
    "overlength": "tests/algos/test_sft.py",
    "eval_data": "a part of its own",
    "selection.patience": "tests/reports/test_ppo_behavior.py",
    "selection.max_truncated": "tests/reports/test_ppo_behavior.py",
}
"""Options without an alternative below, and why."""


def ppo_options(files) -> tuple[Spec, dict[str, object], tuple[str, ...]]:
    base = ppo_config(
        files,
        eval_data=Data(path=str(files.selection)),
        num_ppo_epochs=2,
        reward_clip=1.5,
        optim={"learning_rate": 3e-3, "lr_scheduler_type": "linear"},
        critic_optim={"learning_rate": 3e-3, "lr_scheduler_type": "linear"},
    )
    values = {
        "max_prompt_length": 30, "max_steps": 1, "rollout_batch_size": 7, "mini_batch_size": 3, "num_ppo_epochs": 1, "beta": 0.9, "gamma": 0.5,
        "lam": 0.1, "cliprange": 0.001, "cliprange_high": 0.001, "cliprange_value": 0.001, "vf_coef": 9.0, "reward_norm": "none", "reward_clip": 0.1,
        "whiten_advantages": False, "missing_eos_penalty": 2.0, "eval_steps": 2, "num_sample_generations": 1, "seed": 5,
        "sampling.max_completion_length": 4, "sampling.temperature": 0.5, "sampling.top_p": 0.5, "sampling.top_k": 3, "sampling.repetition_penalty": 1.5,
        "selection.beta": 9.0, "selection.max_kl": 1e-6, "selection.max_length_ratio": 0.1,
    }  # fmt: skip
    values |= {f"{group}.{key}": value for group in ("optim", "critic_optim") for key, value in OPTIM.items()}
    return base, values, ("optim", "critic_optim", "sampling", "selection")


def sft_options(files) -> tuple[Spec, dict[str, object], tuple[str, ...]]:
    base = SFT(
        model=Model(model_name_or_path=str(files.policy)),
        data=Data(path=str(files.dialogues), max_rows=9),
        eval_data=Data(path=str(files.heldout)),
        optim={"learning_rate": 3e-3, "lr_scheduler_type": "linear"},
        train_batch_size=2,
        length_window=2,
        eval_steps=2,
    )
    values = {
        "num_train_epochs": 2, "max_steps": 3, "train_batch_size": 3, "length_window": 1, "max_length": 120, "eval_steps": 3, "seed": 5,
    }  # fmt: skip
    return base, values | {f"optim.{k}": v for k, v in OPTIM.items()}, ("optim",)


def reward_options(files) -> tuple[Spec, dict[str, object], tuple[str, ...]]:
    base = Reward(
        model=Model(model_name_or_path=str(files.policy)),
        data=Data(path=str(files.pairs), max_rows=9),
        eval_data=Data(path=str(files.pairs), max_rows=5),
        optim={"learning_rate": 3e-3, "lr_scheduler_type": "linear"},
        train_batch_size=2,
        length_window=2,
        eval_steps=2,
    )
    values = {
        "num_train_epochs": 2, "max_steps": 3, "train_batch_size": 3, "length_window": 1, "max_length": 40, "num_heads": 2, "head_seed": 7,
        "label_smoothing": 0.3, "center_rewards_coefficient": 2.0, "eval_steps": 3, "seed": 5,
    }  # fmt: skip
    return base, values | {f"optim.{k}": v for k, v in OPTIM.items()}, ("optim",)


@pytest.mark.slow
@pytest.mark.parametrize("job", [ppo_options, sft_options, reward_options])
def test_every_option_changes_what_a_run_shows(world_files, job, record_property):
    """Row 87: each option alone is set to another value, and reports, notes, steps or samples differ from the run without it."""
    base, values, parts = job(world_files)
    expected = outcome(base)
    assert outcome(base) == expected
    left_out = {"margin_scale"}  # the pairs of the world have no margin; tests/reports/test_reward_models.py
    assert set(options(base, parts=parts)) == {
        *values,
        *(NEUTRAL.keys() & set(options(base, parts=parts))),
        *(left_out & set(options(base))),
    }
    without_effect = [path for path, value in values.items() if outcome(changed(base, path, value)) == expected]
    record_property("point", "3: the user-report rows pass (every option has an effect)")
    record_property("job", type(base).__name__)
    record_property("options", len(values))
    record_property("without_effect", len(without_effect))
    assert without_effect == []


@pytest.mark.parametrize(
    "key",
    ["max_steps", "rollout_batch_size", "mini_batch_size", "num_ppo_epochs", "eval_steps", "sampling.max_completion_length"],
)
def test_zero_is_refused_when_the_recipe_is_read(tmp_path, key):
    """Row 88 (oi#1795): a plan of no steps is an error with its key, before anything is loaded."""
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "kind: ppo\npolicy: {model_name_or_path: somewhere}\nreward: {kind: length, target: 1, penalty: 1.0}\n"
        "data: {path: prompts.jsonl}\nsampling: {max_completion_length: 4}\n",
        encoding="utf-8",
    )
    with pytest.raises(ConfigError, match=rf"{key} is 0: Input should be greater than"):
        parse_recipe(read_recipe(recipe, [f"{key}=0"]))


def test_one_row_is_enough_for_every_job(world_files):
    """Row 88 (oi#1796): a batch larger than the data, warm-up shares of one step, one prompt for a whole round."""
    optim = {"learning_rate": 1e-3, "warmup_steps": 0.3, "lr_scheduler_type": "cosine"}
    model = Model(model_name_or_path=str(world_files.policy))
    one = {"model": model, "optim": optim}
    fine = ticks(SFT(**one, data=Data(path=str(world_files.dialogues), max_rows=1)))
    pair = ticks(
        Reward(
            **one, data=Data(path=str(world_files.pairs), max_rows=1), eval_data=Data(path=str(world_files.pairs), max_rows=1)
        )
    )
    rounds = ticks(ppo_config(world_files, data=Data(path=str(world_files.prompts), max_rows=1), optim=optim, max_steps=1))
    assert [len(fine), len(pair), len(rounds)] == [1, 1, 1]
    assert pair[0].report["eval/num_pairs"] == 1
    assert rounds[0].report["episode"] == 8
    for tick in (*fine, *pair, *rounds):
        assert tick.report["skipped_steps"] == 0


def test_no_rows_is_an_error_with_the_file(world_files, tmp_path):
    """Row 88 (oi#1810): never a division by zero."""
    file = write_rows(tmp_path / "empty.jsonl", [])
    with pytest.raises(DataError, match=r"empty\.jsonl"):
        SFT(model=Model(model_name_or_path=str(world_files.policy)), data=Data(path=str(file))).build(ALONE)


def test_how_often_a_run_saves_and_how_often_it_evaluates_have_nothing_to_do_with_each_other(world_files, tmp_path):
    """Row 90 (nemo#1229): every pair of periods evaluates at its own steps, saves at its own, and learns the same."""
    cfg = SFT(
        model=Model(model_name_or_path=str(world_files.policy)),
        data=Data(path=str(world_files.dialogues), max_rows=10),
        eval_data=Data(path=str(world_files.heldout), max_rows=2),
        train_batch_size=2,
        optim={"learning_rate": 1e-3},
    )
    losses = set()
    evaluations = {1: [1, 2, 3, 4, 5], 2: [2, 4, 5], 3: [3, 5], None: [5]}
    checkpoints = {2: [2, 4, 5], 3: [3, 5], 0: [5]}
    for eval_steps, save_steps in ((1, 2), (2, 2), (2, 3), (3, 2), (3, 0), (None, 3)):
        folder = tmp_path / f"{eval_steps}-{save_steps}"
        job = cfg.model_copy(update={"eval_steps": eval_steps}).build(ALONE)
        drive(job, RunFolder(folder), ALONE, cfg=Drive(save_steps=save_steps, save_total_limit=None, view="off"))
        rows = read_metrics(folder / "metrics.jsonl")
        assert [row["step"] for row in rows if "eval/nll" in row] == evaluations[eval_steps]
        assert sorted(int(path.name[5:]) for path in (folder / "checkpoints").iterdir()) == checkpoints[save_steps]
        losses.add((*(row["loss/nll"] for row in rows), rows[-1]["eval/nll"]))
    assert len(losses) == 1


def test_data_goes_on_where_a_resumed_run_stopped_also_inside_an_epoch(world_files):
    """Row 90 (nemo#3071): from every state of a run of 5 prompts in rounds of 3, the rest is that of the whole run."""
    cfg = ppo_config(
        world_files,
        data=Data(path=str(world_files.prompts), max_rows=5),
        rollout_batch_size=3,
        mini_batch_size=3,
        num_sample_generations=3,
        max_steps=4,
    )
    whole = ticks(cfg)
    ids = [[row["id"] for row in tick.samples] for tick in whole]
    assert len({name for part in ids[:2] for name in part}) == 5  # six places of two rounds: every prompt, one of them twice
    for done in (1, 2, 3):
        rest = ticks(cfg, whole[done - 1].state)
        assert [[row["id"] for row in tick.samples] for tick in rest] == ids[done:]


INSIDE = {"yaml": "pyyaml", "tokenizers": "transformers", "huggingface_hub": "transformers"}
"""Modules whose distribution has another name, or comes with another."""


def test_extras_are_the_ones_that_errors_name_and_hold_what_is_imported_only_there():
    """Row 92 (lf#5936): an install line in an error names an extra that exists, and the core imports nothing that is not required."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = {re.match(r"[\w-]+", line)[0].lower() for line in project["dependencies"]}
    optional = {re.match(r"[\w-]+", line)[0].lower() for lines in project["optional-dependencies"].values() for line in lines}
    named, foreign = set(), set()
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        named |= set(re.findall(r"rewarden\[(\w+)\]", text))
        for node in ast.walk(ast.parse(text)):
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module]
                if isinstance(node, ast.ImportFrom) and node.module
                else []
            )
            foreign |= {name.split(".")[0] for name in names} - {"rewarden"} - sys.stdlib_module_names
    assert named <= project["optional-dependencies"].keys()
    assert {"gguf", "trackers"} <= named
    assert {INSIDE.get(name, name) for name in foreign} - required - optional == set()
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        assert (
            set(re.findall(r"rewarden\[(\w+)\]", page.read_text(encoding="utf-8"))) <= project["optional-dependencies"].keys()
        )


def test_one_process_without_any_cluster_is_enough():
    """Row 93 (orlhf#882): no Ray, no server, no launcher: a run is one Python process on whatever device there is."""
    assert Ranks.start().world == 1
    required = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    assert not [line for line in required if line.startswith(("ray", "vllm", "deepspeed", "flash"))]
