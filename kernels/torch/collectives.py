"""Collectives through torch.distributed: NCCL between GPUs, gloo on CPUs.

The process group is private; torch's default group is not touched. Between GPUs, reductions are queued on the current stream and the
host does not wait.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from windlass.kernels.rank_group import RankEndedError, RankGroup

_JOIN_TIMEOUT = timedelta(seconds=120)  # all ranks are there when the first of them wants a sum

_WAIT = timedelta(seconds=600)  # for one that has neither ended nor comes


def collectives_refusal(device: torch.device) -> str | None:
    """Why ranks cannot meet through torch.distributed on this kind of device; None where they can."""
    if not dist.is_available():
        return "this torch was built without torch.distributed"
    if device.type == "cuda" and not dist.is_nccl_available():
        return "this torch was built without NCCL"
    return None if device.type in _GROUPS else f"torch.distributed has no group for {device.type}"


class TorchCollectives:
    """One rank of a group, which meets when a sum is first wanted: until then some of them may still load.

    All ranks make the same calls in the same order, with tensors of one shape on `device`. in_order: sums are of the ranks'
    order, so that a row's bits do not depend on where it lies.
    """

    def __init__(self, ranks: RankGroup, device: torch.device, *, in_order: bool) -> None:
        self._ranks, self._device, self._in_order = ranks, device, in_order
        self._columns = [end - start for start, end in pairwise(ranks.bounds)]
        self._group: Any = None

    def all_reduce(self, x: Tensor) -> None:
        """See `Backend.sum_over_ranks`. Raises RankEndedError."""
        with self._joined_group() as group:
            if self._in_order:
                parts = [torch.empty_like(x) for _ in range(self._ranks.count)]
                group.allgather([parts], [x]).wait()
                total = parts[0].float()
                for part in parts[1:]:
                    total = total + part
            else:
                total = x.float()  # x itself where it is float32
                group.allreduce([total]).wait()
            if total is not x:
                x.copy_(total)

    def gather_columns(self, part: Tensor) -> Tensor:
        """See `Backend.gather_columns`. Raises RankEndedError."""
        ranks, first = self._ranks, self._ranks.rank == 0
        sent = torch.nn.functional.pad(part, (0, max(self._columns) - part.shape[1])).contiguous()  # all of one shape
        parts = [torch.empty_like(sent) for _ in range(ranks.count)] if first else []
        to_first = dist.GatherOptions()
        to_first.rootRank = 0
        with self._joined_group() as group:
            group.gather([parts] if first else [], [sent], to_first).wait()
        if not first:
            return part
        return torch.cat([one[:, :columns] for one, columns in zip(parts, self._columns, strict=True)], dim=1)

    @contextmanager
    def _joined_group(self) -> Iterator[Any]:
        try:
            if self._ranks.fault is not None:
                raise RankEndedError(self._ranks.fault)
            if self._group is None:
                self._group = _GROUPS[self._device.type](self._ranks)
                self._ranks.on_end(self._group.abort)
            yield self._group
        except (RankEndedError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            message = str(error).partition("\n")[0]
            raise RankEndedError(self._ranks.fault or f"a rank of the model has ended: {message}") from error


def _store(ranks: RankGroup) -> Any:
    """Where ranks leave each other their addresses: a file that they have in common and that no name leads to."""
    # A store opens its path once more when it goes, which is when garbage is collected, and ends the process where it cannot. So
    # this descriptor stays open: its number shall lead to nothing else.
    descriptor = os.dup(ranks.store)
    store = dist.FileStore(f"/dev/fd/{descriptor}", ranks.count)  # type: ignore[attr-defined]
    store.set_timeout(_JOIN_TIMEOUT)
    return store


def _gloo(ranks: RankGroup) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = _WAIT
    return dist.ProcessGroupGloo(_store(ranks), ranks.rank, ranks.count, options)


def _nccl(ranks: RankGroup) -> Any:
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # of one machine: else it would listen in the network
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _WAIT
    return dist.ProcessGroupNCCL(_store(ranks), ranks.rank, ranks.count, options)


_GROUPS: dict[str, Callable[[RankGroup], Any]] = {"cpu": _gloo, "cuda": _nccl}
