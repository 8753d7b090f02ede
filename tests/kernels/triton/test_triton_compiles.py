"""Every Triton program compiles for a GPU that is not here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton: pip install --no-deps 'triton>=3.6,<3.9'")
TESTS = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_for_hopper(tmp_path: Path) -> None:
    environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(TESTS)}
    found = subprocess.run(
        [sys.executable, "-W", "ignore", TESTS / "helpers" / "compiling.py", "90"],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=1700,
    )
    assert found.returncode == 0, found.stderr
    compiled = {line.split()[1].rstrip(":") for line in found.stdout.splitlines()}
    assert {"attention", "merge_splits", "rotate_and_append", "product", "gather_blocks", "draw_tokens"} <= compiled
