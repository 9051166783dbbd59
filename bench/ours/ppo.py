"""Our PPO step on the work of `trl_ppo.py`. Environment: PROMPTS (64), STEPS (3), NEW (64), MICRO (16)."""

import json
import os
import tempfile
import time
from pathlib import Path

import torch

import rewarden
from bench.ours.toy_models import random_prompts, text_of, write_policy, write_rows, write_scalar
from rewarden.algos.ppo_config import PPO
from rewarden.data.sources import Data
from rewarden.errors import RewardenError
from rewarden.models.load import Model
from rewarden.rollout.hf import Sampling
from rewarden.runtime.optim import Optim
from rewarden.runtime.ranks import Ranks

B, P, N, S = int(os.getenv("PROMPTS", "64")), 32, int(os.getenv("NEW", "64")), int(os.getenv("STEPS", "3"))
MICRO = int(os.getenv("MICRO", "16"))


def recipe(folder: Path) -> PPO:
    """The peer's settings in our words; what the peer has not (reward scaling, gradient clipping) is off."""
    optim = Optim(learning_rate=1e-5, betas=(0.9, 0.999), lr_scheduler_type="linear", max_grad_norm=None)
    prompts = ({"prompt": text_of(ids)} for ids in random_prompts(512, P, seed=1))
    return PPO(
        policy=Model(model_name_or_path=write_policy(folder / "policy", never_ends=True)),
        reward={"kind": "reward_model", "path": write_scalar(folder / "reward", seed=1)},
        critic=Model(model_name_or_path=write_scalar(folder / "critic", seed=2)),
        critic_head="saved",
        data=Data(path=write_rows(folder / "prompts.jsonl", prompts), format="trl"),
        optim=optim,
        critic_optim=optim,
        sampling=Sampling(max_completion_length=N, temperature=1.0, batch_size=B),
        max_steps=S,
        rollout_batch_size=B,
        mini_batch_size=B,
        per_device_train_batch_size=min(MICRO, B),
        num_ppo_epochs=4,
        beta=0.05,
        gamma=1.0,
        lam=0.95,
        cliprange=0.2,
        cliprange_value=0.2,
        vf_coef=0.1,
        reward_norm=False,
        reward_clip=None,
        whiten_advantages=True,
        num_sample_generations=0,
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        job = recipe(Path(folder)).build(Ranks.single("cpu"))
        start = time.perf_counter()
        reports = [tick.report for tick in job.train(job.start)]
        took = time.perf_counter() - start
    for step, report in enumerate(reports, 1):
        if report["num_tokens"] != B * N or report["skipped_steps"]:
            raise RewardenError(
                f"step {step} sampled {report['num_tokens']:.0f} tokens and skipped {report['skipped_steps']:.0f} updates; the "
                f"peer samples {B * N} and skips none, so the work would not be the same"
            )
    facts = {
        "ours": f"rewarden {rewarden.__version__} ppo",
        "s_per_step": took / S,
        "prompts": B,
        "new_tokens": N,
        "lora": False,
    }
    print(json.dumps({**facts, "microbatch": min(MICRO, B), "threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main()
