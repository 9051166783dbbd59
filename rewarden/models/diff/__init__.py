"""Weight diffs: what a tuned model adds to its base, made, checked and undone shard by shard.

A licence may forbid to publish a tuned model but not the difference to its base. MOSS-RLHF and AlpacaFarm were released that
way. `make_diff` writes such a difference with a manifest of hashes, `recover` gives the tuned model back, `check_diff` says
whether a diff is whole. `import_reward` turns reward checkpoints of those two libraries into ordinary Rewarden folders. No
function holds more than a few rows of a tensor in memory. See docs/weight_diffs.md.
"""

from rewarden.models.diff.check import Checked, check_diff
from rewarden.models.diff.imports import import_reward
from rewarden.models.diff.make import make_diff
from rewarden.models.diff.manifest import MANIFEST, Manifest, read_manifest
from rewarden.models.diff.recover import Recovered, recover
from rewarden.models.diff.rules import RULES
from rewarden.models.diff.sums import KNOWN_SUMS

__all__ = [
    "KNOWN_SUMS",
    "MANIFEST",
    "RULES",
    "Checked",
    "Manifest",
    "Recovered",
    "check_diff",
    "import_reward",
    "make_diff",
    "read_manifest",
    "recover",
]
