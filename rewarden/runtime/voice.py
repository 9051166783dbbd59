"""One voice: when one rank of a run fails, all of them end, and one says why.

The rank that fails first takes the voice in the store through which the ranks met; its error goes on to the command line. The
others, whose collectives break when it leaves, end without a word and with the same exit code.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from rewarden.errors import RewardenError
from rewarden.runtime.ranks import PeerError, Ranks

FAILED = 2
"""The exit code of a rank that leaves the talking to another."""
KEY = "rewarden/voice"


class Terminated(BaseException):
    """SIGTERM came; no Exception, so that no user's code or boundary takes it for a mistake of its own."""


@contextmanager
def one_voice(ranks: Ranks) -> Iterator[None]:
    """Run the block on every rank; of the errors that end it, one is raised, on the rank that failed first.

    The other ranks leave with SystemExit(FAILED). SIGTERM (what a launcher sends to the rest when one rank is gone) unwinds the
    block too, so that locks are released, and becomes a PeerError. Alone it does nothing.
    """
    if ranks.world == 1:
        yield
        return
    main_thread = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _terminated) if main_thread else None
    try:
        yield
        ranks.barrier()  # nobody leaves while another still needs the store
    except BaseException as error:
        if main_thread:
            # The launcher ends the rest as soon as the first is gone; who has the word must come to say it.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if not _takes_voice(ranks):
            raise SystemExit(FAILED) from None
        told = _lost(ranks) if isinstance(error, Terminated) else error
        _tell_launcher(told)
        if told is error:
            raise
        raise told from None
    if main_thread:
        signal.signal(signal.SIGTERM, before)


def _terminated(number: int, frame: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated


def _lost(ranks: Ranks) -> PeerError:
    return PeerError(
        f"rank {ranks.rank} of {ranks.world} was told to stop (SIGTERM), as the launcher does when another rank was killed or "
        "ran out of memory, and a scheduler at its time limit; the same command goes on from the last checkpoint"
    )


def _takes_voice(ranks: Ranks) -> bool:
    """Whether this rank is the first to fail. Without a store nobody can know: it speaks."""
    mine = str(ranks.rank)
    try:
        return dist.distributed_c10d._get_default_store().compare_set(KEY, "", mine).decode() == mine
    except (RuntimeError, ValueError):
        return True


def _tell_launcher(error: BaseException) -> None:
    """Put the message where torch's launcher looks for it; its own summary then ends with it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    text = str(error) if isinstance(error, RewardenError) else f"{type(error).__name__}: {error}"
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": text, "timestamp": int(time.time())}, file)
    except OSError:
        return  # only the launcher's summary is poorer
