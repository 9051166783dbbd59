import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import KINDS, VOCABULARY, WORDS, batch_of, build_model, build_tokenizer, random_rows
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, BertModel

from rewarden.errors import ConfigError
from rewarden.models.forward import sequence_logp
from rewarden.models.load import Model, load_policy, load_tokenizer, save_model, template_of, trainable
from rewarden.models.source import resolve_dtype
from rewarden.models.trunk import check_forward

# peft asks transformers for an attribute under its old name; here peft is used directly.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def spec(folder: Path, **fields: object) -> Model:
    return Model(model_name_or_path=str(folder), **fields)


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_loads_as_it_was_saved(kind, saved):
    folder = saved(kind)
    policy, tokenizer = load_policy(spec(folder)), load_tokenizer(spec(folder))
    ids = torch.tensor([random_rows([9])[0]])
    with torch.no_grad():
        assert torch.equal(policy(input_ids=ids).logits, build_model(kind)(input_ids=ids).logits)
    assert len(trainable(policy)) == len(list(policy.parameters()))
    assert not policy.training
    assert tokenizer.convert_tokens_to_ids("w3") == 6
    assert tokenizer.pad_token is None or kind == "qwen2"


def test_the_forward_is_the_same_twice_with_dropout_in_the_config_and_in_the_adapter(saved):
    folder = saved("gpt2", attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5)
    policy = load_policy(spec(folder, lora_r=2, lora_dropout=0.5))
    batch = batch_of(random_rows([8, 5]))
    logp = [sequence_logp(policy, batch, batch.mask_BT, temperature=1.0) for _ in range(2)]
    assert torch.equal(*logp)


def test_a_model_whose_pad_is_eos_still_learns_the_embedding_of_eos(saved):
    folder = saved("llama", pad_token_id=2)
    policy = load_policy(spec(folder))
    batch = batch_of([[5, 2, 7, 2, 9]])
    sequence_logp(policy, batch, batch.mask_BT, temperature=1.0).sum().backward()
    assert policy.get_input_embeddings().weight.grad[2].abs().max() > 0


@pytest.mark.parametrize(("kind", "expected"), [("llama", True), ("llama_tied", False)])
def test_the_top_layers_train_and_a_tied_head_stays_with_its_embeddings(kind, expected, saved):
    policy = load_policy(spec(saved(kind), trainable_layers=1))
    names = {name for name, _ in trainable(policy)}
    assert ("lm_head.weight" in names) == expected
    assert "model.norm.weight" in names
    assert {name.split(".")[2] for name in names if ".layers." in name} == {"2"}
    assert not policy.get_input_embeddings().weight.requires_grad


def test_lora_sits_on_the_chosen_layers_only_and_starts_as_the_base(saved):
    folder = saved("llama")
    policy = load_policy(spec(folder, lora_r=4, lora_layers=1, lora_target_modules=["q_proj", "down_proj"]))
    names = [name for name, _ in trainable(policy)]
    assert len(names) == 4
    assert all(".layers.2." in name and ("q_proj" in name or "down_proj" in name) for name in names)
    ids = torch.tensor([random_rows([9])[0]])
    with torch.no_grad():
        assert torch.equal(policy(input_ids=ids).logits, build_model("llama")(input_ids=ids).logits)
    everywhere = load_policy(spec(folder, lora_r=4))
    assert len(trainable(everywhere)) == 3 * 7 * 2
    assert not any("lm_head" in name for name, _ in trainable(everywhere))


def test_lora_is_drawn_from_its_seed_and_leaves_the_global_generator_alone(saved):
    folder = saved("gpt2")
    torch.manual_seed(11)
    draws = torch.rand(3)
    torch.manual_seed(11)
    first = dict(trainable(load_policy(spec(folder, lora_r=2), seed=1)))
    assert torch.equal(torch.rand(3), draws)
    again = dict(trainable(load_policy(spec(folder, lora_r=2), seed=1)))
    other = dict(trainable(load_policy(spec(folder, lora_r=2), seed=2)))
    name = next(key for key in first if "lora_A" in key)
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])


def test_a_peft_folder_is_merged_into_its_base(saved, tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model

    base = saved("llama")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        peft_model = get_peft_model(
            AutoModelForCausalLM.from_pretrained(base),
            LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"),
        )
    peft_model.save_pretrained(str(tmp_path / "adapter"))
    ids = torch.tensor([random_rows([9])[0]])
    policy = load_policy(spec(tmp_path / "adapter"))
    assert not isinstance(policy, PeftModel)
    with torch.no_grad():
        expected = peft_model.eval()(input_ids=ids).logits
        assert not torch.allclose(expected, build_model("llama")(input_ids=ids).logits, atol=1e-3)
        assert torch.allclose(policy(input_ids=ids).logits, expected, atol=1e-4)
        adapted = load_policy(spec(tmp_path / "adapter", lora_r=2))
        assert torch.allclose(adapted(input_ids=ids).logits, expected, atol=1e-4)
    assert isinstance(adapted, PeftModel)
    assert load_tokenizer(spec(tmp_path / "adapter")).convert_tokens_to_ids("w3") == 6


def write_gguf(file: Path, model) -> None:
    """A llama GGUF file, written tensor by tensor with the public gguf package (llama.cpp permutes q and k rows for rope)."""
    from gguf import GGUFWriter

    config = model.config
    writer = GGUFWriter(file, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*WORDS[:-3], "w", "3", WORDS[-1]])
    writer.add_token_types([3, 3, 3, *[1] * (VOCABULARY - 3)])
    writer.add_token_merges(["w 3"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)

    def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
        return weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)

    names = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    state = model.state_dict()
    for index in range(config.num_hidden_layers):
        for ours, theirs in names.items():
            weight = state[f"model.layers.{index}.{ours}.weight"]
            if theirs == "attn_q":
                weight = permuted(weight, config.num_attention_heads)
            if theirs == "attn_k":
                weight = permuted(weight, config.num_key_value_heads)
            writer.add_tensor(f"blk.{index}.{theirs}.weight", weight.numpy().astype(np.float32))
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"].numpy())
    writer.add_tensor("output_norm.weight", state["model.norm.weight"].numpy())
    writer.add_tensor("output.weight", state["lm_head.weight"].numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_loads_trains_and_saves_as_an_ordinary_folder(tmp_path):
    model = build_model("llama")
    write_gguf(tmp_path / "tiny.gguf", model)
    ids = torch.tensor([random_rows([9])[0]])
    for asked in (spec(tmp_path / "tiny.gguf"), spec(tmp_path, gguf_file="tiny.gguf")):
        policy, tokenizer = load_policy(asked), load_tokenizer(asked)
        with torch.no_grad():
            assert torch.allclose(policy(input_ids=ids).logits, model(input_ids=ids).logits, atol=1e-5)
        assert tokenizer.convert_tokens_to_ids("w3") == 6
    save_model(policy, tokenizer, tmp_path / "plain")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits, policy(input_ids=ids).logits)
    lora = load_policy(spec(tmp_path / "tiny.gguf", lora_r=2))
    save_model(lora, tokenizer, tmp_path / "adapter")
    assert (tmp_path / "adapter" / "base" / "model.safetensors").exists()


def test_gguf_without_its_package_names_the_install_line(tmp_path, monkeypatch):
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'rewarden\[gguf\]'"):
        load_policy(spec(tmp_path / "x.gguf"))


def test_a_hub_id_loads_from_the_local_cache_without_a_network(saved, tmp_path, monkeypatch):
    snapshot = tmp_path / "cache" / "models--someone--tiny" / "snapshots" / ("a" * 40)
    shutil.copytree(saved("llama"), snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    asked = Model(model_name_or_path="someone/tiny")
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        assert torch.equal(load_policy(asked)(input_ids=ids).logits, build_model("llama")(input_ids=ids).logits)
    assert load_tokenizer(asked).convert_tokens_to_ids("w3") == 6
    with pytest.raises(ConfigError, match="'someone/other' is not a folder, and the hub has no such model"):
        load_policy(Model(model_name_or_path="someone/other"))


def test_what_would_load_wrongly_is_refused_in_words(saved, tmp_path):
    folder = saved("llama")
    with pytest.raises(ConfigError, match="no linear layer is called 'q_prj'; did you mean 'q_proj'"):
        load_policy(spec(folder, lora_r=2, lora_target_modules=["v_proj", "q_prj"]))
    with pytest.raises(ConfigError, match="lora_layers is 4; the model has 3 layers"):
        load_policy(spec(folder, lora_r=2, lora_layers=4))
    with pytest.raises(ConfigError, match="trainable_layers is 4; the model has 3 layers"):
        load_policy(spec(folder, trainable_layers=4))
    with pytest.raises(ConfigError, match="both set"):
        load_policy(spec(folder, trainable_layers=1, lora_r=1))
    with pytest.raises(ConfigError, match="lora_r is 0"):
        load_policy(spec(folder, lora_layers=1))
    with pytest.raises(ConfigError, match="nothing would train"):
        load_policy(spec(saved("llama_tied"), trainable_layers=0))
    with pytest.raises(ConfigError, match="no such folder"):
        load_policy(spec(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="does not exist"):
        load_policy(spec(tmp_path / "nowhere.gguf"))
    with pytest.raises(ConfigError, match=r"no other\.gguf; its GGUF files: none"):
        load_policy(spec(folder, gguf_file="other.gguf"))


def test_a_tokenizer_with_more_ids_than_the_model_embeds_is_refused(saved):
    folder = saved("llama")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(folder)
    with pytest.raises(ConfigError, match=r"ids up to 61 \('\[PAD\]'\), the model embeds only 61"):
        load_tokenizer(spec(folder))


def test_damaged_incomplete_and_pickled_checkpoints_are_refused(saved, tmp_path):
    folder = saved("llama")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match="truncated or damaged"):
        load_policy(spec(folder))
    (folder / "model.safetensors").write_bytes(whole)
    tensors = load_file(folder / "model.safetensors")
    gone = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ConfigError, match=r"lacks 1 tensors of a LlamaForCausalLM, first 'model\.layers\.1\.mlp\.up_proj\.weight'"
    ):
        load_policy(spec(folder))
    (folder / "model.safetensors").unlink()
    torch.save({**tensors, "x": gone}, folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin only, a pickle"):
        load_policy(spec(folder))
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ConfigError, match=r"holds no model\.safetensors"):
        load_policy(spec(folder))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    with pytest.raises(ConfigError, match=r"names model-1\.safetensors, not there"):
        load_policy(spec(folder))


def test_code_that_comes_with_a_model_runs_only_when_allowed(saved):
    folder = saved("llama")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text("raise SystemExit('ran')\n")
    with pytest.raises(ConfigError, match=r"brings its own Python code.*set trust_remote_code: true"):
        load_policy(spec(folder))


def test_a_model_that_looks_ahead_or_scales_its_logits_is_refused():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 61}
    with pytest.raises(ConfigError, match="not causal"):
        check_forward(BertModel(BertConfig(**sizes, initializer_range=0.5)).eval())

    from transformers import CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM

    with pytest.raises(ConfigError, match="scaled or capped logits"):
        check_forward(CohereForCausalLM(CohereConfig(**sizes, num_key_value_heads=2, pad_token_id=0)).eval())
    with pytest.raises(ConfigError, match="scaled or capped logits"):
        check_forward(Gemma2ForCausalLM(Gemma2Config(**sizes, num_key_value_heads=2, head_dim=8)).eval())


def test_dtype_is_what_the_device_computes_natively(monkeypatch):
    assert resolve_dtype("auto", "cpu") is torch.float32
    monkeypatch.setattr("torch.cpu.get_capabilities", dict)
    for dtype in ("bfloat16", "float16"):
        with pytest.raises(ConfigError, match=f"dtype is {dtype}, which this cpu has no instructions for"):
            resolve_dtype(dtype, "cpu")
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"avx512_bf16": True})
    assert resolve_dtype("bfloat16", "cpu") is torch.bfloat16


def test_the_card_decides_the_template_unless_the_recipe_contradicts_it(saved, tmp_path):
    save_model(build_model("llama"), build_tokenizer(), tmp_path / "m", extra={"template": "hh", "note": 1})
    assert template_of(spec(tmp_path / "m")) == "hh"
    assert template_of(spec(tmp_path / "m", template="hh")) == "hh"
    with pytest.raises(ConfigError, match=r"template is 'chat', but .* was trained with 'hh'"):
        template_of(spec(tmp_path / "m", template="chat"))
    assert template_of(spec(saved("gpt2"))) == "chat"


@pytest.mark.slow
def test_smollm2_gives_each_row_its_own_logp(smollm2):
    policy = load_policy(spec(smollm2))
    batch = batch_of([[1, 9690, 198, 2683, 359, 253, 5356, 2], [1, 4093, 198, 19556, 2]])
    with torch.no_grad():
        logp_BT = sequence_logp(policy, batch, batch.mask_BT, temperature=1.0)
        for index, length in enumerate(batch.length_B.tolist()):
            ids = batch.ids_BT[index, :length]
            table = policy(input_ids=ids[None]).logits[0].double().log_softmax(-1)
            expected = table[torch.arange(length - 1), ids[1:]]
            assert (logp_BT[index, 1:length] - expected).abs().max() < 1e-4


def test_shapes_that_differ_from_the_config_are_named_as_such(saved):
    folder = saved("llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": config["intermediate_size"] * 2}))
    with pytest.raises(ConfigError, match=r"its tensors have other shapes than config.json says"):
        load_policy(Model(model_name_or_path=str(folder)))


def test_a_folder_without_a_tokenizer_says_what_to_copy(saved):
    folder = saved("llama")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ConfigError, match=r"has no tokenizer; copy tokenizer.json and tokenizer_config.json"):
        load_tokenizer(Model(model_name_or_path=str(folder)))
