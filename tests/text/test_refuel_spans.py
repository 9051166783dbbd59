"""The worked cases 12 to 15 of specs/refuel.md, section 8: where the masks of a dialogue lie, and what they make of a log-prob."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rewarden.text.collate import collate, role_mask
from rewarden.text.render import load_template

DIALOGUE = ("w0 w1", "w2 w3 w4", "w5", "w6 w7")


@pytest.fixture(scope="module")
def template(build):
    return load_template(build.toy(3))


@pytest.fixture(scope="module")
def model(template):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(template.tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config).double().eval()


def masked_logp(model, ids, mask):
    """Sum of log p(token t | tokens before t) where the mask is true, in float64."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    logp = logits.log_softmax(-1)
    return sum(float(logp[t - 1, ids[t]]) for t in range(1, len(ids)) if mask[t])


@pytest.mark.parametrize(("header", "length", "first", "second"), [(3, 25, (10, 14), (22, 25)), (4, 29, (12, 16), (26, 29))])
def test_case_12_masks_of_a_two_turn_dialogue(build, talk, header, length, first, second):
    rollout = load_template(build.toy(header)).render(talk(*DIALOGUE))
    assert len(rollout.token_ids) == length
    for turn, (start, stop) in enumerate((first, second)):
        mask = role_mask([rollout.spans], length, turn=turn)[0]
        assert mask.nonzero().flatten().tolist() == list(range(start, stop))


def test_case_13_the_input_of_turn_0_holds_nothing_after_it_and_padding_changes_nothing(template, model, talk):
    rollout = template.render(talk(*DIALOGUE[:2]))
    assert len(rollout.token_ids) == 14
    mask = role_mask([rollout.spans], 14, turn=0)[0]
    padded_mask = role_mask([rollout.spans], 32, turn=0)[0]
    assert int(mask.sum()) == int(padded_mask.sum()) == 4
    padded = collate([rollout.token_ids, [0] * 32]).ids_BT[0].tolist()
    assert masked_logp(model, padded, padded_mask) == pytest.approx(masked_logp(model, rollout.token_ids, mask), abs=1e-6)


def test_case_14_only_tokens_up_to_the_end_of_a_turn_matter_to_it(template, model, talk):
    rollout = template.render(talk(*DIALOGUE))
    ids = list(rollout.token_ids)
    mask = role_mask([rollout.spans], len(ids), turn=0)[0]
    whole = masked_logp(model, ids, mask)
    later, earlier = list(ids), list(ids)
    later[14:] = [ids[4]] * (len(ids) - 14)
    earlier[4] = ids[5]
    assert masked_logp(model, later, mask) == pytest.approx(whole, abs=1e-6)
    assert abs(masked_logp(model, earlier, mask) - whole) > 1e-3


def test_case_15_an_empty_answer_has_a_mask_of_its_end_of_turn(template, talk):
    rollout = template.render(talk("w0 w1", "", "w5", "w6"))
    mask = role_mask([rollout.spans], len(rollout.token_ids), turn=0)[0]
    assert mask.nonzero().flatten().tolist() == [10]
    assert rollout.token_ids[10] == template.end_of_turn_id
