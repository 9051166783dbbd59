import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rewarden.maths import align, chunked_token_logp, logprobs, token_entropy, token_logp

NAN = float("nan")


def oracle_logp(logits, ids, temperature):
    """Token by token, in plain Python."""
    out = torch.zeros(ids.shape, dtype=torch.float64)
    for b in range(ids.shape[0]):
        for t in range(1, ids.shape[1]):
            z = [value / temperature for value in logits[b, t - 1].tolist()]
            top = max(z)
            out[b, t] = z[ids[b, t]] - top - math.log(sum(math.exp(value - top) for value in z))
    return out


def test_align_moves_each_statement_onto_the_token_it_is_about():
    assert align(torch.tensor([[1.0, 2.0, 3.0]])).tolist() == [[0.0, 1.0, 2.0]]
    assert align(torch.zeros(2, 0)).shape == (2, 0)


@pytest.mark.parametrize(("temperature", "expected"), [(1, -0.126928), (0.8, -0.078890), (0.5, -0.018150)])
def test_refuel_case_10_temperature_divides_the_logits(temperature, expected):
    logits = torch.tensor([[[2.0, 0.0], [0.0, 0.0]]])
    logp = token_logp(logits, torch.tensor([[1, 0]]), temperature=temperature)
    assert float(logp[0, 1]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("temperature", "expected"), [(1.0, -2.334468), (0.8, -2.697971)])
def test_refuel_case_11_log_probs_of_an_answer_without_an_off_by_one(temperature, expected):
    logits = torch.tensor([[[1.0, 0, 0], [0, 2, 0], [0, 0, 3], [1, 1, 0], [9, 9, 9]]])
    ids = torch.tensor([[0, 1, 2, 2, 1]])
    answer = torch.tensor([[False, False, True, True, False]])
    logp = token_logp(logits, ids, temperature=temperature)
    if temperature == 1.0:
        expected_row = torch.tensor([[0, -1.551445, -2.239545, -0.094923, -0.861995]])
        torch.testing.assert_close(logp, expected_row, rtol=0, atol=1e-6)
    assert float(logp[answer].sum()) == pytest.approx(expected, abs=1e-6)


def test_refuel_case_14_tokens_and_padding_after_a_turn_do_not_change_its_log_prob():
    torch.manual_seed(0)
    embedding = torch.randn(11, 6)

    def logits_of(ids):
        return (embedding[ids].cumsum(1)) @ embedding.t()

    ids = torch.randint(0, 11, (1, 12))
    turn = slice(4, 8)
    base = token_logp(logits_of(ids), ids, temperature=1.0)[:, turn].sum()
    later = ids.clone()
    later[:, 8:] = (later[:, 8:] + 3) % 11
    padded = torch.cat([ids, torch.zeros(1, 9, dtype=torch.long)], dim=1)
    earlier = ids.clone()
    earlier[:, 1] = (earlier[:, 1] + 1) % 11
    torch.testing.assert_close(token_logp(logits_of(later), later, temperature=1.0)[:, turn].sum(), base, rtol=0, atol=1e-6)
    torch.testing.assert_close(token_logp(logits_of(padded), padded, temperature=1.0)[:, turn].sum(), base, rtol=0, atol=1e-6)
    assert abs(token_logp(logits_of(earlier), earlier, temperature=1.0)[:, turn].sum() - base) > 1e-3


def test_t30b_logits_of_the_last_prompt_token_score_the_first_response_token():
    """Prompt of 3, response of 2: logits at positions 2 and 3 score tokens 3 and 4."""
    logits = torch.zeros(1, 5, 4)
    logits[0, 2, 1] = math.log(3)
    logits[0, 3, 2] = math.log(5)
    logp = token_logp(logits, torch.tensor([[0, 0, 0, 1, 2]]), temperature=1.0)
    torch.testing.assert_close(logp[0, 3:], torch.tensor([math.log(3 / 6), math.log(5 / 8)]), rtol=0, atol=1e-6)


def test_t29_the_scored_log_prob_of_token_0_at_temperature_1():
    logp = token_logp(torch.tensor([[[2.0, -1.0, 0.5, 1.0], [0, 0, 0, 0]]]), torch.tensor([[3, 0]]), temperature=1.0)
    assert float(logp[0, 1]) == pytest.approx(-0.495182, abs=1e-6)


def test_t39_half_precision_logits_give_float32_log_probs():
    """bfloat16 rounds -2.3456 to -2.34375 and -5.01 to -5.0, so the log-softmax must not be left in it."""
    logits = torch.tensor([[[0.0, -2.5, -5.0], [0, 0, 0]]], dtype=torch.bfloat16)
    logp = token_logp(logits, torch.tensor([[0, 1]]), temperature=1.0)
    assert logp.dtype == torch.float32
    assert float(logp[0, 1]) == pytest.approx(-2.5 - math.log(1 + math.exp(-2.5) + math.exp(-5)), abs=1e-6)
    assert float(logp[0, 1]) != float(logp[0, 1].bfloat16())


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), rows=st.integers(1, 3), length=st.integers(1, 6), temperature=st.floats(0.2, 3.0))
def test_token_logp_is_the_log_softmax_of_the_previous_position(seed, rows, length, temperature):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, length, 5, generator=generator, dtype=torch.float64) * 4
    ids = torch.randint(0, 5, (rows, length), generator=generator)
    torch.testing.assert_close(
        token_logp(logits, ids, temperature=temperature), oracle_logp(logits, ids, temperature), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("temporary", [1, 20, 1 << 24])
def test_token_logp_has_the_gradient_of_log_softmax_however_it_is_cut(temporary, monkeypatch):
    monkeypatch.setattr(logprobs, "_TEMPORARY_ELEMENTS", temporary)
    torch.manual_seed(1)
    logits = torch.randn(3, 5, 7, dtype=torch.float64)
    ids, weight = torch.randint(0, 7, (3, 5)), torch.randn(3, 5, dtype=torch.float64)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    (token_logp(ours, ids, temperature=0.7) * weight).sum().backward()
    full = (theirs[:, :-1] / 0.7).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    (full * weight[:, 1:]).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda z: token_logp(z, ids, temperature=0.7), logits.requires_grad_())


def test_half_precision_logits_get_the_gradient_in_their_own_type():
    torch.manual_seed(2)
    logits, ids = torch.randn(2, 4, 9).bfloat16(), torch.randint(0, 9, (2, 4))
    half, single = logits.clone().requires_grad_(), logits.float().requires_grad_()
    token_logp(half, ids, temperature=1.0).sum().backward()
    token_logp(single, ids, temperature=1.0).sum().backward()
    torch.testing.assert_close(half.grad, single.grad.bfloat16(), rtol=0, atol=0)


def test_positions_nobody_asks_about_reach_neither_result_nor_gradient():
    torch.manual_seed(3)
    clean, ids = torch.randn(2, 5, 6), torch.randint(0, 6, (2, 5))
    asked = torch.tensor([[False, False, True, True, False]]).expand(2, 5)
    predictor = torch.roll(asked, -1, dims=1)
    grads = []
    for filler in (0.0, NAN):
        logits = torch.where(predictor.unsqueeze(-1), clean, filler).requires_grad_()
        torch.where(asked, token_logp(logits, ids, temperature=1.0), 0.0).sum().backward()
        grads.append(logits.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)
    assert torch.all(grads[1][~predictor] == 0)


@pytest.mark.parametrize("chunk", [1, 3, 4, 11, 50])
@pytest.mark.parametrize("with_bias", [False, True])
def test_chunked_token_logp_is_the_full_log_softmax_in_value_and_gradient(chunk, with_bias):
    torch.manual_seed(4)
    ids = torch.randint(0, 13, (11,))
    weight_of_loss = torch.randn(11, dtype=torch.float64)

    def leaves():
        generator = torch.Generator().manual_seed(5)
        shapes = [(11, 6), (13, 6), (13,)]
        return [torch.randn(*s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]

    hidden, weight, bias = leaves()
    ours = chunked_token_logp(hidden, weight, ids, temperature=0.8, chunk=chunk, bias_V=bias if with_bias else None)
    (ours * weight_of_loss).sum().backward()
    hidden_f, weight_f, bias_f = leaves()
    logits = hidden_f @ weight_f.t() + (bias_f if with_bias else 0)
    full = (logits / 0.8).log_softmax(-1)[torch.arange(11), ids]
    (full * weight_of_loss).sum().backward()
    torch.testing.assert_close(ours, full, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(hidden.grad, hidden_f.grad, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(weight.grad, weight_f.grad, rtol=1e-11, atol=1e-11)
    if with_bias:
        torch.testing.assert_close(bias.grad, bias_f.grad, rtol=1e-11, atol=1e-11)
    with torch.no_grad():
        quiet = chunked_token_logp(hidden, weight, ids, temperature=0.8, chunk=chunk, bias_V=bias if with_bias else None)
    torch.testing.assert_close(quiet, ours.detach(), rtol=0, atol=0)


def test_chunked_token_logp_keeps_nothing_as_wide_as_the_vocabulary_for_backward():
    torch.manual_seed(6)
    hidden, weight = torch.randn(64, 4, requires_grad=True), torch.randn(1000, 4, requires_grad=True)
    ids = torch.randint(0, 1000, (64,))
    kept = []

    def note(tensor):
        kept.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = chunked_token_logp(hidden, weight, ids, temperature=1.0, chunk=16)
    assert not [shape for shape in kept if len(shape) == 2 and shape[1] == 1000]
    out.sum().backward()
    assert hidden.grad.isfinite().all()


def test_chunked_token_logp_of_no_positions_is_empty():
    out = chunked_token_logp(torch.zeros(0, 4), torch.zeros(9, 4), torch.zeros(0, dtype=torch.long), temperature=1.0, chunk=8)
    assert out.shape == (0,)


def test_a_chunk_or_temperature_of_zero_is_refused_in_words():
    ids = torch.zeros(2, dtype=torch.long)
    with pytest.raises(ValueError, match=r"chunk is 0.*use 1 or more"):
        chunked_token_logp(torch.zeros(2, 4), torch.zeros(9, 4), ids, temperature=1.0, chunk=0)
    with pytest.raises(ValueError, match=r"temperature is 0.*above 0"):
        chunked_token_logp(torch.zeros(2, 4), torch.zeros(9, 4), ids, temperature=0, chunk=1)
    with pytest.raises(ValueError, match=r"temperature is 0.*above 0"):
        token_logp(torch.zeros(1, 2, 9), ids.unsqueeze(0), temperature=0)


def test_t14_entropy_of_equal_logits_is_the_log_of_their_number():
    assert float(token_entropy(torch.zeros(1, 4))) == pytest.approx(1.386294, abs=1e-6)
    assert float(token_entropy(torch.full((1, 32000), 2.5))) == pytest.approx(10.373491, abs=1e-5)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), scale=st.floats(0.01, 50))
def test_entropy_is_minus_the_sum_of_p_log_p(seed, scale):
    logits = torch.randn(3, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
    for row, entropy in zip(logits.tolist(), token_entropy(logits).tolist(), strict=True):
        top = max(row)
        total = sum(math.exp(z - top) for z in row)
        p = [math.exp(z - top) / total for z in row]
        assert entropy == pytest.approx(-sum(x * math.log(x) for x in p if x > 0), abs=1e-9)


def test_an_impossible_token_adds_no_entropy_and_no_nan():
    logits = torch.tensor([[0.0, 0.0, -math.inf]], requires_grad=True)
    entropy = token_entropy(logits)
    entropy.sum().backward()
    assert float(entropy.detach()) == pytest.approx(math.log(2), abs=1e-6)
    torch.testing.assert_close(logits.grad, torch.zeros(1, 3), rtol=0, atol=1e-7)
