"""Our reward training on the work of `trl_reward.py`. Environment: PAIRS (512)."""

import json
import os
import tempfile
import time
from pathlib import Path

import torch

import rewarden
from bench.ours.toy_models import text_of, write_rows, write_scalar
from rewarden.algos.reward import Reward
from rewarden.data.sources import Data
from rewarden.errors import RewardenError
from rewarden.models.load import Model
from rewarden.runtime.optim import Optim
from rewarden.runtime.ranks import Ranks

PAIRS = int(os.getenv("PAIRS", "512"))


def sides(num: int) -> tuple[list[list[int]], list[list[int]]]:
    """The peer's rows (chosen, rejected): the same lengths and, but for each last token, the same ids."""
    g = torch.Generator().manual_seed(3)

    def row() -> list[int]:
        n = int(torch.clamp(torch.exp(torch.randn(1, generator=g) * 0.7 + 4.5), 30, 256))
        return torch.randint(0, 2000, (n,), generator=g).tolist()

    return [row() for _ in range(num)], [row() for _ in range(num)]


def recipe(folder: Path, chosen: list[list[int]], rejected: list[list[int]]) -> Reward:
    """The peer's settings in our words; the template ends each row with <eos>, which takes the place of its last token."""
    rows = (
        {"prompt": "", "chosen": text_of(good[:-1]), "rejected": text_of(bad[:-1])}
        for good, bad in zip(chosen, rejected, strict=True)
    )
    return Reward(
        model=Model(model_name_or_path=write_scalar(folder / "start", seed=0)),
        data=Data(path=write_rows(folder / "pairs.jsonl", rows), format="trl"),
        optim=Optim(learning_rate=1e-4, betas=(0.9, 0.999), lr_scheduler_type="linear", max_grad_norm=1.0),
        num_train_epochs=1,
        train_batch_size=16,
        per_device_train_batch_size=16,
        max_length=256,
        overlength="error",
    )


def main() -> None:
    chosen, rejected = sides(PAIRS)
    real = sum(map(len, chosen)) + sum(map(len, rejected))
    with tempfile.TemporaryDirectory() as folder:
        job = recipe(Path(folder), chosen, rejected).build(Ranks.single("cpu"))
        start = time.perf_counter()
        reports = [tick.report for tick in job.train(job.start)]
        took = time.perf_counter() - start
    trained = sum(report["num_tokens"] for report in reports)
    if trained != real or any(report["skipped_steps"] for report in reports):
        raise RewardenError(f"trained on {trained:.0f} tokens; the peer's rows have {real}, so the work would not be the same")
    facts = {"ours": f"rewarden {rewarden.__version__} reward", "real_tokens_per_s": real / took, "pairs": PAIRS}
    print(json.dumps({**facts, "real_tokens": real, "threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main()
