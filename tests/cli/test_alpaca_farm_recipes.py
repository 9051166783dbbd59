"""The recipes of the original ensemble system resolve without network, data or the 7B model, and say what their page says."""

import re
from pathlib import Path

import pytest

from rewarden.errors import ConfigError
from rewarden.recipe.architectures import check_architectures
from rewarden.recipe.jobs import parse_recipe
from rewarden.recipe.read import read_recipe
from rewarden.recipe.show import show_recipe
from rewarden.scoring.registry import register

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
FARM = sorted((ROOT / "recipes").glob("alpaca_farm_*.yaml"))
PAGE = (ROOT / "docs" / "alpaca_farm.md").read_text(encoding="utf-8")

TRUNK = 6_607_343_616
"""Parameters of LLaMA-7B with 32,001 words and without its LM head (specification of the ensembles, 2.4)."""
LM_HEAD = 32_001 * 4096
ADAPTER = 4_194_304
"""Rank 8 on queries and values of 32 layers: 32 * 2 * 8 * (4096 + 4096)."""


def show(capsys, path: Path, *overrides: str) -> str:
    show_recipe(path, overrides)
    return capsys.readouterr().out


def megabytes(text: str, stage: str, row: str) -> int:
    """The first figure of a row of the memory table of a stage."""
    part = text[text.index(f"\n{stage}: ") :]
    found = re.search(rf"^  memory  {row} +([\d,]+)", part, re.MULTILINE)
    assert found is not None
    return int(found[1].replace(",", ""))


def rounded(num_bytes: int) -> int:
    return -(-num_bytes // 1_000_000)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_shipped_recipe_resolves_without_network_data_or_models(here, capsys, path):
    few = ["grid.seed=[0]", "grid.trap=[false]"] if path.stem == "overoptimization" else []  # many cells, all alike
    text = show(capsys, path, *few)
    trained = [stage for stage in read_recipe(path).stages if stage.raw["kind"] in ("sft", "reward", "ppo")]
    assert text.count("  plan  ") >= len({stage.base for stage in trained})


@pytest.mark.parametrize("path", FARM, ids=lambda path: path.stem)
def test_the_recipes_of_the_original_are_short_and_name_the_source_of_their_numbers(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 40
    numbers = [line for line in lines if re.search(r"^ +(num_|\w*batch_size|max_|beta|vf_coef|critic_head|sampling)", line)]
    assert numbers
    assert [line for line in numbers if not re.search(r"# .*(\[P\]|\[AF\]|\[D|ours)", line)] == []


def test_the_memory_of_the_reward_models_is_that_of_the_specification(here, capsys, monkeypatch):
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    text = show(capsys, ROOT / "recipes" / "alpaca_farm_reward.yaml")
    assert "models/sft10k is not here: counted by its architecture as this recipe gives it: llama" in text
    assert "rows of the full length, since runs/alpaca_farm_reward/pairs/all.jsonl is not here" in text
    assert megabytes(text, "independent", "weights") == rounded(4 * (TRUNK + 4096))  # one member at a time
    assert megabytes(text, "linear", "weights") == rounded(4 * (TRUNK + 3 * 4096))
    assert megabytes(text, "lora", "optimizer") == pytest.approx(8 * 3 * ADAPTER / 1e6, rel=0.01)
    assert text.count("16 pairs per optimizer step over 1 rank(s): at most 16 a rank in 16 microbatch(es)") == 4


def test_ppo_holds_four_models(here, capsys):
    text = show(capsys, ROOT / "recipes" / "alpaca_farm_ppo.yaml")
    assert "runs/alpaca_farm_reward/models.yaml:lora is not here: counted as one model like models/sft10k" in text
    assert [megabytes(text, "ppo", row) for row in ("policy", "reference")] == [rounded(4 * (TRUNK + LM_HEAD))] * 2
    assert [megabytes(text, "ppo", row) for row in ("critic", "reward model")] == [rounded(4 * (TRUNK + 4096))] * 2
    assert "625 rounds x 64 rollouts, 40000 in all" in text
    assert "2 epochs x 2 minibatches = 4 optimizer steps" in text


def test_best_of_n_asks_for_one_evaluation_of_each_entry_and_n(here, capsys):
    text = show(capsys, ROOT / "recipes" / "alpaca_farm_best_of_n.yaml")
    assert "200 answers to each prompt; 1024 a step over 1 rank(s), 64 of them decoded together" in text
    # Keys and values of 64 answers of 300 tokens and 2 prompts of at most 1024, float32, 32 layers of width 4096.
    assert megabytes(text, "samples", "key-value cache") == rounded((64 * 300 + 2 * 1024) * 2 * 32 * 4096 * 4)
    stages = read_recipe(ROOT / "recipes" / "alpaca_farm_best_of_n.yaml").stages
    named = sorted(stage.raw["annotations"] for stage in stages if stage.base == "evaluate")
    entries = ("independent", "linear", "lora", "single")
    assert named == sorted(f"results/{entry}_n{n}/annotations.json" for entry in entries for n in (50, 100, 200))
    assert [stage.base for stage in stages].count("samples") == 1


def test_without_a_description_the_estimate_says_what_is_missing_and_the_rest_is_shown(here, capsys):
    text = show(capsys, ROOT / "recipes" / "alpaca_farm_reward.yaml", "sft10k=models/another")
    assert text.count("no estimate: models/another is not on this machine yet") == 4
    assert "model.lora_r = 8" in text
    assert "not here" not in text.split("\npairs: ")[0]  # nothing is said of a description that is not used
    assert text.count("  plan  ") >= 4


def test_a_model_that_is_here_is_read_and_not_described(world_files, write, capsys):
    rows = f"kind: sft\nmodel: {{model_name_or_path: {world_files.policy}}}\ndata: {{path: {world_files.dialogues}}}\n"
    plain = show(capsys, write(rows, "a.yaml"))
    described = write(
        f"architectures: {{{world_files.policy}: {{model_type: llama, hidden_size: 8}}}}\n{rows}name: a\n", "b.yaml"
    )
    assert show(capsys, described) == plain
    assert "not here" not in plain


def test_a_registry_that_is_here_is_read(world_files, write, capsys, here):
    text = f"""
kind: ppo
policy: {{model_name_or_path: {world_files.policy}}}
reward: {{kind: registered, registry: models.yaml, name: one}}
critic: {{model_name_or_path: {world_files.reward}}}
data: {{path: {world_files.prompts}}}
architectures:
  big: {{model_type: llama, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4, vocab_size: 1000000}}
  models.yaml:one: big
"""
    layer = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64
    assert megabytes(show(capsys, write(text)), "recipe", "reward model") == rounded(4 * (64 * 1_000_000 + 2 * layer + 64 + 64))
    register("models.yaml", "one", {"kind": "reward_model", "path": str(world_files.reward)})
    assert megabytes(show(capsys, write(text)), "recipe", "reward model") == 1


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ([], "architectures is \\[\\]; write"),
        ({"m": {"hidden_size": 8}}, "architectures.m is .*with model_type"),
        ({"m": 3}, "architectures.m is 3"),
        ({"m": {"model_type": "llama"}, "n": "mm"}, "architectures.n is 'mm', which is not described there; did you mean 'm'"),
    ],
)
def test_a_description_that_is_none_is_refused(raw, said):
    with pytest.raises(ConfigError, match=said):
        check_architectures(raw, "recipe.yaml")


def table_rows(heading: str) -> list[list[str]]:
    section = re.split(r"^##", PAGE.split(f"\n{heading}\n")[1], maxsplit=1, flags=re.MULTILINE)[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


@pytest.mark.parametrize("path", FARM, ids=lambda path: path.stem)
def test_the_page_says_the_numbers_that_the_recipe_has_and_their_sources(path):
    recipe = read_recipe(path)
    specs = {stage.base: (spec, drive) for stage, (spec, drive) in zip(recipe.stages, parse_recipe(recipe), strict=True)}
    rows = table_rows(f"### {path.name}")
    assert rows
    for key, said, source in rows:
        stage, *parts = key.strip("`").split(".")
        value = specs[stage][parts[0] == "save_steps"]
        for part in parts:
            value = getattr(value, part)
        assert str(list(value) if isinstance(value, list) else value) == said, key
        assert re.match(r"\[P\]|\[AF\]|ours", source), key


def test_every_hazard_names_a_test_that_exists():
    rows = table_rows("## Hazards of the reference code")
    assert len(rows) >= 18
    for name, _, _, test in rows:
        file, function = test.strip("`").split("::")
        assert re.search(rf"^def {function}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), name
