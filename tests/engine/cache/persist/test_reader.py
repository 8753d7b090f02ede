"""Reader thread: a cancelled fetch ends at once and logs nothing."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from helpers.eventually import eventually

from windlass.engine.cache.block_store import BlockFileReader, WantedBlock
from windlass.engine.cache.disk_tier import PersistCounters, TierIndex
from windlass.engine.cache.host_tier import CPUBlockTransfer, HostBlock
from windlass.engine.cache.prefix_cache import BlockKey

WANTED = [WantedBlock(BlockKey(0, bytes([number]) * 32), number) for number in range(4)]


class WaitingPages(CPUBlockTransfer):
    """Host memory has all blocks, and the device has no free rows until `stop` returns true."""

    def __init__(self, max_blocks_per_load: int) -> None:
        super().__init__([[torch.zeros(2, 8, 4, 3)]])
        self.max_blocks_per_load, self.asked, self.num_held = max_blocks_per_load, 0, 0
        self.tier = cast(Any, self)

    def acquire(self, key: BlockKey) -> HostBlock:
        self.num_held += 1
        return HostBlock(key, 0)

    def release(self, block: HostBlock) -> None:
        self.num_held -= 1

    def load(self, held: Sequence[HostBlock], stop: Callable[[], bool]) -> list[int] | None:
        assert len(held) == self.max_blocks_per_load == self.num_held
        self.asked += 1
        eventually(stop, 30)
        return None


class UnopenedFolder:
    """A folder that no block is read from."""

    asked = 0

    @property
    def directory(self) -> None:
        self.asked += 1


@pytest.mark.parametrize("max_blocks_per_load", [len(WANTED), 2])
def test_whoever_stops_while_blocks_come_from_the_host_is_left_alone(
    max_blocks_per_load: int, caplog: pytest.LogCaptureFixture
) -> None:
    pages, folder = WaitingPages(max_blocks_per_load), UnopenedFolder()
    reader = BlockFileReader(cast(Any, folder), pages, TierIndex(4), PersistCounters())
    with caplog.at_level(logging.WARNING):
        fetch = reader.fetch(WANTED)
        eventually(lambda: pages.asked, 30)
        fetch.cancel()
        eventually(lambda: fetch.is_done, 30)
        reader.close()
    assert not caplog.records and pages.asked == 1 and not folder.asked and not pages.num_held
