"""Ranks that meet through torch.distributed: over gloo, and over NCCL that is played where there are no GPUs."""

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

from windlass import kernels
from windlass.kernels import RankEndedError, RankGroup, shared_memory_bytes
from windlass.kernels.torch import collectives as grouped
from windlass.kernels.torch.collectives import TorchCollectives, collectives_refusal

COLUMNS = (32, 48, 5)
CPU = torch.device("cpu")


@pytest.fixture
def ranks() -> Iterator[list[RankGroup]]:
    number, store = os.memfd_create("ranks"), os.memfd_create("store")
    os.ftruncate(number, shared_memory_bytes(3))
    yield [RankGroup(number, rank, 3, COLUMNS, store) for rank in range(3)]
    os.close(number)
    os.close(store)


def together(*calls: Callable[[], object]) -> list[BaseException]:
    """Run them side by side; what they raised."""
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
ends = [socket.socketpair() for _ in range(8)]  # they take the numbers that are free
assert any(end.fileno() == store for pair in ends for end in pair)
del groups, threads
gc.collect()
print("goes on")
"""


def test_ranks_that_go_later_than_their_files_harm_nobody() -> None:
    """Whatever opens a descriptor of that number meanwhile."""
    ran = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout) == (0, "goes on\n"), ran.stderr


def test_columns_of_all_ranks_come_to_the_first(ranks: list[RankGroup]) -> None:
    groups = [TorchCollectives(one, CPU, in_order=False) for one in ranks]
    parts = [torch.randn(7, columns) for columns in COLUMNS]
    found: dict[int, torch.Tensor] = {}

    def gather(rank: int) -> None:
        found[rank] = groups[rank].gather_columns(parts[rank])

    assert not together(*(lambda rank=rank: gather(rank) for rank in range(3)))  # type: ignore[misc]
    assert torch.equal(found[0], torch.cat(parts, dim=1))
    assert found[1] is parts[1] and found[2] is parts[2]


def test_who_comes_after_a_rank_has_ended_is_told(ranks: list[RankGroup]) -> None:
    groups = [TorchCollectives(one, CPU, in_order=False) for one in ranks]
    x = [torch.ones(1, 4) for _ in ranks]
    assert not together(*(lambda g=g, one=one: g.all_reduce(one) for g, one in zip(groups, x, strict=True)))  # type: ignore[misc]
    ranks[0].end("rank 2 ended: killed")
    with pytest.raises(RankEndedError, match="killed"):
        groups[0].gather_columns(torch.ones(1, 32))


class PlayedNccl:
    """A group between GPUs, of which this torch has none: remembers what it was made with, and adds nothing up."""

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


def test_gpus_meet_by_nccl_which_listens_on_this_machine_only(
    ranks: list[RankGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", PlayedNccl, raising=False)
    monkeypatch.setattr(PlayedNccl, "made", [])
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    group = TorchCollectives(ranks[1], torch.device("cuda", 1), in_order=False)
    assert not PlayedNccl.made  # until a sum is wanted others may still load
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


def test_whether_ranks_can_meet_is_known_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert collectives_refusal(torch.device("cuda")) == "this torch was built without NCCL"
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert collectives_refusal(torch.device("cuda", 1)) is None and kernels.ranks_refusal("cuda:1") is None
    assert collectives_refusal(torch.device("meta")) == "torch.distributed has no group for meta"
    assert kernels.ranks_refusal("cpu") is None
