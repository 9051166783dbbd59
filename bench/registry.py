"""Every benchmark, in the order in which they run. A new one is a file like ppo.py, a line here, and its two scripts."""

from bench.benchmark import Benchmark
from bench.best_of_n import BEST_OF_N
from bench.decode import DECODE
from bench.ppo import PPO
from bench.reward import REWARD

BENCHMARKS: tuple[Benchmark, ...] = (PPO, REWARD, *DECODE, BEST_OF_N)
