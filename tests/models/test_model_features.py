import pytest
import torch
from safetensors.torch import load_file
from tiny_models import KINDS, batch_of, random_rows
from torch import nn

from rewarden.errors import ConfigError, DataError
from rewarden.models.adapters import trainable
from rewarden.models.features import FeatureCache
from rewarden.models.forward import sequence_scores
from rewarden.models.load import Model
from rewarden.models.reward import load_reward_model


def reward(folder, **fields: object) -> nn.Module:
    return load_reward_model(Model(model_name_or_path=str(folder), **fields), head="fresh").model


CUTS = [{"trainable_layers": 1}, {"trainable_layers": 2}, {"trainable_layers": 0}, {"lora_r": 2, "lora_layers": 1}]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fields", CUTS, ids=str)
def test_scores_and_gradients_with_the_cache_are_those_without(kind, fields, saved, tmp_path, rows):
    model, batch = reward(saved(kind), **fields), batch_of(rows, filler=2, extra=2)
    with torch.no_grad():
        for _, parameter in trainable(model):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    weight = torch.linspace(-1, 1, len(rows))[:, None]
    cache = FeatureCache(tmp_path / "cache", model)
    results = []
    for features in (None, cache, cache):
        model.zero_grad()
        scores = sequence_scores(model, batch, features=features, max_tokens=60)
        (scores * weight).sum().backward()
        results.append((scores.detach(), [parameter.grad.clone() for _, parameter in trainable(model)]))
    (plain, gradients), computed, read = results
    assert (cache.computed, cache.read) == (len(rows), len(rows))
    for scores, got in (computed, read):
        assert ((scores - plain).abs() <= 1e-5 * (1 + plain.abs())).all()
        for a, b in zip(got, gradients, strict=True):
            assert (a - b).abs().max() <= 1e-5 * (1 + b.abs().max())
    assert torch.equal(computed[0], read[0])


def test_the_frozen_layers_run_once_per_row_and_the_files_outlive_the_object(saved, tmp_path, rows):
    folder = saved("llama")
    model, batch = reward(folder, trainable_layers=1), batch_of(rows)
    sequence_scores(model, batch, features=FeatureCache(tmp_path / "cache", model))
    calls: list[int] = []
    model.model.layers[0].register_forward_hook(lambda *args: calls.append(1))
    again = FeatureCache(tmp_path / "cache", model)
    calls.clear()
    sequence_scores(model, batch, features=again)
    assert calls == []
    assert (again.computed, again.read) == (0, len(rows))
    restarted = reward(folder, trainable_layers=1)
    fresh = FeatureCache(tmp_path / "cache", restarted)
    sequence_scores(restarted, batch, features=fresh)
    assert fresh.computed == 0


def test_the_head_alone_needs_one_vector_per_row(saved, tmp_path, rows):
    model = reward(saved("gpt2"), trainable_layers=0)
    cache = FeatureCache(tmp_path / "cache", model)
    assert cache.last_only
    sequence_scores(model, batch_of(rows), features=cache)
    files = list((tmp_path / "cache").rglob("*.safetensors"))
    assert {tuple(load_file(file)["hidden"].shape) for file in files} == {(1, 32)}


def test_other_weights_another_cut_or_other_ids_are_other_entries(saved, tmp_path, rows):
    folder, batch = saved("llama"), batch_of(rows)
    first = reward(folder, trainable_layers=1)
    keys = {FeatureCache(tmp_path, first).weights}
    keys.add(FeatureCache(tmp_path, reward(folder, trainable_layers=2)).weights)
    other = reward(folder, trainable_layers=1)
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight[0, 0] += 1e-3
    keys.add(FeatureCache(tmp_path, other).weights)
    keys.add(FeatureCache(tmp_path, reward(saved("llama", "other_rope", rope_theta=500.0), trainable_layers=1)).weights)
    assert len(keys) == 4
    cache = FeatureCache(tmp_path, first)
    sequence_scores(first, batch, features=cache)
    sequence_scores(first, batch_of([[*row[:-1], (row[-1] + 1) % 61] for row in rows]), features=cache)
    assert cache.computed == 2 * len(rows)


def test_foreign_stale_and_damaged_entries_are_refused(saved, tmp_path):
    folder = saved("llama")
    model, batch = reward(folder, trainable_layers=1), batch_of(random_rows([5]))
    cache = FeatureCache(tmp_path / "a", model)
    sequence_scores(model, batch, features=cache)
    (entry,) = (tmp_path / "a").rglob("*.safetensors")
    whole = entry.read_bytes()
    entry.write_bytes(whole[:-10])
    with pytest.raises(DataError, match="truncated or damaged"):
        sequence_scores(model, batch, features=cache)

    other = reward(saved("llama", "elsewhere", rope_theta=500.0), trainable_layers=1)
    foreign = FeatureCache(tmp_path / "b", other)
    sequence_scores(other, batch, features=foreign)
    (theirs,) = (tmp_path / "b").rglob("*.safetensors")
    entry.write_bytes(theirs.read_bytes())
    with pytest.raises(DataError, match="other weights or another row"):
        sequence_scores(model, batch, features=cache)
    entry.write_bytes(whole)
    sequence_scores(model, batch, features=cache)

    with pytest.raises(DataError, match="another model object"):
        sequence_scores(other, batch, features=cache)
    model.model.layers[1].requires_grad_(True)
    with pytest.raises(DataError, match="changed since"):
        sequence_scores(model, batch, features=cache)
    model.model.layers[1].requires_grad_(False)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(1.0)
    with pytest.raises(DataError, match="changed since"):
        sequence_scores(model, batch, features=cache)


@pytest.mark.parametrize("fields", [{}, {"lora_r": 2}, {"trainable_layers": 3}])
def test_a_model_whose_lowest_layer_trains_has_nothing_to_cache(fields, saved, tmp_path):
    with pytest.raises(ConfigError, match="need frozen lower layers"):
        FeatureCache(tmp_path, reward(saved("llama"), **fields))


def test_without_a_folder_the_cache_lies_where_the_environment_says(saved, tmp_path, monkeypatch):
    monkeypatch.setenv("REWARDEN_CACHE", str(tmp_path / "mine"))
    assert FeatureCache(None, reward(saved("llama"), trainable_layers=1)).folder.parent == tmp_path / "mine" / "features"


def test_cached_activations_carry_no_dropout(saved, tmp_path, rows):
    model = reward(saved("gpt2", attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5), trainable_layers=1)
    batch = batch_of(rows)
    expected = sequence_scores(model, batch)
    cache = FeatureCache(tmp_path, model)
    model.train()
    assert not torch.allclose(sequence_scores(model, batch, features=cache), expected)
    assert model.transformer.h[0].training
    model.eval()
    assert torch.allclose(sequence_scores(model, batch, features=cache), expected, atol=1e-5)
    assert cache.computed == len(rows)
