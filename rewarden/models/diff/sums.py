"""The integrity sums of published diffs: the sum of all entries of all tensors of the recovered model.

MOSS-RLHF's scripts compare it with a constant, AlpacaFarm's with a file `model_sum.txt` in the diff. Both were computed with
transformers versions that stored the rotary `inv_freq` tables in the state dict, so both sums contain them: 238.72 for
LLaMA-7B. With a newer version the comparison fails although the weights are right. Here the tables never count, and either
historical sum is accepted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rewarden.errors import ConfigError
from rewarden.models.folder import find

KNOWN_SUMS: dict[str, float | None] = {
    "moss_en_reward": 50810.703125,
    "moss_en_sft": 50874.84765625,
    "moss_en_policy": None,
    "moss_zh_reward": 49954.0859375,
}
"""The constants of MOSS-RLHF's merge scripts, with inv_freq; that of the English policy was never filled in."""

SUM_FILE = "model_sum.txt"
RELATIVE, ABSOLUTE = 1e-5, 1e-8


@dataclass(frozen=True, slots=True)
class SumCheck:
    """Our sum without inv_freq, what inv_freq would add, and what was expected; status says how they compare."""

    total: float
    inv_freq: float
    expected: float | None
    source: str
    status: Literal["ok", "unknown", "different"]

    def words(self) -> str:
        """One line for people."""
        sums = f"sum {self.total:.4f}, with inv_freq {self.total + self.inv_freq:.4f}"
        if self.expected is None:
            return f"{sums}: unknown, {self.source}"
        return f"{sums}: {'agrees with' if self.status == 'ok' else 'is not'} {self.expected:.4f} ({self.source})"


def inv_freq_sum(config: Mapping[str, Any]) -> float:
    """The sum of all inv_freq tables, layers * sum_i theta^(-2 i / head_dim), i < head_dim / 2; from config.json.

    Zero for models without rotary embeddings of this kind.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = config.get("rope_theta", rope.get("rope_theta", 10000.0))
    layers, heads, width = (config.get(key) for key in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    if not (layers and heads and width) or config.get("model_type") in ("gpt2", "opt"):
        return 0.0
    head_dim = config.get("head_dim") or width // heads
    return layers * sum(theta ** (-2 * index / head_dim) for index in range(head_dim // 2))


def expected_sum(given: str | None, diff: str) -> tuple[float | None, str]:
    """The sum to expect and where it comes from: a name of KNOWN_SUMS, a number, or the diff's own `model_sum.txt`.

    Errors: ConfigError for anything else.
    """
    if given in KNOWN_SUMS:
        known = KNOWN_SUMS[given]
        return known, f"{given}, published" if known is not None else f"no sum was ever published for {given}"
    if given is not None:
        try:
            return float(given), "given"
        except ValueError:
            names = ", ".join(KNOWN_SUMS)
            raise ConfigError(f"the expected sum is {given!r}; give a number, or one of {names}") from None
    file = find(diff, SUM_FILE)
    if file is None:
        return None, f"no expected sum was given and the diff has no {SUM_FILE}"
    try:
        return float(file.read_text(encoding="utf-8")), str(Path(file).name)
    except ValueError as error:
        raise ConfigError(f"{file} holds no number ({error}); copy it again, or give the sum yourself") from error


def compare(total: float, config: Mapping[str, Any], expected: float | None, source: str) -> SumCheck:
    """Whether `total` (without inv_freq) is the expected sum, which may have been taken with or without inv_freq.

    Tolerance of the published scripts: |sum - expected| <= 1e-8 + 1e-5 |expected|.
    """
    tables = inv_freq_sum(config)
    if expected is None:
        near = [name for name, known in KNOWN_SUMS.items() if known is not None and _near(total, tables, known)]
        return SumCheck(total, tables, None, f"{source}{f'; it is that of {near[0]}' if near else ''}", "unknown")
    return SumCheck(total, tables, expected, source, "ok" if _near(total, tables, expected) else "different")


def _near(total: float, tables: float, expected: float) -> bool:
    slack = ABSOLUTE + RELATIVE * abs(expected)
    return abs(total - expected) <= slack or abs(total + tables - expected) <= slack
