"""Block store whose folder cannot be opened yet: hashing of weights, queued blocks, log messages."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.eventually import eventually

from windlass.engine.cache.block_store import EVICTED, BlockStore, PersistFolder
from windlass.engine.cache.disk_tier import PersistCounters
from windlass.engine.cache.host_tier import BlockTransfer, CPUBlockTransfer, HostBlock, HostTier
from windlass.engine.cache.non_prefix_reuse import PassageRecord
from windlass.engine.cache.prefix_cache import BlockKey

PAGES = CPUBlockTransfer([[torch.zeros(2, 8, 4, 3)]])


def key(number: int) -> BlockKey:
    return BlockKey(0, number.to_bytes(32, "little"))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., BlockStore]]:
    monkeypatch.setattr("windlass.engine.cache.block_store._MIN_BACKOFF", 0.02)
    monkeypatch.setattr("windlass.engine.cache.block_store._MAX_BACKOFF", 0.02)
    made: list[BlockStore] = []

    def make(root: Path, weights: Path, is_current: Callable[[], bool], transfer: BlockTransfer = PAGES) -> BlockStore:
        made.append(BlockStore(PersistFolder(root, 1 << 30, [weights], "", is_current), transfer, 4))
        return made[-1]

    yield make
    for store in made:
        store.close(0.0)


@pytest.mark.parametrize("changed_at", [0, 1], ids=["before", "meanwhile"])
def test_weights_that_have_changed_are_not_hashed_again_and_nothing_waits_for_them(
    changed_at: int, opened: Callable[..., BlockStore], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights, asked = tmp_path / "weights", list[int]()
    if changed_at:  # else they would not even be found
        weights.write_bytes(b"x")

    def is_current() -> bool:
        asked.append(1)
        return len(asked) <= changed_at

    with caplog.at_level(logging.WARNING):
        store = opened(tmp_path, weights, is_current)
        store.offer(key(1), 1, 0)
        store.wait_scanned(30)
        eventually(lambda: not store.stats().waiting_blocks, 30)
        assert store._writer is not None
        store._writer._thread.join(30)
        assert not store._writer._thread.is_alive()
    store.offer(key(2), 2, 0)
    assert len(asked) == changed_at + 1 and store.stats().failures == 1 and store.stats().waiting_blocks == 0
    assert len(caplog.records) == 1 and "start the engine again" in caplog.text


def test_weights_are_hashed_once_however_often_there_is_no_folder(
    opened: Callable[..., BlockStore], tmp_path: Path
) -> None:
    (tmp_path / "weights").write_bytes(b"x")
    asked: list[int] = []
    store = opened(tmp_path / "kept", tmp_path / "weights", lambda: asked.append(1) is None)
    store.offer(key(1), 1, 0)
    eventually(lambda: store.stats().failures >= 3, 30)
    (tmp_path / "kept").mkdir()
    eventually(lambda: store.stats().written_blocks == 1, 30)
    assert len(asked) == 2


class HostPages(CPUBlockTransfer):
    """Pages that have a host tier."""

    def read_host_block(self, block: HostBlock) -> list[Any]:
        return self.read_block(0, 0, 0.0)


class Host:
    """Host memory of `slots` blocks, with a folder that cannot be opened before `open`."""

    def __init__(self, opened: Callable[..., BlockStore], root: Path, slots: int) -> None:
        pages = HostPages([[torch.zeros(2, 8, 4, 3)]])
        self.tier = pages.tier = HostTier(slots, pages.block_bytes, 4, PersistCounters())
        self._folder = root / "kept"
        (root / "weights").write_bytes(b"x")
        self.store = opened(self._folder, root / "weights", lambda: True, pages)

    def compute(self, number: int) -> None:
        self.store.offer(key(number), number % 8, 0)

    def evict(self, number: int) -> None:
        """Evict a block from the device."""
        self.store.withdraw(key(number), number % 8, None)
        self.tier.copy_started(self.store.take_saved(), SimpleNamespace(wait=lambda: None))

    def open(self) -> None:
        self._folder.mkdir()


def test_no_more_blocks_wait_to_be_written_than_there_are(opened: Callable[..., BlockStore], tmp_path: Path) -> None:
    """Blocks that host memory evicts leave the queue and are lost."""
    host = Host(opened, tmp_path, 3)
    for number in range(20):
        host.compute(number)
        host.evict(number)
        assert host.store.stats().waiting_blocks <= 3
    stats = host.store.stats()
    assert stats.waiting_blocks == stats.host_blocks == 3 and stats.lost_blocks == 17
    host.open()
    eventually(lambda: host.store.stats().written_blocks == 3, 30)
    assert all(key(number) in host.store._index for number in range(17, 20)) and host.store.stats().lost_blocks == 17


@pytest.mark.parametrize("again", ["before the host gives it up", "behind that"])
def test_a_block_that_is_computed_anew_is_written(
    again: str, opened: Callable[..., BlockStore], tmp_path: Path
) -> None:
    host = Host(opened, tmp_path, 1)
    host.compute(1)
    host.evict(1)
    if again == "before the host gives it up":
        host.compute(1)
    host.evict(2)  # which was never offered
    assert key(1) not in host.tier
    if again == "behind that":
        host.compute(1)
    host.open()
    eventually(lambda: host.store.stats().written_blocks == 1, 30)
    assert key(1) in host.store._index


PASSAGE = PassageRecord(b"p" * 32, 0, (1, 2, 3, 4), (b"me",))


def test_what_a_plan_brings_in_waits_until_it_is_followed(opened: Callable[..., BlockStore], tmp_path: Path) -> None:
    """It is copied after its load, even if it was offered long before."""
    host = Host(opened, tmp_path, 1)
    store, waiting = host.store, host.store._write_queue._blocks
    store.note_loaded(0, 1)
    for number in (1, 2):
        store.offer(key(number), number, 0, PASSAGE)
    assert list(waiting) == [key(2)] and store.stats().waiting_blocks == 1
    assert store.take_saved() == []
    store.offer(key(3), 3, 0, PASSAGE)
    assert list(waiting) == [key(2), key(3)]
    store.note_applied()
    assert list(waiting) == [key(2), key(3), key(1)]
    assert waiting[key(1)].full_since >= waiting[key(3)].full_since and waiting[key(1)].passage == PASSAGE
    store.offer(key(1), 1, 0, PASSAGE)  # a later step loads nothing into this block
    assert not store._write_queue._loading


def test_what_a_plan_brings_in_and_evicts_is_not_written(opened: Callable[..., BlockStore], tmp_path: Path) -> None:
    """Except from host memory, if that holds it."""
    host = Host(opened, tmp_path, 1)
    host.evict(2)
    for number in (1, 2):
        host.store.note_loaded(0, number)
        host.store.offer(key(number), number, 0, PASSAGE)
        host.store.withdraw(key(number), number, PASSAGE)
    assert host.store.take_saved() == []
    host.store.note_applied()
    waiting = host.store._write_queue._blocks
    assert list(waiting) == [key(2)] and waiting[key(2)].block == EVICTED and waiting[key(2)].passage == PASSAGE
    assert host.store.stats().lost_blocks == 1
