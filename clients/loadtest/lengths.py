"""Distributions of lengths, from their short spelling to seeded draws. Knows nothing of tokens or prompts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from windlass.clients.loadtest.errors import LoadTestError

_KINDS = {"uniform": ("LOW", "HIGH"), "normal": ("MEAN", "SD"), "lognormal": ("MEAN", "SD")}
_SPELLINGS = "128, uniform:LOW:HIGH, normal:MEAN:SD or lognormal:MEAN:SD"


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of whole numbers.

    kind: "fixed" (a is the value), "uniform" (from a to b, both included), "normal" (mean a, standard deviation b) or
    "lognormal" (a and b are the mean and the standard deviation of the length itself, not of its logarithm).
    """

    kind: str
    a: float
    b: float = 0.0

    @classmethod
    def fixed(cls, value: int) -> Lengths:
        """Always `value`."""
        return cls("fixed", value)

    @classmethod
    def parse(cls, text: str, name: str = "a length", least: int = 1) -> Lengths:
        """From "128", "uniform:100:200", "normal:500:100" or "lognormal:500:300". Raises LoadTestError naming `name`."""
        kind, _, rest = text.strip().partition(":")
        try:
            if kind not in _KINDS:
                kind, numbers = "fixed", [float(text)]
            else:
                numbers = [float(part) for part in rest.split(":")]
                if len(numbers) != 2:
                    raise ValueError
            if not all(map(math.isfinite, numbers)) or (kind in ("fixed", "uniform") and any(n % 1 for n in numbers)):
                raise ValueError
        except ValueError:
            raise LoadTestError(f"{name}: {text!r} is no length: write {_SPELLINGS}") from None
        if numbers[0] < least:
            raise LoadTestError(f"{name}: lengths begin at {least}, got {text}")
        if kind == "uniform" and numbers[1] < numbers[0]:
            raise LoadTestError(f"{name}: uniform:LOW:HIGH wants the lower length first, got {text}")
        if kind in ("normal", "lognormal") and (numbers[1] < 0 or numbers[0] <= 0):
            raise LoadTestError(f"{name}: {kind}:MEAN:SD wants a mean above 0 and no negative deviation, got {text}")
        return cls(kind, *numbers)

    def draw(self, random: Random, least: int = 1, most: int | None = None) -> int:
        """One length, between `least` and `most`: what the distribution puts outside is moved to the bound."""
        if self.kind == "fixed":
            value = self.a
        elif self.kind == "uniform":
            value = random.randint(int(self.a), int(self.b))
        elif self.kind == "normal":
            value = random.gauss(self.a, self.b)
        else:
            # The parameters of the underlying normal: https://en.wikipedia.org/wiki/Log-normal_distribution
            spread = math.log1p((self.b / self.a) ** 2)
            value = random.lognormvariate(math.log(self.a) - spread / 2, math.sqrt(spread))
        length = max(least, round(value))
        return length if most is None else min(length, most)

    @property
    def least(self) -> int:
        """The smallest value it must be able to give: what has to fit in any case."""
        return int(self.a) if self.kind in ("fixed", "uniform") else 1

    def __str__(self) -> str:
        return f"{self.a:g}" if self.kind == "fixed" else f"{self.kind}:{self.a:g}:{self.b:g}"
