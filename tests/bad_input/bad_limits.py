"""A disk that is full and permissions that count, for this process and a while, also when it runs as root."""

import ctypes
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

VERSION_3 = 0x20080522
OVERRIDES = (1 << 1) | (1 << 2)
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: what lets root write and read whatever the permissions say."""


@contextmanager
def largest_file(size: int | None) -> Iterator[None]:
    """No file may grow beyond `size` bytes: the write fails in the kernel, as it does on a full disk."""
    if size is None:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def permissions_count(wanted: bool) -> Iterator[None]:
    """Permissions hold for this thread even if it is root's; a system that cannot do that skips the test."""
    if not wanted or os.geteuid() != 0:
        yield
        return
    if sys.platform != "linux":
        pytest.skip("running as root, to whom permissions mean nothing here")
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(VERSION_3, 0)
    held = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice, for 64 bits
    if libc.capget(header, held) != 0:
        pytest.skip("running as root, whose capabilities cannot be read here")
    lowered = (ctypes.c_uint32 * 6)(*held)
    lowered[0] &= ~OVERRIDES
    assert libc.capset(header, lowered) == 0
    try:
        yield
    finally:
        assert libc.capset(header, held) == 0
