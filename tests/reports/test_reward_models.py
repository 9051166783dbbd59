"""User reports 3.2: reward models, and whatever else gives a reward."""

import json
import math
import shutil
import statistics

import pytest
import torch

from rewarden.algos import ppo, ppo_prepare, reward
from rewarden.algos.length_bias import length_facts
from rewarden.algos.pairs import encode_pairs
from rewarden.algos.reward import Reward
from rewarden.algos.reward_evaluation import evaluate
from rewarden.data.sources import Data, load_comparisons
from rewarden.errors import ConfigError, ScoreError
from rewarden.maths import Moments, bradley_terry
from rewarden.models.load import Model, trainable
from rewarden.models.reward import load_reward_model
from rewarden.models.trunk import score_head
from rewarden.scoring import build_scorer
from rewarden.text.render import load_template
from rewarden.types import TokenBatch
from tests.reports.short_runs import ALONE, ppo_actors, ppo_config, prepared, scored_rollouts, talk, ticks


def test_a_critic_with_lora_is_a_classifier_whose_head_trains(world_files):
    """Row 23 (verl#4695): the task is that of a scalar head, and head and adapter are in the critic's optimizer group."""
    spec = {"model_name_or_path": str(world_files.reward), "lora_r": 4}
    cfg = ppo_config(world_files, critic=spec, critic_head="saved", max_steps=1, critic_optim={"learning_rate": 1e-2})
    actors = ppo_actors(cfg)
    model = actors.critic.model
    assert model.peft_config["default"].task_type == "SEQ_CLS"
    names = [name for name, _ in trainable(model)]
    assert any("score" in name for name in names)
    assert sum("lora_" in name for name in names) == len(names) - 1
    head = score_head(model)
    assert head.out_features == 1
    saved = load_reward_model(Model(model_name_or_path=str(world_files.reward)))
    assert torch.equal(head.weight, score_head(saved.model).weight)
    report = ticks(cfg)[-1].report
    assert report["grad_norm/critic"] > 0


def test_ppo_learns_from_a_reward_model_with_another_tokenizer(world_files, reward_folder):
    """Row 27 (trl#1979): the answer is decoded and written in the reward model's own template and bytes."""
    folder = reward_folder("bytes")
    cfg = ppo_config(world_files, reward={"kind": "reward_model", "path": str(folder)}, max_steps=1)
    actors = ppo_actors(cfg)
    assert actors.scorer.members.tokenizer.get_vocab() != actors.template.tokenizer.get_vocab()
    for item in scored_rollouts(cfg, actors)[:3]:
        tokenizer = actors.scorer.members.tokenizer
        messages = [{"role": message.role, "content": message.text} for message in item.rollout.conversation.messages]
        ids = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False)["input_ids"]
        model = actors.scorer.members.models[0].model
        with torch.no_grad():
            hidden = model.model(torch.tensor([ids])).last_hidden_state[0, -1]
        assert item.score.value == pytest.approx(float(hidden @ model.score.weight[0]), abs=1e-4)
    assert math.isfinite(ticks(cfg)[0].report["score/mean"])


def test_length_bias_by_hand():
    """Row 29 (orlhf#236): accuracy where the preferred answer is shorter, about as long, or longer; correlations."""
    score_B2 = torch.tensor([[1.0, 0.0], [2.0, 3.0], [0.0, 1.0], [5.0, 4.0], [1.0, 0.0]])
    length_B2 = torch.tensor([[10.0, 5.0], [10.0, 20.0], [100.0, 95.0], [8.0, 4.0], [4.0, 9.0]])
    right_B = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0])
    preferred_first_B = torch.tensor([True, True, False, True, True])
    decided_B = torch.tensor([True, True, True, True, False])
    facts = length_facts(score_B2, length_B2, right_B, decided_B, preferred_first_B)
    assert facts["eval/accuracy/preferred_longer"] == 1.0
    assert facts["eval/num_pairs/preferred_longer"] == 2
    assert facts["eval/accuracy/preferred_shorter"] == 0.0
    assert facts["eval/num_pairs/preferred_shorter"] == 1
    assert facts["eval/num_pairs/similar_length"] == 1
    margins, gaps = [1.0, -1.0, -1.0, 1.0, 1.0], [5.0, -10.0, 5.0, 4.0, -5.0]
    assert facts["eval/margin_length_correlation"] == pytest.approx(statistics.correlation(margins, gaps))
    pearson = statistics.correlation(score_B2.flatten().tolist(), length_B2.flatten().tolist())
    assert facts["eval/score_length_correlation"] == pytest.approx(pearson)
    flat = length_facts(torch.ones(5, 2), length_B2, right_B, decided_B, preferred_first_B)
    assert flat["eval/score_length_correlation"] == flat["eval/margin_length_correlation"] == 0.0
    only = length_facts(score_B2[:1], length_B2[:1], right_B[:1], decided_B[:1], preferred_first_B[:1])
    assert "eval/accuracy/preferred_shorter" not in only


def test_the_evaluation_of_a_reward_model_says_how_far_to_trust_it(world_files):
    """Rows 29 and 31 (lf#3902): accuracy with its interval, margin, calibration and length, redone text by text."""
    cfg = Reward(
        model=Model(model_name_or_path=str(world_files.reward)), data=Data(path=str(world_files.pairs)), train_batch_size=8
    )
    model = load_reward_model(cfg.model)
    template = load_template(model.tokenizer, "chat")
    rows = load_comparisons(cfg.data).rows
    pairs, _ = encode_pairs(rows, template, None, "error")
    found = evaluate(model, pairs, ALONE, 3)

    def score(ids: tuple[int, ...]) -> float:
        one = TokenBatch(
            ids_BT=torch.tensor([ids]), mask_BT=torch.ones(1, len(ids), dtype=torch.bool), length_B=torch.tensor([len(ids)])
        )
        return float(model.score(one)[0, 0])

    scores = [(score(pair.chosen_ids), score(pair.rejected_ids)) for pair in pairs]
    margins = [a - b for a, b in scores]
    assert found["eval/accuracy"] == pytest.approx(sum(m > 0 for m in margins) / len(margins))
    assert found["eval/accuracy_low"] < found["eval/accuracy"] < found["eval/accuracy_high"]
    assert found["eval/margin"] == pytest.approx(statistics.fmean(margins), abs=1e-5)
    bins: dict[int, list[tuple[float, float]]] = {}
    for m in margins:
        sure = 1 / (1 + math.exp(-abs(m)))
        bins.setdefault(max(math.ceil((sure - 0.5) * 10), 1), []).append((sure, float(m > 0)))
    error = sum(abs(sum(sure for sure, _ in part) - sum(hit for _, hit in part)) for part in bins.values()) / len(margins)
    assert found["eval/calibration_error"] == pytest.approx(error, abs=1e-5)
    lengths = [(pair.chosen_length, pair.rejected_length) for pair in pairs]
    pearson = statistics.correlation([x for both in scores for x in both], [n for both in lengths for n in both])
    assert found["eval/score_length_correlation"] == pytest.approx(pearson, abs=1e-4)
    counts = [found.get(f"eval/num_pairs/{name}", 0.0) for name in ("preferred_shorter", "similar_length", "preferred_longer")]
    assert sum(counts) == len(pairs)


def test_scores_are_left_alone_or_scaled_by_fixed_or_running_moments(world_files):
    """Row 30 (orlhf#224): three named modes, each redone by hand on raw scores."""
    seen = {}
    for mode in ("none", "fixed", "running"):
        fields = {"reward_norm": mode, "reward_clip": None} | ({"reward_moments": (-2.0, 4.0)} if mode == "fixed" else {})
        _, scored, _, facts = prepared(ppo_config(world_files, **fields))
        seen[mode] = facts["score/processed_mean"], facts["reward/rlhf"]
        raw = [item.score.value for item in scored]
    mean = statistics.fmean(raw)
    assert seen["none"][0] == pytest.approx(mean, abs=1e-5)
    assert seen["fixed"][0] == pytest.approx((mean + 2.0) / 4.0, abs=1e-5)
    assert seen["running"][0] == pytest.approx(0.0, abs=1e-5)
    assert all(rlhf == pytest.approx(processed, abs=1e-4) for processed, rlhf in seen.values())  # the first KL is 0


def test_fixed_moments_are_those_of_the_reward_models_own_evaluation(world_files, tmp_path):
    """Row 30 (orlhf#693): a reward model that was evaluated brings mean and std along; one that was not is refused in words."""
    folder = tmp_path / "reward"
    shutil.copytree(world_files.reward, folder)
    card = folder / "rewarden.json"
    evaluation = {"eval/score_mean": 0.5, "eval/score_std": 2.0}
    card.write_text(json.dumps({**json.loads(card.read_text()), "evaluation": evaluation}))
    cfg = ppo_config(world_files, reward={"kind": "reward_model", "path": str(folder)}, reward_norm="fixed", reward_clip=None)
    _, scored, _, facts = prepared(cfg)
    mean = statistics.fmean(item.score.value for item in scored)
    assert facts["score/processed_mean"] == pytest.approx((mean - 0.5) / 2.0, abs=1e-5)
    bare = ppo_config(world_files, reward={"kind": "reward_model", "path": str(world_files.reward)}, reward_norm="fixed")
    with pytest.raises(ConfigError, match=r"set reward_moments: \[mean, std\], or train the reward model with eval_data"):
        ppo.build(bare, ALONE)
    with pytest.raises(ValueError, match="reward_moments is set and reward_norm is running"):
        ppo_config(world_files, reward_moments=(0.0, 1.0))


def test_a_margin_asks_for_more_than_being_better():
    """Row 32 (orlhf#129): loss = softplus(-(r_chosen - r_rejected - margin)); a larger margin costs more and pulls harder."""
    chosen = torch.tensor([1.0, 1.0, 1.0], requires_grad=True)
    loss = bradley_terry(chosen, torch.zeros(3), margin=torch.tensor([0.0, 2.0, -2.0]), label_smoothing=0.0)
    expected = [math.log1p(math.exp(-1.0)), math.log1p(math.exp(1.0)), math.log1p(math.exp(-3.0))]
    assert loss.tolist() == pytest.approx(expected, abs=1e-6)
    loss.sum().backward()
    pull = (-chosen.grad).tolist()
    assert pull == pytest.approx([1 / (1 + math.e), 1 / (1 + math.exp(-1.0)), 1 / (1 + math.exp(3.0))], abs=1e-6)
    assert pull[2] < pull[0] < pull[1]


def test_a_margin_column_is_used_as_far_as_the_recipe_says(world_files):
    """Row 32: `margin_scale` multiplies the column, 0 ignores it."""
    model = load_reward_model(Model(model_name_or_path=str(world_files.reward)))
    template = load_template(model.tokenizer, "chat")
    pairs, _ = encode_pairs(load_comparisons(Data(path=str(world_files.pairs))).rows[:4], template, None, "error")
    batch = reward.prepare(pairs, torch.device("cpu"), margin_scale=0.5, num_heads=1)
    assert batch.margin_B.tolist() == [0.5 * pair.margin for pair in pairs]
    assert reward.prepare(pairs, torch.device("cpu"), margin_scale=0.0, num_heads=1).margin_B.tolist() == [0.0] * 4


HALF_NAN = "def f(completions, **_):\n    return [float('nan') if i % 2 else float(i) for i in range(len(completions))]\n"


def test_a_reward_that_is_not_a_number_stops_with_the_row_or_is_masked_and_counted(world_files, reward_file):
    """Row 34 (trl#5902): NaN is never read as "does not apply"; masked rows enter no mean, no moment and no loss."""
    path = reward_file(HALF_NAN)
    with pytest.raises(ScoreError, match=r"got nan for .*on_nan: mask[\s\S]*assistant:"):
        prepared(ppo_config(world_files, reward={"kind": "function", "path": path}))
    cfg = ppo_config(world_files, reward={"kind": "function", "path": path, "on_nan": "mask"}, max_steps=1)
    _, _, batch, facts = prepared(cfg)
    assert facts["score/num_not_finite"] == facts["score/unscored"] == 4
    assert facts["score/mean"] == pytest.approx((0 + 2 + 4 + 6) / 4)
    assert len(batch) == 4
    report = ticks(cfg)[0].report
    assert math.isfinite(report["loss/total"])
    assert report["policy_version"] == 2


def test_none_leaves_a_row_out_of_the_mean_and_the_moments(world_files, reward_file):
    """Row 34 (trl#4501): None means "does not apply"; the baseline is that of the others."""
    path = reward_file("def f(completions, **_):\n    return [None, 3.0, 5.0] + [None] * (len(completions) - 3)\n")
    cfg = ppo_config(world_files, reward={"kind": "function", "path": path})
    actors = ppo_actors(cfg)
    _, moments, facts = ppo_prepare.prepare(actors, scored_rollouts(cfg, actors), Moments(), cfg, ALONE)
    assert (moments.count, moments.mean) == (2, 4.0)
    assert facts["score/mean"] == 4.0
    assert facts["score/num_not_applicable"] == 6


CALLABLES = """
from functools import partial


def base(completions, scale, **_):
    return [scale * len(text) for text in completions]


class Length:
    def __call__(self, completions, **_):
        return [2.0 * len(text) for text in completions]


partially = partial(base, scale=2.0)
an_object = Length()
nameless = lambda completions, **_: [2.0 * len(text) for text in completions]
"""


@pytest.mark.parametrize("name", ["partially", "an_object", "nameless"])
def test_any_callable_is_a_reward_function(reward_file, name):
    """Row 35 (trl#6313): a partial, an object with __call__ and a lambda, named in a recipe like a function."""
    scorer = build_scorer({"kind": "function", "path": reward_file(CALLABLES, name), "format": "plain"})
    assert [score.value for score in scorer.score([talk("Hi", "Yes"), talk("Hi", "")])] == [6.0, 0.0]
