import json
import shutil

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tiny_models import KINDS, WORDS, batch_of, build_model, build_tokenizer, random_rows
from transformers import AutoModelForSequenceClassification

from rewarden.errors import ConfigError
from rewarden.maths import Moments
from rewarden.models.adapters import trainable
from rewarden.models.calibration import calibrate, calibration_card
from rewarden.models.ensemble import RewardEnsemble, critic_folder, load_ensemble, member_scores
from rewarden.models.ensemble_folder import files_hash, save_adapted_members, save_independent
from rewarden.models.heads import refuse_equal_heads, set_head
from rewarden.models.load import Model, load_policy, save_model
from rewarden.models.members import load_adapted_members, member_name, start_heads, trunk_hash
from rewarden.models.reward import load_reward_model

# peft asks transformers for an attribute under its old name; here peft is used directly.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

SEEDS = (11, 12, 13)


def spec(folder, **fields: object) -> Model:
    return Model(model_name_or_path=str(folder), **fields)


def disturb(parameters, seed: int = 1) -> None:
    """As training would: every trained parameter moves."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def adapter_weights(model):
    return [weight for name, weight in model.named_parameters() if "lora_" in name or "modules_to_save" in name]


def lora_members(folder, *, head="fresh", **fields):
    model = spec(folder, **{"lora_r": 2, **fields})
    heads_KD = start_heads(model, head=head, seeds=SEEDS)
    return load_adapted_members(model, heads_KD=heads_KD, seeds=SEEDS, device="cpu")


def save_lora(members, folder, **extra):
    return save_adapted_members(
        members.model, members.tokenizer, folder, seeds=SEEDS, extra=extra, member_extra=[{} for _ in SEEDS]
    )  # fmt: skip


def build_family(family, saved, folder, kind="llama"):
    """A disturbed ensemble of a family on disk, and its members' scores of a batch before it was saved."""
    base, batch = saved(kind), batch_of(random_rows([9, 3, 17, 1]))
    if family in ("single", "linear"):
        model = load_reward_model(spec(base), head="fresh", num_heads=1 if family == "single" else 3)
        disturb(p for _, p in trainable(model.model))
        save_model(model.model, model.tokenizer, folder)
        return batch, model.score(batch)
    if family == "independent":
        members = [load_reward_model(spec(base), head="fresh", head_seed=seed) for seed in SEEDS]
        for member, seed in zip(members, SEEDS, strict=True):
            disturb((p for _, p in trainable(member.model)), seed)
        places = [save_model(m.model, m.tokenizer, folder.parent / f"done_{k}") for k, m in enumerate(members)]
        save_independent(places, members[0].tokenizer, folder, seeds=SEEDS, extra={"template": "chat"})
        for place in places:
            shutil.rmtree(place)
        return batch, torch.cat([member.score(batch) for member in members], dim=1)
    members = lora_members(base, lora_layers=1)
    disturb(adapter_weights(members.model))
    save_lora(members, folder)
    return batch, member_scores(members.model, tuple(map(member_name, range(3))), batch)


FAMILIES = ["single", "linear", "independent", "lora"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_bit_equal_member_scores_after_reload_also_from_a_moved_folder(family, saved, tmp_path):
    batch, before = build_family(family, saved, tmp_path / "run" / "model")
    moved = tmp_path / "elsewhere" / "deeper" / "ensemble"
    moved.parent.mkdir(parents=True)
    for folder in (tmp_path / "run" / "model", moved):
        if folder == moved:
            (tmp_path / "run" / "model").rename(moved)
            # nothing outside the moved folder is needed
            shutil.rmtree(tmp_path / "run")
            shutil.rmtree(tmp_path / "llama")
        ensemble = load_ensemble(spec(folder))
        assert ensemble.family == family
        assert ensemble.num_members == before.shape[1] == (1 if family == "single" else 3)
        assert torch.equal(ensemble.score(batch), before)
        assert ensemble.num_positions == 128
        assert not any(p.requires_grad for module in ensemble.modules() for p in module.parameters())
        assert not any(part.training for module in ensemble.modules() for part in module.modules())


@pytest.mark.parametrize("family", ["independent", "lora"])
def test_each_member_is_a_model_of_its_own_also_to_transformers_and_peft_alone(family, saved, tmp_path):
    batch, scores = build_family(family, saved, tmp_path / "ensemble")
    for member in range(3):
        folder = tmp_path / "ensemble" / f"member_{member}"
        alone = load_reward_model(spec(folder))
        torch.testing.assert_close(alone.score(batch)[:, 0], scores[:, member], rtol=0, atol=1e-6)
        if family == "lora":
            base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "ensemble" / "trunk")
            plain = PeftModel.from_pretrained(base, str(folder)).eval()
        else:
            plain = AutoModelForSequenceClassification.from_pretrained(folder).eval()
        ids = batch.ids_BT[2:3]
        last = plain.base_model.model.model if family == "lora" else plain.model
        head = load_file(folder / ("adapter_model.safetensors" if family == "lora" else "model.safetensors"))
        weight = next(value for key, value in head.items() if key.endswith("score.weight"))
        with torch.no_grad():
            by_hand = last(ids).last_hidden_state[0, -1] @ weight[0]
        assert float(by_hand) == pytest.approx(float(scores[2, member]), abs=1e-5)


def test_a_linear_ensemble_of_k_heads_costs_one_pass_of_the_trunk(saved, tmp_path):
    batch, _ = build_family("linear", saved, tmp_path / "linear")
    ensemble = load_ensemble(spec(tmp_path / "linear"))
    ensemble.score(batch)  # the trial of joined rows happens once
    calls = []
    ensemble.models[0].model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    assert ensemble.score(batch).shape == (4, 3)
    assert len(calls) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_layers_below_the_lowest_adapter_run_once_for_all_members_and_change_no_score(kind, saved, rows):
    members = lora_members(saved(kind), lora_layers=1)
    disturb(adapter_weights(members.model))
    names, batch = tuple(map(member_name, range(3))), batch_of(rows, filler=2, extra=2)
    scores = member_scores(members.model, names, batch)
    layers = members.model.base_model.model.base_model
    layers = layers.h if kind == "gpt2" else layers.layers
    calls = [0, 0, 0]
    for index, layer in enumerate(layers):
        layer.register_forward_hook(lambda *_, index=index: calls.__setitem__(index, calls[index] + 1))
    again = member_scores(members.model, names, batch)
    assert torch.equal(scores, again)
    passes = calls[0]
    assert calls == [passes, passes, 3 * passes]
    for column, name in enumerate(names):
        members.model.set_adapter(name)
        whole = members.score(batch)[:, 0]
        assert ((scores[:, column] - whole).abs() <= 1e-5 * (1 + whole.abs())).all()
    assert len({round(float(score), 4) for score in scores[0]}) == 3


def test_adapters_in_every_layer_run_the_whole_model_for_each_member(saved, rows):
    members = lora_members(saved())
    disturb(adapter_weights(members.model))
    names, batch = tuple(map(member_name, range(3))), batch_of(rows)
    scores = member_scores(members.model, names, batch)
    for column, name in enumerate(names):
        members.model.set_adapter(name)
        assert torch.equal(scores[:, column], members.score(batch)[:, 0])


def test_scoring_all_members_leaves_the_adapter_in_use_and_what_trains_as_they_were(saved, rows):
    members = lora_members(saved())
    members.model.set_adapter("member_1")
    before = [name for name, _ in trainable(members.model)]
    assert before
    assert all("member_1" in name for name in before)
    member_scores(members.model, tuple(map(member_name, range(3))), batch_of(rows))
    assert members.model.active_adapter == "member_1"
    assert [name for name, _ in trainable(members.model)] == before


def test_at_the_start_of_phase_b_each_member_scores_exactly_as_its_head_of_phase_a(saved, tmp_path, rows):
    """Specification T22: B = 0, so W' = W whatever A is; the head goes on as it was."""
    batch, phase_a = build_family("linear", saved, tmp_path / "phase_a")
    members = lora_members(tmp_path / "phase_a", head="saved")
    scores = member_scores(members.model, tuple(map(member_name, range(3))), batch)
    heads = load_file(tmp_path / "phase_a" / "model.safetensors")["score.weight"]
    linear = load_reward_model(spec(tmp_path / "phase_a"))
    for member in range(3):
        set_head(linear.model, heads[member : member + 1])
        assert torch.equal(scores[:, member : member + 1], linear.score(batch))
    torch.testing.assert_close(scores, phase_a, rtol=0, atol=1e-6)
    drawn = [
        members.model.get_submodule(f"base_model.model.model.layers.0.self_attn.q_proj.lora_A.member_{k}") for k in range(3)
    ]
    assert not torch.equal(drawn[0].weight, drawn[1].weight)


def test_lora_starts_as_the_identity_and_only_b_has_a_gradient():
    """Specification T22: W = I, A = (.5, -.5), B = 0, x = (1, 2): output (1, 2); gradient of A 0, of B (-.5, -.5)."""
    from peft import LoraConfig, get_peft_model

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = torch.nn.Linear(2, 2, bias=False)

        def forward(self, x):
            return self.line(x)

    net = Net()
    with torch.no_grad():
        net.line.weight.copy_(torch.eye(2))
    adapted = get_peft_model(net, LoraConfig(r=1, lora_alpha=1, target_modules=["line"]))
    line = adapted.base_model.model.line
    with torch.no_grad():
        line.lora_A["default"].weight.copy_(torch.tensor([[0.5, -0.5]]))
    out = adapted(torch.tensor([[1.0, 2.0]]))
    assert out.tolist() == [[1.0, 2.0]]
    out.sum().backward()
    assert line.lora_A["default"].weight.grad.abs().max() == 0
    assert line.lora_B["default"].weight.grad.flatten().tolist() == [-0.5, -0.5]


def test_the_trunk_alone_gives_the_mean_of_the_members_starting_heads(saved, tmp_path):
    batch, phase_a = build_family("linear", saved, tmp_path / "phase_a")
    members = lora_members(tmp_path / "phase_a", head="saved")
    save_lora(members, tmp_path / "lora")
    assert critic_folder(str(tmp_path / "lora")) == str(tmp_path / "lora" / "trunk")
    trunk = load_reward_model(spec(critic_folder(str(tmp_path / "lora"))))
    torch.testing.assert_close(trunk.score(batch)[:, 0], phase_a.mean(1), rtol=0, atol=1e-5)


def test_a_critic_starts_from_the_first_independent_member_and_from_any_other_folder_itself(saved, tmp_path):
    build_family("independent", saved, tmp_path / "independent")
    build_family("linear", saved, tmp_path / "linear")
    assert critic_folder(str(tmp_path / "independent")) == str(tmp_path / "independent" / "member_0")
    assert critic_folder(str(tmp_path / "linear")) == str(tmp_path / "linear")


def test_the_trunk_hash_is_of_the_weights_and_survives_saving_and_adapters(saved, tmp_path):
    build_family("linear", saved, tmp_path / "phase_a")
    plain = trunk_hash(load_reward_model(spec(tmp_path / "phase_a")).model)
    assert files_hash(tmp_path / "phase_a") == plain
    members = lora_members(tmp_path / "phase_a", head="saved")
    assert trunk_hash(members.model) == plain
    disturb(adapter_weights(members.model))
    assert trunk_hash(members.model) == plain
    save_lora(members, tmp_path / "lora")
    assert json.loads((tmp_path / "lora" / "ensemble.json").read_text())["trunk"] == plain
    assert files_hash(tmp_path / "lora" / "trunk") == plain
    with torch.no_grad():
        members.model.base_model.model.model.layers[0].mlp.up_proj.base_layer.weight[0, 0] += 1e-3
    assert trunk_hash(members.model) != plain


def test_equal_heads_get_equal_gradients_and_stay_one():
    """Specification T21: three heads (.3, -.1), inputs of T4, five AdamW steps at .1: all end at (.7943533, -.5943533)."""
    heads = torch.tensor([[0.3, -0.1]] * 3, requires_grad=True)
    chosen, rejected = torch.tensor([0.5, -0.2]), torch.tensor([0.1, 0.9])
    optimizer = torch.optim.AdamW([heads], lr=0.1, weight_decay=0.0)
    for _ in range(5):
        optimizer.zero_grad()
        torch.nn.functional.softplus(-(heads @ (chosen - rejected))).mean().backward()
        optimizer.step()
    torch.testing.assert_close(heads.detach(), torch.tensor([[0.7943533, -0.5943533]] * 3), rtol=0, atol=1e-6)
    assert float(heads.detach().std(0).max()) < 1e-7
    with pytest.raises(ConfigError, match="heads of members 0 and 1 are equal at the start"):
        refuse_equal_heads(torch.tensor([[0.3, -0.1]] * 3), "run")
    refuse_equal_heads(torch.tensor([[0.3, -0.1], [0.3, -0.1001]]), "run")


def test_saved_heads_that_are_equal_are_refused(saved, tmp_path):
    model = load_reward_model(spec(saved()), head="fresh", num_heads=3)
    with torch.no_grad():
        model.model.score.weight[2] = model.model.score.weight[0]
    save_model(model.model, model.tokenizer, tmp_path / "collapsed")
    with pytest.raises(ConfigError, match="members 0 and 2 are equal"):
        start_heads(spec(tmp_path / "collapsed"), head="saved", seeds=SEEDS)


def test_calibration_moments_are_those_of_numpy_and_come_back_from_the_card(saved, tmp_path):
    score_NK = torch.tensor([[1.0, 4.0], [2.0, 4.0], [6.0, 1.0]])
    moments = calibrate(score_NK)
    assert moments == (Moments(3, 3.0, 14.0), Moments(3, 3.0, 6.0))
    model = load_reward_model(spec(saved()), head="fresh", num_heads=2)
    card = {"calibration": calibration_card(moments, "eval_data")}
    save_model(model.model, model.tokenizer, tmp_path / "rm", extra=card)
    assert load_ensemble(spec(tmp_path / "rm")).calibration == moments
    save_model(model.model, model.tokenizer, tmp_path / "bare")
    assert load_ensemble(spec(tmp_path / "bare")).calibration is None
    with pytest.raises(ConfigError, match="member 1 gives scores that are not finite"):
        calibrate(torch.tensor([[1.0, float("nan")]]))


def edited(folder, **changes):
    file = folder / "ensemble.json"
    body = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps(body))


def without_head(folder):
    from safetensors.torch import save_file

    file = folder / "adapter_model.safetensors"
    kept = {key: value for key, value in load_file(file).items() if "score" not in key}
    save_file(kept, file, metadata={"format": "pt"})


def two_heads(folder, saved):
    model = load_reward_model(spec(saved("llama", name="again")), head="fresh", num_heads=2)
    save_model(model.model, model.tokenizer, folder)


def other_words(folder):
    build_tokenizer([*WORDS[:-2], "another", WORDS[-1]]).save_pretrained(folder)


def other_trunk(folder):
    from safetensors.torch import save_file

    file = folder / "trunk" / "model.safetensors"
    kept = load_file(file)
    kept["model.norm.weight"] += 0.5
    save_file(kept, file, metadata={"format": "pt"})


FAULTS = [
    ("independent", "a missing member", lambda f, s: shutil.rmtree(f / "member_1"), "names member_1, and .*member_1 is not there"),
    ("lora", "a missing adapter", lambda f, s: (f / "member_2" / "adapter_model.safetensors").unlink(), "member_2 holds no adapter"),
    ("lora", "a missing config", lambda f, s: (f / "member_2" / "adapter_config.json").unlink(), "holds no adapter_config.json"),
    ("lora", "no trunk", lambda f, s: shutil.rmtree(f / "trunk"), "names trunk, and .*trunk is not there"),
    ("lora", "another trunk", lambda f, s: other_trunk(f), "trunk has other weights than the members were trained on"),
    ("lora", "a first member without its head", lambda f, s: without_head(f / "member_0"), "member_0 has no scalar head"),
    ("lora", "a member without its head", lambda f, s: without_head(f / "member_1"), "member_1 has no scalar head"),
    ("independent", "a member of two heads", lambda f, s: two_heads(f / "member_1", s), "member_1 has 2 heads; each member"),
    ("independent", "another tokenizer", lambda f, s: other_words(f / "member_2"), "member_2 has another tokenizer than member_0"),
    ("lora", "another tokenizer", lambda f, s: other_words(f / "member_2"), "member_2 has another tokenizer than member_0"),
    ("lora", "another format", lambda f, s: edited(f, format=7), "has format 7, this version reads 1"),
    ("lora", "an unknown family", lambda f, s: edited(f, family="tree"), "family is 'tree'; allowed: independent, lora"),
    ("lora", "no members", lambda f, s: edited(f, members=[]), r"members is \[\]; list the folder"),
    ("lora", "a member twice", lambda f, s: edited(f, members=["member_0", "member_0"]), "lists member_0 more than once"),
    ("lora", "too few seeds", lambda f, s: edited(f, seeds=[1]), r"seeds is \[1\], for 3 members"),
    ("lora", "full models called lora", lambda f, s: edited(f, family="independent"), "ok"),
    ("independent", "no JSON", lambda f, s: (f / "ensemble.json").write_text("{"), "is damaged"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "fault", "make", "words"), FAULTS, ids=[f"{f}: {w}" for f, w, _, _ in FAULTS])
def test_a_spoilt_ensemble_folder_is_refused_in_words(family, fault, make, words, saved, tmp_path):
    build_family(family, saved, tmp_path / "ensemble")
    make(tmp_path / "ensemble", saved)
    if words == "ok":  # adapters are loaded each with its own copy of the trunk
        assert isinstance(load_ensemble(spec(tmp_path / "ensemble")), RewardEnsemble)
        return
    with pytest.raises(ConfigError, match=words):
        load_ensemble(spec(tmp_path / "ensemble"))


def test_an_ensemble_where_one_model_is_needed_is_refused_in_words(saved, tmp_path):
    build_family("lora", saved, tmp_path / "ensemble")
    for load in (load_policy, load_reward_model):
        with pytest.raises(ConfigError, match="is an ensemble of several models, and one is needed here; give one of its"):
            load(spec(tmp_path / "ensemble"))


def test_saved_heads_must_be_as_many_as_members(saved, tmp_path):
    folder = saved()
    with pytest.raises(ConfigError, match=r"has no scalar heads \(no tensor score.weight\), and head is saved"):
        start_heads(spec(folder), head="saved", seeds=SEEDS)
    model = load_reward_model(spec(folder), head="fresh", num_heads=2)
    save_model(model.model, model.tokenizer, tmp_path / "two")
    with pytest.raises(ConfigError, match=r"has 2 heads, and head is saved: each of the 3 member.s. goes on with one"):
        start_heads(spec(tmp_path / "two"), head="saved", seeds=SEEDS)


def test_an_adapter_is_drawn_from_its_own_seed_wherever_it_stands(saved):
    """Adapter k of three is the adapter of a model that has it alone."""
    folder = saved()
    members = lora_members(folder)
    together = {
        name.replace(".member_2", ""): weight for name, weight in members.model.named_parameters() if ".member_2" in name
    }
    alone = load_reward_model(spec(folder, lora_r=2), head="fresh", head_seed=SEEDS[2]).model
    by_name = {name.replace(".default", ""): weight for name, weight in alone.named_parameters() if ".default" in name}
    assert together.keys() == by_name.keys()
    assert all(torch.equal(weight, by_name[name]) for name, weight in together.items())


def test_the_tiny_model_has_the_layers_these_tests_count():
    assert len(build_model("llama").model.layers) == 3
