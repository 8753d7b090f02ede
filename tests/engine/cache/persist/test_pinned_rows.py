"""Rows in pieces of pinned memory: within the given size, and every row keeps its content."""

from __future__ import annotations

import pytest
import torch
from helpers.played_copies import PlayedCopies

from windlass.engine.cache import host_tier
from windlass.engine.cache.host_tier import PinnedRows, pinned_rows_within

KIB = 1 << 10


class _Pinned(PlayedCopies):
    """taken: sizes of the allocations, rounded up as torch does."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[int] = []

    def host_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        found = super().host_memory(shape, dtype)
        self.taken.append(1 << (found.nbytes - 1).bit_length())
        return found


@pytest.mark.parametrize("asked", [64 * KIB, 100 * KIB, 3 * 64 * KIB, 1000 * KIB, 999_999])
@pytest.mark.parametrize("sizes", [[1024], [520], [1000, 24], [1032, 2064, 8]], ids=repr)
def test_no_more_is_pinned_than_was_asked_for(asked: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tier, "_PIECE", 64 * KIB)
    copies, rows = _Pinned(), pinned_rows_within(asked, sizes)
    for size in sizes:
        PinnedRows(copies, rows, size // 8, torch.int64)
    assert sum(copies.taken) <= asked and max(copies.taken) <= 64 * KIB
    # Less than a row is wasted in each piece, and at the end less than the smallest piece that holds a row.
    wasted = sum(size * (asked // (64 * KIB) + 12) for size in sizes)
    assert rows * sum(sizes) > asked - wasted - len(sizes) * max(sizes)
    assert sizes != [1024] or rows == asked // 1024


def test_a_row_larger_than_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tier, "_PIECE", KIB)
    copies = _Pinned()
    PinnedRows(copies, pinned_rows_within(17 * KIB, [5000]), 625, torch.int64)
    assert copies.taken == [8 * KIB, 8 * KIB]
    assert pinned_rows_within(7 * KIB, [5000]) == 0


def test_every_row_is_where_it_was_put(monkeypatch: pytest.MonkeyPatch) -> None:
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
