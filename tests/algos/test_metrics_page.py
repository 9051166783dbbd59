"""docs/metrics.md names exactly the numbers that jobs write to metrics.jsonl."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rewarden.algos.ppo_config import PPO
from rewarden.algos.reward import Reward
from rewarden.algos.sft import SFT
from rewarden.data.sources import Data
from rewarden.models.load import Model, save_model
from rewarden.models.reward import load_reward_model
from rewarden.rollout.hf import Sampling
from rewarden.runtime.job import Drive, drive
from rewarden.runtime.metrics import read_metrics
from rewarden.runtime.ranks import Ranks
from rewarden.runtime.report import RunFolder
from rewarden.spec import Spec

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
EVERY_JOB = "Every job"
SECTIONS = {"sft": "Supervised fine-tuning", "reward": "Reward model", "ppo": "PPO"}

EXPANSIONS = {
    "sft": {"GROUP": ("policy",), "PHASE": ("checkpoint",)},
    "reward": {
        "GROUP": ("reward",),
        "PHASE": ("checkpoint",),
        "BUCKET": ("preferred_shorter", "similar_length", "preferred_longer"),
        "MEMBER": ("0", "1"),
    },
    "ppo": {
        "GROUP": ("policy", "critic"),
        "PHASE": ("rollout", "score", "prepare", "update", "evaluate", "checkpoint"),
        "STATUS": ("not_applicable",),
        "NAME": ("learned", "learned/weighted", "learned/std", "rule", "rule/weighted", "rule/length"),
        "MEMBER": ("0", "1"),
    },
}
"""What a word in capitals stands for, by job."""


def section(title: str) -> str:
    """What stands under a heading of the page."""
    parts = re.split(r"^## +(.+)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))[title]


def names(title: str, *, column: int = 0) -> list[str]:
    """The names in a column of the table under a heading."""
    return re.findall(r"^\|" + r"[^|]*\|" * column + r" `([^`]+)` \|", section(title), flags=re.MULTILINE)


def expanded(listed: list[str], words: dict[str, tuple[str, ...]]) -> Iterator[str]:
    """Each name once for every value of the word in capitals it holds."""
    for name in listed:
        word = next((word for word in words if word in name), None)
        yield from (name.replace(word, value) for value in words[word]) if word else (name,)


def jobs(files) -> dict[str, list[Spec]]:
    """By section of the page, the smallest jobs that together log all that such a job can log."""
    model = Model(model_name_or_path=str(files.policy))
    dialogues, heldout = Data(path=str(files.dialogues)), Data(path=str(files.heldout))
    pairs = Data(path=str(files.pairs))
    reward = Reward(model=model, data=pairs, eval_data=pairs, train_batch_size=8, max_steps=2)
    members = changed(reward, num_members=2, max_steps=1)
    adapted = changed(reward, eval_data=None, max_steps=1, num_members=2, model=changed(model, lora_r=2))
    more = changed(adapted, diversity_coef=0.1, lm_coef=1.0)
    ppo = PPO(
        policy=model,
        reward={"kind": "reward_model", "path": str(files.reward)},
        data=Data(path=str(files.prompts)),
        eval_data=Data(path=str(files.selection)),
        sampling=Sampling(max_completion_length=6),
        max_steps=2,
        rollout_batch_size=8,
        mini_batch_size=4,
        num_ppo_epochs=1,
        missing_eos_penalty=1.0,
    )
    return {
        "sft": [SFT(model=model, data=dialogues, eval_data=heldout, train_batch_size=8, max_steps=2)],
        "reward": [reward, changed(reward, eval_data=None, max_steps=1, center_rewards_coefficient=0.01), members, more],
        "ppo": [
            ppo,
            changed(ppo, eval_data=None, max_steps=1, vf_coef=0.0),
            changed(ppo, eval_data=None, max_steps=1, reward={"kind": "function", "path": f"{__file__}:first_only"}),
            changed(ppo, eval_data=None, max_steps=1, reward=composed(files)),
        ],
    }


def first_only(completions, **_):
    """A reward function that applies to the first answer alone."""
    return [1.0 if i == 0 else None for i in range(len(completions))]


def composed(files) -> dict:
    """A sum of a rule and an ensemble of two heads."""
    folder = files.reward.with_name("two_heads")
    ensemble = load_reward_model(Model(model_name_or_path=str(files.policy)), num_heads=2, head="fresh")
    save_model(ensemble.model, ensemble.tokenizer, folder, extra={"role": "reward", "num_heads": 2})
    learned = {"scorer": {"kind": "reward_model", "path": str(folder)}, "name": "learned"}
    rule = {"scorer": {"kind": "length", "target": 4, "penalty": 0.1}, "name": "rule", "weight": 0.1}
    return {"kind": "sum", "scorers": [learned, rule]}


def changed(spec: Spec, **fields) -> Spec:
    """The same job with other fields."""
    return spec.model_copy(update=fields)


def logged(spec: Spec, folder: Path) -> set[str]:
    """The keys of metrics.jsonl after a run that saves after every step."""
    ranks = Ranks.single("cpu")
    drive(spec.build(ranks), RunFolder(folder), ranks, cfg=Drive(save_steps=1, view="off"))
    return {key for row in read_metrics(folder / "metrics.jsonl") for key in row}


@pytest.mark.parametrize("job", SECTIONS)
def test_the_page_names_exactly_what_a_job_logs(world_files, tmp_path, job):
    listed = [*names(EVERY_JOB), *names(SECTIONS[job])]
    found = set().union(*(logged(spec, tmp_path / str(number)) for number, spec in enumerate(jobs(world_files)[job])))
    page = set(expanded(listed, EXPANSIONS[job]))
    assert found - page == set(), "logged, not on the page"
    assert page - found == set(), "on the page, not logged"


@pytest.mark.parametrize("title", [EVERY_JOB, *SECTIONS.values()])
def test_no_name_stands_twice_and_every_row_has_four_cells(title):
    table = [line for line in section(title).splitlines() if line.startswith("|")]
    assert len(names(title)) == len(set(names(title))) == len(table) - 2
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table} == {5}


def test_the_names_beside_those_of_trl_are_ours():
    beside = names("Names in TRL", column=1)
    assert beside
    assert set(beside) <= set(names(SECTIONS["ppo"]))
