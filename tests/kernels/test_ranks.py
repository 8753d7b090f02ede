"""Collectives of ranks in shared memory and through torch.distributed, over gloo and a simulated NCCL."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from helpers.cpu_kernels import kernels

from windlass.kernels import RankEndedError, RankGroup, ranks_refusal, shared_memory_bytes
from windlass.kernels.cpu.elementwise_bindings import SharedMemoryCollectives
from windlass.kernels.cpu.library import Library
from windlass.kernels.rank_group import SLOT_BYTES
from windlass.kernels.torch import collectives as grouped
from windlass.kernels.torch.collectives import TorchCollectives, collectives_refusal

COLUMNS = (32, 48, 5)
CPU = torch.device("cpu")
LATE = """
import gc, os, socket, threading
import torch
from windlass.kernels import RankGroup, shared_memory_bytes
from windlass.kernels.torch.collectives import TorchCollectives

number, store = os.memfd_create("ranks"), os.memfd_create("store")
os.ftruncate(number, shared_memory_bytes(2))
groups = [TorchCollectives(RankGroup(number, rank, 2, (8, 8), store), torch.device("cpu"), in_order=False) for rank in range(2)]
threads = [threading.Thread(target=one.all_reduce, args=(torch.ones(3),)) for one in groups]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
os.close(number)
os.close(store)
ends = [socket.socketpair() for _ in range(8)]  # use the free numbers
assert any(end.fileno() == store for pair in ends for end in pair)
del groups, threads
gc.collect()
print("done")
"""


@pytest.fixture
def ranks() -> Iterator[list[RankGroup]]:
    memory, store = os.memfd_create("ranks"), os.memfd_create("store")
    os.ftruncate(memory, shared_memory_bytes(3))
    yield [RankGroup(memory, rank, 3, COLUMNS, store) for rank in range(3)]
    os.close(memory)
    os.close(store)


def together(*calls: Callable[[], object]) -> list[BaseException]:
    """Run these calls in threads, and return what they raised."""
    raised: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return raised


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_order", [True, False])
def test_sums_are_rounded_once_and_equal_on_every_rank(
    ranks: list[RankGroup], dtype: torch.dtype, in_order: bool
) -> None:
    groups = [TorchCollectives(one, CPU, in_order=in_order) for one in ranks]
    for rows in (1, 37):
        parts = [torch.randn(rows, 96).to(dtype) for _ in ranks]
        exact = (parts[0].float() + parts[1].float()) + parts[2].float()
        assert not together(*(lambda g=g, p=p: g.all_reduce(p) for g, p in zip(groups, parts, strict=True)))  # type: ignore[misc]
        assert all(torch.equal(part, parts[0]) for part in parts)
        if in_order:
            assert torch.equal(parts[0], exact.to(dtype))
        else:
            torch.testing.assert_close(parts[0], exact.to(dtype))


@pytest.mark.slow
def test_groups_may_be_deleted_after_their_files_are_closed() -> None:
    """Even if another file has the number of the descriptor by then."""
    ran = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout) == (0, "done\n"), ran.stderr


def test_the_first_rank_gathers_columns(ranks: list[RankGroup]) -> None:
    groups = [TorchCollectives(one, CPU, in_order=False) for one in ranks]
    parts = [torch.randn(7, columns) for columns in COLUMNS]
    found: dict[int, torch.Tensor] = {}

    def gather(rank: int) -> None:
        found[rank] = groups[rank].gather_columns(parts[rank])

    assert not together(*(lambda rank=rank: gather(rank) for rank in range(3)))  # type: ignore[misc]
    assert torch.equal(found[0], torch.cat(parts, dim=1))
    assert found[1] is parts[1] and found[2] is parts[2]


def test_collectives_after_the_end_of_a_rank_raise(ranks: list[RankGroup]) -> None:
    groups = [TorchCollectives(one, CPU, in_order=False) for one in ranks]
    x = [torch.ones(1, 4) for _ in ranks]
    assert not together(*(lambda g=g, one=one: g.all_reduce(one) for g, one in zip(groups, x, strict=True)))  # type: ignore[misc]
    ranks[0].end("rank 2 ended: killed")
    with pytest.raises(RankEndedError, match="killed"):
        groups[0].gather_columns(torch.ones(1, 32))


class PlayedNccl:
    """A group between GPUs without GPUs: records its arguments and doubles tensors instead of adding them."""

    class Options:
        _timeout: Any = None

    made: ClassVar[list[PlayedNccl]] = []

    def __init__(self, store: Any, rank: int, count: int, options: Options) -> None:
        self.place, self.options, self.aborted = (rank, count), options, 0
        self.made.append(self)

    def allreduce(self, tensors: list[torch.Tensor]) -> PlayedNccl:
        tensors[0].mul_(2)
        return self

    def wait(self) -> None:
        pass

    def abort(self) -> None:
        self.aborted += 1


def test_gpus_use_nccl_on_the_loopback_interface(ranks: list[RankGroup], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", PlayedNccl, raising=False)
    monkeypatch.setattr(PlayedNccl, "made", [])
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    group = TorchCollectives(ranks[1], torch.device("cuda", 1), in_order=False)
    assert not PlayedNccl.made  # other ranks may still load before the first sum
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    group.all_reduce(x)
    assert torch.equal(x, torch.full_like(x, 2))
    (made,) = PlayedNccl.made
    assert made.place == (1, 3) and made.options._timeout == grouped._WAIT
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"
    ranks[1].end("rank 2 ended")
    ranks[1].end("the engine was closed")
    assert made.aborted == 1
    with pytest.raises(RankEndedError, match="rank 2 ended"):
        group.all_reduce(x)


def test_refusals_of_devices_without_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert collectives_refusal(torch.device("cuda")) == "this torch was built without NCCL"
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert collectives_refusal(torch.device("cuda", 1)) is None and ranks_refusal("cuda:1") is None
    assert collectives_refusal(torch.device("meta")) == "torch.distributed has no group for meta"
    assert ranks_refusal("cpu") is None


# -- shared memory ---------------------------------------------------------------------------------------------------


@pytest.fixture(params=[pytest.param("generic", marks=pytest.mark.slow), None])
def library(request: pytest.FixtureRequest) -> Library:
    return kernels(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_in_shared_memory_are_in_the_order_of_ranks(
    library: Library, ranks: list[RankGroup], dtype: torch.dtype
) -> None:
    groups = [SharedMemoryCollectives(one) for one in ranks]
    for count in (1, 37, 576, SLOT_BYTES // 2 + 19):
        parts = [torch.randn(1, count).to(dtype) for _ in ranks]
        expected = ((parts[0].float() + parts[1].float()) + parts[2].float()).to(dtype)
        together(*(lambda g=g, p=p: g.all_reduce(library, p) for g, p in zip(groups, parts, strict=True)))  # type: ignore[misc]
        assert all(torch.equal(part, expected) for part in parts)


@pytest.mark.parametrize("rows", [1, 7, 3000])
def test_the_first_rank_gathers_columns_in_shared_memory(library: Library, ranks: list[RankGroup], rows: int) -> None:
    parts = [torch.randn(rows, columns) for columns in COLUMNS]
    found: dict[int, torch.Tensor] = {}

    def gather(rank: int) -> None:
        found[rank] = SharedMemoryCollectives(ranks[rank]).gather_columns(library, parts[rank])

    together(*(lambda rank=rank: gather(rank) for rank in range(3)))  # type: ignore[misc]
    assert torch.equal(found[0], torch.cat(parts, dim=1))
    assert found[1] is parts[1]


def test_ranks_that_wait_for_an_ended_rank_raise(library: Library, ranks: list[RankGroup]) -> None:
    def all_reduce(rank: int) -> None:
        SharedMemoryCollectives(ranks[rank]).all_reduce(library, torch.zeros(8))

    end = "rank 2 ended: killed by SIGKILL"
    raised = together(lambda: all_reduce(0), lambda: all_reduce(1), lambda: ranks[0].end(end))
    assert all(isinstance(error, RankEndedError) for error in raised)
    assert sorted(map(str, raised)) == ["a rank of the model has ended", end]
    with pytest.raises(ValueError, match="contiguous"):
        SharedMemoryCollectives(ranks[0]).all_reduce(library, torch.zeros(4, 8).t())
