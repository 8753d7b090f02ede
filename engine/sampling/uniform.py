"""The random numbers behind draws: functions of a seed and a place, never of what else runs."""

from __future__ import annotations

import hashlib

_XTC = b"exclusion"


def xtc_uniform(seed: int, index: int, position: int) -> float:
    """The number that decides whether top choices are excluded: another one than the draw's at the same place."""
    return _number(seed, index, position, _XTC)


def uniform(seed: int, index: int, position: int) -> float:
    """A number in [0, 1) that is a function of its arguments alone: 53 bits of BLAKE2b over them.

    position counts the tokens already drawn; so neither preemption nor batching can change a draw.
    """
    return _number(seed, index, position, b"")


def _number(seed: int, index: int, position: int, purpose: bytes) -> float:
    place = b"%d:%d:%d" % (seed, index, position)
    digest = hashlib.blake2b(place, digest_size=8, person=purpose).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
