"""The world's tokenizer and tiny policy are ordinary transformers objects."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rewarden.errors import ConfigError
from rewarden.worlds import TripDesk
from rewarden.worlds.tokenizer import build_policy, build_tokenizer, model_config


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "trap"])
def world(request):
    return TripDesk(trap=request.param)


@pytest.fixture(scope="module")
def tokenizer(world):
    return build_tokenizer(world)


def chat(conversation):
    return [{"role": m.role, "content": m.text} for m in conversation.messages]


def test_every_sentence_survives_the_tokenizer(world, tokenizer):
    for sentence in world.sentences():
        ids = tokenizer.encode(sentence)
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == sentence
    together = " ".join(world.sentences())
    assert tokenizer.decode(tokenizer.encode(together)) == together


def test_the_vocabulary_has_its_size(world, tokenizer):
    assert len(tokenizer) == (153 if world.trap else 116)
    assert 150 <= len(tokenizer) <= 156 if world.trap else 110 <= len(tokenizer) <= 130


def test_special_tokens_are_six_and_apart(tokenizer):
    names = ["<|pad|>", "<|unk|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    assert tokenizer.convert_tokens_to_ids(names) == [0, 1, 2, 3, 4, 5]
    assert (tokenizer.pad_token, tokenizer.unk_token, tokenizer.eos_token) == ("<|pad|>", "<|unk|>", "<|end|>")
    assert set(tokenizer.all_special_tokens) == set(names)


def test_a_word_that_begins_a_sentence_and_its_small_form_are_different_tokens(tokenizer):
    assert tokenizer.encode("In the")[0] != tokenizer.encode("a in the")[1]
    assert tokenizer.encode("Bananas") == [tokenizer.unk_token_id]
    assert tokenizer.encode("") == []


def test_the_template_writes_role_content_end(tokenizer):
    messages = [
        {"role": "system", "content": "Trips are fun."},
        {"role": "user", "content": "I see."},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "In spring."},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|system|>Trips are fun.<|end|><|user|>I see.<|end|><|assistant|><|end|><|user|>In spring.<|end|><|assistant|>"
    )
    ids = tokenizer.apply_chat_template(messages[1:2], add_generation_prompt=True, return_dict=False)
    # "I", "see" and "." each one token
    assert [ids[0], *ids[-2:]] == [3, 2, 4]
    assert len(ids) == 6
    assert tokenizer.decode(ids[1:4]) == "I see."


def test_dialogues_have_the_expected_length(world, tokenizer):
    dialogues = world.sft_dialogues(300, 0)
    lengths = [len(tokenizer.apply_chat_template(chat(d), return_dict=False)) for d in dialogues]
    assert 107 <= sum(lengths) / 300 <= 130
    assert max(lengths) <= 320


def test_the_policy_has_its_size_and_spread(world):
    model, tokenizer = build_policy(world, 0)
    # embeddings 96 V (tied); a layer 4 * 96^2 + 3 * 96 * 192 + 2 * 96; final norm 96
    expected = 96 * len(tokenizer) + 2 * (4 * 96**2 + 3 * 96 * 192 + 2 * 96) + 96
    assert model.num_parameters() == expected
    assert round(expected, -3) == (199_000 if world.trap else 196_000)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.model.layers[0].mlp.up_proj.weight.std().item() == pytest.approx(0.08, rel=0.03)
    assert model.config.max_position_embeddings == 320
    assert model.config.eos_token_id == tokenizer.eos_token_id == 2
    assert model.config.pad_token_id == tokenizer.pad_token_id == 0
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_a_seed_gives_its_own_weights_and_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    first, _ = build_policy(TripDesk(), 7)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    again, _ = build_policy(TripDesk(), 7)
    other, _ = build_policy(TripDesk(), 8)
    weights = [m.model.layers[1].self_attn.q_proj.weight for m in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_policy_and_tokenizer_load_with_transformers_alone(world, tmp_path):
    model, tokenizer = build_policy(world, 1)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded, again = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    messages = chat(world.scripted("good", 4))
    ids = tokenizer.apply_chat_template(messages, return_dict=False)
    assert again.apply_chat_template(messages, return_dict=False) == ids
    assert again.decode(ids[1:5]) == tokenizer.decode(ids[1:5])
    assert (again.pad_token_id, again.eos_token_id, len(again)) == (0, 2, len(tokenizer))
    sentence = "Take the cheap spring trip to the sea with your dog."
    assert again.decode(again.encode(sentence)) == sentence
    with torch.no_grad():
        assert torch.equal(model(torch.tensor([ids])).logits, loaded(torch.tensor([ids])).logits)


def test_a_tokenizer_of_the_other_world_is_refused():
    with pytest.raises(ConfigError, match="the tokenizer has 153 entries"):
        model_config(TripDesk(), build_tokenizer(TripDesk(trap=True)))
