"""The blocks of a device that the host's memory holds, for the threads that read and write: its books and its bytes together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from windlass.engine.cache.persist.counts import PersistCounters
from windlass.engine.cache.persist.device_pages import DeviceBlockTransfer
from windlass.engine.cache.persist.fetch import ArrivedBlock, WantedBlock
from windlass.engine.cache.persist.tier import HostBlock, HostTier


@dataclass(frozen=True, slots=True)
class HostSource:
    tier: HostTier
    pages: DeviceBlockTransfer
    counts: PersistCounters

    def load(self, wanted: deque[WantedBlock], stop: Callable[[], bool], *, skip_prefix: bool) -> list[ArrivedBlock]:
        """The first of these, as far as the host's memory has them and as many as come at once; they are wanted no more.

        skip_prefix: blocks of a prefix are of no use any more. None at all where it has not got the first, or `stop` came.
        """
        held: list[HostBlock] = []
        try:
            while (
                wanted
                and len(held) < self.pages.max_blocks_per_load
                and not (skip_prefix and wanted[0].index is not None)
            ):
                block = self.tier.acquire(wanted[0].key)
                if block is None:
                    break
                held.append(block)
                wanted.popleft()
            tickets = self.pages.load(held, stop) if held else None
        finally:
            for block in held:
                self.tier.release(block)
        if tickets is None:
            return []
        sizes = self.pages.block_bytes
        found = [
            ArrivedBlock(block.key, ticket, sizes[block.key.group], block.passage)
            for block, ticket in zip(held, tickets, strict=True)
        ]
        self.counts.host_read += len(found)
        self.counts.host_read_bytes += sum(block.num_bytes for block in found)
        return found
