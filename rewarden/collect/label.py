"""Preference labels from a known truth: Bradley-Terry draws, then flips."""

import math
import random


def noisy_preference(gold_a: float, gold_b: float, *, slope: float, flip: float, seed: int) -> bool:
    """Whether a labeller prefers a.

        P(a) = sigmoid(slope * (gold_a - gold_b)),  then the answer is turned round with probability `flip`

    Deterministic in `seed`. flip is a net probability (0.25 makes a sure label right in 75 of 100 cases).
    """
    rng = random.Random(seed)
    sure = 1.0 / (1.0 + math.exp(-max(min(slope * (gold_a - gold_b), 700.0), -700.0)))
    prefers_a = rng.random() < sure
    return prefers_a != (rng.random() < flip)
