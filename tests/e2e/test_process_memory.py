"""Large pieces go back to the system: measured in processes of their own, with and without."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import ctypes, sys
from pathlib import Path
from windlass.server.startup.launch import release_freed_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4 // 1024

if sys.argv[1] == "with":
    release_freed_memory()
before = resident()
for size in (8, 16, 24, 31):  # each freed piece raises the size up to which glibc keeps what is freed
    body = bytes(bytearray(b"x") * (size << 20))
    text = body.decode()
    held = [b"y" * 2000 for _ in range(100)]  # something small behind it, which keeps the heap from shrinking
    del body, text
print(resident() - before)
"""


def kept(how: str) -> int:
    """MiB that stay resident after large bodies."""
    done = subprocess.run([sys.executable, "-P", "-c", SCRIPT, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_large_bodies_do_not_stay() -> None:
    assert kept("without") > 20  # else this test could not fail
    assert kept("with") < 8
