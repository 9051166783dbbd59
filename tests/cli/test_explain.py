"""`rewarden score --explain`: expected texts, ids and scores come from transformers and peft alone."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedTokenizerFast,
)
from typer.testing import CliRunner

from rewarden.cli import app
from rewarden.data.write import write_jsonl
from rewarden.recipe.run import run_recipe

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QUESTIONS = [
    "How do I keep basil alive?",
    "What is 2 + 2?",
    "Name a colour.",
    "你好吗？",
    "Tell me more.",
    "Why is the sky blue?",
]
ANSWERS = ["Water it every day.", "4", "Blue, I think.", "我很好。", "There is nothing more.", "It scatters light."]


def dialogue(index: int) -> list[dict]:
    return [
        {"role": "user", "content": QUESTIONS[index]},
        {"role": "assistant", "content": ANSWERS[index]},
        {"role": "user", "content": "Are you sure?"},
        {"role": "assistant", "content": f"Yes. {ANSWERS[index]}"},
    ]


def byte_tokenizer(chat_template: str | None) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with ChatML's special tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([*QUESTIONS, *ANSWERS, "Human: Assistant: user assistant"], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    tokenizer.chat_template = chat_template
    return tokenizer


def config(**more) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=384,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        **more,
    )


@dataclass(frozen=True)
class Made:
    classifier: Path
    two_heads: Path
    plain: Path
    adapter: Path
    dialogues: Path
    pairs: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Made:
    root = tmp_path_factory.mktemp("explain")
    dialogues = [{"id": f"d{index}", "messages": dialogue(index)} for index in range(6)]
    pairs = [
        {
            "id": f"p{index}",
            "prompt": dialogue(index)[:3],
            "chosen": dialogue(index)[3:],
            "rejected": [{"role": "assistant", "content": "No."}],
        }
        for index in range(6)
    ]
    write_jsonl(root / "dialogues.jsonl", dialogues)
    write_jsonl(root / "pairs.jsonl", pairs)
    for name, heads, chat_template in (("classifier", 1, CHATML), ("two_heads", 2, CHATML), ("plain", 1, None)):
        torch.manual_seed(5)
        AutoModelForSequenceClassification.from_config(config(num_labels=heads)).save_pretrained(root / name)
        byte_tokenizer(chat_template).save_pretrained(root / name)
    # Two labels of a classifier are no ensemble of rewards unless its card says so.
    (root / "two_heads" / "rewarden.json").write_text('{"num_heads": 2}')
    torch.manual_seed(6)
    AutoModelForCausalLM.from_config(config()).save_pretrained(root / "base")
    byte_tokenizer(CHATML).save_pretrained(root / "base")
    (root / "lora.yaml").write_text(
        f"kind: reward\nname: lora\noutput_dir: {root / 'runs'}\nmodel: {{model_name_or_path: {root / 'base'}, lora_r: 4}}\n"
        f"data: {{path: {root / 'pairs.jsonl'}}}\noptim: {{learning_rate: 0.05}}\ntrain_batch_size: 3\nview: 'off'\n"
    )
    run_recipe(root / "lora.yaml")
    return Made(
        classifier=root / "classifier",
        two_heads=root / "two_heads",
        plain=root / "plain",
        adapter=root / "runs" / "lora" / "model",
        dialogues=root / "dialogues.jsonl",
        pairs=root / "pairs.jsonl",
    )


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)


def explained(*words) -> list[dict]:
    return [json.loads(line) for line in call("score", *words, "--explain", "--json").stdout.splitlines()]


@torch.no_grad()
def logits(model, ids: list[int]) -> list[float]:
    """Scores of one row by the model's own forward; a batch of one row is read at its last token."""
    return model.eval()(input_ids=torch.tensor([ids])).logits[0].tolist()


def chat_ids(folder: Path, messages: list[dict]) -> tuple[str, list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    return text, tokenizer(text, add_special_tokens=False)["input_ids"]


def check_chatml(row: dict, folder: Path, model, messages: list[dict]) -> None:
    """Text, ids, scored position and the three scores of a ChatML row, in which a line break follows the end of turn."""
    text, ids = chat_ids(folder, messages)
    assert row["text"] == text
    assert [token["id"] for token in row["tokens"]] == ids
    end = len(ids) - 2
    assert (row["scored_position"], row["end_of_turn_position"]) == (end + 1, end)
    assert row["tokens"][end]["token"] == "<|im_end|>"
    cuts = {"as_scored": end + 1, "at_end_of_turn": end, "without_end_of_turn": end - 1}
    assert row["scores"].keys() == cuts.keys()
    for name, at in cuts.items():
        assert row["scores"][name]["position"] == at
        heads = logits(model, ids[: at + 1])
        assert row["scores"][name]["members"] == pytest.approx(heads, abs=1e-5)
        assert row["scores"][name]["score"] == pytest.approx(sum(heads) / len(heads), abs=1e-5)


@pytest.mark.parametrize("name", ["classifier", "two_heads"])
def test_a_classifier_of_transformers_alone_is_explained(made, name):
    folder = getattr(made, name)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    rows = explained(made.dialogues, "--reward", folder, "--rows", "0,3-4")
    assert [row["id"] for row in rows] == ["d0", "d3", "d4"]
    for row, index in zip(rows, (0, 3, 4), strict=True):
        check_chatml(row, folder, model, dialogue(index))


def test_a_lora_reward_model_from_a_run_is_explained(made):
    base = AutoModelForSequenceClassification.from_pretrained(made.adapter.parents[2] / "base", num_labels=1)
    model = PeftModel.from_pretrained(base, made.adapter)
    rows = explained(made.pairs, "--reward", made.adapter, "--rows", 2)
    assert [(row["id"], row["side"]) for row in rows] == [("p2", "chosen"), ("p2", "rejected")]
    check_chatml(rows[0], made.adapter, model, dialogue(2))
    check_chatml(rows[1], made.adapter, model, [*dialogue(2)[:3], {"role": "assistant", "content": "No."}])


@pytest.mark.parametrize(
    ("kind", "user", "assistant", "between"),
    [
        ("moss_en", "Human:", "Assistant:", "</s>"),
        ("moss_zh", "<|Human|>", "<|MOSS|>", "</s>"),
        ("hh", "\n\nHuman: ", "\n\nAssistant: ", ""),
    ],
)
def test_a_plain_role_template_is_explained(made, kind, user, assistant, between):
    question, answer, more, last = (message["content"] for message in dialogue(1))
    text = f"{user}{question}{between}{assistant}{answer}</s>{user}{more}{between}{assistant}{last}</s>"
    ids = byte_tokenizer(None)(text, add_special_tokens=False)["input_ids"]
    model = AutoModelForSequenceClassification.from_pretrained(made.plain)
    (row,) = explained(made.dialogues, "--reward", made.plain, "--template", kind, "--rows", 1)
    assert (row["text"], [token["id"] for token in row["tokens"]]) == (text, ids)
    assert row["scored_position"] == row["end_of_turn_position"] == len(ids) - 1
    assert row["scores"].keys() == {"as_scored", "without_end_of_turn"}
    assert row["scores"]["as_scored"]["members"] == pytest.approx(logits(model, ids), abs=1e-5)
    assert row["scores"]["without_end_of_turn"]["members"] == pytest.approx(logits(model, ids[:-1]), abs=1e-5)


def test_alpaca_is_explained_with_its_input(made, tmp_path):
    file = tmp_path / "one.jsonl"
    write_jsonl(file, [{"prompt": "Add.", "completion": "4", "input": "2 + 2"}])
    (row,) = explained(file, "--reward", made.plain, "--template", "alpaca")
    assert row["text"].endswith("### Instruction:\nAdd.\n\n### Input:\n2 + 2\n\n### Response:4</s>")


def test_tokens_say_where_they_stand_and_whose_they_are(made):
    (row,) = explained(made.dialogues, "--reward", made.classifier, "--rows", 0)
    text, tokens = row["text"], row["tokens"]
    assert [token["position"] for token in tokens] == list(range(len(tokens)))
    assert all(text[token["start"] : token["stop"]] == token["text"] for token in tokens)
    assert {token["text"] for token in tokens if token["special"]} == {"<|im_start|>", "<|im_end|>"}
    said = {
        (role, turn): "".join(t["text"] for t in tokens if (t["role"], t["turn"]) == (role, turn))
        for role in ("user", "assistant")
        for turn in (0, 1)
    }
    question, answer, more, last = (message["content"] for message in dialogue(0))
    assert said == {
        ("user", 0): question,
        ("assistant", 0): f"{answer}<|im_end|>",
        ("user", 1): more,
        ("assistant", 1): f"{last}<|im_end|>",
    }


def test_without_rows_the_first_one_is_explained_in_plain_lines(made):
    result = call("score", made.dialogues, "--reward", made.classifier, "--explain")
    (row,) = explained(made.dialogues, "--reward", made.classifier)
    out = result.stdout
    assert "\x1b" not in out
    assert out.startswith("row d0\n")
    assert row["text"] in out
    lines = out[out.index("tokens, ") :].splitlines()
    assert lines[0] == f"tokens, {len(row['tokens'])}:"
    for token, line in zip(row["tokens"], lines[1:], strict=False):
        words = line.split()
        assert words[:3] == [str(token["position"]), str(token["id"]), token["token"]]
        assert repr(token["text"]) in line
        assert f"{token['role']}, turn {token['turn']}" in line
        assert ("<- scored here" in line) == (token["position"] == row["scored_position"])
        assert ("end of turn" in line) == (token["position"] == row["end_of_turn_position"])
    for name, reading in row["scores"].items():
        (line,) = [line for line in lines if line.strip().startswith(name.replace("_", " "))]
        assert re.search(rf"token +{reading['position']} ", line)
        assert f"{reading['score']:.4f}" in line
    difference = row["scores"]["as_scored"]["score"] - row["scores"]["without_end_of_turn"]["score"]
    assert f"what follows the answer changes the score by {difference:+.4f}" in out
    assert "1 head, template chat, at most 256 tokens" in result.stderr


def test_every_member_is_shown_beside_the_aggregate_and_the_spread(made):
    out = call("score", made.dialogues, "--reward", made.two_heads, "--explain").stdout
    (row,) = explained(made.dialogues, "--reward", made.two_heads)
    for reading in row["scores"].values():
        a, b = reading["members"]
        assert re.search(rf"{reading['score']:.4f}  members +{a:.4f} +{b:.4f}, std {abs(a - b) / 2:.4f}\n", out)


def test_a_special_token_that_a_message_spells_is_shown_as_text(made, tmp_path):
    file = tmp_path / "spells.jsonl"
    write_jsonl(file, [{"prompt": "Say <|im_end|> now.", "completion": "No."}])
    (row,) = explained(file, "--reward", made.classifier)
    assert row["spelled_special_tokens"] == 1
    assert sum(token["token"] == "<|im_end|>" for token in row["tokens"]) == 2
    out = call("score", file, "--reward", made.classifier, "--explain").stdout
    assert "1 special tokens spelled in the messages are read as plain text" in out


def test_a_text_that_is_too_long_is_shown_without_a_score(made):
    words = (made.dialogues, "--reward", made.classifier, "--max-length", 20)
    (row,) = explained(*words)
    assert (row["status"], row["scores"]) == ("too_long", {})
    assert len(row["tokens"]) > 20
    out = call("score", *words, "--explain").stdout
    assert f"no score: too_long, {len(row['tokens'])} tokens" in out


def test_control_characters_do_not_reach_the_terminal(made, tmp_path):
    file = tmp_path / "escape.jsonl"
    write_jsonl(file, [{"prompt": "Red \x1b[31m?", "completion": "No."}])
    out = call("score", file, "--reward", made.classifier, "--explain").stdout
    assert "\x1b" not in out
    assert "Red \\x1b[31m?" in out
    assert explained(file, "--reward", made.classifier)[0]["text"].count("\x1b") == 1


def test_explanations_go_into_a_file(made, tmp_path):
    file = tmp_path / "explained.jsonl"
    result = call("score", made.dialogues, "--reward", made.classifier, "--explain", "--rows", "0-1", "--output", file)
    assert result.stdout == ""
    assert f"2 explanations written to {file}" in result.stderr
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert rows == explained(made.dialogues, "--reward", made.classifier, "--rows", "0-1")
