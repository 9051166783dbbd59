"""PPO against ensembles: a conservative reward end to end, what it logs, registries, and what the critic starts from."""

import json
import statistics
from pathlib import Path

import pytest
import torch
from pyarrow import parquet

from rewarden.algos import ppo
from rewarden.algos.actors import critic_start
from rewarden.algos.ppo_config import PPO
from rewarden.algos.scores import calibration
from rewarden.data.sources import Data
from rewarden.errors import ConfigError
from rewarden.models.ensemble_folder import save_adapted_members, save_independent
from rewarden.models.load import Model, load_tokenizer, save_model
from rewarden.models.members import load_adapted_members
from rewarden.models.reward import load_reward_model
from rewarden.rollout.hf import Sampling
from rewarden.runtime.job import Drive, drive
from rewarden.runtime.metrics import read_metrics
from rewarden.runtime.ranks import Ranks
from rewarden.runtime.report import RunFolder
from rewarden.scoring.registry import register

ROUND = 8
MOMENTS = {"members": [{"count": 10, "mean": mean, "m2": 2.5} for mean in (0.4, -0.2, 0.1)]}


@pytest.fixture(scope="module")
def families(world_files, tmp_path_factory) -> dict[str, Path]:
    """Three members of each family, on the world's untrained policy."""
    root = tmp_path_factory.mktemp("families")
    policy = Model(model_name_or_path=str(world_files.policy))
    linear = load_reward_model(policy, num_heads=3, head="fresh", head_seed=5, head_std=0.3)
    save_model(linear.model, linear.tokenizer, root / "linear", extra={"role": "reward", "num_heads": 3})
    save_model(
        linear.model, linear.tokenizer, root / "calibrated", extra={"role": "reward", "num_heads": 3, "calibration": MOMENTS}
    )
    for seed in range(3):
        one = load_reward_model(policy, num_heads=1, head="fresh", head_seed=seed, head_std=0.3)
        save_model(one.model, one.tokenizer, root / f"one_{seed}", extra={"role": "reward", "num_heads": 1})
    alone = [root / f"one_{seed}" for seed in range(3)]
    save_independent(alone, linear.tokenizer, root / "independent", seeds=[0, 1, 2], extra={"template": "chat"})
    heads = torch.randn(3, linear.model.score.in_features, generator=torch.Generator().manual_seed(7))
    adapted = load_adapted_members(policy.model_copy(update={"lora_r": 2}), heads_KD=heads, seeds=[0, 1, 2], device=None)
    save_adapted_members(
        adapted.model, adapted.tokenizer, root / "lora", seeds=[0, 1, 2], extra={"template": "chat"}, member_extra=[{}] * 3
    )
    return {name: root / name for name in ("linear", "calibrated", "independent", "lora")}


def config(files, reward, **changes) -> PPO:
    fields = {
        "policy": Model(model_name_or_path=str(files.policy)),
        "reward": reward,
        "data": Data(path=str(files.prompts)),
        "sampling": Sampling(max_completion_length=6),
        "max_steps": 2,
        "rollout_batch_size": ROUND,
        "mini_batch_size": 4,
        "num_ppo_epochs": 1,
        "num_sample_generations": ROUND,
    }
    return PPO(**{**fields, **changes})


def trained(cfg: PPO, folder: Path) -> tuple[list[dict], list[dict]]:
    """(lines of metrics.jsonl, rows of samples.parquet) of a run."""
    ranks = Ranks.single("cpu")
    drive(ppo.build(cfg, ranks), RunFolder(folder), ranks, cfg=Drive(view="off"))
    return read_metrics(folder / "metrics.jsonl"), parquet.read_table(folder / "samples.parquet").to_pylist()


def without_times(lines: list[dict]) -> list[dict]:
    return [{key: value for key, value in line.items() if not key.startswith("time/")} for line in lines]


def members_of(row: dict) -> list[float]:
    return json.loads(row["members"])


@pytest.mark.parametrize("family", ["linear", "independent", "lora"])
def test_a_conservative_reward_trains_a_policy_and_every_member_is_logged(world_files, families, tmp_path, family):
    """Each score, and each number of the log, from the members that the samples list."""
    aggregate = {"rule": "lower_bound", "coef": 2.0, "center": "none"}
    reward = {"kind": "reward_model", "path": str(families[family]), "aggregate": aggregate}
    lines, samples = trained(config(world_files, reward), tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        rows = [row for row in samples if row["step"] == line["step"]]
        assert len(rows) == ROUND
        columns = list(zip(*(members_of(row) for row in rows), strict=True))
        assert len(columns) == 3
        for row in rows:
            members = members_of(row)
            spread = statistics.pstdev(members)
            assert row["score"] == pytest.approx(statistics.fmean(members) - 2 * spread, abs=1e-5)
            assert row["disagreement"] == pytest.approx(spread, abs=1e-5)
        assert line["score/mean"] == pytest.approx(statistics.fmean(row["score"] for row in rows), abs=1e-5)
        assert line["score/disagreement"] == pytest.approx(statistics.fmean(row["disagreement"] for row in rows), abs=1e-5)
        assert line["score/part/std"] == pytest.approx(line["score/disagreement"], abs=1e-5)
        for member, column in enumerate(columns):
            assert line[f"score/member_mean/{member}"] == pytest.approx(statistics.fmean(column), abs=1e-5)
            assert line[f"score/member_std/{member}"] == pytest.approx(statistics.pstdev(column), abs=1e-5)
    assert lines[-1]["policy_version"] == 4
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


def test_members_are_centered_by_their_calibration_where_the_checkpoint_has_it(world_files, families, tmp_path):
    aggregate = {"rule": "worst_case"}
    reward = {"kind": "reward_model", "path": str(families["calibrated"]), "aggregate": aggregate}
    cfg = config(world_files, reward, max_steps=1)
    assert not any(note.startswith("reward:") for note in ppo.build(cfg, Ranks.single("cpu")).notes)
    _, samples = trained(cfg, tmp_path / "run")
    means = [member["mean"] for member in MOMENTS["members"]]
    for row in samples:
        centered = [member - mean for member, mean in zip(members_of(row), means, strict=True)]
        assert row["score"] == pytest.approx(min(centered), abs=1e-5)
    (note,) = [
        note
        for note in ppo.build(config(world_files, {**reward, "path": str(families["linear"])}), Ranks.single("cpu")).notes
        if note.startswith("reward:")
    ]
    assert "3 members are not centered before worst_case" in note


def test_a_registered_reward_trains_exactly_like_what_the_registry_says(world_files, families, tmp_path):
    aggregate = {"rule": "lower_bound", "coef": 0.5}
    entry = {"kind": "reward_model", "path": str(families["linear"]), "aggregate": aggregate}
    register(tmp_path / "models.yaml", "three", entry)
    registered = {"kind": "registered", "registry": str(tmp_path / "models.yaml"), "name": "three"}
    ours, _ = trained(config(world_files, registered), tmp_path / "registered")
    theirs, _ = trained(config(world_files, entry), tmp_path / "direct")
    assert without_times(ours) == without_times(theirs)


def test_a_coefficient_of_zero_trains_exactly_like_the_mean(world_files, families, tmp_path):
    path = str(families["linear"])
    zero = {"kind": "reward_model", "path": path, "aggregate": {"rule": "lower_bound", "coef": 0, "center": "none"}}
    ours, _ = trained(config(world_files, zero), tmp_path / "zero")
    mean, _ = trained(config(world_files, {"kind": "reward_model", "path": path}), tmp_path / "mean")
    assert without_times(ours) == without_times(mean)


def test_a_single_reward_logs_no_members(world_files, tmp_path):
    lines, samples = trained(
        config(world_files, {"kind": "reward_model", "path": str(world_files.reward)}, max_steps=1), tmp_path
    )
    assert not [key for key in lines[0] if "member" in key or "disagreement" in key or "part" in key]
    assert "members" not in samples[0]


def test_the_critic_starts_from_a_trunk_of_the_reward(world_files, families, tmp_path):
    """The only trunk of the linear family, member 0 of independent ones, and the trunk that LoRA members share."""
    policy = Model(model_name_or_path=str(world_files.policy))
    tokenizer = load_tokenizer(policy)
    expected = {
        "linear": (families["linear"], "fresh"),
        "independent": (families["independent"] / "member_0", "saved"),
        "lora": (families["lora"] / "trunk", "saved"),
    }
    for family, (folder, head) in expected.items():
        register(tmp_path / "models.yaml", family, {"kind": "reward_model", "path": str(families[family])})
        direct = {"kind": "reward_model", "path": str(families[family])}
        registered = {"kind": "registered", "registry": str(tmp_path / "models.yaml"), "name": family}
        for reward in (direct, registered):
            model, found = critic_start(policy, reward, None, None, tokenizer)
            assert (Path(model.model_name_or_path).resolve(), found) == (folder.resolve(), head)


def test_moments_of_the_mean_do_not_normalise_another_aggregate(families, tmp_path):
    for name, aggregate in {"mean": {}, "bound": {"rule": "lower_bound", "coef": 1.0}, "scaled": {"scale": True}}.items():
        entry = {"kind": "reward_model", "path": str(families["calibrated"]), "aggregate": aggregate}
        register(tmp_path / "models.yaml", name, entry)
    card = families["calibrated"] / "rewarden.json"
    before = card.read_text()
    try:
        card.write_text(json.dumps({**json.loads(before), "evaluation": {"eval/score_mean": 0.5, "eval/score_std": 2.0}}))
        place = {"kind": "registered", "registry": str(tmp_path / "models.yaml")}
        assert calibration({**place, "name": "mean"}) == (0.5, 2.0)
        with pytest.raises(ConfigError, match=r"of the mean of its members, not of their lower_bound \(coef 1, ddof 0\)"):
            calibration({**place, "name": "bound"})
        with pytest.raises(ConfigError, match=r"not of their mean \(scaled\); set reward_moments"):
            calibration({**place, "name": "scaled"})
    finally:
        card.write_text(before)
