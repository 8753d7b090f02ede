"""The process's limit of open files. Knows nothing of connections."""

from __future__ import annotations

import contextlib
import resource

MOST = 65536  # wanted where the hard limit is higher, or there is none


def raise_limit() -> int:
    """Raise the soft limit of open files to the hard one, at most to MOST; returns the one now in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # macOS refuses more than the kernel's own bound, whatever the hard limit says.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else soft
