"""Members together are members alone, whichever way they share their weights; what a run writes, and what it refuses."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from rewarden.algos import reward
from rewarden.algos.actors import critic_start
from rewarden.algos.reward import Reward, prepare
from rewarden.algos.reward_evaluation import Exam, member_facts, pair_facts
from rewarden.algos.reward_plan import Plan, bootstrap_rows
from rewarden.errors import ConfigError, ResumeError
from rewarden.maths import bradley_terry
from rewarden.models.calibration import calibrate
from rewarden.models.ensemble import load_ensemble
from rewarden.models.ensemble_folder import files_hash
from rewarden.models.load import Model, load_tokenizer, save_model
from rewarden.models.reward import load_reward_model
from rewarden.runtime.job import Drive, drive
from rewarden.runtime.ranks import Ranks
from rewarden.runtime.report import RunFolder
from rewarden.spec import parse
from rewarden.text.collate import collate

SEEDS = (3, 1_000_007, 12)


def config(files, **changes) -> Reward:
    fields = {
        "kind": "reward",
        "model": {"model_name_or_path": str(files.policy)},
        "data": {"path": str(files.pairs), "max_rows": 20},
        "eval_data": {"path": str(files.pairs), "max_rows": 5},
        "optim": {"learning_rate": 5e-3, "weight_decay": 0.01, "lr_scheduler_type": "cosine", "warmup_steps": 1},
        "train_batch_size": 6,
        "per_device_train_batch_size": 4,
        "max_steps": 3,
    }
    return parse({"reward": Reward}, {**fields, **changes})


def run(cfg: Reward, folder: Path) -> Path:
    ranks = Ranks.single("cpu")
    drive(cfg.build(ranks), RunFolder(folder), ranks, cfg=Drive(save_steps=0, view="off"))
    return folder / "model"


def model_of(files, **changes) -> dict:
    return {"model_name_or_path": str(files.policy), **changes}


def rows_of(files) -> list:
    cfg = config(files)
    ranks = Ranks.single("cpu")
    return list(reward.load_rows(cfg, reward.load_start(cfg, ranks)).train)


def scores(folder, files) -> torch.Tensor:
    pairs = rows_of(files)[:6]
    tokens = collate([side for pair in pairs for side in (pair.chosen_ids, pair.rejected_ids)])
    return load_ensemble(Model(model_name_or_path=str(folder))).score(tokens)


@pytest.mark.parametrize("family", ["independent", "lora"])
def test_members_trained_together_are_those_trained_alone(world_files, tmp_path, family):
    """Same seeds, same data, bootstrap and all: every weight of every member, and the scores."""
    model = model_of(world_files, **({"lora_r": 2} if family == "lora" else {}))
    common = {"model": model, "bootstrap": True}
    together = run(config(world_files, **common, num_members=3, member_seeds=SEEDS), tmp_path / "together")
    assert json.loads((together / "ensemble.json").read_text())["family"] == family
    columns = []
    for member, seed in enumerate(SEEDS):
        alone = run(config(world_files, **common, seed=seed, head_seed=seed), tmp_path / f"alone_{seed}")
        name = "adapter_model.safetensors" if family == "lora" else "model.safetensors"
        ours, theirs = load_file(together / f"member_{member}" / name), load_file(alone / name)
        assert ours.keys() == theirs.keys()
        for key, weight in ours.items():
            torch.testing.assert_close(weight, theirs[key], rtol=0, atol=1e-6)
        columns.append(scores(alone, world_files))
        evaluations = [
            json.loads((f / "rewarden.json").read_text())["evaluation"] for f in (together / f"member_{member}", alone)
        ]
        assert evaluations[0] == pytest.approx(evaluations[1], abs=1e-5)
    torch.testing.assert_close(scores(together, world_files), torch.cat(columns, 1), rtol=0, atol=1e-6)
    assert len({round(float(s), 4) for s in torch.cat(columns, 1)[0]}) == 3


def test_heads_trained_together_on_a_frozen_trunk_are_those_trained_alone(world_files, tmp_path):
    """The mean over K heads is a K-th of each head's own gradient, which AdamW undoes; no clip, which would see them together."""
    optim = {"learning_rate": 5e-3, "max_grad_norm": None, "eps": 1e-12}
    common = {"model": model_of(world_files, trainable_layers=0), "optim": optim}
    together = run(config(world_files, **common, num_heads=3, member_seeds=SEEDS), tmp_path / "together")
    heads_KD = load_file(together / "model.safetensors")["score.weight"]
    for member, seed in enumerate(SEEDS):
        alone = run(config(world_files, **common, head_seed=seed), tmp_path / f"alone_{seed}")
        torch.testing.assert_close(
            heads_KD[member], load_file(alone / "model.safetensors")["score.weight"][0], rtol=0, atol=1e-6
        )


def test_gradients_of_linear_heads_are_those_of_the_specification():
    """Specification T4: the loss is the mean over heads, never the loss of the mean score."""
    heads = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, -1.0]], requires_grad=True)
    chosen = torch.tensor([0.5, -0.2], requires_grad=True)
    rejected = torch.tensor([0.1, 0.9], requires_grad=True)
    losses = bradley_terry(heads @ chosen, heads @ rejected, margin=0.0, label_smoothing=0.0)
    torch.testing.assert_close(losses, torch.tensor([0.5130153, 1.3873353, 0.2014133]), rtol=0, atol=1e-6)
    losses.mean().backward()
    assert float(losses.detach().mean()) == pytest.approx(0.7005880, abs=1e-6)
    expected = torch.tensor([[-0.0535083, 0.1471479], [-0.1000347, 0.2750954], [-0.0243234, 0.0668894]])
    torch.testing.assert_close(heads.grad, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(chosen.grad, torch.tensor([-0.1945793, -0.1892782]), rtol=0, atol=1e-6)
    torch.testing.assert_close(rejected.grad, -chosen.grad, rtol=0, atol=1e-6)


def test_the_terms_of_k_heads_are_the_worked_ones_in_training_too(world_files, monkeypatch):
    """T4 through `loss` and the count that `update` divides by: pairs times heads."""
    hidden = torch.tensor([[0.5, -0.2], [0.1, 0.9]])
    heads = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, -1.0]])
    monkeypatch.setattr("rewarden.algos.reward_loss.sequence_scores", lambda *_, **__: hidden @ heads.T)
    cfg = config(world_files, num_heads=3)
    batch = prepare(rows_of(world_files)[:1], torch.device("cpu"), margin_scale=0.0, num_heads=3)
    term = reward.loss(load_reward_model(cfg.model, head="fresh", num_heads=3), batch, cfg, None)["preference"]
    assert float(term.value_BT.detach().sum() / batch.counts()["preference"]) == pytest.approx(0.7005880, abs=1e-6)


def test_phase_b_goes_on_with_the_heads_of_phase_a_on_its_frozen_trunk(world_files, tmp_path):
    phase_a = run(config(world_files, num_heads=3), tmp_path / "a")
    model = {"model_name_or_path": str(phase_a), "lora_r": 2}
    frozen = {"learning_rate": 0.0}
    start = run(config(world_files, model=model, num_members=3, head="saved", optim=frozen), tmp_path / "start")
    torch.testing.assert_close(scores(start, world_files), scores(phase_a, world_files), rtol=0, atol=1e-6)
    heads_KD = load_file(phase_a / "model.safetensors")["score.weight"]
    for member in range(3):
        tensors = load_file(start / f"member_{member}" / "adapter_model.safetensors")
        head = next(value for key, value in tensors.items() if key.endswith("score.weight"))
        assert torch.equal(head[0], heads_KD[member])
    lora = run(config(world_files, model=model, num_members=3, head="saved"), tmp_path / "b")
    assert not torch.allclose(scores(lora, world_files), scores(phase_a, world_files), atol=1e-4)
    stored = json.loads((lora / "ensemble.json").read_text())["trunk"]
    assert stored == files_hash(phase_a) == files_hash(lora / "trunk")


def test_a_trunk_that_moved_while_adapters_were_trained_is_not_saved(world_files, tmp_path):
    cfg = config(world_files, model=model_of(world_files, lora_r=2), num_members=2, max_steps=1)
    ranks = Ranks.single("cpu")
    job = cfg.build(ranks)
    list(job.train(job.start))
    with torch.no_grad():
        job.parts["reward"].model.base_model.model.model.layers[0].mlp.up_proj.base_layer.weight[0, 0] += 1e-3
    with pytest.raises(ConfigError, match="the trunk of the LoRA ensemble changed"):
        job.export(tmp_path)


@pytest.mark.parametrize("family", ["linear", "independent", "lora"])
def test_a_run_writes_evaluation_calibration_and_the_registry(world_files, tmp_path, family):
    changes = {"linear": {"num_heads": 2}, "independent": {"num_members": 2}, "lora": {"num_members": 2}}[family]
    model = model_of(world_files, **({"lora_r": 2} if family == "lora" else {}))
    cfg = config(world_files, model=model, max_steps=1, **changes)
    folder = run(cfg, tmp_path / "runs" / "mine")
    pairs = rows_of(world_files)[:5]
    tokens = collate([pair.chosen_ids for pair in pairs] + [pair.rejected_ids for pair in pairs])
    ensemble = load_ensemble(Model(model_name_or_path=str(folder)))
    assert (ensemble.family, ensemble.num_members) == (family, 2)
    score_NK = ensemble.score(tokens)
    score_N2K = torch.stack(score_NK.chunk(2), dim=1)
    written = json.loads((folder.parent / "evaluation.json").read_text())
    members = [pair_facts(score_N2K[:, :, k], pairs)["eval/accuracy"] for k in range(2)]
    assert written["eval/member_accuracy"] == members
    together = pair_facts(score_N2K.mean(2), pairs)
    assert {key: value for key, value in written.items() if "member" not in key} == pytest.approx(together, abs=1e-5)
    assert json.loads((folder / "rewarden.json").read_text())["evaluation"] == written
    for moments, numbers in zip(ensemble.calibration, score_NK.double().numpy().T, strict=True):
        assert moments.count == 10
        assert moments.mean == pytest.approx(numbers.mean(), abs=1e-5)
        assert moments.std(0) == pytest.approx(numbers.std(), abs=1e-5)
    policy = Model(model_name_or_path=str(world_files.policy))
    start, head = critic_start(policy, {"kind": "reward_model", "path": str(folder)}, None, None, load_tokenizer(policy))
    places = {"linear": (".", "fresh"), "independent": ("member_0", "saved"), "lora": ("trunk", "saved")}
    assert (Path(start.model_name_or_path), head) == (folder / places[family][0], places[family][1])
    assert load_reward_model(start, num_heads=1, head=head).num_heads == 1
    registry = yaml.safe_load((tmp_path / "runs" / "models.yaml").read_text())
    assert registry == {"mine": {"kind": "reward_model", "path": "mine/model"}}


def test_members_have_in_common_what_numpy_says(world_files):
    pairs = rows_of(world_files)[:3]
    score_N2K = torch.tensor([[[2.0, 1.0], [1.0, 3.0]], [[0.0, 5.0], [1.0, 5.0]], [[4.0, 2.0], [1.0, 0.0]]])
    facts = member_facts(score_N2K, pairs)
    # differences d: member 0: 1, -1, 3; member 1: -2, 0, 2
    assert facts["eval/member_accuracy/0"] == pytest.approx(2 / 3)
    assert facts["eval/member_accuracy/1"] == pytest.approx((0 + 0.5 + 1) / 3)
    # means 1 and 0, cov 0*-2 + -2*0 + 2*2 = 4, sums of squares 8 and 8
    assert facts["eval/member_correlation"] == pytest.approx(4 / 8)
    assert facts["eval/member_std"] == pytest.approx((1.5 + 0.5 + 0.5) / 3)


def test_held_out_pairs_and_calibration_texts_depend_on_no_seed_of_a_member(world_files):
    exams = []
    for seeds, seed in ((None, 0), (SEEDS, 0), (tuple(reversed(SEEDS)), 99)):
        for held_out in (True, False):
            cfg = config(world_files, num_members=3, member_seeds=seeds, seed=seed, bootstrap=True)
            cfg = cfg if held_out else cfg.model_copy(update={"eval_data": None})
            rows = reward.load_rows(cfg, reward.load_start(cfg, Ranks.single("cpu")))
            exams.append(Exam.of(rows.train, rows.held_out, Ranks.single("cpu"), 4))
    assert [len(exam.pairs) for exam in exams] == [5, 20] * 3
    for first, second in ((0, 2), (0, 4), (1, 3), (1, 5)):
        assert exams[first].pairs == exams[second].pairs


def test_a_bootstrap_draws_as_many_pairs_from_the_seed_and_leaves_about_a_third_out():
    drawn = bootstrap_rows(3000, 5)
    assert drawn == bootstrap_rows(3000, 5)
    assert drawn != bootstrap_rows(3000, 6)
    assert len(drawn) == 3000
    assert set(drawn) <= set(range(3000))
    # expected share that never comes: (1 - 1/n)^n = .3678, standard error about .0057
    assert 1 - len(set(drawn)) / 3000 == pytest.approx(0.3678, abs=0.025)


def test_the_steps_of_a_member_take_its_draw_once_an_epoch(world_files):
    pairs = rows_of(world_files)
    cfg = config(world_files, num_members=2, bootstrap=True, train_batch_size=6)
    plan = Plan(cfg, pairs, 1)
    assert plan.per_epoch == 4
    for epoch in range(2):
        rows = [row for step in range(4) for row in plan.rows(4 * epoch + step)]
        assert sorted(rows) == sorted(bootstrap_rows(20, cfg.seeds[1]))
    assert plan.num_tokens(0) == sum(len(pairs[row].chosen_ids) + len(pairs[row].rejected_ids) for row in plan.rows(0))


def test_the_seeds_of_members_are_small_numbers_that_depend_on_the_run_seed_and_the_member(world_files):
    seeds = config(world_files, num_members=4).seeds
    assert seeds[:3] == config(world_files, num_members=3).seeds
    assert len(set(seeds)) == 4
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert not set(seeds) & set(config(world_files, num_members=4, seed=1).seeds)


def test_calibration_needs_finite_scores_and_counts_every_text():
    assert [m.count for m in calibrate(torch.zeros(4, 2))] == [4, 4]


def test_members_cannot_be_exported_when_a_finished_one_is_gone(world_files, tmp_path):
    cfg = config(world_files, num_members=2, max_steps=1)
    ranks = Ranks.single("cpu")
    job = cfg.build(ranks)
    job.enter(tmp_path / "work")
    list(job.train(job.start))
    (tmp_path / "work" / "member_1").rename(tmp_path / "elsewhere")
    with pytest.raises(ResumeError, match="member_1 is gone, which this run had finished"):
        job.export(tmp_path)


REFUSED = [
    ({"num_heads": 2, "num_members": 2}, "num_heads is 2 and num_members is 2; heads share one trunk"),
    ({"num_heads": 2, "bootstrap": True}, "bootstrap is set with num_heads 2"),
    ({"num_members": 2, "member_seeds": [1, 2, 3]}, r"member_seeds has 3 seeds for 2 member\(s\); give one for each"),
    ({"num_members": 3, "member_seeds": [1, 2, 1]}, r"member_seeds is \[1, 2, 1\], in which a seed is repeated"),
    ({"num_members": 0}, "num_members"),
    ({"head": "old"}, "head"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED, ids=[str(changes) for changes, _ in REFUSED])
def test_a_contradictory_ensemble_is_refused_before_anything_is_loaded(world_files, changes, words):
    with pytest.raises(ConfigError, match=words):
        config(world_files, **changes)


def test_saved_heads_that_do_not_fit_are_refused_in_words(world_files, tmp_path):
    two = {"model_name_or_path": str(run(config(world_files, num_heads=2, max_steps=1), tmp_path / "two"))}
    ranks = Ranks.single("cpu")
    for changes, words in (
        (
            {"num_members": 3},
            "has 2 heads, and head is saved: each of the 3 member.s. goes on with one of them. Set num_members",
        ),
        ({"num_members": 3, "model": {**two, "lora_r": 2}}, "has 2 heads, and head is saved"),
        ({"num_heads": 3}, "has 2 heads, and head is saved"),
        ({}, "has 2 heads, and head is saved"),
        ({"num_members": 2, "model": model_of(world_files)}, "has no scalar heads .no tensor score.weight., and head is saved"),
    ):
        with pytest.raises(ConfigError, match=words):
            config(world_files, **{"model": two, "head": "saved", **changes}).build(ranks)


def test_heads_that_are_equal_at_the_start_are_refused(world_files, tmp_path):
    model = load_reward_model(Model(model_name_or_path=str(world_files.policy)), head="fresh", num_heads=2)
    with torch.no_grad():
        model.model.score.weight[1] = model.model.score.weight[0]
    save_model(model.model, model.tokenizer, tmp_path / "collapsed")
    collapsed = {"model_name_or_path": str(tmp_path / "collapsed")}
    for changes in ({"num_heads": 2}, {"num_members": 2}, {"num_members": 2, "model": {**collapsed, "lora_r": 2}}):
        with pytest.raises(ConfigError, match="heads of members 0 and 1 are equal at the start"):
            config(world_files, **{"model": collapsed, "head": "saved", **changes}).build(Ranks.single("cpu"))


def test_a_linear_ensemble_goes_on_with_its_saved_heads(world_files, tmp_path):
    first = run(config(world_files, num_heads=2), tmp_path / "first")
    again = {"model_name_or_path": str(first)}
    frozen = {"learning_rate": 0.0}
    second = run(config(world_files, model=again, head="saved", num_heads=2, optim=frozen), tmp_path / "second")
    assert torch.equal(scores(first, world_files), scores(second, world_files))


def test_members_over_cached_activations_are_those_without(world_files, tmp_path):
    model = model_of(world_files, lora_r=2, lora_layers=1)
    plain = run(config(world_files, model=model, num_members=2), tmp_path / "plain")
    cached = run(
        config(world_files, model=model, num_members=2, feature_cache_dir=str(tmp_path / "cache")), tmp_path / "cached"
    )
    torch.testing.assert_close(scores(plain, world_files), scores(cached, world_files), rtol=0, atol=1e-4)
