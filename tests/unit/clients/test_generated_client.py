"""client.py is generated from async_client.py."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_client_is_generated_from_async_client():
    generated = runpy.run_path(str(ROOT / "tools" / "generate_sync_client.py"))["generate"]()
    committed = (ROOT / "clients" / "client.py").read_bytes()
    assert generated.encode() == committed, "run: python tools/generate_sync_client.py"
