"""The moments of each member's scores on a set of texts: what scores are centred and scaled by where no other set is at hand.

Bradley-Terry scores have a free offset and members trained apart have their own scales, so a score says nothing by itself;
its distance from the mean of a fixed set of texts, in units of their spread, does. Training writes the moments into the
card of the checkpoint (`rewarden.json`, "calibration").
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor

from rewarden.errors import ConfigError
from rewarden.maths import Moments


def calibrate(score_NK: Float[Tensor, "N K"]) -> tuple[Moments, ...]:
    """The moments of each member over N texts.

    Errors: ConfigError when a score is not finite.
    """
    if not bool(score_NK.isfinite().all()):
        member = int((~score_NK.isfinite()).any(0).nonzero()[0])
        raise ConfigError(
            f"member {member} gives scores that are not finite, so it has no mean and spread; its training failed: lower "
            "learning_rate, or set max_grad_norm"
        )
    return tuple(Moments().update(score_N) for score_N in score_NK.T)


def calibration_card(moments: Sequence[Moments], texts: str) -> dict[str, Any]:
    """The "calibration" entry of a card; `texts` says which texts they are of."""
    return {"texts": texts, "members": [{"count": m.count, "mean": m.mean, "m2": m.m2} for m in moments]}


def read_calibration(card: Mapping[str, Any], num_members: int, where: str) -> tuple[Moments, ...] | None:
    """The moments in a card, one for each member, or None where it has none.

    Errors: ConfigError for an entry that is damaged or of another number of members.
    """
    found = card.get("calibration")
    if found is None:
        return None
    try:
        moments = tuple(Moments(int(m["count"]), float(m["mean"]), float(m["m2"])) for m in found["members"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: 'calibration' in rewarden.json is damaged ({error!r}); copy the file again") from error
    if len(moments) != num_members:
        raise ConfigError(
            f"{where}: 'calibration' in rewarden.json is of {len(moments)} members, the checkpoint has {num_members}; copy the "
            "file again, or remove the entry"
        )
    return moments
