"""One rank that trains on tables of sizes and writes down the id of every row it handles: `python conservation_worker.py FOLDER`.

Nothing is replaced: the functions named in `watch` run as they are, their arguments and results are noted on the way.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rewarden.algos import evaluation, ppo, ppo_rounds, reward, reward_evaluation, sft
from rewarden.algos.ppo_config import PPO
from rewarden.data.sources import Data
from rewarden.models.features import FeatureCache
from rewarden.models.forward import sequence_scores
from rewarden.models.load import Model
from rewarden.models.reward import load_reward_model
from rewarden.rollout.hf import Sampling
from rewarden.runtime.ranks import Ranks
from rewarden.text.collate import collate

SEEN: dict[str, list[Any]] = {}


def watch(module: Any, name: str, note: Callable[[tuple, Any], None]) -> None:
    """Let `module.name` tell `note` its arguments and result."""
    plain = getattr(module, name)

    def watched(*arguments: Any, **named: Any) -> Any:
        result = plain(*arguments, **named)
        note(arguments, result)
        return result

    setattr(module, name, watched)


def see(kind: str, ids: list[Any]) -> None:
    SEEN.setdefault(kind, []).extend(ids)


def see_rows(arguments: tuple, result: Any) -> None:
    """Rows of SFT or pairs: a training batch is made with gradients on, an evaluation's without."""
    see("trained" if torch.is_grad_enabled() else "evaluated", [row.id for row in arguments[0]])


def see_scored(kind: str) -> Callable[[tuple, Any], None]:
    def note(arguments: tuple, scored: Any) -> None:
        see(f"{kind} asked", [rollout.conversation.id for rollout in arguments[1]])
        see(f"{kind} scored", [item.rollout.conversation.id for item in scored if item.score.status == "ok"])
        if kind == "rollouts":
            see("rollouts to learn", [list(item.rollout.token_ids) for item in scored if item.score.status == "ok"])

    return note


def see_learnt(arguments: tuple, result: Any) -> None:
    """The rows of every microbatch of an optimizer step, as the ids of their tokens: a batch has no names."""
    for part in arguments[1]:
        rows = zip(part.tokens.ids_BT.tolist(), part.tokens.length_B.tolist(), strict=True)
        see("rollouts learnt", [row[:length] for row, length in rows])


def data(folder: Path, name: str, rows: int) -> Data:
    return Data(path=str(folder / name), max_rows=rows)


def sft_case(folder: Path, ranks: Ranks, case: dict[str, int]) -> None:
    cfg = sft.SFT(
        model=Model(model_name_or_path=str(folder / "start/model")),
        data=data(folder, "start/sft.jsonl", case["rows"]),
        eval_data=data(folder, "start/sft_heldout.jsonl", case["eval"]),
        num_train_epochs=2,
        train_batch_size=case["batch"],
        per_device_train_batch_size=2,
        length_window=2,
    )
    job = sft.build(cfg, ranks)
    assert len(list(job.train(job.start))) == job.steps


def reward_case(folder: Path, ranks: Ranks, case: dict[str, int]) -> None:
    cfg = reward.Reward(
        model=Model(model_name_or_path=str(folder / "start/model")),
        data=data(folder, "pairs/pairs.jsonl", case["rows"]),
        eval_data=data(folder, "pairs/heldout.jsonl", case["eval"]),
        num_train_epochs=2,
        train_batch_size=case["batch"],
        per_device_train_batch_size=2,
    )
    job = reward.build(cfg, ranks)
    assert len(list(job.train(job.start))) == job.steps


def ppo_case(folder: Path, ranks: Ranks, case: dict[str, int]) -> None:
    cfg = PPO(
        policy=Model(model_name_or_path=str(folder / "start/model")),
        reward={"kind": "length", "target": 20, "penalty": 0.1},
        data=data(folder, "pairs/prompts.jsonl", case["rows"]),
        eval_data=data(folder, "pairs/selection.jsonl", case["eval"]),
        sampling=Sampling(max_completion_length=4),
        rollout_batch_size=case["batch"],
        mini_batch_size=case["mini"],
        num_ppo_epochs=2,
        per_device_train_batch_size=2,
        max_steps=case["rows"],  # rows x batch rollouts: every prompt comes `batch` times
    )
    job = ppo.build(cfg, ranks)
    assert len(list(job.train(job.start))) == job.steps


def features_at_once(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """All ranks compute and write the same cached rows at the same moment, then read them."""
    model = load_reward_model(
        Model(model_name_or_path=str(folder / "start/model"), trainable_layers=1), num_heads=1, head="fresh", head_seed=1
    )
    tokens = collate([[5, 6, 7, 8, 9 + row] for row in range(6)])
    with torch.no_grad():
        plain = sequence_scores(model.model, tokens)
        cache = FeatureCache(folder / "features", model.model)
        ranks.barrier()
        first = sequence_scores(model.model, tokens, features=cache)
        ranks.barrier()
        again = sequence_scores(model.model, tokens, features=cache)
    return {
        "gap": float((first - plain).abs().max()),
        "gap read": float((again - first).abs().max()),
        "computed": cache.computed,
        "read": cache.read,
    }


KINDS = {"sft": sft_case, "reward": reward_case, "ppo": ppo_case}


def main() -> None:
    torch.set_num_threads(1)
    ranks = Ranks.start()
    folder = Path(sys.argv[1])
    watch(sft, "prepare", see_rows)
    watch(reward, "prepare", see_rows)
    watch(reward_evaluation, "collate_pairs", see_rows)
    watch(ppo_rounds, "sample_and_score", see_scored("rollouts"))
    watch(evaluation, "sample_and_score", see_scored("evaluation"))
    watch(ppo_rounds, "update", see_learnt)
    seen = []
    for case in json.loads((folder / "cases.json").read_text(encoding="utf-8")):
        SEEN.clear()
        KINDS[case["kind"]](folder, ranks, case)
        seen.append({**SEEN})
    facts = {"cases": seen, "features": features_at_once(folder, ranks)}
    (folder / f"rank{ranks.rank}.json").write_text(json.dumps(facts), encoding="utf-8")
    ranks.barrier()


if __name__ == "__main__":
    main()
