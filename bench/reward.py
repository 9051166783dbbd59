"""Reward training: real (not padded) tokens a second over one epoch."""

from bench.benchmark import Benchmark, Entry, times_as_much

REWARD = Benchmark(
    name="reward",
    title="reward training, TRL 1.16.0 RewardTrainer",
    ours="reward.py",
    peer="trl_reward.py",
    entries=(Entry(name="reward_train_speedup", unit="real tokens/s", key="real_tokens_per_s", ratio=times_as_much),),
    sizes={"PAIRS": "512"},
    small={"PAIRS": "32"},
    same=("pairs",),
    seconds=(70.0, 135.0),
)
