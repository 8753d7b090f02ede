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
    bytes_of_blocks,
    consecutive_runs,
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
        self.pages = DeviceBlockTransfer(self.planes, self.copies, self.tier)

    def evict(self, group: int, blocks: range, first_key: int = 0) -> list[BlockKey]:
        """Evict blocks and overwrite them."""
        keys = [BlockKey(group, (first_key + number).to_bytes(32, "big")) for number in blocks]
        for key, block in zip(keys, blocks, strict=True):
            assert self.tier.admit(key, block, None)
        self.pages.save(self.tier.take_pending_saves())
        self.wipe(group, blocks)
        return keys

    def wipe(self, group: int, blocks: range) -> None:
        for plane in self.planes[group]:
            plane.view(torch.uint8)[:, blocks.start : blocks.stop] = 0

    def load(self, keys: list[BlockKey], blocks: range) -> None:
        for first in range(0, len(keys), self.pages.max_blocks_per_load):
            held = [self.tier.acquire(key) for key in keys[first : first + self.pages.max_blocks_per_load]]
            tickets = self.pages.load([one for one in held if one is not None], lambda: False)
            assert tickets is not None and len(tickets) == len(held)
            self.put(keys[0].group, tickets, blocks[first : first + len(held)])
            for one in held:
                assert one is not None
                self.tier.release(one)

    def put(self, group: int, tickets: list[int], blocks: range) -> None:
        self.pages.put([LoadedBlock(group, block, ticket) for block, ticket in zip(blocks, tickets, strict=True)])

    def same(self, group: int, sources: range, targets: range) -> bool:
        """Whether the target blocks equal the initial content of the source blocks."""
        return all(
            torch.equal(plane.view(torch.uint8)[:, list(targets)], before[:, list(sources)])
            for plane, before in zip(self.planes[group], self.before[group], strict=True)
        )


@pytest.mark.parametrize("kind", SHAPES)
def test_every_byte_comes_back(kind: str) -> None:
    made = Pages(kind)
    for group in range(len(made.planes)):
        keys = made.evict(group, range(3, 14))
        made.load(list(reversed(keys)), range(23, 12, -1))
        assert made.same(group, range(13, 2, -1), range(23, 12, -1))
        assert made.same(group, range(3), range(3)), "others are touched"
    assert made.counts.host_saved_blocks == 11 * len(made.planes)


@pytest.mark.parametrize("kind", SHAPES)
def test_files_are_those_of_main_memory(kind: str) -> None:
    """Files have the same bytes as those of a CPU's pages."""
    made = Pages(kind)
    plain = CPUBlockTransfer(made.planes)
    assert made.pages.forms == plain.forms
    form = BlockFormat(b"\0" * 32, plain.forms)
    for group in range(len(made.planes)):
        key = BlockKey(group, b"x" * 32)
        files = [
            b"".join(bytes(memoryview(piece).cast("B")) for piece in form.encode(key, None, pages.read_block(group, 7, 0.0)))
            for pages in (made.pages, plain)
        ]  # fmt: skip
        assert files[0] == files[1]
        (evicted,) = made.evict(group, range(7, 8))
        held = made.tier.acquire(evicted)
        assert held is not None
        kept = form.encode(key, None, made.pages.read_host_block(held))
        assert b"".join(bytes(memoryview(piece).cast("B")) for piece in kept) == files[0]
        ticket = made.pages.stage(group, form.decode(key, bytearray(files[0])).planes, lambda: False)
        assert ticket is not None
        made.put(group, [ticket], range(20, 21))
        assert made.same(group, range(7, 8), range(20, 21))


def test_of_two_that_are_put_into_one_block_the_last_counts() -> None:
    """In every order of rows; the rows of both are free again."""
    made = Pages("bfloat16")
    keys = made.evict(0, range(4))
    held = [made.tier.acquire(key) for key in keys]
    tickets = made.pages.load([one for one in held if one is not None], lambda: False)
    assert tickets is not None
    first, second, third, fourth = tickets
    blocks = ((second, 20), (first, 20), (third, 21), (fourth, 21))
    made.pages.put([LoadedBlock(0, block, ticket) for ticket, block in blocks])
    assert made.same(0, range(1), range(20, 21)) and made.same(0, range(3, 4), range(21, 22))
    assert len(made.pages._free) == len(made.pages._incoming)


@pytest.mark.parametrize("there_is", [0, 1])
@pytest.mark.parametrize("kind", SHAPES)
def test_what_came_is_put_without_memory_too(kind: str, there_is: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Pages(kind)
    for group in range(len(made.planes)):
        keys, rows = made.evict(group, range(3, 11)), made.pages._rows[group]
        scatter, left = rows.scatter, [there_is]

        def fails(blocks: torch.Tensor, row: torch.Tensor, scatter: Any = scatter, left: list[int] = left) -> None:
            scatter(blocks[:1], row[:1])  # a part is written before the failure
            left[0] -= 1
            if left[0] < 0:
                raise torch.OutOfMemoryError(NO_ROOM)
            scatter(blocks, row)

        monkeypatch.setattr(rows, "scatter", fails)
        made.load(keys, range(12, 20))
        assert left[0] < 0 and made.same(group, range(3, 11), range(12, 20))
        assert made.same(group, range(3), range(3)) and made.same(group, range(20, 24), range(20, 24))
    assert len(made.pages._free) == len(made.pages._incoming)


def test_more_than_there_are_rows_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are reused only after their content was copied; the copies here run as late as possible."""
    monkeypatch.setattr(host_tier, "_OUTGOING_BYTES", 3 * sum(bytes_of_blocks(Pages("bfloat16").planes)))
    monkeypatch.setattr(host_tier, "_INCOMING_BYTES", 1)
    made = Pages("bfloat16")
    keys = made.evict(0, range(12))
    assert len(made.copies.queues[0].asked) == 4 and made.copies.queues[0].done == 2  # the first two, for their rows
    made.load(keys, range(12, 24))
    assert made.same(0, range(12), range(12, 24))


def test_what_each_copy_comes_after() -> None:
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
    assert back.asked[1] in ([left.event, put], [left.event]), "rows that were never used wait for nothing"
    made.pages.read_block(0, 5, full_since=float("inf"))
    made.pages.read_block(0, 5, full_since=0.0)
    assert aside.asked[0] == aside.asked[1] == [made.copies.marks[-1]]


def test_a_place_that_is_read_from_is_not_taken() -> None:
    made = Pages("bfloat16", slots=2)
    keys = made.evict(0, range(2))
    held = made.tier.acquire(keys[0])
    assert held is not None
    made.evict(0, range(4, 5))  # in the slot of the other
    assert keys[0] in made.tier and keys[1] not in made.tier
    made.tier.acquire(BlockKey(0, (4).to_bytes(32, "big")))
    assert not made.tier.admit(BlockKey(0, b"y" * 32), 6, None) and made.counts.host_lost_blocks == 1
    made.tier.release(held)
    assert made.tier.admit(BlockKey(0, b"y" * 32), 6, None) and keys[0] not in made.tier


def test_what_is_brought_in_and_evicted_by_one_plan_is_not_saved() -> None:
    """The block still has its previous content then."""
    made = Pages("bfloat16")
    assert not made.tier.admit(BlockKey(0, b"a" * 32), 5, is_loading=True)
    assert made.tier.take_pending_saves() == [] and made.counts.host_lost_blocks == 0
    assert made.tier.admit(BlockKey(0, b"a" * 32), 5)  # by the next step


def test_whoever_reads_waits_for_the_plan_that_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tier, "_COPY_SECONDS", 60.0)
    made = Pages("bfloat16")
    key = BlockKey(0, b"a" * 32)
    assert made.tier.acquire(key) is None
    assert made.tier.admit(key, 5, None)
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(made.tier.acquire(key)))
    thread.start()
    made.pages.save(made.tier.take_pending_saves())
    thread.join(30)
    assert found and found[0] is not None


def test_no_room_for_what_arrives_ends_with_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tier, "_INCOMING_BYTES", 1)
    made = Pages("bfloat16")
    keys = made.evict(0, range(8))
    tickets: list[int] = []
    for key in keys[:4]:
        held = made.tier.acquire(key)
        assert held is not None
        tickets += made.pages.load([held], lambda: False) or []
    asked: list[int] = []

    def stop() -> bool:
        asked.append(1)
        return len(asked) > 2

    held = made.tier.acquire(keys[4])
    assert held is not None and made.pages.load([held], stop) is None
    made.pages.drop(tickets[0])
    assert made.pages.load([held], lambda: True) is not None


def test_passages_are_known_whichever_group_goes_first() -> None:
    made = Pages("two groups")
    record = PassageRecord(b"p" * 32, 16, tuple(range(16)), (b"me",))
    for order in ((0, 1), (1, 0)):
        digest = bytes([order[0]]) * 32
        for group in order:  # the passage index removes a passage with its first block
            assert made.tier.admit(BlockKey(group, digest), 3 + group, record if group == order[0] else None)
        made.pages.save(made.tier.take_pending_saves())
        held = made.tier.acquire(BlockKey(0, digest))
        assert held is not None and held.passage == record


def test_runs() -> None:
    assert list(consecutive_runs([])) == []
    assert list(consecutive_runs([4])) == [(0, 1)]
    assert list(consecutive_runs([1, 2, 3, 7, 8, 6])) == [(0, 3), (3, 5), (5, 6)]


@pytest.mark.parametrize("saves", [True, False])
def test_no_more_is_taken_of_the_device_than_is_said(saves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_what_is_known_of_a_passage_waits_for_its_first_block_and_no_longer() -> None:
    """Repeatedly, and whether or not the first block brings the same record."""
    digest, record = b"d" * 32, PassageRecord(b"p" * 32, 0, (1, 2, 3, 4), (b"me",))
    tier = HostTier(4, [10, 10], 4, PersistCounters())
    for passage in (None, record):
        tier.admit(BlockKey(1, digest), 0, record)
        assert tier._passages == {digest: record}
        tier.admit(BlockKey(0, digest), 0, passage)
        assert not tier._passages and tier.index.passage_of(BlockKey(0, digest)) == record


@pytest.mark.parametrize("layers", [1, 2])
def test_a_copy_stays_as_it_was_when_the_page_changes(layers: int) -> None:
    planes = [torch.zeros(layers, 8, 4, 3), torch.zeros(layers, 8, 4, dtype=torch.int8)]
    copies = CPUBlockTransfer([planes]).read_block(0, 5, 0.0)
    for plane, copy in zip(planes, copies, strict=True):
        assert copy.shape == (layers, plane[0, 0].nbytes) and copy.flags.c_contiguous
        assert not np.shares_memory(copy, plane.view(torch.uint8).numpy())
        plane.fill_(1)
        assert not copy.any()
