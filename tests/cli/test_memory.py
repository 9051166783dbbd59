"""The memory estimate of `rewarden show`: hand-worked sums on a world in miniature."""

import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rewarden.algos.ppo_config import PPO
from rewarden.algos.reward import Reward
from rewarden.algos.sft import SFT
from rewarden.errors import ConfigError
from rewarden.models.layout import MAX_TOKENS
from rewarden.models.memory import loses_blocks
from rewarden.recipe.lengths import SAMPLE, largest_microbatch, largest_rollouts, sample_lengths
from rewarden.recipe.memory import LIBRARIES, estimate, known_models, memory_lines
from rewarden.recipe.show import show_recipe

OPTIM = {"learning_rate": 1e-3}


@pytest.fixture(autouse=True)
def no_holes(monkeypatch):
    """Sums without what the C library of this machine loses; one test puts it back."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")


def sft(files, **more) -> SFT:
    fields = {"model": {"model_name_or_path": str(files.policy)}, "data": {"path": str(files.dialogues)}, "optim": OPTIM}
    return SFT.model_validate({**fields, **more})


def reward(files, **more) -> Reward:
    model = {"model_name_or_path": str(files.policy), **more.pop("model", {})}
    return Reward.model_validate({"model": model, "data": {"path": str(files.pairs)}, "optim": OPTIM, **more})


def ppo(files, **more) -> PPO:
    fields = {
        "policy": {"model_name_or_path": str(files.policy)},
        "reward": {"kind": "reward_model", "path": str(files.reward)},
        "data": {"path": str(files.prompts)},
        "sampling": {"max_completion_length": 7},
        "rollout_batch_size": 8,
        "mini_batch_size": 4,
        "per_device_train_batch_size": 2,
        "max_steps": 3,
    }
    return PPO.model_validate({**fields, **more})


def rows_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def num_tokens(files, messages, **more) -> int:
    """Tokens of a conversation by transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(files.policy)
    return len(
        tokenizer(tokenizer.apply_chat_template(messages, tokenize=False, **more), add_special_tokens=False)["input_ids"]
    )


def bytes_of(folder) -> int:
    return sum(4 * p.numel() for p in AutoModelForCausalLM.from_pretrained(folder).parameters())


def test_a_microbatch_of_all_rows_holds_all_tokens(world_files):
    lengths = [num_tokens(world_files, row["messages"]) for row in rows_of(world_files.dialogues)]
    spec = sft(world_files, train_batch_size=50, per_device_train_batch_size=50)
    sample = sample_lengths(spec, spec.model)
    assert (sample.lengths, sample.whole) == (tuple(lengths), True)
    assert largest_microbatch(spec, sample) == sum(lengths)


def test_microbatches_of_one_row_are_as_large_as_the_longest(world_files):
    lengths = [num_tokens(world_files, row["messages"]) for row in rows_of(world_files.dialogues)]
    spec = sft(world_files, train_batch_size=4, per_device_train_batch_size=1)
    assert largest_microbatch(spec, sample_lengths(spec, spec.model)) == max(lengths)


def test_a_pair_counts_with_both_sides(world_files):
    lengths = [
        sum(num_tokens(world_files, row["prompt"] + row[side]) for side in ("chosen", "rejected"))
        for row in rows_of(world_files.pairs)
    ]
    spec = reward(world_files, train_batch_size=50, per_device_train_batch_size=50)
    assert largest_microbatch(spec, sample_lengths(spec, spec.model)) == sum(lengths)


def test_rollouts_count_with_answers_of_full_length(world_files):
    lengths = [num_tokens(world_files, row["prompt"], add_generation_prompt=True) for row in rows_of(world_files.prompts)]
    spec = ppo(world_files)
    sample = sample_lengths(spec, spec.policy)
    assert sample.lengths == tuple(lengths)
    assert 2 * (min(lengths) + 7) <= largest_rollouts(spec, sample) <= 2 * (max(lengths) + 7)
    same = sample.__class__(lengths=(10,), whole=True, how="")
    assert largest_rollouts(spec, same) == 2 * (10 + 7)


def test_data_that_is_not_here_counts_with_full_rows(world_files):
    spec = sft(world_files, data={"path": "somebody/dialogues"}, train_batch_size=4, max_length=100)
    sample = sample_lengths(spec, spec.model)
    assert "somebody/dialogues is not here" in sample.how
    assert largest_microbatch(spec, sample) == 4 * 100


def test_only_the_first_rows_of_a_large_file_are_read(world_files, here):
    many = [json.dumps({"prompt": "Hello", "completion": "Yes."})] * SAMPLE + ["no JSON at all"]
    (here / "many.jsonl").write_text("\n".join(many))
    spec = sft(world_files, data={"path": "many.jsonl"}, train_batch_size=8)
    sample = sample_lengths(spec, spec.model)
    assert (len(sample.lengths), sample.whole) == (SAMPLE, False)
    assert largest_microbatch(spec, sample) == 8 * sample.lengths[0]


def test_the_update_of_full_sft_by_hand(world_files):
    spec = sft(world_files, train_batch_size=50, per_device_train_batch_size=50)
    found = estimate(spec)
    weights = bytes_of(world_files.policy)
    config = AutoModelForCausalLM.from_pretrained(world_files.policy).config
    tokens = sum(num_tokens(world_files, row["messages"]) for row in rows_of(world_files.dialogues))
    heads, pairs, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    # Each of two norms keeps its input, its normalized input and its output; then queries, keys, values, what attention gives
    # (twice, since it is put together from the rows) and a number per head; then gate, act(gate), up and their product.
    per_layer = 6 * config.hidden_size + (3 * heads + 2 * pairs) * width + heads + 4 * config.intermediate_size
    logits = min(tokens, 2**24 // config.vocab_size) * config.vocab_size
    assert found.peak.name == "update"
    parts = found.peak.parts
    assert parts["libraries"] == LIBRARIES
    assert parts["weights"] == weights
    assert parts["optimizer"] == 2 * weights
    assert parts["gradients"] == weights + 4 * config.vocab_size * config.hidden_size
    assert parts["activations"] == 4 * tokens * config.num_hidden_layers * per_layer
    assert parts["logits"] == 3 * 4 * logits
    assert found.peak.total == sum(parts.values())
    copy = {phase.name: phase.parts for phase in found.phases}["checkpoint"]["copy to write"]
    assert copy == 2 * weights


def test_gradient_checkpointing_keeps_one_state_per_layer_and_one_layer_whole(world_files):
    plain = estimate(sft(world_files)).peak.parts
    model = {"model_name_or_path": str(world_files.policy), "gradient_checkpointing": True}
    spec = sft(world_files, model=model)
    less = estimate(spec).peak.parts
    config = AutoModelForCausalLM.from_pretrained(world_files.policy).config
    tokens = largest_microbatch(spec, sample_lengths(spec, spec.model))
    assert tokens <= MAX_TOKENS["cpu"]
    states = 4 * tokens * config.num_hidden_layers * config.hidden_size
    assert less["activations"] == states + plain["activations"] // config.num_hidden_layers
    assert {key: value for key, value in less.items() if key != "activations"} == {
        key: value for key, value in plain.items() if key != "activations"
    }


def test_frozen_layers_keep_nothing_and_cached_features_lie_on_disk(world_files):
    whole = estimate(reward(world_files, model={"lora_r": 4})).phases[0].parts
    spec = reward(world_files, model={"lora_r": 4, "lora_layers": 1}, feature_cache_dir="features")
    found = estimate(spec)
    config = AutoModelForCausalLM.from_pretrained(world_files.policy).config
    assert found.phases[0].parts["activations"] * config.num_hidden_layers == whole["activations"]
    tokens = sum(
        num_tokens(world_files, row["prompt"] + row[side])
        for row in rows_of(world_files.pairs)
        for side in ("chosen", "rejected")
    )
    assert found.disk == 4 * tokens * config.hidden_size
    head_only = estimate(reward(world_files, model={"trainable_layers": 0}, feature_cache_dir="features"))
    assert head_only.disk == 4 * 2 * len(rows_of(world_files.pairs)) * config.hidden_size
    assert head_only.phases[0].parts["activations"] == 0


def test_ppo_holds_policy_reference_critic_and_reward_model(world_files):
    weights = bytes_of(world_files.policy)
    config = AutoModelForCausalLM.from_pretrained(world_files.policy).config
    vocabulary = 4 * config.vocab_size * config.hidden_size
    # A scalar head takes the place of the vocabulary projection, where that is not tied to the embeddings.
    scalar = weights + 4 * config.hidden_size - (0 if config.tie_word_embeddings else vocabulary)
    spec = ppo(world_files)
    phases = {phase.name: phase.parts for phase in estimate(spec).phases}
    base = phases["update"]
    assert (base["policy"], base["reference"]) == (weights, weights)
    assert (base["critic"], base["reward model"]) == (scalar, scalar)
    assert base["optimizer"] == 2 * (weights + scalar)
    longest = max(num_tokens(world_files, row["prompt"], add_generation_prompt=True) for row in rows_of(world_files.prompts))
    cache = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    assert phases["rollout"]["key-value cache"] == 8 * (longest + 7) * cache
    adapted = ppo(world_files, policy={"model_name_or_path": str(world_files.policy), "lora_r": 4})
    assert "reference" not in estimate(adapted).phases[0].parts


def test_rewards_without_a_model_weigh_nothing_and_those_of_a_sum_all_count(world_files):
    length = {"kind": "length", "target": 5, "penalty": 0.1}
    model = {"kind": "reward_model", "path": str(world_files.reward)}
    one, none, two = (
        estimate(ppo(world_files, reward=raw)).phases[0].parts.get("reward model", 0)
        for raw in (model, length, {"kind": "sum", "scorers": [{"scorer": part} for part in (model, length, model)]})
    )
    assert (none, two) == (0, 2 * one)


def test_what_malloc_loses_is_a_part_of_its_own(world_files, monkeypatch):
    spec = sft(world_files)
    assert "gaps that malloc leaves" not in estimate(spec).peak.parts
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_")
    monkeypatch.setattr("rewarden.models.memory.platform.libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert loses_blocks()
    parts = estimate(spec).peak.parts
    # Nothing is adapted, so only a tenth of what is kept.
    assert parts["gaps that malloc leaves"] == pytest.approx(0.1 * parts["activations"], rel=0.01)
    monkeypatch.setattr("rewarden.models.memory.platform.libc_ver", lambda: ("musl", "1"))
    assert not loses_blocks()


def test_a_model_of_an_earlier_stage_is_worked_out_from_what_that_stage_starts_from(world_files, here):
    first = sft(world_files)
    known = known_models({here / "runs" / "chain" / "sft": first})
    later = reward(world_files, model={"model_name_or_path": str(here / "runs" / "chain" / "sft" / "model")})
    assert estimate(later, known) == estimate(reward(world_files))
    with pytest.raises(ConfigError, match="model is not on this machine yet"):
        estimate(later, {})


def test_a_model_that_is_not_here_is_not_asked_for_on_the_network(world_files, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the network was asked")

    monkeypatch.setattr("httpx.Client.send", refuse)
    spec = sft(world_files, model={"model_name_or_path": "somebody/a-model"})
    assert memory_lines(spec, {}) == ["no estimate: somebody/a-model is not on this machine yet"]


def test_a_table_of_phases_adds_up(world_files):
    lines = memory_lines(ppo(world_files), {})
    header = next(line for line in lines if "update" in line and "rollout" in line)
    assert header.split() == ["update", "rollout", "prepare", "checkpoint"]
    total = next(line for line in lines if line.startswith("total"))
    expected = [phase.total for phase in estimate(ppo(world_files)).phases]
    assert [float(cell.replace(",", "")) for cell in total.split()[1:]] == [-(-number // 1_000_000) for number in expected]
    assert re.fullmatch(r"peak: [\d,]+ MB, in the phase '\w+'", lines[-1])


def test_show_prints_the_estimate_of_every_stage_that_trains(world_files, write, capsys):
    path = write(
        f"stages:\n- {{stage: sft, kind: sft, model: {{model_name_or_path: {world_files.policy}}}, "
        f"data: {{path: {world_files.dialogues}}}}}\n"
        f"- {{stage: reward, kind: reward, model: {{model_name_or_path: '${{sft}}/model'}}, data: {{path: {world_files.pairs}}}}}\n"
        "- {stage: say, kind: 'jobs.py:Write', text: a}\n"
    )
    show_recipe(path, ())
    stages = capsys.readouterr().out.split("\n\n")[1:]
    peaks = [re.findall(r"^  memory  peak: ([\d,]+) MB", stage, re.MULTILINE) for stage in stages]
    assert [len(found) for found in peaks] == [1, 1, 0]
    assert "no estimate" not in "".join(stages)


def test_nothing_is_loaded(world_files, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("weights were read")

    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", refuse)
    before = torch.random.get_rng_state()
    for spec in (sft(world_files), reward(world_files, model={"lora_r": 2}), ppo(world_files)):
        assert estimate(spec) is not None
    assert torch.equal(torch.random.get_rng_state(), before)
