"""Our sampler on the work of `hf_generate.py`. Environment: ROWS (128), LENGTH (128), NEW (64)."""

import json
import os
import tempfile
import time
from pathlib import Path

import torch

import rewarden
from bench.ours.toy_models import opened, random_prompts, write_policy
from rewarden.errors import RewardenError
from rewarden.models.load import Model, load_policy, load_tokenizer
from rewarden.rollout.hf import HFSampler, Sampling
from rewarden.text.render import load_template

ROWS, LENGTH, NEW = int(os.getenv("ROWS", "128")), int(os.getenv("LENGTH", "128")), int(os.getenv("NEW", "64"))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = Model(model_name_or_path=write_policy(Path(folder) / "policy", never_ends=True))
        template = load_template(load_tokenizer(model))
        policy = load_policy(model, device="cpu")
    HFSampler(policy, template, Sampling(max_completion_length=2)).sample(
        opened(template, random_prompts(2, LENGTH, seed=2)), seeds=range(2)
    )
    rollouts = opened(template, random_prompts(ROWS, LENGTH, seed=1))
    sampler = HFSampler(policy, template, Sampling(max_completion_length=NEW, batch_size=ROWS))
    start = time.perf_counter()
    answered = sampler.sample(rollouts, seeds=range(ROWS))
    took = time.perf_counter() - start
    tokens, given = sum(len(row.logp_sampler) for row in answered), sum(len(row.token_ids) for row in rollouts)
    if (tokens, given) != (ROWS * NEW, ROWS * LENGTH):
        raise RewardenError(
            f"sampled {tokens} tokens after {given} of prompts; the peer samples {ROWS * NEW} after {ROWS * LENGTH}, so the "
            "work would not be the same"
        )
    facts = {"ours": f"rewarden {rewarden.__version__} sampler", "tokens_per_s": tokens / took, "rows": ROWS, "length": LENGTH}
    print(json.dumps({**facts, "new_tokens": NEW, "threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main()
