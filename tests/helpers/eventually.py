"""Waits for what happens elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def eventually(condition: Callable[[], Any], seconds: float) -> None:
    """Return once the condition holds; fail after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"did not happen within {seconds} s"
        time.sleep(0.02)
