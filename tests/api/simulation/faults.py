"""What may go wrong, and whether it does: drawn from the seed at every point at which something could.

A seed enables some kinds of faults, each with a rate of its own, so that some runs have many of one kind and others none at all.
Every point is numbered: the same seed has the same faults at the same points. It does not know what a fault does.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

INJECTED = "injected"  # in the message of every error that a fault raises

# The kinds, and the most of a rate: of points of a kind at which it happens.
ENGINE = {
    "step crashes": 0.03,
    "step has no memory": 0.03,
    "engine is killed": 0.02,
    "engine stands still": 0.01,  # asleep for ever
    "engine is stopped": 0.01,  # by a signal, for ever
    "engine is stopped for a moment": 0.02,  # and nobody may take it for dead
    "no engine can be started": 0.5,  # for want of memory, or of descriptors
    "engine computes for ever": 0.006,
    "step is slow": 0.2,
    "logits are not finite": 0.05,
    "request has no memory": 0.1,
    "disk fails at a load": 0.5,
    "disk fails at an adapter": 0.5,
}
NETWORK = {
    "connection is reset": 0.02,
    "process stands still": 0.01,  # the clock jumps for everybody in it
    "clock on the wall is set": 0.01,
    "piece is late": 0.1,
}
TEXT = {
    "text process dies": 0.1,
    "text process is slow": 0.1,
    "text process has no memory": 0.1,
    "no process can be started": 0.2,
}
CLIENTS = {"client is slow": 0.7, "client stops reading": 0.6, "client leaves": 0.5, "client sends slowly": 0.3}
KINDS = {**ENGINE, **NETWORK, **TEXT, **CLIENTS}
SHARE = 0.25  # of the kinds that a seed enables


@dataclass
class Faults:
    """at: points asked so far, by kind. log: (seconds, kind, of what) of what happened."""

    rng: random.Random
    rates: dict[str, float] = field(default_factory=dict)
    at: Counter[str] = field(default_factory=Counter)
    log: list[tuple[float, str, str]] = field(default_factory=list)
    over: bool = False  # nothing goes wrong any more

    @classmethod
    def drawn(cls, rng: random.Random) -> Faults:
        chosen = rng.random() * 2 * SHARE  # some seeds have hardly any
        rates = {kind: most * rng.random() for kind, most in KINDS.items() if rng.random() < chosen}
        return cls(rng, rates)

    def happens(self, kind: str, now: float, of: str = "") -> bool:
        """Whether it goes wrong at this point."""
        self.at[kind] += 1
        if self.over or self.rng.random() >= self.rates.get(kind, 0.0):
            return False
        self.log.append((now, kind, of))
        return True

    def between(self, begin: float, end: float, *kinds: str) -> list[str]:
        """Those of these kinds that happened within this time, with what they happened to."""
        return [of for at, kind, of in self.log if kind in kinds and begin <= at <= end]

    def happened(self, *kinds: str) -> bool:
        return any(kind in kinds for _, kind, _ in self.log)
