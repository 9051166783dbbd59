"""Our sampler on the work of `hf_best_of_n.py`: 4 prompts of 128 tokens. Environment: SAMPLES (200), NEW (64).

Like the peer it draws at temperature 1 from all words and is not warmed up: what our sampler tries out on a new model is
inside the time.
"""

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

SAMPLES, NEW = int(os.getenv("SAMPLES", "200")), int(os.getenv("NEW", "64"))
PROMPTS, LENGTH = 4, 128


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = Model(model_name_or_path=write_policy(Path(folder) / "policy", never_ends=True))
        template = load_template(load_tokenizer(model))
        policy = load_policy(model, device="cpu")
    prompts = opened(template, random_prompts(PROMPTS, LENGTH, seed=1))
    rollouts = [prompt for prompt in prompts for _ in range(SAMPLES)]
    sampler = HFSampler(policy, template, Sampling(max_completion_length=NEW))
    start = time.perf_counter()
    answered = sampler.sample(rollouts, seeds=range(len(rollouts)))
    took = time.perf_counter() - start
    tokens, given = sum(len(row.logp_sampler) for row in answered), sum(len(row.token_ids) for row in rollouts)
    expected = (len(rollouts) * NEW, len(rollouts) * LENGTH)
    if (tokens, given) != expected:
        raise RewardenError(
            f"sampled {tokens} tokens after {given} of prompts; the peer samples {expected[0]} after {expected[1]}, so the "
            "work would not be the same"
        )
    facts = {"ours": f"rewarden {rewarden.__version__} sampler", "tokens_per_s": tokens / took, "samples": SAMPLES}
    facts |= {"new_tokens": NEW, "shared_rows": sampler.stats.shared_rows, "threads": torch.get_num_threads()}
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
