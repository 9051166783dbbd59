"""`sample_n`: every answer has its own seed, is stored once, and stays what it is when the run is stopped or N is raised."""

import gc
import json
import random
import re
import shutil
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import yaml

from rewarden.collect.sample_store import read_samples
from rewarden.collect.samples import SampleN
from rewarden.collect.scores import ScoreSamples
from rewarden.errors import ConfigError, DataError
from rewarden.models.load import load_policy, load_tokenizer, save_model
from rewarden.recipe.jobs import parse_stage
from rewarden.recipe.read import read_recipe
from rewarden.rollout.hf import HFSampler, Sampling
from rewarden.runtime.report import RunFolder
from rewarden.runtime.samples import Samples as RunSamples
from rewarden.runtime.seed import seed_of
from rewarden.text.render import load_template
from tests.collect.stores import NUM_PROMPTS, run, write_store

ROOT = Path(__file__).parents[2]


def spec(desk, **fields) -> SampleN:
    return SampleN(
        **{
            "policy": {"model_name_or_path": str(desk.policy)},
            "data": {"path": str(desk.prompts)},
            "num_generations": 4,
            "sampling": {"max_completion_length": 6},
            "rows_per_step": 7,
            "seed": 3,
            **fields,
        }
    )


def rows(folder: Path) -> list[dict]:
    return [{k: v for k, v in row.items() if k != "step"} for row in pq.read_table(folder / "samples.parquet").to_pylist()]


@pytest.fixture(scope="module")
def sampled(desk, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sampled") / "samples"
    run(spec(desk), folder)
    return folder


def test_every_answer_is_the_one_its_own_seed_gives(desk, sampled):
    """Each drawn alone, by a sampler of its own."""
    cfg = spec(desk)
    template = load_template(load_tokenizer(cfg.policy))
    samples = read_samples(sampled)
    assert (len(samples.prompts), samples.num_generations) == (NUM_PROMPTS, 4)
    sampler = HFSampler(load_policy(cfg.policy), template, Sampling(max_completion_length=6))
    for p in range(NUM_PROMPTS):
        for i in range(4):
            opened = template.start(samples.prompts[p])
            (alone,) = sampler.sample([opened], seeds=[seed_of(3, "sample_n", samples.prompts[p].id, i)])
            assert samples.text(p, i) == alone.conversation.messages[-1].text
            assert int(samples.num_tokens_PN[p, i]) == len(alone.logp_sampler)
            assert float(samples.logp_PN[p, i]) == pytest.approx(sum(alone.logp_sampler), abs=1e-4)
            assert samples.conversations[p][i].messages == alone.conversation.messages
            assert samples.conversations[p][i].meta.get("truncated") == alone.conversation.meta.get("truncated")
            assert samples.conversations[p][i].meta["user_seed"] == samples.prompts[p].meta["user_seed"]


def test_rows_stand_in_the_order_of_prompt_and_answer_and_samples_json_says_how_they_were_drawn(sampled):
    assert [(row["prompt"], row["index"]) for row in rows(sampled)] == [(p, i) for p in range(NUM_PROMPTS) for i in range(4)]
    facts = json.loads((sampled / "samples.json").read_text())
    assert facts["sampling"] == {
        "max_completion_length": 6, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0,
    }  # fmt: skip
    assert (facts["num_prompts"], facts["num_generations"], facts["seed"]) == (NUM_PROMPTS, 4, 3)


@pytest.mark.parametrize("done", [1, 2])
def test_a_run_that_fails_after_any_step_and_goes_on_stores_the_same(desk, sampled, tmp_path, monkeypatch, done):
    calls = iter(range(done))
    sample = HFSampler.sample

    def failing(self, *args, **kwargs):
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return sample(self, *args, **kwargs)

    monkeypatch.setattr(HFSampler, "sample", failing)
    with pytest.raises(KeyboardInterrupt):
        run(spec(desk), tmp_path / "samples")
    with pytest.raises(DataError, match="unfinished run; run it again"):
        read_samples(tmp_path / "samples")
    monkeypatch.undo()
    assert run(spec(desk), tmp_path / "samples", resume="must").resumed_from == done
    assert rows(tmp_path / "samples") == rows(sampled)
    assert read_samples(tmp_path / "samples").fingerprint == read_samples(sampled).fingerprint


def kill_and_resume(desk, folder: Path, num_kills: int, seed: int) -> Path:
    """Runs of the command line, killed at drawn moments; then one to the end."""
    rng = random.Random(seed)
    recipe = folder / "recipe.yaml"
    fields = spec(desk, num_generations=40, rows_per_step=5).model_dump(mode="json", exclude_defaults=True)
    recipe.write_text(yaml.safe_dump({"kind": "sample_n", **fields, "name": "samples", "output_dir": str(folder)}))
    command = [sys.executable, "-m", "rewarden.cli", "run", str(recipe)]
    metrics = folder / "samples" / "metrics.jsonl"
    with (folder / "log.txt").open("w") as log:
        for _ in range(num_kills):
            before = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            target = before + rng.randint(1, 40 // (num_kills + 1))
            process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
            deadline = time.monotonic() + 300
            while not metrics.exists() or metrics.read_bytes().count(b"\n") < target:
                assert process.poll() is None, (folder / "log.txt").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.002)
            time.sleep(rng.uniform(0, 0.02))
            process.kill()
            assert process.wait() == -9
        subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, check=True, timeout=600)
    return folder / "samples"


@pytest.mark.parametrize("num_kills", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_killed_anywhere_and_resumed_the_stored_answers_are_identical(desk, tmp_path, num_kills):
    (tmp_path / "killed").mkdir()
    killed = kill_and_resume(desk, tmp_path / "killed", num_kills, seed=random.SystemRandom().randrange(10**6))
    run(spec(desk, num_generations=40, rows_per_step=5), tmp_path / "once")
    assert rows(killed) == rows(tmp_path / "once")
    for name in ("prompts.jsonl", "samples.json"):
        assert (killed / name).read_bytes() == (tmp_path / "once" / name).read_bytes()


def test_a_larger_n_begins_with_the_answers_of_a_smaller_one(desk, sampled, tmp_path):
    run(spec(desk, num_generations=6, rows_per_step=11), tmp_path / "more")
    more, fewer = read_samples(tmp_path / "more"), read_samples(sampled)
    for p in range(NUM_PROMPTS):
        assert [more.text(p, i) for i in range(4)] == [fewer.text(p, i) for i in range(4)]
    assert len({more.text(p, i) for p in range(NUM_PROMPTS) for i in range(6)}) > 10


def test_extending_takes_earlier_answers_over_to_the_letter_and_samples_only_the_others(desk, sampled, tmp_path, monkeypatch):
    asked = []
    sample = HFSampler.sample

    def counting(self, rollouts, **kwargs):
        asked.append(len(rollouts))
        return sample(self, rollouts, **kwargs)

    monkeypatch.setattr(HFSampler, "sample", counting)
    run(spec(desk, num_generations=6, extends=str(sampled)), tmp_path / "more")
    assert sum(asked) == NUM_PROMPTS * 2
    more, fewer = rows(tmp_path / "more"), rows(sampled)
    assert [row for row in more if row["index"] < 4] == fewer
    assert (
        sum(json.loads(line)["samples/copied"] for line in (tmp_path / "more" / "metrics.jsonl").read_text().splitlines())
        == NUM_PROMPTS * 4
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"seed": 4}, r"samples of another seed \(3\)"),
        ({"sampling": {"max_completion_length": 6, "top_p": 0.9}}, "samples of another sampling"),
        ({"num_generations": 4}, "already holds 4 answers to each prompt, and num_generations is 4; raise it"),
    ],
)
def test_samples_of_something_else_are_not_extended(desk, sampled, fields, words):
    with pytest.raises(ConfigError, match=words):
        run(spec(desk, **{"num_generations": 6, "extends": str(sampled), **fields}), sampled.parent / "never")


def test_samples_of_another_policy_or_other_prompts_are_not_extended(desk, sampled, tmp_path):
    policy = load_policy(spec(desk).policy)
    with torch.no_grad():
        next(policy.parameters()).add_(0.01)
    save_model(policy, load_tokenizer(spec(desk).policy), tmp_path / "other", extra={"role": "policy", "template": "chat"})
    cfg = spec(desk, num_generations=6, extends=str(sampled), policy={"model_name_or_path": str(tmp_path / "other")})
    with pytest.raises(ConfigError, match="samples of another policy"):
        run(cfg, tmp_path / "a")
    lines = desk.prompts.read_text().splitlines(keepends=True)
    (tmp_path / "fewer.jsonl").write_text("".join(lines[1:]))
    cfg = spec(desk, num_generations=6, extends=str(sampled), data={"path": str(tmp_path / "fewer.jsonl")})
    with pytest.raises(ConfigError, match="holds samples for 5 prompts, not for the 4 of the data"):
        run(cfg, tmp_path / "b")


def test_a_policy_that_was_only_moved_can_be_extended(desk, sampled, tmp_path):
    shutil.copytree(desk.policy, tmp_path / "moved")
    run(
        spec(desk, num_generations=5, extends=str(sampled), policy={"model_name_or_path": str(tmp_path / "moved")}),
        tmp_path / "a",
    )
    assert read_samples(tmp_path / "a").num_generations == 5


def test_prompts_that_leave_no_room_are_dropped_and_counted(desk, tmp_path):
    long = {"id": "long", "prompt": [{"role": "user", "content": "I would like a hotel. " * 200}]}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(long) + "\n" + desk.prompts.read_text())
    run(spec(desk, data={"path": str(tmp_path / "prompts.jsonl")}, num_generations=1), tmp_path / "a")
    facts = json.loads((tmp_path / "a" / "samples.json").read_text())
    assert facts["num_prompts"] == NUM_PROMPTS
    assert list(facts["prompts_dropped"].values()) == [1]
    (tmp_path / "only.jsonl").write_text(json.dumps(long) + "\n")
    with pytest.raises(DataError, match="no prompt leaves the policy room for an answer"):
        run(spec(desk, data={"path": str(tmp_path / "only.jsonl")}), tmp_path / "b")


def test_a_folder_without_samples_and_one_with_missing_rows_are_refused(sampled, tmp_path):
    with pytest.raises(DataError, match="no such run"):
        read_samples(tmp_path / "nowhere")
    store = write_store(tmp_path / "store", [["a", "b"], ["c", "d"]])
    assert read_samples(store).text(1, 0) == "c"
    table = pq.read_table(store / "samples.parquet")
    pq.write_table(table.slice(0, 3), store / "samples.parquet")
    with pytest.raises(DataError, match="holds 3 rows; 2 prompts with 2 answers each, in order, make 4"):
        read_samples(store)
    (store / "samples.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="cannot be read"):
        read_samples(store)
    (store / "samples.json").write_text("{")
    with pytest.raises(DataError, match="damaged"):
        read_samples(store)


def test_the_fingerprint_is_of_prompts_answers_and_their_ends(tmp_path):
    one = read_samples(write_store(tmp_path / "a", [["x y", "z"]])).fingerprint
    assert read_samples(write_store(tmp_path / "b", [["x y", "z"]])).fingerprint == one
    assert read_samples(write_store(tmp_path / "c", [["x", "y z"]])).fingerprint != one
    assert read_samples(write_store(tmp_path / "d", [["x y", "z"]], ended=["eos", "length"])).fingerprint != one
    other = [{"id": "p0", "prompt": [{"role": "user", "content": "question 1"}]}]
    assert read_samples(write_store(tmp_path / "e", [["x y", "z"]], prompts=other)).fingerprint != one


def test_texts_are_not_held_as_python_objects(tmp_path):
    """4,000 texts of 2,000 characters: reading, counting and hashing them keep no Python text, and never all at once."""
    gc.collect()
    texts = [[f"{p} {i} " + "é" * 2000 for i in range(100)] for p in range(40)]
    store = write_store(tmp_path / "store", texts, tokens=[1] * 4_000)
    del texts
    gc.collect()
    tracemalloc.start()
    samples = read_samples(store)
    assert samples.characters_PN()[3, 7] == 2004
    assert not bool(samples.empty_PN().any() or samples.cut_PN().any())
    assert samples.conversations[39][99].messages[-1].text.startswith("39 99 é")
    held, _ = tracemalloc.get_traced_memory()
    assert held < 2_000_000
    assert samples.fingerprint
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 2_000_000
    assert peak < 9_000_000, "all texts as Python objects are 8 MB and 16 MB encoded"


def test_a_run_folder_stores_texts_with_line_separators_and_in_row_groups(tmp_path):
    """U+2028 and U+0085 end a line for str.splitlines; JSON leaves them as they are."""
    odd = "one\u2028two\u0085three\u2029four"
    folder = RunFolder(tmp_path)
    folder.samples.append(1, [{"text": odd}, {"text": "plain"}])
    folder.samples.flush()
    assert RunSamples(tmp_path / "samples.parquet").read() == [{"step": 1, "text": odd}, {"step": 1, "text": "plain"}]
    folder.samples.append(2, [{"text": str(i)} for i in range(9_000)])
    folder.samples.flush(final=True)
    file = pq.ParquetFile(tmp_path / "samples.parquet")
    assert file.metadata.num_rows == 9_002
    assert file.metadata.num_row_groups == 3


PAGE = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
BESIDES = {"step", "num_tokens", "time/step", "time/tokens_per_s"}
"""Of every job."""


def listed(title: str) -> set[str]:
    """The names in the table under a heading of the metrics page."""
    part = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `([^`]+)` \|", part, flags=re.MULTILINE))


def logged(folder: Path) -> set[str]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {name for line in lines for name in line if not name.startswith("time/")}


def test_the_metrics_page_names_what_sampling_and_scoring_log(sampled, tmp_path):
    assert logged(sampled) - BESIDES == listed("Samples")
    run(ScoreSamples(samples=str(sampled), scorers={"gold": {"kind": "gold"}}), tmp_path / "scores")
    assert logged(tmp_path / "scores") - BESIDES == listed("Scores of samples")


def test_every_step_is_kept_unless_the_recipe_says_otherwise():
    recipe = read_recipe(ROOT / "recipes" / "best_of_n_world.yaml")
    how = {stage.name: parse_stage(stage, stage.name)[1].save_steps for stage in recipe.stages}
    assert (how["samples"], how["scores"], how["sft"]) == (1, 1, 50)
    changed = read_recipe(ROOT / "recipes" / "best_of_n_world.yaml", ["samples.save_steps=7"])
    assert {stage.name: parse_stage(stage, stage.name)[1].save_steps for stage in changed.stages}["samples"] == 7
