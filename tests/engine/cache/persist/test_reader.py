"""Reader thread: a cancelled fetch ends at once and logs nothing."""

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.eventually import eventually

from windlass.engine.cache.block_store import BlockFileReader, WantedBlock
from windlass.engine.cache.disk_tier import PersistCounters, TierIndex
from windlass.engine.cache.host_tier import CPUBlockTransfer
from windlass.engine.cache.prefix_cache import BlockKey

WANTED = [WantedBlock(BlockKey(0, bytes([number]) * 32), number) for number in range(4)]


class WaitingHost:
    """Host memory has these blocks, and the device has no free rows until `stop` returns true."""

    def __init__(self, max_blocks_per_load: int) -> None:
        self._most_at_once, self.asked = max_blocks_per_load, 0

    def load(self, wanted: deque[WantedBlock], stop: Callable[[], bool], *, skip_prefix: bool) -> list[Any]:
        for _ in range(self._most_at_once):
            wanted.popleft()
        self.asked += 1
        eventually(stop, 30)
        return []


@pytest.mark.parametrize("max_blocks_per_load", [len(WANTED), 2])
def test_whoever_stops_while_blocks_come_from_the_host_is_left_alone(
    max_blocks_per_load: int, caplog: pytest.LogCaptureFixture
) -> None:
    host, opened = WaitingHost(max_blocks_per_load), list[int]()
    pages = CPUBlockTransfer([[torch.zeros(2, 8, 4, 3)]])
    reader_of: Any = BlockFileReader
    reader = reader_of(lambda: opened.append(1), pages, TierIndex(4), PersistCounters(), host)
    with caplog.at_level(logging.WARNING):
        fetch = reader.fetch(WANTED)
        eventually(lambda: host.asked, 30)
        fetch.cancel()
        eventually(lambda: fetch.is_done, 30)
        reader.close()
    assert not caplog.records and host.asked == 1 and not opened
