"""Collectives in shared memory: sums have one order, the first rank gathers columns, all ranks notice one that ends."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import torch
from helpers.cpu_kernels import kernels

from windlass.kernels import RankEndedError, RankGroup, shared_memory_bytes
from windlass.kernels.cpu.elementwise_bindings import SharedMemoryCollectives
from windlass.kernels.cpu.library import Library, load
from windlass.kernels.rank_group import SLOT_BYTES

COLUMNS = (32, 48, 5)


@pytest.fixture(params=["generic", "best"])
def library(request: pytest.FixtureRequest) -> Library:
    return kernels("generic") if request.param == "generic" else load()


@pytest.fixture
def ranks() -> Iterator[list[RankGroup]]:
    number = os.memfd_create("ranks")
    os.ftruncate(number, shared_memory_bytes(3))
    yield [RankGroup(number, rank, 3, COLUMNS) for rank in range(3)]
    os.close(number)


def together(calls: list[threading.Thread]) -> None:
    for call in calls:
        call.start()
    for call in calls:
        call.join(60)
        assert not call.is_alive()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_in_the_order_of_ranks_on_every_rank(
    library: Library, ranks: list[RankGroup], dtype: torch.dtype
) -> None:
    groups = [SharedMemoryCollectives(one) for one in ranks]
    for count in (1, 37, 576, SLOT_BYTES // 2 + 19):
        parts = [torch.randn(1, count).to(dtype) for _ in ranks]
        expected = ((parts[0].float() + parts[1].float()) + parts[2].float()).to(dtype)
        calls = [
            threading.Thread(target=group.all_reduce, args=(library, part))
            for group, part in zip(groups, parts, strict=True)
        ]
        together(calls)
        assert all(torch.equal(part, expected) for part in parts)


@pytest.mark.parametrize("rows", [1, 7, 3000])
def test_columns_of_all_ranks_come_to_the_first(library: Library, ranks: list[RankGroup], rows: int) -> None:
    parts = [torch.randn(rows, columns) for columns in COLUMNS]
    found: dict[int, torch.Tensor] = {}

    def gather(rank: int) -> None:
        found[rank] = SharedMemoryCollectives(ranks[rank]).gather_columns(library, parts[rank])

    together([threading.Thread(target=gather, args=(rank,)) for rank in range(3)])
    assert torch.equal(found[0], torch.cat(parts, dim=1))
    assert found[1] is parts[1]


def test_whoever_waits_for_a_rank_that_ended_is_told(library: Library, ranks: list[RankGroup]) -> None:
    told: list[str] = []

    def wait(rank: int) -> None:
        try:
            SharedMemoryCollectives(ranks[rank]).all_reduce(library, torch.zeros(8))
        except RankEndedError as error:
            told.append(str(error))

    waiting = [threading.Thread(target=wait, args=(rank,)) for rank in (0, 1)]
    for thread in waiting:
        thread.start()
    ranks[0].end("rank 2 ended: killed by SIGKILL")
    for thread in waiting:
        thread.join(60)
    assert sorted(told) == ["a rank of the model has ended", "rank 2 ended: killed by SIGKILL"]
    with pytest.raises(ValueError, match="contiguous"):
        SharedMemoryCollectives(ranks[0]).all_reduce(library, torch.zeros(4, 8).t())
