"""The recipes of the original ensemble system run to their end, on a model of a thousandth of a thousandth of the size."""

import json
import random
from pathlib import Path

import pytest

from rewarden.models.load import save_model
from rewarden.worlds import TripDesk
from rewarden.worlds.tokenizer import build_policy

RECIPES = Path(__file__).parents[2] / "recipes"
ENTRIES = ("independent", "linear", "lora", "single")


def write_rows(name: str, rows: list[dict]) -> str:
    Path(name).write_text(json.dumps(rows))
    return f"{{path: {name}, subset: null, split: train}}"


def annotate(outputs: Path, target: Path) -> None:
    """A judge that prefers the model's answer to every other instruction."""
    rows = [
        {
            "instruction": row["instruction"],
            "output_1": "A reference.",
            "output_2": row["output"],
            "generator_1": "reference",
            "generator_2": row["generator"],
            "annotator": "coin",
            "preference": 1 + number % 2,
        }
        for number, row in enumerate(json.loads(outputs.read_text()))
    ]
    target.parent.mkdir(parents=True)
    target.write_text(json.dumps(rows))


@pytest.mark.slow
def test_the_three_recipes_run_in_the_order_of_the_original_workflow(here, shell):
    world, rng = TripDesk(), random.Random(0)
    save_model(*build_policy(world, 0), Path("sft10k"), extra={"role": "policy", "template": "alpaca"})
    said = sorted(world.sentences())
    openings = [world.start(number).messages[0].text for number in range(60)]

    def pair(text: str) -> dict:
        first, second = rng.sample(said, 2)
        return {"instruction": text, "input": "", "output_1": first, "output_2": second, "preference": rng.choice([1, 2])}

    data = {name: write_rows(f"{name}.json", [pair(text) for text in openings[:24]]) for name in ("noisy", "human")}
    prompts = [{"instruction": text, "input": "", "output": "x", "dataset": "koala"} for text in openings[24:]]
    unlabeled, held = write_rows("unlabeled.json", prompts[:16]), write_rows("eval.json", prompts[16:22])
    sources = [f"pairs.data.{name}={value}" for name, value in data.items()]

    def run(name: str, *overrides: str) -> tuple[object, str]:
        code, out, err = shell("run", RECIPES / f"alpaca_farm_{name}.yaml", "sft10k=sft10k", *overrides)
        return code, out + err

    code, text = run("reward", *sources, "pairs.holdout_prompts=6")
    assert code == 0, text
    registry = (Path("runs/alpaca_farm_reward/models.yaml")).read_text()
    assert [line.split(":")[0] for line in registry.splitlines()] == ["independent", "linear", "trunk", "lora"]

    short = [f"samples.data={held}", "samples.sampling.max_completion_length=6"]
    few = ["samples.num_generations=4", "curves.n=[1,2,4]", "curves.outputs=[2,4]", "grid.n=[2,4]"]
    code, text = run("best_of_n", *short, *few)
    assert code == 2
    assert "results/lora_n4/annotations.json" in text
    for entry in ENTRIES:
        for n in (2, 4):
            outputs = Path(f"runs/alpaca_farm_best_of_n/curves/outputs/{entry}_n{n}.json")
            annotate(outputs, Path(f"results/{entry}_n{n}/annotations.json"))
    code, text = run("best_of_n", *short, *few)
    assert code == 0, text
    rates = Path("runs/alpaca_farm_best_of_n").glob("evaluate*/win_rate.json")
    assert [json.loads(file.read_text())["win_rate"] for file in rates] == [50.0] * 8

    rounds = ["ppo.max_steps=2", "ppo.rollout_batch_size=8", "ppo.mini_batch_size=4", "ppo.sampling.max_completion_length=6"]
    code, text = run("ppo", f"ppo.data={unlabeled}", *rounds, *short)
    assert code == 2
    assert "results/alpaca_farm_ppo/annotations.json" in text
    annotate(Path("runs/alpaca_farm_ppo/answers/outputs/lora_n1.json"), Path("results/alpaca_farm_ppo/annotations.json"))
    code, text = run("ppo", f"ppo.data={unlabeled}", *rounds, *short)
    assert code == 0, text
