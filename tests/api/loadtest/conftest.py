"""Fixtures of the load tester's command line."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without keys and settings, and a terminal of 120 columns."""
    for name in [name for name in os.environ if name.startswith(("WINDLASS_", "OPENAI_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "120")
