"""One model of the mean of several members' weights."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import batch_of, build_model, build_tokenizer, random_rows

from rewarden.errors import ConfigError
from rewarden.models.adapters import trainable
from rewarden.models.average import average_members
from rewarden.models.ensemble import load_ensemble
from rewarden.models.ensemble_folder import save_adapted_members, save_independent
from rewarden.models.load import Model, save_model
from rewarden.models.members import load_adapted_members, start_heads
from rewarden.models.reward import load_reward_model

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def spec(folder, **fields) -> Model:
    return Model(model_name_or_path=str(folder), **fields)


def trained(base, folder, seed: int, *, head_seed: int = 0, size: float = 0.02, **fields):
    """A reward model as some training would leave it, saved."""
    model = load_reward_model(spec(base, **fields), head="fresh", head_seed=head_seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in trainable(model.model):
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))
    save_model(model.model, model.tokenizer, folder, extra={"role": "reward"})
    return folder


def lora_ensemble(base, folder, num: int, **fields):
    seeds = tuple(range(num))
    model = spec(base, **{"lora_r": 1, "lora_alpha": 1, **fields})
    members = load_adapted_members(model, heads_KD=start_heads(model, head="fresh", seeds=seeds), seeds=seeds, device="cpu")
    return save_adapted_members(
        members.model, members.tokenizer, folder, seeds=seeds, extra={}, member_extra=[{} for _ in seeds]
    )  # fmt: skip


def edited(folder, change) -> None:
    """Every tensor of an adapter, replaced by what `change(name, tensor)` makes of it."""
    file = folder / "adapter_model.safetensors"
    tensors = {name: change(name, tensor).contiguous() for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def test_whole_models_are_averaged_weight_by_weight(saved, tmp_path):
    base = saved()
    folders = [trained(base, tmp_path / f"m{seed}", seed) for seed in range(3)]
    found = average_members([spec(folder) for folder in folders])
    files = [load_file(folder / "model.safetensors") for folder in folders]
    ours = found.model.model.state_dict()
    for name in files[0]:
        expected = torch.stack([tensors[name].double() for tensors in files]).mean(0).float()
        torch.testing.assert_close(ours[name], expected, rtol=0, atol=1e-7)
    assert found.members == tuple(map(str, folders))
    assert 0 < found.distance < 0.5


def test_an_independent_ensemble_is_averaged_like_its_members_and_reloads_bit_for_bit(saved, tmp_path):
    base = saved()
    folders = [trained(base, tmp_path / f"m{seed}", seed) for seed in range(2)]
    tokenizer = load_reward_model(spec(folders[0])).tokenizer
    save_independent(folders, tokenizer, tmp_path / "two", seeds=(0, 1), extra={"template": "chat"})
    together = average_members([spec(tmp_path / "two")]).model
    alone = average_members([spec(folder) for folder in folders]).model
    batch = batch_of(random_rows([9, 3, 17, 1]))
    assert torch.equal(together.score(batch), alone.score(batch))
    save_model(together.model, together.tokenizer, tmp_path / "mean", extra={"role": "reward"})
    loaded = load_ensemble(spec(tmp_path / "mean"))
    assert (loaded.family, loaded.num_members) == ("single", 1)
    assert torch.equal(loaded.score(batch), together.score(batch))


def test_lora_products_are_averaged_not_factors(saved, tmp_path):
    """Specification T26: what 3 of 10 members learned keeps .3 (and not .09), what 9 of 10 learned keeps .9 (not .81)."""
    folder = lora_ensemble(saved(), tmp_path / "ten", 10, lora_layers=1)
    trunk = load_file(folder / "trunk" / "model.safetensors")
    for member in range(10):

        def change(name, tensor, member=member):
            out = torch.zeros_like(tensor) if "lora_" in name else tensor
            if "lora_A" in name and "q_proj" in name:
                out[0, 0] = float(member < 3)
            elif "lora_A" in name and "v_proj" in name:
                out[0, 0] = float(member < 9)
            elif "lora_B" in name and ("q_proj" in name or "v_proj" in name):
                out[0, 0] = float(member < 3 if "q_proj" in name else member < 9)
            return out

        edited(folder / f"member_{member}", change)
    found = average_members([spec(folder)])
    assert len(found.members) == 10
    ours = found.model.model.state_dict()
    moved = {name: ours[name] - trunk[name] for name in trunk if not name.startswith("score")}
    (query,) = [name for name in moved if "q_proj" in name and moved[name].any()]
    (value,) = [name for name in moved if "v_proj" in name and moved[name].any()]
    assert float(moved[query][0, 0]) == pytest.approx(0.3, abs=1e-6)
    assert float(moved[value][0, 0]) == pytest.approx(0.9, abs=1e-6)
    assert sum(int(change.any()) for change in moved.values()) == 2
    assert sum(int((change != 0).sum()) for change in moved.values()) == 2


def test_lora_members_are_averaged_with_their_scale_and_their_heads(saved, tmp_path):
    """W + mean of alpha / r * B_k A_k, and the mean head, written out from the files."""
    folder = lora_ensemble(saved(), tmp_path / "three", 3, lora_r=2, lora_alpha=8)
    for member in range(3):
        generator = torch.Generator().manual_seed(member)
        edited(folder / f"member_{member}", lambda _, t, g=generator: t + 0.02 * torch.randn(t.shape, generator=g))
    trunk = load_file(folder / "trunk" / "model.safetensors")
    files = [load_file(folder / f"member_{member}" / "adapter_model.safetensors") for member in range(3)]
    found = average_members([spec(folder)]).model
    ours = found.model.state_dict()
    downs = [name for name in files[0] if "lora_A" in name]
    assert len(downs) == 3 * 7
    for name in downs:
        products = [4.0 * tensors[name.replace("lora_A", "lora_B")].double() @ tensors[name].double() for tensors in files]
        place = name.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")
        torch.testing.assert_close(ours[place], (trunk[place] + torch.stack(products).mean(0)).float(), rtol=0, atol=1e-6)
    heads = [next(t for name, t in tensors.items() if name.endswith("score.weight")) for tensors in files]
    torch.testing.assert_close(ours["score.weight"], torch.stack(heads).mean(0), rtol=0, atol=1e-7)
    assert not any("lora" in name for name in ours)


def test_single_adapters_on_one_trunk_are_averaged_too(saved, tmp_path):
    base = saved()
    folders = [trained(base, tmp_path / f"a{seed}", seed, lora_r=2) for seed in range(2)]
    found = average_members([spec(folder) for folder in folders])
    merged = [load_reward_model(spec(folder)).model.merge_and_unload().state_dict() for folder in folders]
    ours = found.model.model.state_dict()
    name = "model.layers.2.mlp.up_proj.weight"
    torch.testing.assert_close(ours[name], (merged[0][name] + merged[1][name]) / 2, rtol=0, atol=1e-6)
    assert not torch.equal(merged[0][name], merged[1][name])


def test_heads_of_unlike_start_are_seen_in_their_cosine(saved, tmp_path):
    base = saved()
    alike = [trained(base, tmp_path / f"a{s}", s, size=0.002) for s in range(2)]
    unlike = [trained(base, tmp_path / f"u{s}", s, head_seed=s, size=0.002) for s in range(2)]
    assert average_members([spec(folder) for folder in alike]).head_cosine > 0.95
    assert abs(average_members([spec(folder) for folder in unlike]).head_cosine) < 0.6


def refused(words: str, *models: Model) -> None:
    with pytest.raises(ConfigError, match=words):
        average_members(models)


def test_members_that_have_no_mean_are_refused(saved, tmp_path):
    base = saved()
    one = trained(base, tmp_path / "one", 1)
    refused("one member has no mean; give two or more", spec(one))
    linear = load_reward_model(spec(base), head="fresh", num_heads=3)
    save_model(linear.model, linear.tokenizer, tmp_path / "linear")
    refused("has 3 heads on one trunk, whose mean is the mean of their scores", spec(tmp_path / "linear"), spec(one))
    narrow = trained(saved(name="narrow", intermediate_size=40), tmp_path / "narrow_r", 1)
    refused(r"narrow_r and .*one have different shapes, first model.layers.0.mlp.down_proj.weight", spec(one), spec(narrow))
    adapter = trained(base, tmp_path / "adapter", 1, lora_r=2)
    refused("is an adapter, the other a whole model", spec(one), spec(adapter))
    elsewhere = trained(saved(name="elsewhere", seed=1), tmp_path / "elsewhere_r", 1)
    refused("they did not start from the same weights, and their mean is no model", spec(one), spec(elsewhere))
    moved = trained(trained(base, tmp_path / "moved", 5), tmp_path / "other_adapter", 1, lora_r=2)
    refused("are adapters on different trunks", spec(adapter), spec(moved))


def test_members_that_read_texts_otherwise_are_refused(saved, tmp_path):
    base = saved()
    one, two = (trained(base, tmp_path / f"m{seed}", seed) for seed in range(2))
    card = json.loads((two / "rewarden.json").read_text())
    (two / "rewarden.json").write_text(json.dumps({**card, "template": "alpaca"}))
    refused("has the template 'alpaca', .*m0 'chat'", spec(one), spec(two))
    words = ["<unk>", "<s>", "</s>", *(f"v{n}" for n in range(57)), "<|endoftext|>"]
    three = trained(base, tmp_path / "m3", 3)
    build_tokenizer(words).save_pretrained(three)
    refused("have different tokenizers", spec(one), spec(three))
    assert build_model("llama").config.vocab_size == 61
