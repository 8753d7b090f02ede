"""The one error a load test raises for what a person can change."""

from __future__ import annotations


class LoadTestError(Exception):
    """One line that says what to change: the address, the key, the model, a length, a line of a trace."""
