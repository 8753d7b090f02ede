"""Pages of keys and values lie in huge pages where the system has them."""

from __future__ import annotations

import mmap
import re
import sys
from pathlib import Path

import pytest
import torch

from windlass.kernels.device_memory import advise_huge_pages


@pytest.fixture(autouse=True)
def poisoned_outputs() -> None:
    """Not here: memory that is poisoned has been touched."""


def huge_bytes_around(address: int) -> int:
    """AnonHugePages of the mapping that holds the address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds:
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) << 10
    return 0


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's madvise")
def test_advice_is_taken_and_touches_nothing() -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("this system has no transparent huge pages")
    # From the system itself: the allocator may hand out what an earlier test has touched and given back.
    tensor = torch.frombuffer(mmap.mmap(-1, 64 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
    assert advise_huge_pages(tensor)
    middle = tensor.data_ptr() + (32 << 20)
    before = huge_bytes_around(middle)  # the mapping may have merged with a neighbour of the same kind
    assert before < 64 << 20
    tensor.fill_(1)
    assert huge_bytes_around(middle) > before


def test_what_is_small_is_left_alone() -> None:
    assert not advise_huge_pages(torch.empty(4096, dtype=torch.uint8))
