"""Algorithms, one file each. To add one: a new file here and one line in ALGORITHMS."""

from rewarden.algos.average import Average
from rewarden.algos.ppo_config import PPO
from rewarden.algos.reward import Reward
from rewarden.algos.sft import SFT
from rewarden.spec import Spec

ALGORITHMS: dict[str, type[Spec]] = {"sft": SFT, "reward": Reward, "average": Average, "ppo": PPO}
