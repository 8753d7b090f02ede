"""The random numbers behind draws: functions of a seed and a place, never of what else runs."""

from __future__ import annotations

import hashlib


def uniform(seed: int, index: int, position: int) -> float:
    """A number in [0, 1) that is a function of its arguments alone: 53 bits of BLAKE2b over them.

    position counts the tokens already drawn; so neither preemption nor batching can change a draw.
    """
    digest = hashlib.blake2b(b"%d:%d:%d" % (seed, index, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
