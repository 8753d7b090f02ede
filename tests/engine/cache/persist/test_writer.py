"""Writer thread: it continues in spite of any content of the folder, and logs its failures."""

import itertools
import json
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.eventually import eventually

from windlass.engine.cache import block_store
from windlass.engine.cache.block_store import BlockFileWriter, QueuedBlock, WriteQueue
from windlass.engine.cache.disk_tier import BlockDirectory, BlockFormat, PersistCounters, TierIndex
from windlass.engine.cache.host_tier import CPUBlockTransfer
from windlass.engine.cache.prefix_cache import BlockKey

PAGES = CPUBlockTransfer([[torch.zeros(2, 8, 4, 3)]])


def key(number: int) -> BlockKey:
    return BlockKey(0, number.to_bytes(32, "little"))


class Writing:
    """A writer of one folder and its inputs."""

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


def test_a_file_that_says_nonsense_keeps_no_block_from_being_written(writing: Callable[..., Writing]) -> None:
    at = writing()
    record = '{"passage": {"parent": "", "position": Infinity, "token_ids": [], "scopes": []}}'
    header = json.dumps({"__metadata__": {"block": record, "sha256": ""}}).encode()
    file = at.folder.folder / f"{key(7).digest.hex()}-0.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    at.start()
    at.offer(1)
    eventually(lambda: at.counts.written_blocks or at.counts.failures, 30)
    assert (at.counts.written_blocks, at.counts.failures) == (1, 0) and key(7) in at.known


def test_files_that_cannot_be_removed_are_told_once(
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
        assert len(caplog.records) == 2 and "this is over" in caplog.text


def test_a_folder_that_cannot_be_listed_is_tried_again_later_each_time(
    writing: Callable[..., Writing], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now, failed_at = [100.0], list[float]()

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(block_store, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    at, enough = writing(), threading.Event()
    fail, folder = at.counts.fail, at.folder.folder

    def noted(what: str, error: Exception) -> None:
        fail(what, error)
        failed_at.append(now[0])
        if len(failed_at) == 9:  # the folder is usable again
            folder.unlink()
            folder.mkdir()
            enough.set()

    monkeypatch.setattr(at.counts, "fail", noted)
    folder.rmdir()
    folder.write_text("in its place")
    with caplog.at_level(logging.WARNING):
        at.offer(1)
        at.start()
        assert enough.wait(30)
        eventually(lambda: at.counts.written_blocks, 30)
    pauses = [later - before for before, later in itertools.pairwise(failed_at)]
    assert pauses == pytest.approx([1, 2, 4, 8, 16, 32, 60, 60])
    assert [record.getMessage().partition(" (")[0] for record in caplog.records] == [
        "cached blocks cannot be stored",
        "cached blocks cannot be stored: this is over",
    ]
