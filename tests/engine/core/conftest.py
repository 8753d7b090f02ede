"""Long time limits for engines on a busy machine. Tests of a time limit set it themselves."""

from __future__ import annotations

import pytest

from windlass.engine.cache import host_tier
from windlass.engine.client import request_router
from windlass.engine.scheduling import kv_restore


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for stored blocks and for statistics instead of giving up."""
    monkeypatch.setattr(kv_restore, "_GRACE_SECONDS", 60.0)
    monkeypatch.setattr(host_tier, "_COPY_SECONDS", 60.0)
    monkeypatch.setattr(request_router, "STATS_TIMEOUT", 30.0)
