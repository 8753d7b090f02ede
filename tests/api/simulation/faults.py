"""Faults, drawn from the seed at every point at which one could happen.

A seed enables some kinds of faults with separate rates, so that some runs have many of one kind and others none. The same seed
has the same faults at the same points. The effects of faults are implemented by the callers.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

INJECTED = "injected"  # in the message of every error that a fault raises

# Kinds, and the highest rate of each: the share of points at which it happens.
ENGINE = {
    "step crashes": 0.03,
    "step has no memory": 0.03,
    "engine is killed": 0.02,
    "engine stands still": 0.01,  # asleep forever
    "engine is stopped": 0.01,  # by a signal, forever
    "engine is stopped for a moment": 0.02,  # it must not be considered dead
    "no engine can be started": 0.5,  # without memory or descriptors
    "engine computes for ever": 0.006,
    "step is slow": 0.2,
    "logits are not finite": 0.05,
    "request has no memory": 0.1,
    "disk fails at a load": 0.5,
    "disk fails at an adapter": 0.5,
}
NETWORK = {
    "connection is reset": 0.02,
    "process stands still": 0.01,  # the clock jumps for all its parts
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
SHARE = 0.25  # mean share of kinds that a seed enables


@dataclass
class Faults:
    """at: number of points so far, by kind. log: (seconds, kind, object) of the faults."""

    rng: random.Random
    rates: dict[str, float] = field(default_factory=dict)
    at: Counter[str] = field(default_factory=Counter)
    log: list[tuple[float, str, str]] = field(default_factory=list)
    over: bool = False  # no further faults

    @classmethod
    def drawn(cls, rng: random.Random) -> Faults:
        chosen = rng.random() * 2 * SHARE  # some seeds have few
        rates = {kind: most * rng.random() for kind, most in KINDS.items() if rng.random() < chosen}
        return cls(rng, rates)

    def happens(self, kind: str, now: float, of: str = "") -> bool:
        """Whether the fault happens at this point. of: the affected object."""
        self.at[kind] += 1
        if self.over or self.rng.random() >= self.rates.get(kind, 0.0):
            return False
        self.log.append((now, kind, of))
        return True

    def between(self, begin: float, end: float, *kinds: str) -> list[str]:
        """Objects of the faults of these kinds between two times."""
        return [of for at, kind, of in self.log if kind in kinds and begin <= at <= end]

    def happened(self, *kinds: str) -> bool:
        return any(kind in kinds for _, kind, _ in self.log)
