"""How long to wait before asking a server again."""

import email.utils
import math
from datetime import UTC, datetime
from random import Random

from rewarden.runtime.seed import seed_of


def back_off(attempt: int, *, first_s: float, most_s: float, seed: int, key: str) -> float:
    """Seconds to wait after failure number `attempt` (from 0) of the request `key`.

        min(first_s * 2^attempt, most_s) * u,   u uniform in [0.5, 1], from the seed, the request and the attempt

    Doubling gives a struggling server room; the jitter keeps requests that failed together from coming back together.
    """
    draw = Random(seed_of("back off", seed, key, attempt)).random()
    return min(first_s * 2.0 ** min(attempt, 60), most_s) * (0.5 + 0.5 * draw)


def retry_after(header: str | None, now: datetime | None = None) -> float | None:
    """Seconds that a Retry-After header (RFC 9110, section 10.2.3: seconds or a date) asks to wait; None when it does not."""
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            moment = email.utils.parsedate_to_datetime(header)
        except ValueError:
            return None
        moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        seconds = (moment - (now or datetime.now(UTC))).total_seconds()
    return max(seconds, 0.0) if math.isfinite(seconds) else None
