"""Other work may stall whatever an engine waits for: only a test that sets the time itself is about giving up."""

from __future__ import annotations

import pytest

from windlass.engine.cache.persist import tier
from windlass.engine.client import statistics
from windlass.engine.scheduling import restoring


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept blocks are waited for until they are read or copied, and fresh statistics until they come."""
    monkeypatch.setattr(restoring, "_PATIENCE", 60.0)
    monkeypatch.setattr(tier, "_COPY_SECONDS", 60.0)
    monkeypatch.setattr(statistics, "STATS_TIMEOUT", 30.0)
