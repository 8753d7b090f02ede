"""How the API process treats memory: large pieces go back to the system at once, and what start-up left is not visited
again by the garbage collector. Knows nothing of requests."""

from __future__ import annotations

import contextlib
import ctypes
import gc

LARGE = 1 << 20  # bytes
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc


def return_large_pieces() -> None:
    """Have malloc give pieces of LARGE bytes and more back when they are freed.

    Left alone, glibc raises that size to that of the largest piece freed so far, up to 32 MiB: a few large bodies would
    then stay in the process for good. Without effect where there is no glibc.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, LARGE)
        mallopt(_M_TRIM_THRESHOLD, LARGE)


def keep_startup_objects() -> None:
    """Call it once everything is imported and made: collections then look at what requests made, and take less time."""
    gc.collect()
    gc.freeze()
