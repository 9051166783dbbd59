"""What may stand beside the pair loss: the LM loss, strength of a vote, and the diversity of LoRA members."""

import math

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rewarden.algos import reward
from rewarden.algos.pairs import EncodedPair
from rewarden.algos.reward import Reward, prepare
from rewarden.algos.reward_families import make_team
from rewarden.algos.reward_strength import MEAN, Strength, strengthened
from rewarden.errors import ConfigError, DataError
from rewarden.models.diversity import down_projections
from rewarden.models.load import Model, load_tokenizer, save_model
from rewarden.models.members import start_heads
from rewarden.models.reward import load_reward_model
from rewarden.models.reward_lm import LanguageHead, load_language_head
from rewarden.runtime.job import Drive, drive
from rewarden.runtime.metrics import read_metrics
from rewarden.runtime.ranks import Ranks
from rewarden.runtime.report import RunFolder
from rewarden.spec import parse
from rewarden.text.render import load_template
from rewarden.types import Comparison, Message
from tests.models.tiny_models import build_model

CPU = torch.device("cpu")


def config(files, **changes) -> Reward:
    fields = {
        "kind": "reward",
        "model": {"model_name_or_path": str(files.policy)},
        "data": {"path": str(files.pairs), "max_rows": 12},
        "optim": {"learning_rate": 5e-3},
        "train_batch_size": 6,
        "max_steps": 2,
    }
    return parse({"reward": Reward}, {**fields, **changes})


def run(cfg: Reward, folder) -> list[dict]:
    ranks = Ranks.single("cpu")
    drive(cfg.build(ranks), RunFolder(folder), ranks, cfg=Drive(save_steps=0, view="off"))
    return read_metrics(folder / "metrics.jsonl")


def pairs_of(cfg: Reward) -> list[EncodedPair]:
    return list(reward.load_rows(cfg, reward.load_start(cfg, Ranks.single("cpu"))).train)


def encoded(number: int, **fields) -> EncodedPair:
    given = {"preference": 1.0, "margin": 0.0, "chosen_answer": ((1, 4),)}
    ids = (5, 6, 7, 8)
    return EncodedPair(id=str(number), chosen_ids=ids, rejected_ids=ids, chosen_length=3, rejected_length=3, **(given | fields))


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


# The LM loss.


def test_the_loss_with_its_lm_term_is_the_worked_one(world_files, monkeypatch):
    """Specification T17 and T18: scores [2, .5, 1] against 1, token NLL [1, 2, 3], weight 1: .660162 + 2."""
    score_NK = torch.tensor([[2.0], [0.5], [1.0], [1.0], [1.0], [1.0]])
    logp_NT = torch.zeros(6, 4)
    logp_NT[1, 1:] = -torch.tensor([1.0, 2.0, 3.0])
    monkeypatch.setattr("rewarden.algos.reward_loss.scores_and_logp", lambda *_, **__: (score_NK, logp_NT))
    cfg = config(world_files, lm_coef=1.0)
    pairs = [encoded(0, chosen_answer=()), encoded(1), encoded(2, chosen_answer=())]
    batch = prepare(pairs, CPU, margin_scale=1.0, num_heads=1)
    language = LanguageHead(weight_VD=torch.zeros(9, 2), bias_V=None)
    terms = reward.loss(load_reward_model(cfg.model, head="fresh"), batch, cfg, None, language)
    counts = batch.counts()
    total = sum(
        term.weight * float((term.value_BT * term.mask_BT).sum()) / float(counts[name])
        for name, term in terms.items()
        if name in ("preference", "lm")
    )
    assert total == pytest.approx(2.660162, abs=1e-6)


def test_lm_terms_are_cross_entropies_of_the_language_model_on_the_chosen_answers(world_files):
    """Against transformers' own logits, one text at a time; the scores are those without the LM loss; so are the parts."""
    cfg = config(world_files, lm_coef=0.5)
    model, pairs = load_reward_model(cfg.model, head="fresh"), pairs_of(cfg)[:4]
    batch = prepare(pairs, CPU, margin_scale=1.0, num_heads=1)
    language = load_language_head(cfg.model, CPU)
    assert language.weight_VD is None, "the world's policy has tied embeddings"
    terms = reward.loss(model, batch, cfg, None, language)
    causal = AutoModelForCausalLM.from_pretrained(world_files.policy)
    template, expected = load_template(load_tokenizer(cfg.model), "chat"), []
    with torch.no_grad():
        for pair in pairs:
            ((start, stop),) = pair.chosen_answer
            assert stop - start == pair.chosen_length
            assert pair.chosen_ids[stop - 1] == template.end_of_turn_id
            logp = causal(torch.tensor([pair.chosen_ids])).logits[0].log_softmax(-1)
            expected += [-float(logp[t - 1, pair.chosen_ids[t]]) for t in range(start, stop)]
    term = terms["lm"]
    assert term.value_BT[term.mask_BT].tolist() == pytest.approx(expected, abs=1e-4)
    assert (int(batch.counts()["lm"]), term.weight) == (len(expected), 0.5)
    without = reward.loss(model, batch, cfg, None)
    assert "lm" not in without
    torch.testing.assert_close(terms["preference"].value_BT, without["preference"].value_BT)
    parts = [reward.loss(model, batch.rows(i), cfg, None, language)["lm"] for i in torch.arange(4).split(3)]
    assert sum(float((p.value_BT * p.mask_BT).sum().detach()) for p in parts) == pytest.approx(sum(expected), rel=1e-5)


def test_an_untied_lm_head_is_taken_from_the_language_model_and_stays_as_it_was(world_files, tmp_path):
    tokenizer = load_tokenizer(Model(model_name_or_path=str(world_files.policy)))
    causal = build_model("llama", vocab_size=len(tokenizer), max_position_embeddings=512)
    save_model(causal, tokenizer, tmp_path / "untied", extra={"template": "chat"})
    cfg = config(world_files, model={"model_name_or_path": str(tmp_path / "untied")}, lm_coef=1.0, max_length=None)
    language = load_language_head(cfg.model, CPU)
    assert torch.equal(language.weight_VD, causal.lm_head.weight)
    assert not language.weight_VD.requires_grad
    pair = pairs_of(cfg)[0]
    batch = prepare([pair], CPU, margin_scale=1.0, num_heads=1)
    model = load_reward_model(cfg.model, head="fresh")
    term = reward.loss(model, batch, cfg, None, language)["lm"]
    with torch.no_grad():
        logp = causal(torch.tensor([pair.chosen_ids])).logits[0].log_softmax(-1)
    ((start, stop),) = pair.chosen_answer
    expected = [-float(logp[t - 1, pair.chosen_ids[t]]) for t in range(start, stop)]
    assert term.value_BT[term.mask_BT].tolist() == pytest.approx(expected, abs=1e-4)
    term.value_BT.sum().backward()
    assert all(p.grad is not None for name, p in model.model.named_parameters() if "layers" in name)


def test_the_lm_loss_lowers_the_nll_of_the_chosen_answers(world_files, tmp_path):
    rows = run(config(world_files, lm_coef=1.0, max_steps=12, num_train_epochs=9, seed=1), tmp_path / "on")
    assert rows[-1]["loss/lm"] < rows[0]["loss/lm"] - 0.5
    assert rows[0]["loss/total"] == pytest.approx(rows[0]["loss/preference"] + rows[0]["loss/lm"], abs=1e-5)


def test_an_lm_loss_that_could_not_act_is_refused(world_files):
    with pytest.raises(ConfigError, match=r"lm_coef is 1 and model.trainable_layers is 0"):
        config(world_files, lm_coef=1.0, model={"model_name_or_path": str(world_files.policy), "trainable_layers": 0})
    with pytest.raises(ConfigError, match="is a reward model, without the LM head that the LM loss needs"):
        load_language_head(Model(model_name_or_path=str(world_files.reward)), CPU)


# Strength of a vote.


def compared(number: int, mu: float | None, **fields) -> Comparison:
    def said(text: str) -> tuple[Message, ...]:
        return (Message(role="assistant", text=text),)

    meta = {"where": f"f.jsonl:{number + 1}"} | ({} if mu is None else {MEAN: mu})
    prompt = (Message(role="user", text="q"),)
    return Comparison(id=f"{number}", prompt=prompt, chosen=said("good"), rejected=said("bad"), meta=meta, **fields)


def loss_at(d: float, mu: float, world_files, monkeypatch, *, scale: float = 1.0, clip=None, **strength) -> float:
    """The pair loss of one pair of difference d, through strength, batch and loss."""
    (row,) = strengthened([compared(0, mu)], Strength(**strength)).rows
    scores = torch.tensor([[d], [0.0]])
    monkeypatch.setattr("rewarden.algos.reward_loss.sequence_scores", lambda *_, **__: scores)
    cfg = config(world_files)
    pair = encoded(0, preference=row.preference, margin=row.margin or 0.0)
    batch = prepare([pair], CPU, margin_scale=scale, margin_clip=clip, num_heads=1)
    return float(reward.loss(load_reward_model(cfg.model, head="fresh"), batch, cfg, None)["preference"].value_BT)


def test_the_losses_of_preference_strength_are_the_worked_ones(world_files, monkeypatch):
    """d = 1. Flip: softplus(1) = 1.313262 (T20b). Others by hand from softplus(-(d - mu)) and sigmoid(mu)."""

    def at(mu, **strength):
        return loss_at(1.0, mu, world_files, monkeypatch, **strength)

    assert softplus(1) == pytest.approx(1.313262, abs=1e-6)
    flip = {"flip_share": 0.5}
    both = [compared(0, -1.0), compared(1, 2.0)]
    assert [r.chosen[0].text for r in strengthened(both, Strength(**flip)).rows] == ["bad", "good"]
    assert at(1.0, margin=True) == pytest.approx(0.693147, abs=1e-6)
    assert at(-1.0, margin=True) == pytest.approx(0.126928, abs=1e-6)
    assert at(3.0, margin=True) == pytest.approx(2.126928, abs=1e-6)
    assert at(30.0, margin=True, scale=0.1) == pytest.approx(2.126928, abs=1e-6)
    assert at(30.0, margin=True, clip=(-1.0, 1.0)) == pytest.approx(0.693147, abs=1e-6)
    assert at(-30.0, margin=True, clip=(0.0, 1.0)) == pytest.approx(0.313262, abs=1e-6)
    assert at(0.0, soft_labels=True) == pytest.approx(0.813262, abs=1e-6)
    assert at(1.0, soft_labels=True) == pytest.approx(0.582203, abs=1e-6)
    assert at(2.0, soft_labels=True, margin=True) == pytest.approx(0.880797 * 1.313262 + 0.119203 * 0.313262, abs=1e-5)


def test_flip_goes_first_and_negates_mu(world_files, monkeypatch):
    """mu = -1, d = 1: the new difference is -1 and the new mu 1."""
    rows = [compared(0, -1.0), compared(1, 5.0)]
    out = strengthened(rows, Strength(flip_share=0.5, soft_labels=True, margin=True)).rows
    assert [row.margin for row in out] == [1.0, 5.0]
    assert [row.preference for row in out] == pytest.approx([0.731059, 0.993307], abs=1e-6)
    assert out[0].chosen == rows[0].rejected
    assert out[0].rejected == rows[0].chosen
    scores = torch.tensor([[0.0], [1.0]])
    monkeypatch.setattr("rewarden.algos.reward_loss.sequence_scores", lambda *_, **__: scores)
    cfg = config(world_files)
    batch = prepare([encoded(0, preference=out[0].preference, margin=1.0)], CPU, margin_scale=1.0, num_heads=1)
    term = reward.loss(load_reward_model(cfg.model, head="fresh"), batch, cfg, None)["preference"]
    assert float(term.value_BT) == pytest.approx(0.731059 * 2.126928 + 0.268941 * 0.126928, abs=1e-5)


def test_smoothing_is_that_of_the_specification(world_files, monkeypatch):
    """T19: p = .1 at d = 1, and at its minimiser ln 9."""
    cfg = config(world_files, label_smoothing=0.1)
    model = load_reward_model(cfg.model, head="fresh")
    for d, expected in ((1.0, 0.413262), (math.log(9), 0.325083)):
        scores = torch.tensor([[d], [0.0]])
        monkeypatch.setattr("rewarden.algos.reward_loss.sequence_scores", lambda *_, scores=scores, **__: scores)
        batch = prepare([encoded(0)], CPU, margin_scale=1.0, num_heads=1)
        assert float(reward.loss(model, batch, cfg, None)["preference"].value_BT) == pytest.approx(expected, abs=1e-6)


def test_the_note_says_what_became_of_the_pairs():
    rows = [compared(n, mu) for n, mu in enumerate((-2.0, 1.0, -0.5, 3.0, 2.0))]
    assert strengthened(rows, Strength(flip_share=0.2, margin=True)).note == (
        "strength: mu < 0 in 2 of 5 pairs, labels turned round: 1 (of the lowest 20%), margins are mu"
    )


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (compared(3, None), r"f.jsonl:4: column 'mean preference difference' is None.*kind: vote"),
        (compared(3, math.nan), r"f.jsonl:4: column .* is nan"),
        (compared(3, True), r"f.jsonl:4: column .* is True"),
        (compared(3, 1.0, preference=0.5), r"f.jsonl:4: preference is 0.5, and strength makes the label from mu"),
        (compared(3, 1.0, margin=2.0), r"f.jsonl:4: margin is 2, of the side that strength may turn round"),
    ],
)
def test_a_pair_that_strength_cannot_use_is_named(row, words):
    with pytest.raises(DataError, match=words):
        strengthened([compared(0, 0.5), row], Strength(soft_labels=True))


def test_settings_without_an_effect_are_refused(world_files):
    with pytest.raises(ConfigError, match="strength changes nothing"):
        config(world_files, strength={})
    with pytest.raises(ConfigError, match=r"margin_clip is \[1.0, 0.0\]; write the lower bound first"):
        config(world_files, margin_clip=[1.0, 0.0])
    with pytest.raises(ConfigError, match=r"diversity_coef is 0.1 and the family is independent"):
        config(world_files, diversity_coef=0.1, num_members=2)


# Diversity.


def lora(files, **changes) -> Reward:
    return config(files, model={"model_name_or_path": str(files.policy), "lora_r": 2}, num_members=2, **changes)


def test_diversity_reaches_the_adapter_in_use_alone(world_files):
    cfg = lora(world_files, diversity_coef=1.0)
    model = reward.load_start(cfg, Ranks.single("cpu"))
    layers = down_projections(model.model)
    assert {len(members) for members in layers} == {2}
    assert [[a.requires_grad for a in members] for members in layers] == [[True, False]] * len(layers)
    batch = prepare(pairs_of(cfg)[:5], CPU, margin_scale=1.0, num_heads=1)
    expected = sum(float(torch.linalg.matrix_norm(torch.cat(m).detach().double(), "nuc")) for m in layers) / len(layers)
    for part in (batch, batch.rows(torch.arange(2))):
        term = reward.loss(model, part, cfg, None)["diversity"]
        mean = float((term.value_BT * term.mask_BT).sum().detach()) / int(part.counts()["diversity"])
        assert (mean, term.weight) == (pytest.approx(expected, rel=1e-5), -1.0)


def test_members_become_more_different_with_the_term_than_without(world_files, tmp_path):
    """Nuclear over Frobenius norm of the stacked A, from the saved files: at most the root of the number of rows."""

    def spread(name: str, **changes) -> float:
        folder = tmp_path / name
        run(lora(world_files, max_steps=8, num_train_epochs=4, optim={"learning_rate": 2e-2}, **changes), folder)
        members = [load_file(folder / "model" / f"member_{k}" / "adapter_model.safetensors") for k in range(2)]
        keys = [key for key in members[0] if "lora_A" in key]
        stacked = [torch.cat([member[key] for member in members]) for key in keys]
        return sum(float(torch.linalg.matrix_norm(w, "nuc") / torch.linalg.matrix_norm(w, "fro")) for w in stacked) / len(keys)

    rows = run(lora(world_files, diversity_coef=0.1, diversity_scale_free=True), tmp_path / "logged")
    assert rows[0]["loss/total"] == pytest.approx(rows[0]["loss/preference"] - 0.1 * rows[0]["loss/diversity"], abs=1e-4)
    assert spread("without") < spread("with", diversity_coef=1.0, diversity_scale_free=True) <= 2.0


def test_a_team_of_lora_members_has_one_optimizer_each_with_the_term_too(world_files):
    cfg = lora(world_files, diversity_coef=0.1)
    ranks = Ranks.single("cpu")
    model = reward.load_start(cfg, ranks)
    exam = reward.Exam.of(pairs_of(cfg), (), ranks, 4)
    team = make_team(cfg, model, exam, 2, ranks)
    assert start_heads(cfg.model, head="fresh", seeds=cfg.seeds).shape[0] == 2
    before = [[a.detach().clone() for a in members] for members in down_projections(model.model)]
    plan = reward.Plan(cfg, pairs_of(cfg), 1)
    optimizer = team.take(1, 0)
    batch = prepare([pairs_of(cfg)[row] for row in plan.rows(0)], CPU, margin_scale=1.0, num_heads=1)
    reward.update(optimizer, [batch], lambda b: reward.loss(team.model, b, cfg, None), ranks=ranks)
    after = down_projections(model.model)
    assert all(torch.equal(now[0], was[0]) for now, was in zip(after, before, strict=True))
    assert any(not torch.equal(now[1], was[1]) for now, was in zip(after, before, strict=True))
