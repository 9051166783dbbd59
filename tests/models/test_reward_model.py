import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tiny_models import KINDS, batch_of, build_tokenizer, random_rows
from transformers import AutoModelForSequenceClassification

from rewarden.errors import ConfigError, DataError
from rewarden.models.forward import sequence_scores
from rewarden.models.load import Model, load_policy, load_tokenizer, save_model, trainable
from rewarden.models.reward import load_reward_model, right_padded

IDS = torch.tensor([random_rows([11])[0]])


# peft asks transformers for an attribute under its old name; here peft is used directly.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def spec(folder, **fields: object) -> Model:
    return Model(model_name_or_path=str(folder), **fields)


def disturb(model: torch.nn.Module, seed: int = 1) -> None:
    """As training would: every trainable parameter moves."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in trainable(model):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_head_on_a_language_model_saves_and_loads_bit_for_bit_also_by_transformers_alone(kind, saved, tmp_path, rows):
    reward = load_reward_model(spec(saved(kind)), head="fresh", head_seed=3)
    disturb(reward.model)
    save_model(reward.model, reward.tokenizer, tmp_path / "rm")
    again = load_reward_model(spec(tmp_path / "rm"))
    batch = batch_of(rows)
    assert torch.equal(reward.score(batch), again.score(batch))
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm").eval()
    with torch.no_grad():
        assert torch.equal(plain(input_ids=IDS).logits, reward.model(input_ids=IDS).logits)
        assert torch.equal(sequence_scores(plain, batch), reward.score(batch))


@pytest.mark.parametrize("kind", ["llama", "llama_tied", "gpt2"])
def test_a_lora_reward_model_gives_bit_equal_scores_after_reload_also_by_peft_alone(kind, saved, tmp_path, rows):
    base = saved(kind)
    reward = load_reward_model(spec(base, lora_r=3), head="fresh", num_heads=2)
    disturb(reward.model)
    save_model(reward.model, reward.tokenizer, tmp_path / "rm")
    assert not (tmp_path / "rm" / "base").exists()
    batch = batch_of(rows)
    again = load_reward_model(spec(tmp_path / "rm"))
    assert again.num_heads == 2
    assert torch.equal(reward.score(batch), again.score(batch))
    assert {name for name, _ in trainable(again.model)} == {name for name, _ in trainable(reward.model)}
    plain_base = AutoModelForSequenceClassification.from_pretrained(base, num_labels=2)
    plain = PeftModel.from_pretrained(plain_base, str(tmp_path / "rm")).eval()
    with torch.no_grad():
        assert torch.equal(plain(input_ids=IDS).logits, reward.model(input_ids=IDS).logits)
        assert torch.equal(sequence_scores(plain, batch), reward.score(batch))


def test_a_reward_model_from_a_lora_sft_model_carries_the_merged_base(saved, tmp_path, rows):
    policy = load_policy(spec(saved("llama"), lora_r=2))
    disturb(policy)
    save_model(policy, build_tokenizer(), tmp_path / "sft")
    reward = load_reward_model(spec(tmp_path / "sft", lora_r=2), head="fresh")
    with torch.no_grad():
        hidden = policy.get_base_model().model(input_ids=IDS).last_hidden_state
        head = reward.model.base_model.model.score.modules_to_save["default"].weight
        expected = float(hidden[0, -1] @ head[0])
    assert abs(float(reward.score(batch_of([IDS[0].tolist()]))) - expected) < 1e-4 * (1 + abs(expected))
    disturb(reward.model)
    save_model(reward.model, reward.tokenizer, tmp_path / "rm")
    moved = tmp_path / "elsewhere" / "rm"
    moved.parent.mkdir()
    (tmp_path / "rm").rename(moved)
    again = load_reward_model(spec(moved))
    assert torch.equal(reward.score(batch_of(rows)), again.score(batch_of(rows)))
    plain = AutoModelForSequenceClassification.from_pretrained(moved / "base", num_labels=1)
    plain = PeftModel.from_pretrained(plain, str(moved)).eval()
    assert torch.equal(sequence_scores(plain, batch_of(rows)).detach(), reward.score(batch_of(rows)))


def test_a_critic_with_its_own_adapter_starts_from_the_merged_reward_model(saved, tmp_path, rows):
    reward = load_reward_model(spec(saved("llama"), lora_r=3), head="fresh")
    disturb(reward.model)
    save_model(reward.model, reward.tokenizer, tmp_path / "rm")
    batch = batch_of(rows)
    for fields in ({"lora_r": 2}, {"trainable_layers": 1}):
        critic = load_reward_model(spec(tmp_path / "rm", **fields))
        assert torch.allclose(critic.score(batch), reward.score(batch), atol=1e-4)
        assert any("score" in name for name, _ in trainable(critic.model))
        disturb(critic.model)
        assert not torch.allclose(critic.score(batch), reward.score(batch), atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_side_padding_amount_and_batch_change_no_score(kind, saved):
    reward = load_reward_model(spec(saved(kind)), head="fresh", num_heads=2)
    texts = random_rows([1, 4, 9, 16, 30, 2, 7, 7, 25, 11, 3, 5, 8, 13, 21, 30], seed=4)
    alone = torch.cat([reward.score_padded(torch.tensor([row]), torch.ones(1, len(row), dtype=torch.long)) for row in texts])
    bound = 1e-5 * (1 + alone.abs())
    for width in (30, 47):
        for filler in (0, 2):
            right = torch.tensor([[*row, *[filler] * (width - len(row))] for row in texts])
            left = torch.tensor([[*[filler] * (width - len(row)), *row] for row in texts])
            right_mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in texts])
            assert ((reward.score_padded(right, right_mask) - alone).abs() <= bound).all()
            assert ((reward.score_padded(left, right_mask.flip(1).bool()) - alone).abs() <= bound).all()
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    assert ((reward.score(batch_of([texts[i] for i in order])) - alone[order]).abs() <= bound[order]).all()
    assert alone.dtype == torch.float32


def test_a_last_token_that_equals_the_pad_token_is_scored(saved):
    """transformers' own pooling looks for the last token that is not the pad id, and would score the one before."""
    reward = load_reward_model(spec(saved("llama", pad_token_id=2)), head="fresh")
    with torch.no_grad():
        hidden = reward.model.model(input_ids=torch.tensor([[5, 6, 2]])).last_hidden_state[0, -1]
    expected = float(hidden @ reward.model.score.weight[0].detach())
    assert abs(float(reward.score(batch_of([[5, 6, 2]], filler=2, extra=3))) - expected) < 1e-5 * (1 + abs(expected))


def test_a_missing_head_is_an_error_wherever_it_is_missing(saved, tmp_path):
    with pytest.raises(ConfigError, match="no scalar head"):
        load_reward_model(spec(saved("llama")))
    reward = load_reward_model(spec(saved("gpt2")), head="fresh")
    save_model(reward.model, reward.tokenizer, tmp_path / "full")
    tensors = load_file(tmp_path / "full" / "model.safetensors")
    del tensors["score.weight"]
    save_file(tensors, tmp_path / "full" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="no scalar head"):
        load_reward_model(spec(tmp_path / "full"))

    lora = load_reward_model(spec(saved("llama"), lora_r=2), head="fresh")
    save_model(lora.model, lora.tokenizer, tmp_path / "lora")
    file = tmp_path / "lora" / "adapter_model.safetensors"
    tensors = {key: value for key, value in load_file(file).items() if "score" not in key}
    assert len(tensors) < len(load_file(file))
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"no scalar head.*modules_to_save"):
        load_reward_model(spec(tmp_path / "lora"))


def test_heads_are_drawn_row_by_row_with_the_promised_spread(saved):
    folder = saved("llama")
    one = load_reward_model(spec(folder), head="fresh", head_seed=7).model.score.weight
    three = load_reward_model(spec(folder), head="fresh", head_seed=7, num_heads=3).model.score.weight
    other = load_reward_model(spec(folder), head="fresh", head_seed=8).model.score.weight
    assert torch.equal(one[0], three[0])
    assert not torch.equal(three[0], three[1])
    assert not torch.equal(one, other)
    wide = load_reward_model(spec(folder), head="fresh", num_heads=400).model.score.weight
    assert abs(float(wide.detach().std()) - 0.3 / 32**0.5) < 0.002
    zero = load_reward_model(spec(folder), head="fresh", head_std=0.0).model.score.weight
    assert not zero.any()


def test_a_new_head_may_replace_a_saved_one_of_another_size(saved, tmp_path, rows):
    reward = load_reward_model(spec(saved("llama")), head="fresh")
    save_model(reward.model, reward.tokenizer, tmp_path / "rm")
    with pytest.raises(ConfigError, match="1 heads, num_heads is 3"):
        load_reward_model(spec(tmp_path / "rm"), num_heads=3)
    three = load_reward_model(spec(tmp_path / "rm"), num_heads=3, head="fresh")
    save_model(three.model, three.tokenizer, tmp_path / "three")
    again = load_reward_model(spec(tmp_path / "three"))
    assert again.num_heads == 3
    assert torch.equal(three.score(batch_of(rows)), again.score(batch_of(rows)))


def test_a_reward_model_is_no_policy_and_head_only_training_leaves_the_trunk(saved, tmp_path):
    reward = load_reward_model(spec(saved("llama_tied"), trainable_layers=0), head="fresh")
    assert [name for name, _ in trainable(reward.model)] == ["score.weight"]
    save_model(reward.model, reward.tokenizer, tmp_path / "rm")
    with pytest.raises(ConfigError, match="holds a reward model"):
        load_policy(spec(tmp_path / "rm"))
    lora = load_reward_model(spec(saved("llama"), lora_r=2), head="fresh")
    save_model(lora.model, lora.tokenizer, tmp_path / "lora")
    with pytest.raises(ConfigError, match="holds a reward model"):
        load_policy(spec(tmp_path / "lora"))


def test_the_head_stays_float32_in_a_bfloat16_model(saved, tmp_path, rows, monkeypatch):
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"avx512_bf16": True})
    reward = load_reward_model(spec(saved("llama"), dtype="bfloat16"), head="fresh")
    assert reward.model.score.weight.dtype == torch.float32
    assert reward.model.model.norm.weight.dtype == torch.bfloat16
    save_model(reward.model, reward.tokenizer, tmp_path / "rm")
    again = load_reward_model(spec(tmp_path / "rm", dtype="bfloat16"))
    assert torch.equal(again.model.score.weight, reward.model.score.weight)
    assert torch.equal(again.score(batch_of(rows)), reward.score(batch_of(rows)))


def test_rows_without_tokens_or_with_holes_are_refused(saved):
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    with pytest.raises(DataError, match="row 1 has no real token"):
        right_padded(ids, torch.tensor([[1, 1, 1], [0, 0, 0]]))
    with pytest.raises(DataError, match="row 0 has padding between"):
        right_padded(ids, torch.tensor([[1, 0, 1], [1, 1, 1]]))
    moved = right_padded(ids, torch.tensor([[0, 1, 1], [1, 1, 1]]))
    assert moved.ids_BT[0, :2].tolist() == [2, 3]
    assert moved.length_B.tolist() == [2, 3]


@pytest.mark.slow
def test_smollm2_scores_do_not_depend_on_the_batch(smollm2):
    reward = load_reward_model(spec(smollm2, lora_r=4, lora_layers=2), head="fresh")
    tokenizer = load_tokenizer(spec(smollm2))
    texts = ["Hello there.", "The capital of France is Paris, of course.", "No.", "A longer text " * 12]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    together = reward.score(batch_of(ids, filler=2))
    alone = torch.cat([reward.score(batch_of([row])) for row in ids])
    assert ((together - alone).abs() <= 1e-4 * (1 + alone.abs())).all()
