import json
import os

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tiny_models import KINDS, build_tokenizer, random_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

from rewarden.errors import ConfigError, ResumeError
from rewarden.models.adapters import freeze, trainable
from rewarden.models.load import Model, load_policy, read_card, restore, save_model
from rewarden.models.parts import ModelPart
from rewarden.models.reward import load_reward_model

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
IDS = torch.tensor([random_rows([11])[0]])


def spec(folder, **fields: object) -> Model:
    return Model(model_name_or_path=str(folder), **fields)


def disturb(model: torch.nn.Module, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in trainable(model):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_model_loads_by_transformers_alone_bit_for_bit(kind, saved, tmp_path):
    policy = load_policy(spec(saved(kind)))
    disturb(policy)
    save_model(policy, build_tokenizer(), tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(logits(plain), logits(policy))
    tied = kind in ("llama_tied", "gpt2")
    assert (plain.get_input_embeddings().weight is plain.get_output_embeddings().weight) == tied
    assert ("lm_head.weight" in load_file(tmp_path / "out" / "model.safetensors")) != tied
    assert AutoTokenizer.from_pretrained(tmp_path / "out").convert_tokens_to_ids("w3") == 6


@pytest.mark.parametrize("kind", ["llama", "llama_tied", "gpt2"])
def test_a_lora_policy_loads_by_peft_alone_bit_for_bit(kind, saved, tmp_path):
    base = saved(kind)
    policy = load_policy(spec(base, lora_r=2, lora_layers=2))
    disturb(policy)
    save_model(policy, build_tokenizer(), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base.resolve())
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(tmp_path / "out")).eval()
    assert torch.equal(logits(plain), logits(policy))


@pytest.mark.parametrize("kind", ["llama", "llama_tied", "gpt2"])
def test_an_adapter_on_a_merged_base_carries_that_base(kind, saved, tmp_path):
    first = load_policy(spec(saved(kind), lora_r=2))
    disturb(first)
    save_model(first, build_tokenizer(), tmp_path / "sft", extra={"template": "hh"})
    second = load_policy(spec(tmp_path / "sft", lora_r=2))
    disturb(second, seed=2)
    save_model(second, build_tokenizer(), tmp_path / "ppo")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "ppo" / "base")
    plain = PeftModel.from_pretrained(base, str(tmp_path / "ppo")).eval()
    assert torch.equal(logits(plain), logits(second))
    assert (base.get_input_embeddings().weight is base.get_output_embeddings().weight) == (kind != "llama")
    assert read_card(tmp_path / "ppo")["template"] == "hh"
    merged = load_policy(spec(tmp_path / "ppo"))
    assert torch.allclose(logits(merged), logits(second), atol=1e-4)


def test_merging_on_save_writes_one_full_model_and_leaves_the_adapter_in_memory(saved, tmp_path):
    policy = load_policy(spec(saved("llama"), lora_r=2))
    disturb(policy)
    before = logits(policy)
    save_model(policy, build_tokenizer(), tmp_path / "out", merge=True)
    assert not (tmp_path / "out" / "adapter_config.json").exists()
    assert torch.allclose(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), before, atol=1e-4)
    assert torch.equal(logits(policy), before)
    assert isinstance(policy, PeftModel)
    again = load_policy(spec(tmp_path / "out", lora_r=2))
    save_model(again, build_tokenizer(), tmp_path / "next")
    assert not (tmp_path / "next" / "base").exists()


def test_the_card_holds_role_template_and_extras(saved, tmp_path):
    policy = load_policy(spec(saved("llama"), template="alpaca"))
    save_model(policy, build_tokenizer(), tmp_path / "p", extra={"step": 3})
    assert read_card(tmp_path / "p") == {"role": "policy", "template": "alpaca", "step": 3}
    reward = load_reward_model(spec(tmp_path / "p"), head="fresh")
    assert reward.template_kind == "alpaca"
    save_model(reward.model, reward.tokenizer, tmp_path / "r")
    assert read_card(tmp_path / "r")["role"] == "reward"
    assert load_reward_model(spec(tmp_path / "r")).template_kind == "alpaca"
    assert read_card(tmp_path / "nowhere") == {}


def test_saving_over_a_folder_replaces_all_of_it_and_a_failed_save_leaves_the_old_one(saved, tmp_path, monkeypatch):
    policy = load_policy(spec(saved("llama")))
    target = tmp_path / "out"
    save_model(policy, build_tokenizer(), target)
    (target / "stale.txt").write_text("old")
    old = logits(policy)
    disturb(policy)

    class Full(OSError):
        pass

    def no_space(*args: object) -> None:
        raise Full("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        with pytest.raises(Full):
            save_model(policy, build_tokenizer(), target)
    assert (target / "stale.txt").exists()
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(target)), old)
    save_model(policy, build_tokenizer(), target)
    assert not (target / "stale.txt").exists()
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(target)), logits(policy))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["llama", "out"]


@pytest.mark.parametrize("fields", [{}, {"lora_r": 2}, {"trainable_layers": 1}])
@pytest.mark.parametrize("role", ["policy", "reward"])
def test_restore_brings_the_saved_weights_back_in_place(role, fields, saved, tmp_path):
    def build() -> torch.nn.Module:
        folder = saved("llama")
        if role == "policy":
            return load_policy(spec(folder, **fields))
        return load_reward_model(spec(folder, **fields), head="fresh").model

    model = build()
    disturb(model)
    save_model(model, build_tokenizer(), tmp_path / "out")
    expected = {name: parameter.clone() for name, parameter in model.named_parameters()}
    other = build()
    kept = dict(other.named_parameters())
    disturb(other, seed=9)
    restore(other, tmp_path / "out")
    for name, parameter in other.named_parameters():
        assert parameter is kept[name]
        assert torch.equal(parameter, expected[name]), name


def test_restore_refuses_another_models_folder(saved, tmp_path):
    policy = load_policy(spec(saved("llama"), lora_r=2))
    save_model(policy, build_tokenizer(), tmp_path / "lora")
    narrow = load_policy(spec(saved("llama"), lora_r=2, lora_target_modules=["q_proj"]))
    save_model(narrow, build_tokenizer(), tmp_path / "narrow")
    with pytest.raises(ConfigError, match="lacks 36 of the adapter's tensors"):
        restore(policy, tmp_path / "narrow")
    with pytest.raises(ConfigError, match="holds 36 tensors the model has no place for"):
        restore(narrow, tmp_path / "lora")
    with pytest.raises(ConfigError, match="no scalar head"):
        restore(load_reward_model(spec(saved("llama")), head="fresh").model, saved("llama"))
    with pytest.raises(ConfigError, match="differ in"):
        restore(load_policy(spec(saved("llama"))), saved("qwen2"))


@pytest.mark.parametrize("fields", [{}, {"lora_r": 2}, {"trainable_layers": 1}])
def test_a_checkpoint_part_holds_what_trains_bit_for_bit(fields, saved, tmp_path):
    reward = load_reward_model(spec(saved("llama_tied"), **fields), head="fresh")
    part = ModelPart(reward.model)
    disturb(reward.model)
    expected = {name: parameter.clone() for name, parameter in trainable(reward.model)}
    freeze(reward.model)
    part.save(tmp_path)
    assert set(load_file(tmp_path / "trainable.safetensors")) == set(expected)
    again = load_reward_model(spec(saved("llama_tied"), **fields), head="fresh")
    ModelPart(again.model).load(tmp_path)
    for name, parameter in trainable(again.model):
        assert torch.equal(parameter, expected[name]), name


def test_a_checkpoint_part_of_another_run_or_a_damaged_one_is_refused(saved, tmp_path):
    part = ModelPart(load_policy(spec(saved("llama"), trainable_layers=1)))
    with pytest.raises(ResumeError, match=r"holds no trainable\.safetensors"):
        part.load(tmp_path)
    part.save(tmp_path)
    with pytest.raises(ResumeError, match="9 parameters differ from those that train now"):
        ModelPart(load_policy(spec(saved("llama"), trainable_layers=2))).load(tmp_path)
    file = tmp_path / "trainable.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ResumeError, match="truncated or damaged"):
        part.load(tmp_path)


def test_weights_that_are_not_finite_are_not_saved(saved, tmp_path):
    policy = load_policy(spec(saved("llama")))
    with torch.no_grad():
        next(policy.parameters()).view(-1)[0] = float("nan")
    with pytest.raises(ConfigError, match=r"1 weights hold NaN or inf, first .* so the model is not saved"):
        save_model(policy, build_tokenizer(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_damaged_card_is_refused_in_words(text, tmp_path):
    (tmp_path / "rewarden.json").write_text(text)
    with pytest.raises(ConfigError, match=r"rewarden.json .*copy it again, or remove it"):
        read_card(tmp_path)
