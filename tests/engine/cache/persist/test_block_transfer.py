"""Transfer of blocks between pages and host memory: complete, and each copy after those it depends on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.little_memory import NO_ROOM
from helpers.played_copies import PlayedCopies

from windlass.engine.cache import host_tier
from windlass.engine.cache.cache_operations import LoadedBlock
from windlass.engine.cache.disk_tier import BlockFormat, PersistCounters
from windlass.engine.cache.host_tier import (
    CPUBlockTransfer,
    DeviceBlockTransfer,
    HostTier,
    PinnedRows,
    bytes_of_blocks,
    consecutive_runs,
    pinned_rows_within,
    staging_bytes,
)
from windlass.engine.cache.non_prefix_reuse import PassageRecord
from windlass.engine.cache.prefix_cache import BlockKey

_BLOCKS, _LAYERS = 24, 3
SHAPES: dict[str, list[list[tuple[tuple[int, ...], torch.dtype]]]] = {
    "bfloat16": [[((16, 2, 8), torch.bfloat16), ((16, 2, 4), torch.bfloat16)]],
    "float8": [[((16, 2, 8), torch.float8_e4m3fn), ((16, 2, 8), torch.float8_e4m3fn)]],
    "codes and scales": [[((16, 3, 5), torch.int8), ((16, 3, 5), torch.int8), ((3, 16), torch.float32)]],
    "of an odd size": [[((3, 1, 5), torch.int8), ((3, 1, 1), torch.bfloat16)]],
    "two groups": [[((16, 2, 8), torch.float32)], [((16, 1, 3), torch.int8), ((1, 16), torch.float32)]],
}


class Pages:
    """Device pages with random bytes, their host tier, and their initial content."""

    def __init__(self, kind: str, slots: int = 12) -> None:
        self.planes = [
            [
                torch.randint(0, 255, (_LAYERS, _BLOCKS, *shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8).view(dtype)
                for shape, dtype in group
            ]
            for group in SHAPES[kind]
        ]  # fmt: skip
        self.before = [[plane.view(torch.uint8).clone() for plane in group] for group in self.planes]
        self.copies, self.counts = PlayedCopies(), PersistCounters()
        self.tier = HostTier(slots, bytes_of_blocks(self.planes), 16, self.counts)
        self.transfer = DeviceBlockTransfer(self.planes, self.copies, self.tier)

    def evict(self, group: int, blocks: range, first_key: int = 0) -> list[BlockKey]:
        """Evict blocks and overwrite them."""
        keys = [BlockKey(group, (first_key + number).to_bytes(32, "big")) for number in blocks]
        for key, block in zip(keys, blocks, strict=True):
            assert self.tier.admit(key, block, None)
        self.transfer.save(self.tier.take_pending_saves())
        self.clear(group, blocks)
        return keys

    def clear(self, group: int, blocks: range) -> None:
        for plane in self.planes[group]:
            plane.view(torch.uint8)[:, blocks.start : blocks.stop] = 0

    def load(self, keys: list[BlockKey], blocks: range) -> None:
        for first in range(0, len(keys), self.transfer.max_blocks_per_load):
            held = [self.tier.acquire(key) for key in keys[first : first + self.transfer.max_blocks_per_load]]
            tickets = self.transfer.load([one for one in held if one is not None], lambda: False)
            assert tickets is not None and len(tickets) == len(held)
            self.put(keys[0].group, tickets, blocks[first : first + len(held)])
            for one in held:
                self.tier.release(one)

    def put(self, group: int, tickets: list[int], blocks: range) -> None:
        self.transfer.put([LoadedBlock(group, block, ticket) for block, ticket in zip(blocks, tickets, strict=True)])

    def same(self, group: int, sources: range, targets: range) -> bool:
        """Whether the target blocks equal the initial content of the source blocks."""
        return all(
            torch.equal(plane.view(torch.uint8)[:, list(targets)], before[:, list(sources)])
            for plane, before in zip(self.planes[group], self.before[group], strict=True)
        )


@pytest.mark.parametrize("kind", SHAPES)
def test_evicted_blocks_are_restored_exactly(kind: str) -> None:
    made = Pages(kind)
    for group in range(len(made.planes)):
        keys = made.evict(group, range(3, 14))
        made.load(list(reversed(keys)), range(23, 12, -1))
        assert made.same(group, range(13, 2, -1), range(23, 12, -1))
        assert made.same(group, range(3), range(3)), "other blocks have changed"
    assert made.counts.host_saved_blocks == 11 * len(made.planes)


@pytest.mark.parametrize("kind", SHAPES)
def test_files_of_device_and_main_memory_are_equal(kind: str) -> None:
    """Also blocks of the host tier."""
    made = Pages(kind)
    plain = CPUBlockTransfer(made.planes)
    assert made.transfer.forms == plain.forms
    form = BlockFormat(b"\0" * 32, plain.forms)
    for group in range(len(made.planes)):
        key = BlockKey(group, b"x" * 32)
        files = [
            b"".join(bytes(memoryview(piece).cast("B")) for piece in form.encode(key, None, pages.read_block(group, 7, 0.0)))
            for pages in (made.transfer, plain)
        ]  # fmt: skip
        assert files[0] == files[1]
        (evicted,) = made.evict(group, range(7, 8))
        held = made.tier.acquire(evicted)
        kept = form.encode(key, None, made.transfer.read_host_block(held))
        assert b"".join(bytes(memoryview(piece).cast("B")) for piece in kept) == files[0]
        ticket = made.transfer.stage(group, form.decode(key, bytearray(files[0])).planes, lambda: False)
        made.put(group, [ticket], range(20, 21))
        assert made.same(group, range(7, 8), range(20, 21))


def test_the_last_of_two_loads_into_one_block_counts() -> None:
    """In any order of rows; the rows of both are free again."""
    made = Pages("bfloat16")
    keys = made.evict(0, range(4))
    held = [made.tier.acquire(key) for key in keys]
    tickets = made.transfer.load([one for one in held if one is not None], lambda: False)
    first, second, third, fourth = tickets
    blocks = ((second, 20), (first, 20), (third, 21), (fourth, 21))
    made.transfer.put([LoadedBlock(0, block, ticket) for ticket, block in blocks])
    assert made.same(0, range(1), range(20, 21)) and made.same(0, range(3, 4), range(21, 22))
    assert len(made.transfer._free) == len(made.transfer._incoming)


@pytest.mark.parametrize("available", [0, 1])
@pytest.mark.parametrize("kind", SHAPES)
def test_blocks_are_scattered_without_device_memory(kind: str, available: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Pages(kind)
    for group in range(len(made.planes)):
        keys, rows = made.evict(group, range(3, 11)), made.transfer._rows[group]
        scatter, left = rows.scatter, [available]

        def fails(blocks: torch.Tensor, row: torch.Tensor, scatter: Any = scatter, left: list[int] = left) -> None:
            scatter(blocks[:1], row[:1])  # some blocks are written before the failure
            left[0] -= 1
            if left[0] < 0:
                raise torch.OutOfMemoryError(NO_ROOM)
            scatter(blocks, row)

        monkeypatch.setattr(rows, "scatter", fails)
        made.load(keys, range(12, 20))
        assert left[0] < 0 and made.same(group, range(3, 11), range(12, 20))
        assert made.same(group, range(3), range(3)) and made.same(group, range(20, 24), range(20, 24))
    assert len(made.transfer._free) == len(made.transfer._incoming)


def test_more_blocks_than_staging_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are reused only after their content was copied; these copies run as late as possible."""
    monkeypatch.setattr(host_tier, "_OUTGOING_BYTES", 3 * sum(bytes_of_blocks(Pages("bfloat16").planes)))
    monkeypatch.setattr(host_tier, "_INCOMING_BYTES", 1)
    made = Pages("bfloat16")
    keys = made.evict(0, range(12))
    assert len(made.copies.queues[0].asked) == 4 and made.copies.queues[0].done == 2  # the first two, for their rows
    made.load(keys, range(12, 24))
    assert made.same(0, range(12), range(12, 24))


def test_copies_wait_for_the_events_they_depend_on() -> None:
    """Outgoing copies wait for the gather; incoming ones for that copy and for the last scatter from the same rows."""
    made = Pages("bfloat16", slots=24)
    out, back, aside = made.copies.queues
    keys = made.evict(0, range(12))
    assert out.asked == [[made.copies.marks[-1]]]
    made.load(keys[:6], range(12, 18))
    left = made.tier.acquire(keys[0])
    assert left is not None and back.asked == [[left.event]] and out.done == 1
    put = made.copies.marks[-1]
    made.load(keys[6:], range(18, 24))
    assert back.asked[1] in ([left.event, put], [left.event]), "unused rows wait for nothing"
    made.transfer.read_block(0, 5, full_since=float("inf"))
    made.transfer.read_block(0, 5, full_since=0.0)
    assert aside.asked[0] == aside.asked[1] == [made.copies.marks[-1]]


def test_a_slot_that_is_read_is_not_reused() -> None:
    made = Pages("bfloat16", slots=2)
    keys = made.evict(0, range(2))
    held = made.tier.acquire(keys[0])
    made.evict(0, range(4, 5))  # in the slot of the other block
    assert keys[0] in made.tier and keys[1] not in made.tier
    made.tier.acquire(BlockKey(0, (4).to_bytes(32, "big")))
    assert not made.tier.admit(BlockKey(0, b"y" * 32), 6, None) and made.counts.host_lost_blocks == 1
    made.tier.release(held)
    assert made.tier.admit(BlockKey(0, b"y" * 32), 6, None) and keys[0] not in made.tier


def test_blocks_loaded_and_evicted_by_one_plan_are_not_saved() -> None:
    """The block has its previous content until then."""
    made = Pages("bfloat16")
    assert not made.tier.admit(BlockKey(0, b"a" * 32), 5, is_loading=True)
    assert made.tier.take_pending_saves() == [] and made.counts.host_lost_blocks == 0
    assert made.tier.admit(BlockKey(0, b"a" * 32), 5)  # by the next step


def test_a_reader_waits_for_the_plan_that_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tier, "_COPY_SECONDS", 60.0)
    made = Pages("bfloat16")
    key = BlockKey(0, b"a" * 32)
    assert made.tier.acquire(key) is None
    assert made.tier.admit(key, 5, None)
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(made.tier.acquire(key)))
    thread.start()
    made.transfer.save(made.tier.take_pending_saves())
    thread.join(30)
    assert found and found[0] is not None


def test_a_load_without_rows_ends_when_it_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tier, "_INCOMING_BYTES", 1)
    made = Pages("bfloat16")
    keys = made.evict(0, range(8))
    tickets: list[int] = []
    for key in keys[:4]:
        held = made.tier.acquire(key)
        tickets += made.transfer.load([held], lambda: False) or []
    asked: list[int] = []

    def stop() -> bool:
        asked.append(1)
        return len(asked) > 2

    held = made.tier.acquire(keys[4])
    assert held is not None and made.transfer.load([held], stop) is None
    made.transfer.drop(tickets[0])
    assert made.transfer.load([held], lambda: True) is not None


def test_passages_are_stored_whichever_group_is_first() -> None:
    made = Pages("two groups")
    record = PassageRecord(b"p" * 32, 16, tuple(range(16)), (b"me",))
    for order in ((0, 1), (1, 0)):
        digest = bytes([order[0]]) * 32
        for group in order:  # the passage index removes a passage with its first block
            assert made.tier.admit(BlockKey(group, digest), 3 + group, record if group == order[0] else None)
        made.transfer.save(made.tier.take_pending_saves())
        held = made.tier.acquire(BlockKey(0, digest))
        assert held is not None and held.passage == record


def test_consecutive_runs() -> None:
    assert list(consecutive_runs([])) == []
    assert list(consecutive_runs([4])) == [(0, 1)]
    assert list(consecutive_runs([1, 2, 3, 7, 8, 6])) == [(0, 3), (3, 5), (5, 6)]


@pytest.mark.parametrize("saves", [True, False])
def test_staging_memory_is_within_its_estimate(saves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tier, "_OUTGOING_BYTES", 3000)
    monkeypatch.setattr(host_tier, "_INCOMING_BYTES", 9000)
    made: list[torch.Tensor] = []
    empty: Callable[..., torch.Tensor] = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *given, **named: made.append(empty(*given, **named)) or made[-1])
    for kind in SHAPES:
        made.clear()
        pages = Pages(kind)
        made.clear()
        DeviceBlockTransfer(pages.planes, PlayedCopies(), pages.tier if saves else None)
        largest = sum(bytes_of_blocks(pages.planes))
        assert 0 < sum(one.nbytes for one in made) <= staging_bytes(largest, saves=saves)


def test_a_passage_record_waits_for_its_first_block() -> None:
    """Repeatedly, whether or not the first block has the same record."""
    digest, record = b"d" * 32, PassageRecord(b"p" * 32, 0, (1, 2, 3, 4), (b"me",))
    tier = HostTier(4, [10, 10], 4, PersistCounters())
    for passage in (None, record):
        tier.admit(BlockKey(1, digest), 0, record)
        assert tier._passages == {digest: record}
        tier.admit(BlockKey(0, digest), 0, passage)
        assert not tier._passages and tier.index.passage_of(BlockKey(0, digest)) == record


@pytest.mark.parametrize("layers", [1, 2])
def test_a_copy_does_not_change_with_its_page(layers: int) -> None:
    planes = [torch.zeros(layers, 8, 4, 3), torch.zeros(layers, 8, 4, dtype=torch.int8)]
    copies = CPUBlockTransfer([planes]).read_block(0, 5, 0.0)
    for plane, copy in zip(planes, copies, strict=True):
        assert copy.shape == (layers, plane[0, 0].nbytes) and copy.flags.c_contiguous
        assert not np.shares_memory(copy, plane.view(torch.uint8).numpy())
        plane.fill_(1)
        assert not copy.any()


KIB = 1 << 10


class _Pinned(PlayedCopies):
    """Copies that record their pinned memory.

    taken: sizes of the allocations, rounded up as torch does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[int] = []

    def host_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        found = super().host_memory(shape, dtype)
        self.taken.append(1 << (found.nbytes - 1).bit_length())
        return found


@pytest.mark.parametrize("asked", [64 * KIB, 100 * KIB, 3 * 64 * KIB, 1000 * KIB, 999_999])
@pytest.mark.parametrize("sizes", [[1024], [520], [1000, 24], [1032, 2064, 8]], ids=repr)
def test_pinned_memory_is_within_the_given_size(asked: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tier, "_PIECE", 64 * KIB)
    copies, rows = _Pinned(), pinned_rows_within(asked, sizes)
    for size in sizes:
        PinnedRows(copies, rows, size // 8, torch.int64)
    assert sum(copies.taken) <= asked and max(copies.taken) <= 64 * KIB
    # Less than a row is wasted in each piece, and at the end less than the smallest piece that holds a row.
    wasted = sum(size * (asked // (64 * KIB) + 12) for size in sizes)
    assert rows * sum(sizes) > asked - wasted - len(sizes) * max(sizes)
    assert sizes != [1024] or rows == asked // 1024


def test_rows_larger_than_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tier, "_PIECE", KIB)
    copies = _Pinned()
    PinnedRows(copies, pinned_rows_within(17 * KIB, [5000]), 625, torch.int64)
    assert copies.taken == [8 * KIB, 8 * KIB]
    assert pinned_rows_within(7 * KIB, [5000]) == 0


def test_pinned_rows_keep_their_content(monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one, and in contiguous ranges over several pieces."""
    monkeypatch.setattr(host_tier, "_PIECE", KIB)
    copies, words = _Pinned(), 13  # 9 rows in a piece, then 4, 2 and 1
    rows = PinnedRows(copies, 34, words, torch.int64)
    assert len(copies.taken) == 6 and sum(copies.taken) == 3 * KIB + 512 + 256 + 128
    numbers = torch.arange(34 * words).view(34, words)
    rows.receive(range(34), numbers)
    assert all(torch.equal(rows.row(number), numbers[number]) for number in range(34))
    order = [33, 32, 7, 8, 9, 10, 26, 27, 28, 29, 30, 31]
    found = torch.zeros(len(order), words, dtype=torch.int64)
    rows.send(order, found)
    assert torch.equal(found, numbers[order])
    apart = torch.zeros(len(order), words + 1, dtype=torch.int64)
    rows.send(order, apart[:, :words])
    assert torch.equal(apart[:, :words], numbers[order])
