"""Our side's scripts at small sizes: they do what they say, and compute what transformers and TRL's formulas give."""

import ast
import importlib
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def fresh(toy, monkeypatch):
    """Sizes are read when a script is loaded, so every test loads it anew."""
    for name in [name for name in sys.modules if name.startswith("bench.ours")]:
        monkeypatch.delitem(sys.modules, name)
    return monkeypatch


def printed_by(name: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, **sizes: str) -> dict:
    for key, value in sizes.items():
        monkeypatch.setenv(key, value)
    runpy.run_path(str(ROOT / "bench" / "ours" / f"{name}.py"), run_name="__main__")
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_no_special_token_can_be_sampled_from_the_policy_that_never_ends(fresh, tmp_path):
    from transformers import AutoModelForCausalLM

    models = importlib.import_module("bench.ours.toy_models")
    model = AutoModelForCausalLM.from_pretrained(models.write_policy(tmp_path / "policy", never_ends=True))
    ids_BT = torch.randint(0, 2000, (4, 96), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        logits_BTV = model(ids_BT).logits
    words, special = logits_BTV[..., : models.NUM_WORDS], logits_BTV[..., models.NUM_WORDS :]
    assert special.shape[-1] == 4
    assert bool((words.amin(-1) - special.amax(-1) > 50).all())
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(5.2e6, rel=0.02)


def test_prompts_and_pairs_have_the_peers_ids(fresh):
    models = importlib.import_module("bench.ours.toy_models")
    expected = torch.randint(0, 2000, (512, 32), generator=torch.Generator().manual_seed(1)).tolist()
    assert models.random_prompts(512, 32, seed=1) == expected
    tokenizer = models.tokenizer("right")
    assert tokenizer(models.text_of(expected[0]))["input_ids"] == expected[0]


def test_the_pairs_are_those_that_the_peers_script_draws(fresh, toy):
    tree = ast.parse((toy / "trl_reward.py").read_text(encoding="utf-8"))
    names = {"g", "row"}  # the peer's own generator of rows, without its trainer
    kept = [
        node
        for node in tree.body
        if getattr(node, "name", None) in names
        or (isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in names)
    ]
    theirs: dict = {"torch": torch}
    exec(compile(ast.Module(body=kept, type_ignores=[]), "trl_reward.py", "exec"), theirs)
    expected = [theirs["row"]() for _ in range(8)], [theirs["row"]() for _ in range(8)]
    assert importlib.import_module("bench.ours.reward").sides(8) == expected


def test_ppo_samples_every_token_of_the_peer(fresh, capsys):
    found = printed_by("ppo", capsys, fresh, PROMPTS="4", NEW="6", STEPS="1", MICRO="2")
    assert (found["prompts"], found["new_tokens"], found["microbatch"], found["lora"]) == (4, 6, 2, False)
    assert found["s_per_step"] > 0


def test_reward_training_sees_every_real_token_of_the_peer(fresh, capsys):
    found = printed_by("reward", capsys, fresh, PAIRS="5")
    assert found["pairs"] == 5
    assert found["real_tokens_per_s"] > 0


def test_decoding_samples_every_token_of_the_peer(fresh, capsys):
    found = printed_by("decode", capsys, fresh, ROWS="3", LENGTH="9", NEW="5")
    assert (found["rows"], found["length"], found["new_tokens"]) == (3, 9, 5)


def test_best_of_n_samples_every_token_of_the_peer_with_shared_prompts(fresh, capsys):
    found = printed_by("best_of_n", capsys, fresh, SAMPLES="3", NEW="5")
    assert (found["samples"], found["new_tokens"], found["shared_rows"]) == (3, 5, 12)


def test_outputs_are_those_of_transformers_and_of_trls_formulas(fresh, capsys):
    checks = printed_by("same", capsys, fresh)["checks"]
    assert len(checks) == 13
    assert {name: value for name, value in checks.items() if not value <= 1e-4} == {}


def test_a_difference_is_found_where_there_is_one(fresh):
    same = importlib.import_module("bench.ours.same")
    assert same.difference(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.5, 2.9])) == pytest.approx(0.5)
    a, b = torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(2, 1, bias=False)
    a.weight.grad, b.weight.grad = torch.tensor([[1.0, 4.0]]), torch.tensor([[2.0, -4.0]])
    assert same.gradient_difference(a, b) == pytest.approx(2.0)
    b.weight.grad = None
    with pytest.raises(AssertionError, match="weight has no gradient on their side"):
        same.gradient_difference(a, b)
