"""Bad models: folders that are incomplete, damaged, of another kind, or that do not fit what is asked of them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from bad_desk import Desk, Kind
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertLMHeadModel, LlamaConfig, LlamaForCausalLM

SFT = "run sft.yaml model.model_name_or_path=m"
PPO = "run ppo.yaml reward={kind: reward_model, path: m}"


def damaged(
    name: str, change: Callable[[Desk], object], *words: str, what: str = "policy", extra: str = "", **more: object
) -> Kind:
    """A copy of the policy (or of the reward model) with something wrong, given to the command."""

    def make(desk: Desk) -> None:
        desk.copy(what, "m")
        change(desk)

    return Kind(name, f"{SFT if what == 'policy' else PPO} {extra}", words, make=make, **more)


def without(file: str) -> Callable[[Desk], object]:
    return lambda desk: (desk.path / "m" / file).unlink()


def holding(file: str, content: str | bytes) -> Callable[[Desk], object]:
    return lambda desk: desk.write(f"m/{file}", content)


def edited(file: str, **changes: object) -> Callable[[Desk], object]:
    return lambda desk: desk.edit(f"m/{file}", **changes)


def retemplated(template: str | None) -> Callable[[Desk], object]:
    """Another chat template, wherever the tokenizer keeps it."""

    def change(desk: Desk) -> None:
        (desk.path / "m" / "chat_template.jinja").unlink(missing_ok=True)
        desk.edit("m/tokenizer_config.json", chat_template=... if template is None else template)

    return change


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Desk], object]:
    """The weights with some tensors changed."""

    def rewrite(desk: Desk) -> None:
        file = desk.path / "m" / "model.safetensors"
        kept = load_file(file)
        change(kept)
        save_file(kept, file, metadata={"format": "pt"})

    return rewrite


def cut_weights(desk: Desk) -> None:
    file = desk.path / "m" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def pickled(desk: Desk) -> None:
    file = desk.path / "m" / "model.safetensors"
    torch.save(load_file(file), desk.path / "m" / "pytorch_model.bin")
    file.unlink()


def sharded(index: str) -> Callable[[Desk], object]:
    def change(desk: Desk) -> None:
        (desk.path / "m" / "model.safetensors").unlink()
        desk.write("m/model.safetensors.index.json", index)

    return change


def own_code(desk: Desk) -> None:
    desk.edit("m/config.json", auto_map={"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Mine"}, model_type="mine")
    desk.write("m/mine.py", "raise SystemExit('this code must not run')\n")


def first_layer_only(desk: Desk) -> None:
    desk.edit("m/config.json", num_hidden_layers=1)


def encoder(desk: Desk) -> None:
    size = json.loads((desk.path / "m" / "config.json").read_text())["vocab_size"]
    config = BertConfig(
        vocab_size=size, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, is_decoder=False
    )
    (desk.path / "m" / "model.safetensors").unlink()
    BertLMHeadModel(config).save_pretrained(desk.path / "m")


def small_vocabulary(folder: Path, size: int) -> None:
    """A language model of few words, with the tokenizer files of the folder it is put beside."""
    config = LlamaConfig(
        vocab_size=size, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def adapter(desk: Desk, **config: object) -> None:
    """A LoRA folder `m` of the policy; `base_model_name_or_path` may be set to anything."""
    from rewarden.models.load import Model, load_policy, load_tokenizer, save_model

    spec = Model(model_name_or_path=desk.world.names["policy"], lora_r=2)
    save_model(load_policy(spec), load_tokenizer(spec), desk.path / "m")
    if config:
        desk.edit("m/adapter_config.json", **config)


def lora(name: str, change: Callable[[Desk], object], *words: str, **config: object) -> Kind:
    """An adapter with something wrong."""

    def make(desk: Desk) -> None:
        adapter(desk, **config)
        change(desk)

    return Kind(name, SFT, words, make=make)


def narrow_base(desk: Desk) -> None:
    """The adapter's base is another model of the same vocabulary."""
    small_vocabulary(desk.path / "m" / "base", 116)


def other_words(desk: Desk) -> None:
    """A policy of the world's other variant, which has more words."""
    from rewarden.models.save import save_model
    from rewarden.worlds import TripDesk
    from rewarden.worlds.tokenizer import build_policy

    policy, tokenizer = build_policy(TripDesk(trap=True), 0)
    save_model(policy, tokenizer, desk.path / "other")


def classifier(desk: Desk) -> None:
    """A sequence classifier of three labels that Rewarden did not write."""
    (desk.path / "m" / "rewarden.json").unlink()
    tensors(lambda kept: kept.update({"score.weight": torch.zeros(3, kept["score.weight"].shape[1])}))(desk)
    labels = {"0": "negative", "1": "neutral", "2": "positive"}
    desk.edit("m/config.json", id2label=labels, label2id={label: int(key) for key, label in labels.items()})


def members(change: Callable[[Desk], object], **file: object) -> Callable[[Desk], object]:
    """An independent ensemble `m` of two copies of the reward model, with something wrong."""

    def make(desk: Desk) -> None:
        for name in ("member_0", "member_1"):
            desk.copy("reward", f"m/{name}")
        body = {"format": 1, "family": "independent", "members": ["member_0", "member_1"], "seeds": [1, 2], "trunk": None}
        desk.write("m/ensemble.json", json.dumps({**body, **file}))
        change(desk)

    return make


def without_member(desk: Desk) -> None:
    shutil.rmtree(desk.path / "m" / "member_1")


def member_without_head(desk: Desk) -> None:
    """A member that is a language model."""
    without_member(desk)
    desk.copy("policy", "m/member_1")


def member_of_two_heads(desk: Desk) -> None:
    without_member(desk)
    desk.copy("ensemble", "m/member_1")


def member_of_other_words(desk: Desk) -> None:
    """A member's tokenizer has one word more than the other's in place of one."""
    file = desk.path / "m" / "member_1" / "tokenizer.json"
    raw = json.loads(file.read_text())
    words = raw["model"]["vocab"]
    words["zebra"] = words.pop(max(words, key=words.get))
    file.write_text(json.dumps(raw))


NAN = float("nan")

ENSEMBLES = [
    Kind(
        "an ensemble without one of its members",
        PPO,
        ("m/ensemble.json names member_1", "m/member_1 is not there", "copy the whole folder again"),
        make=members(without_member),
    ),
    Kind(
        "an ensemble with a member that has no head",
        PPO,
        ("m/member_1 has no scalar head", "its scores would be random"),
        make=members(member_without_head),
    ),
    Kind(
        "an ensemble with a member of two heads",
        PPO,
        ("m/member_1 has 2 heads; each member of an ensemble has one",),
        make=members(member_of_two_heads),
    ),
    Kind(
        "an ensemble whose members read in different words",
        PPO,
        ("m/member_1 has another tokenizer than member_0", "entries of a registry"),
        make=members(member_of_other_words),
    ),
    Kind(
        "full models said to be adapters",
        PPO,
        ("m/member_0 holds no adapter_config.json, and the family is lora",),
        make=members(lambda desk: None, family="lora"),
    ),
    Kind(
        "an ensemble of an unknown family",
        PPO,
        ("m/ensemble.json: family is 'tree'; allowed: independent, lora",),
        make=members(lambda desk: None, family="tree"),
    ),
    Kind(
        "an ensemble of another format",
        PPO,
        ("m/ensemble.json has format 9, this version reads 1",),
        make=members(lambda desk: None, format=9),
    ),
    Kind(
        "an ensemble without members",
        PPO,
        ("m/ensemble.json: members is []; list the folder of each member",),
        make=members(lambda desk: None, members=[]),
    ),
    Kind(
        "an ensemble that names a member twice",
        PPO,
        ("m/ensemble.json: members lists member_0 more than once",),
        make=members(lambda desk: None, members=["member_0", "member_0"]),
    ),
    Kind(
        "a damaged ensemble.json",
        PPO,
        ("m/ensemble.json is damaged", "copy it again"),
        make=members(lambda desk: desk.write("m/ensemble.json", "{")),
    ),
    Kind(
        "an ensemble where one model is needed",
        SFT,
        ("m is an ensemble of several models, and one is needed here", "m/member_0"),
        make=members(lambda desk: None),
    ),
    Kind(
        "saved heads for more members than there are",
        "run reward.yaml model.model_name_or_path=$ensemble head=saved num_members=3",
        ("ensemble has 2 heads, and head is saved", "Set num_members (or num_heads, to train them together) to 2"),
    ),
    Kind(
        "saved heads of a language model",
        "run reward.yaml head=saved num_members=2",
        ("has no scalar heads", "the folder of a linear ensemble"),
    ),
    Kind(
        "heads and members at once",
        "run reward.yaml num_heads=2 num_members=2",
        ("num_heads is 2 and num_members is 2; heads share one trunk", "set one of them"),
    ),
    Kind(
        "a seed for two members",
        "run reward.yaml num_members=3 member_seeds=[1, 2, 1]",
        ("member_seeds is [1, 2, 1], in which a seed is repeated",),
    ),
    Kind(
        "too few seeds for the members",
        "run reward.yaml num_members=3 member_seeds=[1, 2]",
        ("member_seeds has 2 seeds for 3 member(s); give one for each",),
    ),
    Kind(
        "a bootstrap of heads that share their batches",
        "run reward.yaml num_heads=2 bootstrap=true",
        ("bootstrap is set with num_heads 2", "use num_members"),
    ),
]
"""Ensembles that are incomplete, whose members do not fit each other, and recipes that ask for what cannot be."""

MODELS = [
    Kind("a model folder that is not there", SFT.replace("=m", "=models/none"), ("models/none", "is not a folder")),
    Kind("a file as a model", SFT.replace("=m", "=sft.yaml"), ("sft.yaml is a file; give a folder",)),
    Kind(
        "an empty model folder", SFT, ("m has no config.json", "save_pretrained"), make=lambda desk: (desk.path / "m").mkdir()
    ),
    damaged("no config.json", without("config.json"), "m has no config.json", "save_pretrained"),
    damaged("a broken config.json", holding("config.json", '{"model_type": '), "m/config.json is damaged", "copy it again"),
    damaged("a config.json that is a list", holding("config.json", "[]"), "m/config.json is damaged (it holds list"),
    damaged("an unknown model_type", edited("config.json", model_type="llamaa"), "m: cannot load", "llamaa"),
    damaged("a config without model_type", edited("config.json", model_type=...), "m: cannot load", "model_type"),
    damaged(
        "heads that do not divide the width",
        edited("config.json", num_attention_heads=5, head_dim=...),
        "m: cannot load the config",
        "hidden size (96)",
        "attention heads (5)",
    ),
    damaged("no weights", without("model.safetensors"), "m holds no model.safetensors", "save_pretrained"),
    damaged(
        "truncated safetensors", cut_weights, "m/model.safetensors", "is truncated or damaged", "copy or download it again"
    ),
    damaged("empty safetensors", holding("model.safetensors", b""), "m/model.safetensors (0 bytes) is truncated or damaged"),
    damaged("a pickle where safetensors is expected", pickled, "m holds pytorch_model.bin only, a pickle", "save_pretrained"),
    damaged(
        "an index that names an absent shard",
        sharded('{"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}'),
        "model.safetensors.index.json names model-00001-of-00002.safetensors, not there",
    ),
    damaged("a broken index", sharded("{"), "m/model.safetensors.index.json is damaged", "copy it again"),
    damaged("an index without a weight_map", sharded("{}"), "m/model.safetensors.index.json", "weight_map"),
    damaged("remote code without opt-in", own_code, "m brings its own Python code", "trust_remote_code: true"),
    damaged(
        "shapes other than the config's",
        edited("config.json", intermediate_size=100),
        "m: its tensors have other shapes than config.json says",
    ),
    damaged(
        "a tensor that is missing",
        tensors(lambda kept: kept.pop("model.norm.weight")),
        "m lacks 1 tensors",
        "'model.norm.weight'",
        "incomplete",
    ),
    damaged("more layers in the config", edited("config.json", num_hidden_layers=3), "m lacks 9 tensors", "model.layers.2."),
    damaged(
        "more layers in the file",
        first_layer_only,
        "m holds 9 tensors that its config.json has no place for",
        "model.layers.1.",
        "copy config",
    ),
    damaged(
        "weights that are NaN",
        tensors(lambda kept: kept["model.norm.weight"].fill_(NAN)),
        "m: the weight 'model.norm.weight' holds NaN or inf",
        "another checkpoint",
    ),
    damaged(
        "a vocabulary larger than the embeddings",
        lambda desk: small_vocabulary(desk.path / "m", 50),
        "the tokenizer has ids up to 115",
        "the model embeds only 50",
        "resize the embeddings",
    ),
    damaged(
        "a pad token without an id",
        edited("tokenizer_config.json", pad_token="[PAD]"),
        "m: the tokenizer has ids up to 116 ('[PAD]')",
        "padding needs none",
    ),
    damaged(
        "a pad id beyond the embeddings",
        edited("config.json", pad_token_id=999),
        "m: pad_token_id in config.json is no id of its vocabulary",
        "null",
    ),
    damaged(
        "no tokenizer",
        lambda desk: [(desk.path / "m" / f).unlink() for f in ("tokenizer.json", "tokenizer_config.json")],
        "m has no tokenizer",
        "copy tokenizer.json",
    ),
    damaged("a broken tokenizer.json", holding("tokenizer.json", "{"), "m/tokenizer.json is damaged", "copy it again"),
    damaged(
        "a tokenizer of another class",
        edited("tokenizer_config.json", tokenizer_class="ByT5Tokenizer"),
        "m: the tokenizer has ids up to 258",
        "the model embeds only 116",
    ),
    damaged("a tokenizer without template", retemplated(None), "has no chat_template", "moss_en, moss_zh, alpaca, hh"),
    damaged(
        "a template that raises",
        retemplated("{{ raise_exception('no assistants here') }}"),
        "the chat template refuses this conversation: no assistants here",
    ),
    damaged("a template that does not parse", retemplated("{% for m in messages %}"), "the chat template refuses"),
    damaged(
        "a template that does not end a turn",
        retemplated("{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"),
        "not a special token, so a policy could not end its turn",
    ),
    damaged(
        "a template that leaves messages out",
        retemplated("{{ messages[-1]['content'] }}<|end|>"),
        "the chat template leaves out message 0",
    ),
    damaged(
        "a template without generation prompt",
        retemplated("{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"),
        "has no generation prompt",
    ),
    Kind("an unknown template", "run sft.yaml model.template=chatt", ("template", "'chatt'", "chat")),
    Kind(
        "another template than the model was trained with",
        "run sft.yaml model.template=hh",
        ("template is 'hh', but ", "was trained with 'chat'"),
    ),
    damaged(
        "a plain template without eos",
        lambda desk: (edited("tokenizer_config.json", eos_token=...)(desk), without("rewarden.json")(desk)),
        "the format 'hh' ends a turn with the eos token",
        "set eos_token",
        extra="model.template=hh",
    ),
    damaged("a damaged card", holding("rewarden.json", "{"), "m/rewarden.json is damaged", "remove it"),
    Kind(
        "a reward model as policy",
        "run sft.yaml model.model_name_or_path=$reward",
        ("holds a reward model (it has a scalar head)",),
    ),
    Kind(
        "a policy as reward model",
        "run ppo.yaml reward={kind: reward_model, path: $policy}",
        ("has no scalar head", "its scores would be random"),
    ),
    damaged(
        "a classifier of three labels as reward",
        classifier,
        "m is a classifier with the labels negative, neutral, positive",
        "single label",
        what="reward",
    ),
    damaged(
        "a head that is NaN",
        tensors(lambda kept: kept["score.weight"].fill_(NAN)),
        "m: the weight 'score.weight' holds NaN or inf",
        what="reward",
    ),
    damaged("an encoder", encoder, "m: BertLMHeadModel: padding on the right changes real tokens", "decoder-only"),
    Kind(
        "LoRA and trainable_layers",
        "run sft.yaml model.lora_r=4 model.trainable_layers=1",
        ("lora_r and trainable_layers are both set",),
    ),
    Kind("lora_layers without LoRA", "run sft.yaml model.lora_layers=1", ("lora_layers is set but lora_r is 0",)),
    Kind(
        "more trainable layers than there are",
        "run sft.yaml model.trainable_layers=9",
        ("trainable_layers is 9; the model has 2",),
    ),
    Kind(
        "more LoRA layers than there are",
        "run sft.yaml model.lora_r=2 model.lora_layers=9",
        ("lora_layers is 9; the model has 2",),
    ),
    Kind(
        "LoRA on a module that is not there",
        "run sft.yaml model.lora_r=2 model.lora_target_modules=[q_prj]",
        ("lora_target_modules: no linear layer is called 'q_prj'", "did you mean 'q_proj'?"),
    ),
    Kind(
        "half precision on a CPU",
        "run sft.yaml model.dtype=float16",
        ("dtype is float16, which this cpu has no instructions for",),
    ),
    Kind(
        "an attention kernel that is not there",
        "run sft.yaml model.attn_implementation=fast",
        ("cannot load the model", "fast"),
    ),
    Kind("a GGUF file that is not there", "run sft.yaml model.model_name_or_path=x.gguf", ("x.gguf does not exist",)),
    Kind(
        "a GGUF file that is none",
        "run sft.yaml model.model_name_or_path=x.gguf",
        ("x.gguf: not a whole GGUF file", "download it again"),
        files={"x.gguf": b"GGUF no"},
    ),
    Kind(
        "a hub model without a network",
        "run sft.yaml model.model_name_or_path=nobody/nothing",
        ("'nobody/nothing' is not a folder",),
    ),
    lora(
        "an adapter whose base is gone",
        lambda desk: None,
        "m: its base model /gone does not exist",
        base_model_name_or_path="/gone",
    ),
    lora(
        "an adapter that names no base",
        lambda desk: None,
        "m: adapter_config.json names no base model",
        base_model_name_or_path=None,
    ),
    lora("an adapter of another base", narrow_base, "m: the adapter does not fit its base", "size mismatch"),
    lora(
        "a broken adapter_config.json", holding("adapter_config.json", "{"), "m/adapter_config.json is damaged", "copy it again"
    ),
    lora("an adapter without weights", without("adapter_model.safetensors"), "m holds no adapter_model.safetensors"),
    Kind(
        "a critic of other words",
        "run ppo.yaml policy.model_name_or_path=other critic={model_name_or_path: $reward}",
        ("critic: ", "has another tokenizer than the policy"),
        make=other_words,
    ),
    Kind(
        "policies of other words compared",
        "run compare.yaml after.model_name_or_path=other",
        ("other have different tokenizers",),
        make=other_words,
    ),
    *ENSEMBLES,
]
"""Every kind of bad model."""
