"""client.py is generated from async_client.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_client_is_generated_from_async_client():
    # A process of its own: unasync imports setuptools, which must come before anything else imports distutils.
    tool = [sys.executable, str(ROOT / "tools" / "generate_sync_client.py"), "--check"]
    done = subprocess.run(tool, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
