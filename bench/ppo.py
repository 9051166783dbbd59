"""PPO at equal work: time and peak memory of one run each."""

from bench.benchmark import Benchmark, Entry, times_as_much, times_faster

PPO = Benchmark(
    name="ppo",
    title="PPO step, TRL 1.12.0 PPOTrainer",
    ours="ppo.py",
    peer="trl_ppo.py",
    entries=(
        Entry(name="ppo_step_speedup", unit="s per step", key="s_per_step", ratio=times_faster),
        Entry(name="ppo_peak_memory", unit="GB above imports", key="peak_above_imports_gb", ratio=times_as_much),
    ),
    sizes={"PROMPTS": "64", "NEW": "64", "STEPS": "3", "LORA": "0"},
    small={"PROMPTS": "8", "NEW": "8", "STEPS": "1"},
    only_ours={"MICRO": "16"},
    same=("prompts", "new_tokens", "lora"),
    peer_path=("trl12",),
    seconds=(80.0, 95.0),
)
