"""benchmarks/load_generator.py runs from end to end, in miniature; what it measures is nobody's business here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "load_generator.py"


@pytest.mark.parametrize("client", ["generator", "httpx"])
def test_it_runs(client):
    command = [
        sys.executable,
        str(SCRIPT),
        "--client",
        client,
        "--streams",
        "3",
        "--seconds",
        "0.2",
        "--rates",
        "60",
        "150",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    slow, fast = map(json.loads, done.stdout.splitlines())
    assert (slow["offered_chunks_per_second"], fast["offered_chunks_per_second"]) == (60, 150)
    for measured in (slow, fast):
        assert measured["chunks_per_second"] > 0 and measured["cpu_us_per_chunk"] > 0
        assert client == "httpx" or measured["completed"] == 3
