"""The folder of an engine's blocks while it cannot be opened: what is hashed, what is kept waiting, and what is said."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from helpers.eventually import eventually

from windlass.engine.cache.persist.counts import PersistCounts
from windlass.engine.cache.persist.keys import BlockKey
from windlass.engine.cache.persist.pages import PersistedPages
from windlass.engine.cache.persist.store import BlockOrigin, BlockStore, KeptFolder

PAGES = PersistedPages([[torch.zeros(2, 8, 4, 3)]])


def key(number: int) -> BlockKey:
    return BlockKey(0, number.to_bytes(32, "little"))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., BlockStore]]:
    monkeypatch.setattr("windlass.engine.cache.persist.writer._FIRST_PAUSE", 0.02)
    monkeypatch.setattr("windlass.engine.cache.persist.writer._LONGEST_PAUSE", 0.02)
    made: list[BlockStore] = []

    def make(root: Path, weights: Path, is_current: Callable[[], bool]) -> BlockStore:
        folder = KeptFolder(root, 1 << 30, BlockOrigin((weights,), "", is_current))
        made.append(BlockStore(folder, PAGES, 4, PersistCounts()))
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
        store.wait_known(30)
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
