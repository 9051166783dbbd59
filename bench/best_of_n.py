"""Sampling many answers to the same few prompts, whose keys and values our rows share."""

from bench.benchmark import Benchmark, Entry, times_as_much

BEST_OF_N = Benchmark(
    name="best_of_n",
    title="sampling 200 answers a prompt, transformers generate",
    ours="best_of_n.py",
    peer="hf_best_of_n.py",
    entries=(Entry(name="best_of_n_speedup", unit="tokens/s, 4 x 200 answers", key="tokens_per_s", ratio=times_as_much),),
    sizes={"SAMPLES": "200", "NEW": "64"},
    small={"SAMPLES": "4", "NEW": "8"},
    same=("samples",),
    seconds=(12.0, 105.0),
)
