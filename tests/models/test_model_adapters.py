import copy

import pytest
import torch
from tiny_models import batch_of, build_model, random_rows
from torch import nn

from rewarden.errors import ConfigError
from rewarden.models.adapters import adapter_off, copy_frozen, freeze, trainable
from rewarden.models.forward import sequence_logp, sequence_scores
from rewarden.models.load import Model, load_policy
from rewarden.models.reward import load_reward_model


def spec(folder, **fields: object) -> Model:
    return Model(model_name_or_path=str(folder), **fields)


def disturb(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in trainable(model):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_policy_with_its_adapter_off_is_the_reference_to_the_bit(kind, saved, rows):
    folder = saved(kind)
    policy, batch = load_policy(spec(folder, lora_r=3, lora_dropout=0.3)), batch_of(rows)
    reference = load_policy(spec(folder))

    def logp(model: nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return sequence_logp(model, batch, batch.mask_BT, temperature=0.7)

    assert torch.equal(logp(policy), logp(reference))
    disturb(policy)
    assert not torch.allclose(logp(policy), logp(reference), atol=1e-2)
    moved = logp(policy)
    with adapter_off(policy):
        assert torch.equal(logp(policy), logp(reference))
    assert torch.equal(logp(policy), moved)


def test_adapter_off_also_switches_off_the_trained_copy_of_a_head(saved, rows):
    critic, batch = load_reward_model(spec(saved("llama"), lora_r=3), head="fresh").model, batch_of(rows)
    with torch.no_grad():
        before = sequence_scores(critic, batch)
        disturb(critic)
        assert not torch.allclose(sequence_scores(critic, batch), before, atol=1e-2)
        with adapter_off(critic):
            assert torch.equal(sequence_scores(critic, batch), before)


@pytest.mark.parametrize("frozen", [False, True])
def test_adapter_off_leaves_what_trains_as_it_was_even_when_the_block_raises(frozen, saved):
    policy = load_policy(spec(saved("llama"), lora_r=2))
    if frozen:
        freeze(policy)
    before = [name for name, _ in trainable(policy)]
    with pytest.raises(KeyError), adapter_off(policy):
        raise KeyError
    assert [name for name, _ in trainable(policy)] == before
    assert bool(before) != frozen


def test_adapters_can_be_switched_off_twice(saved, rows):
    policy, batch = load_policy(spec(saved("llama"), lora_r=2)), batch_of(rows)
    disturb(policy)
    with torch.no_grad(), adapter_off(policy):
        outer = sequence_logp(policy, batch, batch.mask_BT, temperature=1.0)
        with adapter_off(policy):
            pass
        assert torch.equal(sequence_logp(policy, batch, batch.mask_BT, temperature=1.0), outer)


def test_a_gradient_taken_around_an_adapter_off_block_is_complete(saved, rows):
    policy, batch = load_policy(spec(saved("llama"), lora_r=2)), batch_of(rows)
    disturb(policy)
    expected = copy.deepcopy(policy)
    sequence_logp(expected, batch, batch.mask_BT, temperature=1.0).sum().backward()
    logp = sequence_logp(policy, batch, batch.mask_BT, temperature=1.0).sum()
    with torch.no_grad(), adapter_off(policy):
        sequence_logp(policy, batch, batch.mask_BT, temperature=1.0)
    logp.backward()
    for (name, got), (_, want) in zip(trainable(policy), trainable(expected), strict=True):
        assert torch.equal(got.grad, want.grad), name


def test_a_model_without_an_adapter_cannot_switch_one_off():
    with pytest.raises(ConfigError, match="no adapter to switch off; set lora_r"), adapter_off(build_model("llama")):
        pass


@pytest.mark.parametrize("kind", ["llama_tied", "gpt2"])
def test_a_frozen_copy_stays_where_it_was(kind):
    model = build_model(kind)
    ids = torch.tensor([random_rows([6])[0]])
    reference = copy_frozen(model)
    before = reference(input_ids=ids).logits
    disturb(model)
    assert torch.equal(reference(input_ids=ids).logits, before)
    assert not trainable(reference)
    assert len(trainable(model)) > 0
    assert reference.get_input_embeddings().weight is reference.get_output_embeddings().weight
