"""Other work may stall whatever an engine waits for: only a test that sets the time itself is about giving up."""

from __future__ import annotations

import pytest

from windlass.engine.cache import host_tier
from windlass.engine.client import request_router
from windlass.engine.scheduling import kv_restore


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept blocks are waited for until they are read or copied, and fresh statistics until they come."""
    monkeypatch.setattr(kv_restore, "_GRACE_SECONDS", 60.0)
    monkeypatch.setattr(host_tier, "_COPY_SECONDS", 60.0)
    monkeypatch.setattr(request_router, "STATS_TIMEOUT", 30.0)
