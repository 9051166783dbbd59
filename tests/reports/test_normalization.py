"""User reports 3.4: loss normalisation, gradient accumulation, metrics."""

import math

import pytest
import torch
from safetensors import safe_open

from rewarden.algos.sft import SFT
from rewarden.data.sources import Data
from rewarden.models.load import Model, load_policy, load_tokenizer, save_model, trainable
from rewarden.models.parts import ModelPart
from rewarden.rollout.hf import Sampling
from rewarden.text.render import load_template
from tests.models.tiny_models import build_model, build_tokenizer
from tests.reports.short_runs import ALONE, ppo_config, ticks, without_times


def sft_config(files, **changes) -> SFT:
    fields = {
        "model": Model(model_name_or_path=str(files.policy)),
        "data": Data(path=str(files.dialogues), max_rows=7),
        "optim": {"learning_rate": 1e-3},
        "train_batch_size": 4,
        "num_train_epochs": 2,
    }
    return SFT(**{**fields, **changes})


def test_accumulation_changes_nothing_also_where_an_epoch_does_not_divide(world_files):
    """Row 60 (trl#3021): 7 rows in steps of 4 and 3, as one piece, as 3 + 1, and row by row; weights and losses agree."""
    runs = {}
    for size in (4, 3, 1):
        job = sft_config(world_files, per_device_train_batch_size=size).build(ALONE)
        reports = [without_times(tick.report) for tick in job.train(job.start)]
        runs[size] = reports, {name: p.detach().clone() for name, p in trainable(job.parts["policy"].model)}
    reports, weights = runs[4]
    assert [report["epoch"] for report in reports] == [0.5, 1.0, 1.5, 2.0]
    for size in (3, 1):
        for one, other in zip(reports, runs[size][0], strict=True):
            assert one == pytest.approx(other, abs=2e-5, rel=1e-4)
        for name, weight in weights.items():
            torch.testing.assert_close(runs[size][1][name], weight, atol=2e-5, rtol=1e-4)


def test_the_first_steps_loss_and_gradient_norm_are_those_of_plain_cross_entropy(world_files):
    """Rows 40, 60 and 63 (trl#3961, oi#1498): mean over all target tokens of the step, norm before clipping, from transformers."""
    cfg = sft_config(
        world_files,
        per_device_train_batch_size=1,
        max_steps=1,
        train_batch_size=7,
        optim={"learning_rate": 1e-3, "max_grad_norm": 1e-3},
    )
    report = ticks(cfg)[0].report
    model = load_policy(cfg.model)
    template = load_template(load_tokenizer(cfg.model), "chat")
    from rewarden.data.sources import load_conversations

    total, count = torch.zeros(()), 0
    for row in load_conversations(cfg.data).rows:
        rollout = template.render(row)
        ids = torch.tensor([rollout.token_ids])
        logp = model(ids).logits[0].log_softmax(-1)
        for span in rollout.spans:
            if span.role == "assistant":
                for t in range(span.start, span.stop):
                    total = total - logp[t - 1, ids[0, t]]
                    count += 1
    loss = total / count
    loss.backward()
    norm = math.sqrt(sum(float(p.grad.double().pow(2).sum()) for _, p in trainable(model)))
    assert report["loss/nll"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert report["grad_norm/policy"] == pytest.approx(norm, rel=1e-4)
    assert norm > 100 * 1e-3


def test_every_part_of_a_reward_is_logged_raw_and_weighted_and_their_sum_is_the_score(world_files):
    """Row 62 (trl#5353): what is logged is what is learned from."""
    parts = [
        {"scorer": {"kind": "length", "target": 5, "penalty": 1.0}, "weight": 0.25, "name": "short"},
        {"scorer": {"kind": "regex", "pattern": "e"}, "weight": -2.0, "name": "has_e"},
    ]
    report = ticks(ppo_config(world_files, reward={"kind": "sum", "scorers": parts}, max_steps=1))[0].report
    short, has_e = report["score/part/short"], report["score/part/has_e"]
    assert report["score/part/short/weighted"] == pytest.approx(0.25 * short)
    assert report["score/part/has_e/weighted"] == pytest.approx(-2.0 * has_e)
    assert report["score/mean"] == pytest.approx(0.25 * short - 2.0 * has_e, abs=1e-5)
    assert short < 0 < has_e <= 1


def test_tied_weights_are_saved_once_and_trained_once(tmp_path):
    """Row 64 (trl#6053): embedding and LM head are one tensor in memory, in the optimizer, in the export and in a checkpoint."""
    build_model("llama_tied").save_pretrained(tmp_path / "start")
    build_tokenizer().save_pretrained(tmp_path / "start")
    policy = load_policy(Model(model_name_or_path=str(tmp_path / "start")))
    names = [name for name, _ in trainable(policy)]
    assert sum("embed_tokens" in name or "lm_head" in name for name in names) == 1
    save_model(policy, build_tokenizer(), tmp_path / "model")
    (tmp_path / "part").mkdir()
    ModelPart(policy).save(tmp_path / "part")
    for folder in ("model", "part"):
        (file,) = (tmp_path / folder).glob("*.safetensors")
        with safe_open(file, "pt") as saved:
            keys = list(saved.keys())
        assert sum("embed_tokens" in key or "lm_head" in key for key in keys) == 1
    again = load_policy(Model(model_name_or_path=str(tmp_path / "model")))
    assert again.get_output_embeddings().weight is again.get_input_embeddings().weight
    assert torch.equal(again.get_input_embeddings().weight, policy.get_input_embeddings().weight)


def test_the_first_gradients_of_policy_and_critic_are_there(world_files):
    """Row 63 (oi#1498): a path that loses gradients shows as a norm of 0 in the first line."""
    report = ticks(ppo_config(world_files, max_steps=1, sampling=Sampling(max_completion_length=12)))[0].report
    assert report["grad_norm/policy"] > 0
    assert report["grad_norm/critic"] > 0
