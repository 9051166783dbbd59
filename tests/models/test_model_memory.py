"""Bytes of a model from its config: parameters are those of the real model, activations are what autograd really keeps."""

from functools import partial
from pathlib import Path

import pytest
import torch
from tiny_models import batch_of, build_model, random_rows
from transformers import GPT2Config, GPT2LMHeadModel

from rewarden.models.forward import sequence_logp
from rewarden.models.load import Model, load_policy
from rewarden.models.memory import measure
from rewarden.models.reward import load_reward_model

CHOICES = [
    {},
    {"lora_r": 4},
    {"lora_r": 4, "lora_layers": 1},
    {"lora_r": 2, "lora_target_modules": ["q_proj", "down_proj"]},
    {"trainable_layers": 1},
]


def real_bytes(model) -> tuple[int, int]:
    """(all, trained) bytes of a loaded model, each tensor once."""
    parameters = list(model.parameters())
    return tuple(sum(4 * p.numel() for p in kept) for kept in (parameters, [p for p in parameters if p.requires_grad]))


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("kind", ["llama", "llama_tied"])
def test_parameters_are_those_of_the_loaded_policy(saved, kind, choice):
    spec = Model(model_name_or_path=str(saved(kind)), **choice)
    found = measure(spec)
    assert (found.weights, found.trained) == real_bytes(load_policy(spec))
    assert found.gradients == found.trained
    assert found.optimizer == 2 * found.trained


def test_parameters_of_a_small_llama_by_hand(saved):
    # Width 32, 4 heads and 2 key-value heads of 8, MLP 48, 3 layers, 61 words, untied.
    layer = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48 + 2 * 32
    found = measure(Model(model_name_or_path=str(saved("llama"))))
    assert found.weights == 4 * (3 * layer + 2 * 61 * 32 + 32)
    assert found.cache == 4 * 3 * 2 * 2 * 8
    assert found.hidden == 4 * 32
    assert found.projection == 4 * 61 * 32
    assert found.logits == 4 * 61
    assert (found.kept, found.depth) == (3, 3)


def test_lora_of_a_small_llama_by_hand(saved):
    # Rank 4 on q, k, v, o (32->32, 32->16, 32->16, 32->32), gate, up (32->48) and down (48->32) of the top layer.
    adapter = 4 * ((32 + 32) + (32 + 16) + (32 + 16) + (32 + 32) + (32 + 48) + (32 + 48) + (48 + 32))
    found = measure(Model(model_name_or_path=str(saved("llama")), lora_r=4, lora_layers=1))
    assert found.trained == 4 * adapter
    # Kept per token: 2 norms of 32; inputs 32, 32, 32, 48; queries and what attention gives 2 x 32, keys and values 2 x 16, one
    # number per head; gate, its activation, up: 3 x 48; 7 x 4 inside the adapters.
    kept = 2 * 32 + (3 * 32 + 48) + 2 * 32 + 2 * 16 + 4 + 3 * 48 + 7 * 4
    assert found.activations == 4 * kept
    assert (found.kept, found.depth) == (1, 3)


def test_parameters_are_those_of_the_loaded_reward_model(saved):
    spec = Model(model_name_or_path=str(saved("llama")), lora_r=4, lora_layers=2)
    loaded = load_reward_model(spec, num_heads=2, head="fresh")
    found = measure(spec, num_heads=2)
    # peft keeps the head that was there beside the one that trains.
    assert (found.weights, found.trained) == real_bytes(loaded.model)


def kept_by_autograd(model, run) -> int:
    """Bytes of the tensors that a forward pass keeps for its backward pass, parameters apart, each storage once."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    assert result.requires_grad
    return sum(storage.nbytes() for storage in seen.values())


def deep(kind: str, depth: int, folder: Path) -> Path:
    """A saved tiny model with this many layers."""
    if kind == "gpt2":
        GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=32, n_layer=depth, n_head=4, n_positions=128)).save_pretrained(folder)
    else:
        build_model(kind, num_hidden_layers=depth).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral", "gpt2"])
def test_activations_of_a_layer_are_what_autograd_keeps(tmp_path, kind, choice):
    if kind == "gpt2" and "lora_target_modules" in choice:
        choice = {**choice, "lora_target_modules": ["c_attn", "c_proj"]}
    lengths = [40, 40, 40, 40]
    tokens = batch_of(random_rows(lengths))
    mask_BT = tokens.mask_BT.clone()
    mask_BT[:, :-1] = False  # one position projected, and all tokens but each row's last one run
    got, expected = [], []
    for depth in (2, 4):
        above = {**choice, **({"trainable_layers": depth} if "trainable_layers" in choice else {})}
        above |= {"lora_layers": depth} if "lora_layers" in choice else {}
        spec = Model(model_name_or_path=str(deep(kind, depth, tmp_path / f"{kind}{depth}")), **above)
        policy = load_policy(spec)
        got.append(measure(spec).activations)
        expected.append(kept_by_autograd(policy, partial(sequence_logp, policy, tokens, mask_BT, temperature=1.0)))
    per_token = (expected[1] - expected[0]) / (sum(lengths) - len(lengths))
    assert got[1] - got[0] == pytest.approx(per_token, rel=0.03)
