"""Block store, its writer and its reader: unopened folders, failures, cancelled fetches, queued blocks."""

import itertools
import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from helpers.eventually import eventually

from windlass.engine.cache import block_store
from windlass.engine.cache.block_store import (
    EVICTED,
    BlockFileReader,
    BlockFileWriter,
    BlockStore,
    PersistFolder,
    QueuedBlock,
    WantedBlock,
    WriteQueue,
)
from windlass.engine.cache.disk_tier import BlockDirectory, BlockFormat, PersistCounters, TierIndex
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
def test_changed_weights_stop_the_store(
    changed_at: int, opened: Callable[..., BlockStore], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights, asked = tmp_path / "weights", list[int]()
    if changed_at:  # otherwise they are missing
        weights.write_bytes(b"x")

    def is_current() -> bool:
        asked.append(1)
        return len(asked) <= changed_at

    with caplog.at_level(logging.WARNING):
        store = opened(tmp_path, weights, is_current)
        store.offer(key(1), 1, 0)
        store.wait_scanned(30)
        eventually(lambda: not store.stats().waiting_blocks, 30)
        store._writer._thread.join(30)
        assert not store._writer._thread.is_alive()
    store.offer(key(2), 2, 0)
    assert len(asked) == changed_at + 1 and store.stats().failures == 1 and store.stats().waiting_blocks == 0
    assert len(caplog.records) == 1 and "start the engine again" in caplog.text


def test_weights_are_hashed_once(opened: Callable[..., BlockStore], tmp_path: Path) -> None:
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
    """Host tier of `slots` blocks, with a folder that cannot be opened before `open`."""

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


def test_the_write_queue_is_bounded_by_the_host_tier(opened: Callable[..., BlockStore], tmp_path: Path) -> None:
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


@pytest.mark.parametrize("again", ["before the host evicts it", "after that"])
def test_a_block_computed_again_is_written(again: str, opened: Callable[..., BlockStore], tmp_path: Path) -> None:
    host = Host(opened, tmp_path, 1)
    host.compute(1)
    host.evict(1)
    if again == "before the host evicts it":
        host.compute(1)
    host.evict(2)  # which was never offered
    assert key(1) not in host.tier
    if again == "after that":
        host.compute(1)
    host.open()
    eventually(lambda: host.store.stats().written_blocks == 1, 30)
    assert key(1) in host.store._index


PASSAGE = PassageRecord(b"p" * 32, 0, (1, 2, 3, 4), (b"me",))


def test_loaded_blocks_are_written_after_their_plan_is_applied(
    opened: Callable[..., BlockStore], tmp_path: Path
) -> None:
    """They are copied after their load, even if they were offered long before."""
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


def test_blocks_loaded_and_evicted_by_one_plan_are_not_written(
    opened: Callable[..., BlockStore], tmp_path: Path
) -> None:
    """Except from host memory, if it holds them."""
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


WANTED = [WantedBlock(key(number), number) for number in range(4)]


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
    """Folder from which no block is read."""

    asked = 0

    @property
    def directory(self) -> None:
        self.asked += 1


@pytest.mark.parametrize("max_blocks_per_load", [len(WANTED), 2])
def test_a_cancelled_fetch_from_the_host_ends_silently(
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


class Writing:
    """Writer of one folder, and its inputs."""

    def __init__(self, root: Path, max_bytes: int = 1 << 30) -> None:
        self.counts, self.write_queue, self.known = PersistCounters(), WriteQueue(), TierIndex(4)
        self.folder = BlockDirectory(root, BlockFormat(b"n" * 32, PAGES.forms), max_bytes)
        self._persist: Any = SimpleNamespace(directory=None, open=self._open, max_bytes=max_bytes)

    def _open(self, *_: object) -> BlockDirectory:
        self._persist.directory = self.folder
        return self.folder

    def start(self) -> None:
        self.writer = BlockFileWriter(self._persist, PAGES, self.write_queue, self.known, self.counts)

    def offer(self, number: int) -> None:
        self.write_queue.offer(QueuedBlock(key(number), number % 8, 0))


@pytest.fixture
def writing(tmp_path: Path) -> Iterator[Callable[..., Writing]]:
    made: list[Writing] = []

    def make(max_bytes: int = 1 << 30) -> Writing:
        made.append(Writing(tmp_path, max_bytes))
        return made[-1]

    yield make
    for one in made:
        one.writer.close(0.0)


def test_blocks_are_written_next_to_an_invalid_file(writing: Callable[..., Writing]) -> None:
    at = writing()
    record = '{"passage": {"parent": "", "position": Infinity, "token_ids": [], "scopes": []}}'
    header = json.dumps({"__metadata__": {"block": record, "sha256": ""}}).encode()
    file = at.folder.folder / f"{key(7).digest.hex()}-0.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    at.start()
    at.offer(1)
    eventually(lambda: at.counts.written_blocks or at.counts.failures, 30)
    assert (at.counts.written_blocks, at.counts.failures) == (1, 0) and key(7) in at.known


def test_files_that_cannot_be_removed_are_logged_once(
    writing: Callable[..., Writing], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    at, allowed = writing(2 * 4096), threading.Event()
    unlink = Path.unlink

    def limited(path: Path, **options: bool) -> None:
        if not allowed.is_set():
            raise PermissionError(13, "Permission denied")
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", limited)
    at.start()
    for number in range(12):
        at.offer(number)
    with caplog.at_level(logging.WARNING):
        eventually(lambda: at.counts.written_blocks == 12, 30)
        eventually(lambda: at.counts.disk_bytes == 12 * 4096, 30)
        assert at.counts.failures > 1 and at.counts.evicted_blocks == 0
        assert (
            len(caplog.records) == 1
            and "Permission denied" in caplog.text
            and str(at.folder.folder.parent) in caplog.text
        )
        allowed.set()
        at.offer(12)
        eventually(lambda: at.counts.evicted_blocks, 30)
        assert len(caplog.records) == 2 and "resolved: " in caplog.text


def test_a_folder_that_cannot_be_listed_is_retried_with_backoff(
    writing: Callable[..., Writing], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now, failed_at = [100.0], list[float]()

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(block_store, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    at, enough = writing(), threading.Event()
    fail, folder = at.counts.fail, at.folder.folder

    def record(what: str, error: Exception) -> None:
        fail(what, error)
        failed_at.append(now[0])
        if len(failed_at) == 9:  # the folder is usable again
            folder.unlink()
            folder.mkdir()
            enough.set()

    monkeypatch.setattr(at.counts, "fail", record)
    folder.rmdir()
    folder.write_text("a file")
    with caplog.at_level(logging.WARNING):
        at.offer(1)
        at.start()
        assert enough.wait(30)
        eventually(lambda: at.counts.written_blocks, 30)
    pauses = [later - before for before, later in itertools.pairwise(failed_at)]
    assert pauses == pytest.approx([1, 2, 4, 8, 16, 32, 60, 60])
    assert [record.getMessage().partition(" (")[0] for record in caplog.records] == [
        "cached blocks cannot be stored",
        "resolved: cached blocks cannot be stored",
    ]
