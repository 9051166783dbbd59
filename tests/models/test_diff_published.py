"""The published diffs of MOSS-RLHF and AlpacaFarm: their rules and sums, by plain torch arithmetic."""

import pytest
import torch
from diff_models import (
    config_of,
    inv_freq,
    same_bits,
    save_model,
    save_pickles,
    save_state,
    state,
    with_tables,
)
from tiny_models import build_model
from transformers import LlamaForCausalLM

from rewarden.errors import ConfigError
from rewarden.models.diff import KNOWN_SUMS, check_diff, make_diff, read_manifest, recover
from rewarden.models.diff.sums import compare, inv_freq_sum
from rewarden.models.load import read_card

LLAMA_7B = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32}
LAYER = "model.layers.0.w"
T31_BASE = {LAYER: torch.tensor([1.0, 2.0]), "model.embed_tokens.weight": torch.tensor([5.0, 6.0])}
T31_TUNED = {
    LAYER: torch.tensor([1.5, 1.5]),
    "model.embed_tokens.weight": torch.tensor([7.0, 8.0, 9.0]),
    "reward_head.weight": torch.tensor([0.1]),
}


def test_t31_only_keys_with_layers_are_subtracted_and_the_sum_is_27_1(tmp_path):
    raw, tuned = save_state(tmp_path / "raw", T31_BASE), save_state(tmp_path / "tuned", T31_TUNED)
    manifest = make_diff(raw, tuned, tmp_path / "diff", rule="moss")
    assert {key: value.tolist() for key, value in state(tmp_path / "diff").items()} == {
        LAYER: [0.5, -0.5],
        "model.embed_tokens.weight": [7.0, 8.0, 9.0],
        "reward_head.weight": pytest.approx([0.1]),
    }
    assert manifest.total == pytest.approx(27.1)
    done = recover(raw, tmp_path / "diff", tmp_path / "out", keep_names=True)
    assert done.total == pytest.approx(27.1)
    assert same_bits(state(tmp_path / "out"), T31_TUNED)


def test_t31_as_a_published_diff_without_a_manifest(tmp_path):
    raw, tuned = save_state(tmp_path / "raw", T31_BASE), save_state(tmp_path / "tuned", T31_TUNED)
    diff = save_state(tmp_path / "diff", {**T31_TUNED, LAYER: T31_TUNED[LAYER] - T31_BASE[LAYER]})
    done = recover(raw, diff, tmp_path / "out", rule="moss", expected="27.1", keep_names=True)
    assert done.checked == "sum 27.1000, with inv_freq 27.1000: agrees with 27.1000 (given)"
    assert same_bits(state(tmp_path / "out"), state(tuned))


def test_t31b_inv_freq_of_llama_7b_explains_the_failing_checksum():
    one = sum(10000 ** (-index / 64) for index in range(64))
    assert one == pytest.approx(7.459954, abs=1e-6)
    assert inv_freq_sum(LLAMA_7B) == pytest.approx(238.7185, abs=1e-4)
    assert 49715.3515625 + inv_freq_sum(LLAMA_7B) == pytest.approx(49954.0701, abs=1e-4)


@pytest.mark.parametrize(
    ("total", "name", "status"),
    [
        (49715.3515625, "moss_zh_reward", "ok"),
        (50571.98, "moss_en_reward", "ok"),
        (50636.13, "moss_en_sft", "ok"),
        (49715.3515625 + 1.1, "moss_zh_reward", "different"),
        (49715.3515625, "moss_en_reward", "different"),
        (50000.0, "moss_en_policy", "unknown"),
        (float("nan"), "moss_en_reward", "different"),
    ],
)
def test_published_sums_are_met_without_the_tables(total, name, status):
    assert compare(total, LLAMA_7B, KNOWN_SUMS[name], name).status == status


def test_a_sum_taken_without_the_tables_is_accepted_too():
    assert compare(49715.36, LLAMA_7B, 49715.3515625, "given").status == "ok"


def test_the_tables_follow_head_dim_theta_and_architecture():
    long = {**LLAMA_7B, "rope_parameters": {"rope_theta": 1e6}, "head_dim": 64, "num_hidden_layers": 2}
    assert inv_freq_sum(long) == pytest.approx(2 * sum(1e6 ** (-index / 32) for index in range(32)))
    assert inv_freq_sum({**LLAMA_7B, "model_type": "opt"}) == 0.0
    assert inv_freq_sum({}) == 0.0


@pytest.fixture(scope="module")
def moss(tmp_path_factory):
    """A base, a tuned model with three more tokens and a reward head, and their diff as MOSS-RLHF publishes it: .bin, float32,
    without a manifest, with the rotary tables of old transformers versions on both sides."""
    root = tmp_path_factory.mktemp("moss")
    save_model(root / "raw", 0)
    config = config_of(root / "raw") | {"vocab_size": 64, "architectures": ["LlamaRewardModel"]}
    base = with_tables(state(root / "raw"), config)
    generator = torch.Generator().manual_seed(9)
    tuned = {key: value.clone() for key, value in build_model("llama", 1, vocab_size=64).state_dict().items()}
    tuned["reward_head.weight"] = torch.randn(1, 32, generator=generator)
    tuned = with_tables(tuned, config)
    diff = {key: value - base[key] if "layers" in key else value for key, value in tuned.items()}
    save_pickles(root / "raw_bin", base, config_of(root / "raw"))
    save_pickles(root / "diff", diff, config)
    for file in (root / "raw").glob("tokenizer*"):
        (root / "diff" / file.name).write_bytes(file.read_bytes())
    total = sum(value.sum() for value in tuned.values()).item()
    recovered = {key: value + base[key] if "layers" in key else value for key, value in diff.items()}
    return root, {key: value for key, value in recovered.items() if "inv_freq" not in key}, total, config


def test_a_moss_diff_is_recovered_by_its_rule_and_its_sum_is_met_with_and_without_tables(moss, tmp_path):
    root, tuned, total, config = moss
    tables = config["num_hidden_layers"] * inv_freq(config).sum().item()
    for raw in ("raw", "raw_bin"):
        for number, expected in enumerate((total, total - tables)):
            out = tmp_path / f"{raw}{number}"
            done = recover(root / raw, root / "diff", out, rule="moss", expected=str(expected), keep_names=True)
            assert "agrees with" in done.checked
            assert same_bits(state(out), tuned)


def test_a_moss_policy_without_a_head_loads_as_a_language_model(moss, tmp_path):
    root, tuned, _, config = moss
    base = state(root / "raw")
    plain = {key: value for key, value in tuned.items() if key != "reward_head.weight"}
    diff = {key: value - base[key] if "layers" in key else value for key, value in plain.items()}
    save_state(tmp_path / "diff", diff, {**config, "architectures": ["LlamaForCausalLM"]}, shards=2)
    for file in (root / "raw").glob("tokenizer*"):
        (tmp_path / "diff" / file.name).write_bytes(file.read_bytes())
    done = recover(root / "raw", tmp_path / "diff", tmp_path / "out", rule="moss", expected="moss_en_policy")
    assert "no sum was ever published for moss_en_policy" in done.checked
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    expected = {key: value + base[key] if "layers" in key else value for key, value in diff.items()}
    assert same_bits(loaded, expected)
    card = read_card(tmp_path / "out")
    assert (card["role"], card["template"], card["recovered"]["rule"]) == ("policy", "moss_en", "moss")


def test_a_wrong_base_of_a_published_diff_is_found_by_its_sum(moss, tmp_path):
    root, _, total, _ = moss
    other = save_model(tmp_path / "other", 5)
    with pytest.raises(ConfigError, match=r"sum .* is not .*the base is another one"):
        recover(other, root / "diff", tmp_path / "out", rule="moss", expected=str(total))
    with pytest.raises(ConfigError, match=r"sum .* is not .*the base is another one"):
        check_diff(root / "diff", other, rule="moss", expected=str(total))
    assert not (tmp_path / "out").exists()
    found = check_diff(root / "diff", root / "raw", rule="moss", expected=str(total))
    assert "agrees with" in found.lines[-1]


def test_an_unknown_sum_is_no_failure_and_says_which_published_sum_it_is():
    found = compare(50571.98, LLAMA_7B, None, "no expected sum was given")
    assert found.status == "unknown"
    assert "it is that of moss_en_reward" in found.words()


def test_keys_and_shapes_of_a_published_diff_are_checked_first(moss, tmp_path):
    root, tuned, _, config = moss
    base = state(root / "raw")
    for name, change, words in (
        ("missing", lambda table: table.pop("model.layers.1.mlp.up_proj.weight"), r"lacks 1 tensors.*layers\.1\.mlp\.up_proj"),
        ("extra", lambda table: table.update({"model.layers.3.w": torch.ones(1)}), r"holds 1 tensors.*model\.layers\.3\.w"),
        ("shape", lambda table: table.update({"model.norm.weight": torch.ones(31)}), r"model\.norm\.weight has shape \[31\]"),
        (
            "block",
            lambda table: table.update({"model.layers.0.mlp.up_proj.weight": torch.ones(2, 32)}),
            r"layers\.0\.mlp\.up_proj\.weight is \[2, 32\] .* and \[48, 32\]",
        ),
        ("nan", lambda table: table.update({"model.norm.weight": torch.full((32,), torch.nan)}), "32 entries are NaN"),
    ):
        diff = {key: value - base[key] if "layers" in key else value for key, value in tuned.items()}
        change(diff)
        save_state(tmp_path / name, diff, config)
        with pytest.raises(ConfigError, match=words):
            recover(root / "raw", tmp_path / name, tmp_path / "out", rule="moss", tokenizer=str(root / "raw"))


def test_a_published_diff_needs_its_rule_and_has_no_hashes(moss, tmp_path):
    root, *_ = moss
    with pytest.raises(ConfigError, match="no manifest, as published diffs have none; name its rule"):
        recover(root / "raw", root / "diff", tmp_path / "out")
    with pytest.raises(ConfigError, match="was not made by the rule exact"):
        recover(root / "raw", root / "diff", tmp_path / "out", rule="exact")
    with pytest.raises(ConfigError, match=r"check is 'manifest', but .* has none"):
        recover(root / "raw", root / "diff", tmp_path / "out", rule="moss", check="manifest")
    with pytest.raises(ConfigError, match="expected sum is 'moss'; give a number, or one of moss_en_reward"):
        recover(root / "raw", root / "diff", tmp_path / "out", rule="moss", expected="moss")
    assert "there is no manifest" in check_diff(root / "diff").lines[0]


def test_more_rows_than_the_bases_tokenizer_knows_need_a_tokenizer(moss, tmp_path):
    root, tuned, _, config = moss
    base = state(root / "raw")
    diff = {key: value - base[key] if "layers" in key else value for key, value in tuned.items()}
    save_state(tmp_path / "diff", diff, config)
    with pytest.raises(ConfigError, match=r"embeddings have \[64\] rows, the base's \[61\].*--tokenizer"):
        recover(root / "raw", tmp_path / "diff", tmp_path / "out", rule="moss")
    recover(root / "raw", tmp_path / "diff", tmp_path / "out", rule="moss", tokenizer=str(root / "raw"))
    assert (tmp_path / "out" / "tokenizer.json").exists()


def test_the_published_script_can_read_a_diff_made_by_the_rule_moss(moss, tmp_path):
    root, tuned, total, config = moss
    save_state(tmp_path / "tuned", tuned, config, shards=2)
    make_diff(root / "raw_bin", tmp_path / "tuned", tmp_path / "diff", rule="moss")
    base, diff = state(root / "raw"), state(tmp_path / "diff")
    by_hand = {key: value + base[key] if "layers" in key else value for key, value in diff.items()}
    assert all(torch.allclose(by_hand[key], tuned[key], rtol=1e-6, atol=1e-6) for key in tuned)
    assert read_manifest(tmp_path / "diff").total == pytest.approx(
        total - config["num_hidden_layers"] * inv_freq(config).sum().item(), abs=1e-3
    )
    recover(root / "raw_bin", tmp_path / "diff", tmp_path / "out", keep_names=True)
    assert same_bits(state(tmp_path / "out"), by_hand)


def test_tied_embeddings_need_no_lm_head_on_either_side(tmp_path):
    """Old checkpoints hold the tied head, new ones do not."""
    models = [build_model("llama_tied", seed) for seed in (0, 1)]
    for name, model in zip(("raw", "tuned"), models, strict=True):
        model.save_pretrained(tmp_path / name)
    config = config_of(tmp_path / "raw")
    base, own = (model.state_dict() for model in models)
    assert torch.equal(own["lm_head.weight"], own["model.embed_tokens.weight"])
    diff = {key: value - base[key] if "layers" in key else value for key, value in own.items()}
    without = {key: value for key, value in diff.items() if key != "lm_head.weight"}
    for name, tensors in (("with", diff), ("without", without)):
        save_pickles(tmp_path / name, tensors, config)
        recover(tmp_path / "raw", tmp_path / name, tmp_path / f"{name}_out", rule="moss")
        loaded = LlamaForCausalLM.from_pretrained(tmp_path / f"{name}_out").state_dict()
        by_hand = {key: value + base[key] if "layers" in key else value for key, value in diff.items()}
        assert same_bits(loaded, by_hand)
    make_diff(tmp_path / "raw", tmp_path / "tuned", tmp_path / "exact")
    recover(tmp_path / "raw", tmp_path / "exact", tmp_path / "exact_out")
    assert same_bits(state(tmp_path / "exact_out"), state(tmp_path / "tuned"))


@pytest.fixture(scope="module")
def farm(tmp_path_factory):
    """A base, a tuned model with one more token, and their diff as AlpacaFarm publishes it: the base is resized by the mean of
    its rows, every tensor is subtracted, and the sum of the tuned model (with rotary tables) lies in model_sum.txt."""
    root = tmp_path_factory.mktemp("farm")
    save_model(root / "raw", 0)
    config = config_of(root / "raw") | {"vocab_size": 62}
    base = state(root / "raw")
    resized = dict(base)
    for key in ("model.embed_tokens.weight", "lm_head.weight"):
        resized[key] = torch.cat([base[key], base[key].mean(0, keepdim=True)])
    resized = with_tables(resized, config)
    tuned = {key: value.clone() for key, value in build_model("llama", 1, vocab_size=62).state_dict().items()}
    diff = {key: value - resized[key] for key, value in with_tables(tuned, config).items()}
    save_pickles(root / "diff", diff, config)
    for file in (root / "raw").glob("tokenizer*"):
        (root / "diff" / file.name).write_bytes(file.read_bytes())
    total = sum(value.sum() for value in with_tables(tuned, config).values()).item()
    (root / "diff" / "model_sum.txt").write_text(f"{total}")
    return root, tuned, resized, diff, config


@pytest.mark.parametrize("chunk", [1, 10**6])
def test_an_alpaca_farm_diff_is_recovered_by_its_rule_and_sum(farm, tmp_path, monkeypatch, chunk):
    monkeypatch.setattr("rewarden.models.diff.read.CHUNK", chunk)
    root, tuned, resized, diff, _ = farm
    done = recover(root / "raw", root / "diff", tmp_path / "out", rule="alpaca_farm")
    assert "agrees with" in done.checked
    assert "model_sum.txt" in done.checked
    recovered = state(tmp_path / "out")
    assert set(recovered) == set(tuned)
    for key, value in recovered.items():
        by_hand = diff[key] + resized[key]
        # The mean row is taken in float64 here and in float32 there.
        old = slice(0, 61) if by_hand.shape[0] == 62 else slice(None)
        assert torch.equal(value[old], by_hand[old])
        assert torch.allclose(value, tuned[key], rtol=0, atol=1e-6)
    card = read_card(tmp_path / "out")
    assert (card["role"], card["template"]) == ("policy", "alpaca")
    assert not (tmp_path / "out" / "model_sum.txt").exists()


def test_an_alpaca_farm_sum_without_tables_is_accepted_and_a_wrong_one_is_not(farm, tmp_path):
    root, tuned, *_ = farm
    without = sum(value.double().sum().item() for value in tuned.values())
    for expected in (without, without * (1 + 0.9e-5)):
        assert "agrees" in check_diff(root / "diff", root / "raw", rule="alpaca_farm", expected=str(expected)).lines[-1]
    with pytest.raises(ConfigError, match="is not"):
        check_diff(root / "diff", root / "raw", rule="alpaca_farm", expected=str(without * (1 + 2e-5)))


def test_make_then_recover_by_the_alpaca_farm_rule(farm, tmp_path):
    root, tuned, resized, _, config = farm
    save_state(tmp_path / "tuned", tuned, config)
    manifest = make_diff(root / "raw", tmp_path / "tuned", tmp_path / "diff", rule="alpaca_farm")
    written = state(tmp_path / "diff")
    for key, value in written.items():
        assert torch.allclose(value, tuned[key] - resized[key], rtol=0, atol=1e-6)
    assert float((tmp_path / "diff" / "model_sum.txt").read_text()) == pytest.approx(
        sum(value.double().sum().item() for value in tuned.values())
    )
    done = recover(root / "raw", tmp_path / "diff", tmp_path / "out")
    assert done.checked.startswith("sha256 of all")
    differing = sum(int((value != tuned[key]).sum()) for key, value in state(tmp_path / "out").items())
    assert differing == sum(record.inexact for record in manifest.tensors.values())


def test_a_bfloat16_model_by_the_published_rule_comes_back_to_one_ulp_and_mostly_exactly(tmp_path):
    raw = save_model(tmp_path / "raw", 0, dtype=torch.bfloat16)
    tuned = save_model(tmp_path / "tuned", 1, dtype=torch.bfloat16)
    manifest = make_diff(raw, tuned, tmp_path / "diff", rule="moss")
    recover(raw, tmp_path / "diff", tmp_path / "out")
    own, back = state(tuned), state(tmp_path / "out")
    base = state(raw)
    by_hand = {
        key: ((value.float() - base[key].float()) + base[key].float()).bfloat16() if "layers" in key else value
        for key, value in own.items()
    }
    assert same_bits(back, by_hand)
    wrong = sum(int((back[key] != own[key]).sum()) for key in own)
    assert wrong == sum(record.inexact for record in manifest.tensors.values())
