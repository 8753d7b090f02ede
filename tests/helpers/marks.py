"""Marks of tests with many parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(names: Iterable[Any], *quick: Any) -> list[Any]:
    """Return all values as parameters, and mark those that are not named as slow."""
    known = list(names)
    assert set(quick) <= set(known), "there is no such parameter"
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in known]


def slow_after(count: int, values: Iterable[Any]) -> list[Any]:
    """Return all values as parameters, and mark those after the first `count` as slow. A tuple has several parameters."""
    return [
        value if i < count else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
        for i, value in enumerate(values)
    ]
