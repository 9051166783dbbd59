import json
import math
from dataclasses import replace

import pytest
import torch

from rewarden.algos import reward
from rewarden.algos.pairs import EncodedPair, encode_pairs
from rewarden.algos.reward import Reward, prepare
from rewarden.algos.reward_evaluation import Exam, evaluate
from rewarden.algos.reward_families import Together
from rewarden.data.sources import Data, load_comparisons
from rewarden.errors import DataError
from rewarden.models.load import Model, load_tokenizer
from rewarden.models.reward import load_reward_model
from rewarden.runtime.ranks import Ranks
from rewarden.text.render import load_template

CPU = torch.device("cpu")


def config(files, **changes) -> Reward:
    fields = {
        "model": Model(model_name_or_path=str(files.policy)),
        "data": Data(path=str(files.pairs)),
        "optim": {"learning_rate": 2e-3},
        "train_batch_size": 8,
    }
    return Reward(**{**fields, **changes})


def pairs_of(cfg):
    template = load_template(load_tokenizer(cfg.model), "chat")
    return encode_pairs(load_comparisons(cfg.data).rows, template, None, "error")[0]


def test_the_loss_is_bradley_terry_on_scores_of_single_texts(world_files):
    """Against scores of one text at a time from the plain sequence classifier, and softplus written out."""
    cfg = config(world_files, label_smoothing=0.1, center_rewards_coefficient=0.5)
    model = load_reward_model(cfg.model, head="fresh", head_seed=0)
    pairs = [
        replace(p, preference=w, margin=m) for p, w, m in zip(pairs_of(cfg)[:3], (1.0, 0.5, 0.8), (0.0, 0.3, -0.2), strict=True)
    ]

    def score(ids):
        hidden = model.model.model(torch.tensor([ids])).last_hidden_state[0, -1].double()
        return float(hidden @ model.model.score.weight[0].double())

    expected_pair, expected_center = [], []
    with torch.no_grad():
        for pair in pairs:
            a, b = score(pair.chosen_ids), score(pair.rejected_ids)
            d = a - b - pair.margin
            wrong = (1 - pair.preference) * 0.9 + pair.preference * 0.1
            expected_pair.append((1 - wrong) * math.log1p(math.exp(-d)) + wrong * math.log1p(math.exp(d)))
            expected_center.append((a + b) ** 2)
    batch = prepare(pairs, CPU, margin_scale=1.0, num_heads=1)
    terms = reward.loss(model, batch, cfg, None)
    assert terms["preference"].value_BT[:, 0].tolist() == pytest.approx(expected_pair, abs=1e-5)
    assert terms["centering"].value_BT[:, 0].tolist() == pytest.approx(expected_center, abs=1e-5)
    assert terms["centering"].weight == 0.5


def test_a_tie_pulls_equal_scores_nowhere(world_files):
    cfg = config(world_files)
    model = load_reward_model(cfg.model, head="fresh", head_seed=0)
    pair = pairs_of(cfg)[0]
    tie = EncodedPair(
        id="t",
        chosen_ids=pair.chosen_ids,
        rejected_ids=pair.chosen_ids,
        chosen_length=1,
        rejected_length=1,
        preference=0.5,
        margin=0.0,
    )
    terms = reward.loss(model, prepare([tie], CPU, margin_scale=1.0, num_heads=1), cfg, None)
    terms["preference"].value_BT.sum().backward()
    assert float(terms["preference"].value_BT.detach()) == pytest.approx(math.log(2), abs=1e-6)
    assert all(p.grad is None or float(p.grad.abs().max()) < 1e-5 for p in model.model.parameters())


def test_equal_scores_count_half_in_the_accuracy(world_files):
    """Specification T17: a pair and its swap give 1 and 0, and .5 both when a head of zeros scores all texts alike."""
    cfg = config(world_files)
    model = load_reward_model(cfg.model, head="fresh", head_seed=0)
    pair = replace(pairs_of(cfg)[0], preference=1.0)
    swapped = replace(pair, chosen_ids=pair.rejected_ids, rejected_ids=pair.chosen_ids)
    batch = prepare([pair, swapped], CPU, margin_scale=1.0, num_heads=1)
    assert sorted(reward.loss(model, batch, cfg, None)["reward/accuracy"].value_BT[:, 0].tolist()) == [0.0, 1.0]
    torch.nn.init.zeros_(model.model.score.weight)
    assert reward.loss(model, batch, cfg, None)["reward/accuracy"].value_BT[:, 0].tolist() == [0.5, 0.5]


def test_heads_trained_together_have_the_mean_of_their_losses(world_files):
    cfg = config(world_files, num_heads=3)
    model = load_reward_model(cfg.model, num_heads=3, head="fresh", head_seed=0)
    pairs = pairs_of(cfg)[:5]
    batch = prepare(pairs, CPU, margin_scale=1.0, num_heads=3)
    term = reward.loss(model, batch, cfg, None)["preference"]
    assert term.value_BT.shape == (5, 3)
    assert int(batch.counts()["preference"]) == 15
    assert len({round(v, 5) for v in term.value_BT[0].tolist()}) == 3


def test_training_learns_a_planted_preference_for_longer_answers(world_files, tmp_path):
    cfg = config(world_files, num_train_epochs=30)
    pairs = pairs_of(cfg)
    planted = [
        p
        if p.chosen_length >= p.rejected_length
        else EncodedPair(
            id=p.id,
            chosen_ids=p.rejected_ids,
            rejected_ids=p.chosen_ids,
            chosen_length=p.rejected_length,
            rejected_length=p.chosen_length,
            preference=1.0,
            margin=0.0,
        )
        for p in pairs
        if p.chosen_length != p.rejected_length
    ]
    if len(planted) < 4:
        planted = list(pairs)
    job = reward.build(cfg, Ranks.single("cpu"))
    model = load_reward_model(cfg.model, head="fresh", head_seed=0)
    ranks = Ranks.single("cpu")
    exam = Exam.of(planted, (), ranks, 8)
    team = Together(cfg, model, exam, 200)
    ticks = list(reward.train(team, planted, exam, ranks, cfg, 40, reward.State()))
    assert ticks[-1].report["loss/preference"] < 0.3
    final = evaluate(model, planted, Ranks.single("cpu"), 8)
    assert final["eval/accuracy"] >= 0.9
    assert job.steps == 30 * math.ceil(len(pairs) / 8)


def test_evaluation_counts_label_ties_and_reports_the_longer_answer_rule(world_files):
    cfg = config(world_files)
    model = load_reward_model(cfg.model, head="fresh", head_seed=0)
    p = pairs_of(cfg)[0]

    def pair(preference, chosen, rejected):
        return EncodedPair(
            id="x",
            chosen_ids=p.chosen_ids,
            rejected_ids=p.rejected_ids,
            chosen_length=chosen,
            rejected_length=rejected,
            preference=preference,
            margin=0.0,
        )

    pairs = [pair(1.0, 5, 3), pair(1.0, 3, 5), pair(0.5, 9, 1), pair(1.0, 4, 4)]
    out = evaluate(model, pairs, Ranks.single("cpu"), 2)
    assert out["eval/num_pairs"] == 3
    assert out["eval/num_tied_labels"] == 1
    assert out["eval/longer_wins_accuracy"] == 0.5
    assert out["eval/accuracy"] in (0.0, 1.0)
    assert out["eval/accuracy_low"] <= out["eval/accuracy"] <= out["eval/accuracy_high"]


def test_held_out_pairs_of_which_none_is_left_are_an_error(world_files, tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "Hello", "chosen": "Where?", "rejected": "No"}) + "\n")
    cfg = config(world_files, data=Data(path=str(file)), eval_data=Data(path=str(world_files.pairs)), max_length=10)
    with pytest.raises(DataError, match=r"no held-out pair is left, .*longer than 10 tokens dropped"):
        reward.build(cfg, Ranks.single("cpu"))
