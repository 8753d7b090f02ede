"""Rotary scalings that requests of a load test carry: their short spelling, their weight, and a name for the report.

Knows nothing of what a scaling does: the server judges it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from windlass.clients.loadtest.errors import LoadTestError
from windlass.clients.loadtest.finite import fits_json

_EXAMPLE = '\'{"rope_type": "yarn", "factor": 4}\', the name of a profile, or null'


@dataclass(frozen=True, slots=True)
class WeightedScaling:
    """value: an object, the name of a profile, or None for the server's own. weight: how often, against the others."""

    value: Mapping[str, Any] | str | None
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not fits_json(self.value):
            raise LoadTestError("a rotary scaling (--rope-scaling) holds NaN or infinity, which no JSON has")

    @classmethod
    def parse(cls, text: str) -> WeightedScaling:
        """From "JSON", "NAME" or "null", each also as "WEIGHT@…". Raises LoadTestError."""
        weight = 1.0
        if match := re.match(r"\s*([0-9.eE+-]+)@", text):
            try:
                weight = float(match[1])
            except ValueError:
                weight = math.nan
            if not (math.isfinite(weight) and weight > 0):
                raise LoadTestError(f"--rope-scaling {text}: a weight is a number above 0, as in 3@null")
            text = text[match.end() :]
        text = text.strip()
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            if re.fullmatch(r"[A-Za-z0-9][\w.-]*", text):
                return cls(text, weight)
            raise LoadTestError(f"--rope-scaling is not valid JSON ({error}): write {_EXAMPLE}") from None
        if value is not None and not isinstance(value, dict):
            raise LoadTestError(f"--rope-scaling {text}: write {_EXAMPLE}")
        return cls(value, weight)

    def fields(self) -> dict[str, Any]:
        """The fields of a request; no field asks for the server's own scaling."""
        return {} if self.value is None else {"rope_scaling": self.value}

    @property
    def name(self) -> str:
        """Short, for labels."""
        if self.value is None:
            return "server's scaling"
        if isinstance(self.value, str):
            return self.value
        kind = self.value.get("rope_type", "scaling")
        factor = self.value.get("factor")
        return f"{kind} x{factor:g}" if isinstance(factor, int | float) else str(kind)
