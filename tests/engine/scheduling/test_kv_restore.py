"""The time at which a request stops waiting for blocks, with a simulated clock."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from windlass.engine.cache.block_store import Fetch, WantedBlock
from windlass.engine.cache.prefix_cache import BlockKey
from windlass.engine.scheduling.kv_restore import KVRestorer


class Reader:
    def release_staged(self, num_bytes: int) -> None: ...

    def cancel(self, fetch: Fetch) -> None:
        fetch.is_cancelled = True


def prefix(groups: int, parts: int) -> list[WantedBlock]:
    """100 blocks of text. All KV groups have the same digests, second key copies have their own."""
    return [
        WantedBlock(BlockKey(group, bytes([part, index])), index)
        for index in range(100)
        for part in range(parts)
        for group in range(groups)
    ]


def passage(groups: int) -> list[WantedBlock]:
    return [WantedBlock(BlockKey(group, bytes([index])), None) for group in range(groups) for index in range(100)]


def window(first: int) -> list[WantedBlock]:
    """A second group whose window covers the end of the text only."""
    return [WantedBlock(BlockKey(1, bytes([0, index])), index) for index in range(first, 100)]


@pytest.mark.parametrize(
    "wanted",
    [prefix(1, 1), prefix(2, 1), prefix(1, 2), prefix(2, 2), passage(1), passage(3), prefix(1, 1) + window(96)],
    ids=["plain", "two groups", "far keys", "both", "passage", "passage in groups", "window"],
)
@pytest.mark.parametrize(("per_second", "waits"), [(990, False), (1010, True)])
def test_restore_waits_by_tokens_and_not_by_blocks(wanted: list[WantedBlock], per_second: int, waits: bool) -> None:
    seconds = 1 + 800 / per_second  # nothing is cancelled in the first one
    blocks = cast(Any, SimpleNamespace(block_size=16))
    restoring = KVRestorer(blocks, cast(Any, None), cast(Any, None), lambda: seconds)
    fetch = Fetch(wanted, cast(Any, Reader()))
    fetch.started_at, fetch.num_read = 0.0, len(wanted) // 2  # 800 tokens
    restoring._cancel_if_slow(fetch)
    assert fetch.is_cancelled is not waits
