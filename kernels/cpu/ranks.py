"""What the ranks of one model do together on CPUs, through the compiled kernels and the memory that they share."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from windlass.kernels.cpu.checks import check
from windlass.kernels.cpu.library import TYPE_CODES, Library
from windlass.kernels.cpu.structs import RankGroupFields
from windlass.kernels.layouts.ranks import SLOT_BYTES, RankEndedError, RankGroup


class SharedMemoryCollectives:
    """One rank, as the kernels see it. Its calls count meetings, so all ranks make the same ones in the same order."""

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks
        self._bounds = (ctypes.c_int64 * len(ranks.bounds))(*ranks.bounds)
        self._group = RankGroupFields(
            ranks.address, ctypes.addressof(self._bounds), ranks.rank, ranks.count, SLOT_BYTES, 0
        )
        self._address = ctypes.addressof(self._group)

    def all_reduce(self, x: Tensor, *, library: Library) -> None:
        """See `Backend.sum_over_ranks`. Raises RankEndedError."""
        check(
            x.dtype in TYPE_CODES and x.is_cpu and x.is_contiguous(),
            f"sum_over_ranks: x is {x.dtype} {tuple(x.shape)}, not a contiguous float CPU tensor",
        )
        self._raise_for_code(library.sum_over_ranks(self._address, x.data_ptr(), TYPE_CODES[x.dtype], x.numel()))

    def gather_columns(self, part: Tensor, *, library: Library) -> Tensor:
        """See `Backend.gather_columns`. Raises RankEndedError."""
        bounds, rank = self._ranks.bounds, self._ranks.rank
        columns = bounds[rank + 1] - bounds[rank]
        check(
            part.dtype == torch.float32 and part.is_cpu and part.is_contiguous() and part.shape[1:] == (columns,),
            f"gather_columns: part is {part.dtype} {tuple(part.shape)}, not contiguous float32 [R, {columns}]",
        )
        out = torch.empty((part.shape[0], bounds[-1]), dtype=torch.float32) if rank == 0 else None
        address = None if out is None else out.data_ptr()
        self._raise_for_code(library.gather_columns(self._address, part.data_ptr(), address, part.shape[0]))
        return part if out is None else out

    def _raise_for_code(self, code: int) -> None:
        if code:
            raise RankEndedError(self._ranks.fault or "a rank of the model has ended")
