"""Collectives through torch.distributed: NCCL between GPUs, gloo on CPUs.

The process group is private; torch's default group is not touched. Between GPUs, reductions are queued on the current stream
and the host does not wait.
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

_JOIN_TIMEOUT = timedelta(seconds=120)  # all ranks exist when the first one needs a sum

_WAIT = timedelta(seconds=600)  # for a rank that has neither ended nor joined


def collectives_refusal(device: torch.device) -> str | None:
    """Why torch.distributed cannot be used on this kind of device, or None."""
    if not dist.is_available():
        return "this torch was built without torch.distributed"
    if device.type == "cuda" and not dist.is_nccl_available():
        return "this torch was built without NCCL"
    return None if device.type in _GROUPS else f"torch.distributed has no group for {device.type}"


class TorchCollectives:
    """One rank of a group. The group is formed at the first collective call, since ranks may load at different times.

    All ranks make the same calls in the same order, with tensors of one shape on `device`. in_order: sums are formed in rank
    order, so that a row's bits do not depend on its position.
    """

    def __init__(self, ranks: RankGroup, device: torch.device, *, in_order: bool) -> None:
        self._ranks, self._device, self._in_order = ranks, device, in_order
        self._columns = [end - start for start, end in pairwise(ranks.bounds)]
        self._group: Any = None

    def all_reduce(self, x: Tensor) -> None:
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
    """The store in which ranks exchange their addresses: an unlinked file that they share."""
    # A store opens its path again when it is garbage-collected, and ends the process if it cannot. So this descriptor stays
    # open, and its number is not reused.
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
    # All ranks are on one machine; otherwise it would listen on the network.
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _WAIT
    return dist.ProcessGroupNCCL(_store(ranks), ranks.rank, ranks.count, options)


_GROUPS: dict[str, Callable[[RankGroup], Any]] = {"cpu": _gloo, "cuda": _nccl}
