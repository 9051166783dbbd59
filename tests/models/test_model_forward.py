import math

import pytest
import torch
from tiny_models import KINDS, SHAPE, VOCABULARY, batch_of, build_model, random_rows
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from rewarden.errors import ConfigError, DataError
from rewarden.models.forward import (
    length_buckets,
    sequence_logp,
    sequence_logp_entropy,
    sequence_scores,
    sequence_values,
)


def build_scorer(kind: str, num_heads: int = 1) -> PreTrainedModel:
    causal = build_model(kind)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        causal.config.num_labels = num_heads
        scorer = AutoModelForSequenceClassification.from_config(causal.config).eval()
    scorer.base_model.load_state_dict(causal.base_model.state_dict())
    return scorer


def one_row_logp(model: PreTrainedModel, row: list[int], temperature: float) -> list[float]:
    """By the definition, in float64, one row at a time through the whole model."""
    logits = model(input_ids=torch.tensor([row])).logits[0].double() / temperature
    table = logits.log_softmax(-1)
    return [0.0, *(float(table[t - 1, row[t]]) for t in range(1, len(row)))]


def some_mask(batch, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(batch.ids_BT.shape, generator=generator) < 0.6) & batch.mask_BT


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_tokens", [1, 40, 10_000])
def test_logp_of_a_batch_is_that_of_each_row_alone(kind, max_tokens, rows):
    model, batch = build_model(kind), batch_of(rows, filler=7, extra=3)
    mask_BT = some_mask(batch)
    logp_BT = sequence_logp(model, batch, mask_BT, temperature=0.8, max_tokens=max_tokens)
    expected = torch.zeros(logp_BT.shape, dtype=torch.float64)
    with torch.no_grad():
        for index, row in enumerate(rows):
            expected[index, : len(row)] = torch.tensor(one_row_logp(model, row, 0.8))
    expected = torch.where(mask_BT, expected, 0.0)
    assert (logp_BT - expected).abs().max() < 1e-5
    assert logp_BT.dtype == torch.float32
    assert (logp_BT[:, 0] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_padded_batch_in_one_piece(kind, rows):
    batch = batch_of(rows)
    mask_BT = some_mask(batch)
    weight_BT = torch.rand(mask_BT.shape, generator=torch.Generator().manual_seed(3))
    gradients = []
    for max_tokens in (25, None):
        model = build_model(kind).double()
        if max_tokens is not None:
            logp_BT = sequence_logp(model, batch, mask_BT, temperature=1.3, max_tokens=max_tokens)
        else:
            logits = model(input_ids=batch.ids_BT, attention_mask=batch.mask_BT.long()).logits / 1.3
            taken = logits.log_softmax(-1)[:, :-1].gather(-1, batch.ids_BT[:, 1:, None])[..., 0]
            logp_BT = nn.functional.pad(taken, (1, 0)) * mask_BT
        (logp_BT * weight_BT).sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, expected in gradients[1].items():
        scale = expected.abs().max().clamp(min=1e-12)
        assert (gradients[0][name] - expected).abs().max() / scale < 1e-6, name


def test_what_follows_the_masked_turn_and_any_padding_change_nothing_but_the_prefix_does():
    """specs/refuel.md, section 8, cases 13 and 14."""
    model = build_model("llama")
    row = random_rows([25])[0]
    mask = [10 <= t < 14 for t in range(25)]

    def total(ids: list[int], pad: int = 0, filler: int = 0) -> float:
        batch = batch_of([ids], filler=filler, extra=pad)
        mask_BT = torch.tensor([[*mask[: len(ids)], *[False] * pad]])
        assert mask_BT.sum() == 4
        with torch.no_grad():
            return float(sequence_logp(model, batch, mask_BT, temperature=1.0).sum())

    base = total(row)
    for t in range(14, 25):
        assert abs(total([*row[:t], (row[t] + 1) % VOCABULARY, *row[t + 1 :]]) - base) <= 1e-6
    for pad, filler in [(7, 0), (7, 2), (100, row[3])]:
        assert abs(total(row, pad, filler) - base) <= 1e-6
    assert abs(total(row[:14]) - base) <= 1e-6
    assert abs(total(row[:14], pad=18) - base) <= 1e-6
    for t in range(14):
        assert abs(total([*row[:t], (row[t] + 1) % VOCABULARY, *row[t + 1 :]]) - base) > 1e-4


def test_logp_and_entropy_by_hand():
    """A model whose logits are always [2, 0]: specs/refuel.md, section 8, case 10."""
    model = build_model(
        "llama_tied", vocab_size=2, bos_token_id=0, eos_token_id=1, hidden_size=4, num_attention_heads=1, num_key_value_heads=1
    )
    model.config.tie_word_embeddings = False
    model.lm_head = nn.Linear(4, 2, bias=True)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.bias.copy_(torch.tensor([2.0, 0.0]))
    batch = batch_of([[1, 0, 1]])
    for temperature, expected in [(1.0, -0.126928), (0.8, -0.078890), (0.5, -0.018150)]:
        with torch.no_grad():
            logp_BT = sequence_logp(model, batch, batch.mask_BT, temperature=temperature)
            both_BT, entropy_BT = sequence_logp_entropy(model, batch, batch.mask_BT, temperature=temperature)
        assert abs(float(logp_BT[0, 1]) - expected) < 1e-6
        p = 1 / (1 + math.exp(-2.0 / temperature))
        entropy = -(p * math.log(p) + (1 - p) * math.log(1 - p))
        assert torch.allclose(entropy_BT, torch.tensor([[0.0, entropy, entropy]]), atol=1e-6)
        assert torch.allclose(both_BT, logp_BT, atol=1e-6)


def test_the_projection_in_chunks_gives_the_same(monkeypatch, rows):
    model, batch = build_model("qwen2"), batch_of(rows)
    mask_BT = some_mask(batch)
    whole = sequence_logp(model, batch, mask_BT, temperature=1.0)
    monkeypatch.setattr("rewarden.models.forward._chunk", lambda num_words: 3)
    pieces = sequence_logp(model, batch, mask_BT, temperature=1.0)
    assert torch.allclose(whole, pieces, atol=1e-6)
    both, entropy = sequence_logp_entropy(model, batch, mask_BT, temperature=1.0)
    assert torch.allclose(whole, both, atol=1e-6)
    with torch.no_grad():
        for index, row in enumerate(rows):
            p = model(input_ids=torch.tensor([row])).logits[0].double().softmax(-1)
            expected = torch.cat([torch.zeros(1), -(p * p.log()).sum(-1)[:-1]]) * mask_BT[index, : len(row)]
            assert (entropy[index, : len(row)] - expected).abs().max() < 1e-5


def test_many_logits_are_computed_again_and_few_are_kept(monkeypatch, rows):
    batch, kept, gradients = batch_of(rows), [], []

    def note(tensor):
        if tensor.shape[-1] == VOCABULARY and len(tensor) != SHAPE["hidden_size"]:  # the weight is there in any case
            kept.append(len(tensor))
        return tensor

    for limit in (2**24, 20 * VOCABULARY):
        model = build_model("llama")
        monkeypatch.setattr("rewarden.models.forward.LOGITS_AT_ONCE", limit)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            total = sequence_logp(model, batch, batch.mask_BT, temperature=1.0).sum()
        total.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        assert kept == ([sum(map(len, rows)) - len(rows)] if limit == 2**24 else [])
        kept.clear()
    for a, b in zip(*gradients, strict=True):
        assert (a - b).abs().max() <= 1e-5 * (1 + b.abs().max())


def test_an_empty_mask_gives_zeros_and_a_zero_gradient(rows):
    model, batch = build_model("llama"), batch_of(rows)
    empty_BT = torch.zeros_like(batch.mask_BT)
    logp_BT = sequence_logp(model, batch, empty_BT, temperature=1.0)
    assert (logp_BT == 0).all()
    logp_BT.sum().backward()
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())


def test_the_same_batch_gives_the_same_bits_and_a_permuted_one_permuted_rows(rows):
    model, batch = build_model("gpt2"), batch_of(rows)
    order = torch.tensor([3, 1, 7, 0, 6, 2, 5, 4])
    mask_BT = some_mask(batch)
    with torch.no_grad():
        first = sequence_logp(model, batch, mask_BT, temperature=1.0)
        assert torch.equal(first, sequence_logp(model, batch, mask_BT, temperature=1.0))
        permuted = sequence_logp(model, batch_of([rows[i] for i in order]), mask_BT[order], temperature=1.0)
    assert torch.allclose(permuted, first[order], atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_the_head_before_each_token_and_scores_the_head_at_the_last(kind, rows):
    scorer, batch = build_scorer(kind), batch_of(rows, filler=2, extra=2)
    with torch.no_grad():
        value_BT = sequence_values(scorer, batch, max_tokens=40)
        score_BK = sequence_scores(scorer, batch, max_tokens=40)
        for index, row in enumerate(rows):
            hidden = scorer.base_model(input_ids=torch.tensor([row])).last_hidden_state[0].double()
            heads = hidden @ scorer.score.weight[0].double()
            assert abs(float(score_BK[index, 0]) - float(heads[-1])) < 1e-5 * (1 + abs(float(heads[-1])))
            expected = torch.cat([torch.zeros(1), heads[:-1]])
            assert (value_BT[index, : len(row)] - expected).abs().max() < 1e-5 * (1 + float(heads.abs().max()))
            assert (value_BT[index, len(row) :] == 0).all()
    assert score_BK.shape == (len(rows), 1)


def test_values_and_scores_have_the_gradients_of_the_plain_forward(rows):
    batch = batch_of(rows)
    got, expected = build_scorer("llama").double(), build_scorer("llama").double()
    (sequence_values(got, batch, max_tokens=30).square().sum() + sequence_scores(got, batch, max_tokens=30).sum()).backward()
    heads = expected.score(expected.base_model(input_ids=batch.ids_BT, attention_mask=batch.mask_BT.long()).last_hidden_state)[
        ..., 0
    ]
    values = (heads[:, :-1].square() * batch.mask_BT[:, 1:]).sum()
    (values + heads.gather(1, batch.length_B[:, None] - 1).sum()).backward()
    for (name, a), b in zip(got.named_parameters(), expected.parameters(), strict=True):
        # transformers' RMSNorm works in float32 whatever the model is.
        assert (a.grad - b.grad).abs().max() < 1e-6 * b.grad.abs().max(), name


def test_buckets_cover_every_row_once_within_the_bound():
    lengths = [7, 0, 300, 12, 12, 90, 1, 2500, 64, 64, 65, 200]
    groups = length_buckets(lengths, max_tokens=600)
    assert sorted(row for group in groups for row in group) == [row for row, n in enumerate(lengths) if n]
    for group in groups:
        longest = max(lengths[row] for row in group)
        assert len(group) == 1 or len(group) * longest <= 600
    assert length_buckets([], max_tokens=10) == []


def test_wrong_questions_are_refused_in_words(rows):
    model, scorer, batch = build_model("gpt2"), build_scorer("gpt2", num_heads=2), batch_of(rows, extra=1)
    with pytest.raises(DataError, match="mark real tokens only"):
        sequence_logp(model, batch, torch.ones_like(batch.mask_BT), temperature=1.0)
    long = batch_of(random_rows([200]))
    with pytest.raises(DataError, match="a row of 199 tokens; the model has positions for 128"):
        sequence_logp(model, long, long.mask_BT, temperature=1.0)
    with pytest.raises(DataError, match="2 heads; values need one"):
        sequence_values(scorer, batch)
    with pytest.raises(ConfigError, match="no bias-free linear head `score`"):
        sequence_scores(model, batch)
    with pytest.raises(ConfigError, match="no vocabulary projection"):
        sequence_logp(scorer, batch, batch.mask_BT, temperature=1.0)
    empty = batch_of([[1, 2], []])
    with pytest.raises(DataError, match="row 1 has no token"):
        sequence_scores(scorer, empty)
