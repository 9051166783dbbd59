"""Recovered and imported reward checkpoints load as Rewarden reward models and critics, with the scores that torch gives."""

import json
import shutil

import pytest
import torch
from diff_models import config_of, same_bits, save_model, save_pickles, save_state, state
from tiny_models import batch_of, build_model, random_rows
from transformers import AutoModelForSequenceClassification, LlamaForCausalLM

from rewarden.errors import ConfigError
from rewarden.models.diff import import_reward, make_diff, recover
from rewarden.models.forward import sequence_values
from rewarden.models.load import Model, load_policy, read_card
from rewarden.models.reward import load_reward_model

MOSS_TOKENS = ["<|Human|>", "<|MOSS|>"]


def hidden(model: LlamaForCausalLM, row: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model.model(input_ids=torch.tensor([row])).last_hidden_state[0]


def load(folder):
    return load_reward_model(Model(model_name_or_path=str(folder), dtype="float32"))


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """A base folder, a tuned language model with its folder's config, and a head."""
    root = tmp_path_factory.mktemp("reward")
    save_model(root / "raw", 0)
    model = build_model("llama", 1, vocab_size=63)
    head = torch.randn(1, 32, generator=torch.Generator().manual_seed(4))
    config = config_of(root / "raw") | {"vocab_size": 63}
    return root, model, head, config


@pytest.fixture
def moss(parts, tmp_path):
    """A reward model as MOSS-RLHF keeps it: the language model and `reward_head` beside it."""
    root, model, head, config = parts
    tensors = {**model.state_dict(), "reward_head.weight": head}
    save_state(tmp_path / "tuned", tensors, config | {"architectures": ["LlamaRewardModel"]}, shards=2)
    for file in (root / "raw").glob("tokenizer*"):
        shutil.copy(file, tmp_path / "tuned")
    return tmp_path / "tuned"


@pytest.fixture
def farm(parts, tmp_path):
    """A reward model as AlpacaFarm keeps it: the backbone inside, a head with a bias, a config that only names a path."""
    root, model, head, _ = parts
    backbone = tmp_path / "sft10k"
    model.save_pretrained(backbone)
    for file in (root / "raw").glob("tokenizer*"):
        shutil.copy(file, backbone)
    tensors = {f"backbone_model.{key}": value for key, value in model.state_dict().items()}
    tensors |= {"reward_head.weight": head, "reward_head.bias": torch.tensor([0.25])}
    said = {"model_type": "reward_model", "backbone_model_name_or_path": str(backbone), "architectures": ["RewardModel"]}
    save_pickles(tmp_path / "farm", tensors, said)
    return tmp_path / "farm"


def check_scores_and_values(folder, model, head) -> None:
    """The folder's scores and values against the backbone's hidden states times the head."""
    loaded = load(folder)
    rows = random_rows([7, 3, 12])
    expected = torch.stack([hidden(model, row)[-1] @ head[0] for row in rows])
    assert torch.allclose(loaded.score(batch_of(rows))[:, 0], expected, atol=1e-5)
    values = sequence_values(loaded.model, batch_of(rows)).detach()
    for row, value in zip(rows, values, strict=True):
        by_hand = hidden(model, row) @ head[0]
        assert value[0] == 0
        assert torch.allclose(value[1 : len(row)], by_hand[:-1], atol=1e-5)


@pytest.mark.parametrize("rule", ["exact", "moss"])
def test_a_recovered_moss_reward_model_scores_and_values_as_the_original(parts, moss, tmp_path, rule):
    root, model, head, _ = parts
    make_diff(root / "raw", moss, tmp_path / "diff", rule=rule)
    recover(root / "raw", tmp_path / "diff", tmp_path / "out")
    check_scores_and_values(tmp_path / "out", model, head)
    card = read_card(tmp_path / "out")
    assert (card["role"], card["template"], card["extra_tensors"]) == ("reward", "moss_en", ["lm_head.weight"])
    assert card["recovered"]["base"] == "raw"


def test_transformers_alone_loads_what_was_recovered_and_every_bit_is_kept(parts, moss, tmp_path):
    root, model, head, _ = parts
    make_diff(root / "raw", moss, tmp_path / "diff")
    recover(root / "raw", tmp_path / "diff", tmp_path / "out")
    assert same_bits(state(tmp_path / "out"), {**model.state_dict(), "score.weight": head})
    loaded, info = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert type(loaded).__name__ == "LlamaForSequenceClassification"
    assert (loaded.config.num_labels, loaded.config.vocab_size) == (1, 63)
    assert torch.equal(loaded.score.weight, head)


def test_keep_names_leaves_the_original_layout(parts, moss, tmp_path):
    root, *_ = parts
    make_diff(root / "raw", moss, tmp_path / "diff")
    recover(root / "raw", tmp_path / "diff", tmp_path / "out", keep_names=True)
    assert same_bits(state(tmp_path / "out"), state(moss))
    assert config_of(tmp_path / "out") == config_of(moss)
    with pytest.raises(ConfigError, match="becomes one by `rewarden import`"):
        load(tmp_path / "out")


def test_a_published_moss_reward_diff_becomes_a_reward_model_in_bfloat16_with_a_float32_head(parts, moss, tmp_path):
    root, _, head, config = parts
    base, tuned = state(root / "raw"), state(moss)
    diff = {key: value - base[key] if "layers" in key else value for key, value in tuned.items()}
    save_pickles(tmp_path / "diff", diff, config)
    (tmp_path / "diff" / "added_tokens.json").write_text(json.dumps({"<|Human|>": 61, "<|MOSS|>": 62}))
    for file in moss.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "diff")
    recover(root / "raw", tmp_path / "diff", tmp_path / "out", rule="moss", dtype="bfloat16")
    written = state(tmp_path / "out")
    by_hand = {key: (value + base[key] if "layers" in key else value).bfloat16() for key, value in diff.items()}
    del by_hand["reward_head.weight"]
    assert same_bits(written, {**by_hand, "score.weight": head})
    assert read_card(tmp_path / "out")["template"] == "moss_zh"
    assert config_of(tmp_path / "out")["dtype"] == "bfloat16"
    plain = {key: value.float() for key, value in by_hand.items()}
    model = build_model("llama", 1, vocab_size=63)
    model.load_state_dict(plain)
    check_scores_and_values(tmp_path / "out", model, head)


def test_a_moss_reward_checkpoint_is_imported(parts, moss, tmp_path):
    _, model, head, _ = parts
    assert import_reward(moss, tmp_path / "out") == ()
    check_scores_and_values(tmp_path / "out", model, head)
    assert same_bits(state(tmp_path / "out"), {**model.state_dict(), "score.weight": head})
    card = read_card(tmp_path / "out")
    assert (card["template"], card["imported"]["from"]) == ("moss_en", "moss")


def test_an_alpaca_farm_reward_checkpoint_is_imported_and_its_bias_is_said(parts, farm, tmp_path):
    _, model, head, _ = parts
    notes = import_reward(farm, tmp_path / "out")
    assert any("bias 0.25 is left out" in note for note in notes)
    check_scores_and_values(tmp_path / "out", model, head)
    card = read_card(tmp_path / "out")
    assert (card["role"], card["template"], card["left_out_bias"]) == ("reward", "alpaca", [0.25])
    assert config_of(tmp_path / "out")["architectures"] == ["LlamaForSequenceClassification"]
    assert "backbone_model_name_or_path" not in config_of(tmp_path / "out")


def test_a_backbone_that_moved_is_named_and_may_be_given(parts, farm, tmp_path):
    _, model, head, _ = parts
    moved = tmp_path / "elsewhere"
    (tmp_path / "sft10k").rename(moved)
    with pytest.raises(ConfigError, match=r"names the backbone '.*sft10k', where no config.json lies; give .*--backbone"):
        import_reward(farm, tmp_path / "out")
    with pytest.raises(ConfigError, match="backbone is 'nowhere', where no config"):
        import_reward(farm, tmp_path / "out", backbone="nowhere")
    import_reward(farm, tmp_path / "out", backbone=str(moved))
    check_scores_and_values(tmp_path / "out", model, head)


def test_an_alpaca_farm_reward_diff_needs_the_base_alone(parts, farm, tmp_path):
    root, model, head, _ = parts
    make_diff(root / "raw", farm, tmp_path / "diff", rule="alpaca_farm")
    (tmp_path / "diff" / "diff.json").unlink()
    shutil.rmtree(tmp_path / "sft10k")
    done = recover(root / "raw", tmp_path / "diff", tmp_path / "out", rule="alpaca_farm", tokenizer=str(root / "raw"))
    assert "agrees with" in done.checked
    assert any("vocab_size 61 becomes 63" in note for note in done.notes)
    check_scores_and_values(tmp_path / "out", model, head)


def test_an_exact_diff_of_an_alpaca_farm_reward_model_comes_back_in_both_layouts(parts, farm, tmp_path):
    root, model, head, _ = parts
    make_diff(root / "raw", farm, tmp_path / "diff")
    recover(root / "raw", tmp_path / "diff", tmp_path / "same", keep_names=True)
    wrapped = {f"backbone_model.{key}": value for key, value in model.state_dict().items()}
    assert same_bits(
        state(tmp_path / "same"), {**wrapped, "reward_head.weight": head, "reward_head.bias": torch.tensor([0.25])}
    )
    recover(root / "raw", tmp_path / "diff", tmp_path / "ours", tokenizer=str(root / "raw"))
    check_scores_and_values(tmp_path / "ours", model, head)


def test_what_cannot_be_imported_is_named(parts, moss, farm, tmp_path):
    root, _, _, config = parts
    make_diff(root / "raw", moss, tmp_path / "diff")
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="is a weight diff; recover it instead"):
        import_reward(tmp_path / "diff", out)
    with pytest.raises(ConfigError, match=r"holds no reward_head\.weight"):
        import_reward(root / "raw", out)
    import_reward(moss, tmp_path / "ours")
    with pytest.raises(ConfigError, match=r"is a reward model with the head score\.weight already"):
        import_reward(tmp_path / "ours", out)
    tensors = state(moss)
    cases = {
        "missing": (
            {key: value for key, value in tensors.items() if "layers.2.mlp.up" not in key},
            {},
            r"lacks 1 .*layers\.2\.mlp",
        ),
        "extra": ({**tensors, "value_head.weight": torch.ones(1)}, {}, "value_head"),
        "shape": (tensors, {"intermediate_size": 50}, r"has shape \[32, 48\], config\.json makes it \[32, 50\]"),
        "kind": (tensors, {"model_type": "clip"}, "no sequence classifier for model_type 'clip'"),
    }
    for name, (held, changes, words) in cases.items():
        save_state(tmp_path / name, held, config | changes)
        for file in (root / "raw").glob("tokenizer*"):
            shutil.copy(file, tmp_path / name)
        with pytest.raises(ConfigError, match=words):
            import_reward(tmp_path / name, out)
    save_state(tmp_path / "mute", tensors, config)
    with pytest.raises(ConfigError, match="holds no tokenizer"):
        import_reward(tmp_path / "mute", out)
    assert not out.exists()


def test_an_import_stopped_halfway_goes_on(moss, tmp_path):
    def stop(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_reward(moss, tmp_path / "out", report=stop)
    said: list[str] = []
    import_reward(moss, tmp_path / "out", report=said.append)
    assert said[0].endswith("kept from an earlier try")
    import_reward(moss, tmp_path / "straight")
    assert same_bits(state(tmp_path / "out"), state(tmp_path / "straight"))


def test_an_imported_reward_model_is_no_policy(moss, tmp_path):
    import_reward(moss, tmp_path / "out")
    with pytest.raises(ConfigError, match="holds a reward model"):
        load_policy(Model(model_name_or_path=str(tmp_path / "out")))
