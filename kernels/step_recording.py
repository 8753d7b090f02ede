"""Step recording contract: persistent buffers of a decode step, recorded CPU calls and captured device graphs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windlass.kernels.device_memory import DeviceEvent
from windlass.kernels.token_sampling import SamplingTensors

# Takes the tables of all sequences, int32 [K, R, columns], and how many columns matter; fills everything but `metadata`.
# Raises IndexError where a row has no block or no rotary row.
BufferFiller: TypeAlias = Callable[[NDArray[np.int32], int], None]


class MultiStepInputs(NamedTuple):
    """What the rows of a step need to go on by themselves. blocks: columns of `tables` that all of their tokens lie in."""

    fill: BufferFiller
    tables: NDArray[np.int32]
    blocks: int


@dataclass(frozen=True, slots=True)
class PersistentBuffers:
    """B rows, each the next token of a sequence. Everything is contiguous and lies in host memory.

    said: [5, B] int64, what the caller writes: of each row its token, its slot's number in its sequence, the position of that
    sequence's first slot, its rotary row, and its row of the tables. The others follow: positions, lengths: [B] int64.
    slots: [K, B] int64. tables: [K, B, width] int32, of which columns past a sequence's blocks mean nothing. cos, sin:
    [G, B, d/2] float32, q_scale: [G, B] float32, score_scale: [B] float32.
    """

    metadata: NDArray[np.int64]
    positions: NDArray[np.int64]
    lengths: NDArray[np.int64]
    slots: NDArray[np.int64]
    tables: NDArray[np.int32]
    cos: Tensor
    sin: Tensor
    q_scale: Tensor
    score_scale: Tensor

    @classmethod
    def zeros(cls, groups: int, rows: int, width: int, rotary_groups: int, half: int) -> PersistentBuffers:
        """For K `groups`, B `rows` and tables of `width` columns, which begin as -1."""
        positions, lengths = np.zeros((2, rows), dtype=np.int64)
        tables = np.full((groups, rows, width), -1, dtype=np.int32)
        cos, sin = (torch.from_numpy(np.zeros((rotary_groups, rows, half), dtype=np.float32)) for _ in range(2))
        scale = torch.from_numpy(np.ones((rotary_groups, rows), dtype=np.float32))
        metadata, slots = np.zeros((5, rows), dtype=np.int64), np.zeros((groups, rows), dtype=np.int64)
        score_scale = torch.from_numpy(np.ones(rows, dtype=np.float32))
        return cls(metadata, positions, lengths, slots, tables, cos, sin, scale, score_scale)


class Recording(ABC):
    """The calls of a piece of work, to be made again on the same memory. obstacle: why they cannot be, None if they can."""

    obstacle: str | None

    @abstractmethod
    def repeat(self) -> bool:
        """Make the calls again; False as soon as one reports an error. Raises ValueError where there is an obstacle."""

    def draw_passes(
        self, ahead: MultiStepInputs, passes: int, maxima: tuple[Tensor, Tensor], stop_ids: Sequence[Sequence[int]]
    ) -> NDArray[np.int64] | None:
        """Make the calls up to `passes` times: the ids that one time's `maxima` [B] hold are what the next one computes.

        ahead: of the rows, which are filled for the first time. It ends behind a pass that came to one of a row's `stop_ids`,
        and before one that failed or whose largest logits are not finite. Returns the ids of all passes that count, [P, B],
        or None where the device does not offer this. Raises IndexError where the rows' blocks do not hold so many.
        """
        return None

    @abstractmethod
    def same_calls(self, other: Recording) -> bool:
        """Whether the other recording made the same calls, addresses aside."""


class Recorder(ABC):
    """Records what its backend is asked to do, in one piece of memory that all of its recordings share."""

    @abstractmethod
    def record(self) -> AbstractContextManager[Recording]:
        """Record what is done meanwhile, which is done as ever.

        Tensors that are there before have to outlive the recording where they are. Those made meanwhile hold what was
        written to them until this recorder records something else, or one of its recordings is repeated.
        """


class Graphs(ABC):
    """Work of a device beside its host: captured once, asked for again and again, waited for at the end.

    What is asked for is done in the order in which it was asked for, some time later; nothing here but `DeviceEvent.wait` lets the host
    wait. One memory holds what all captured work makes: it stays until other captured work is done.
    """

    @abstractmethod
    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture what work does on the device; the call returned does it again, on the same memory, for `submit`.

        It is run once before, so it has to do no harm. What it reads of Python's is read now and never again. Raises RuntimeError
        where it does what cannot be captured, as waiting for the device, and what torch raises where there is no memory.
        """

    @abstractmethod
    def submit(self, work: Callable[[], None]) -> None:
        """Have the device do this next: captured work, or torch operations that do not wait."""

    @abstractmethod
    def sample_rows(
        self, logits: Tensor, maxima: tuple[Tensor, Tensor], draws: SamplingTensors
    ) -> tuple[Tensor, Tensor]:
        """The tokens [B] and statuses [B], int64, of draws from all rows of logits [B, V], as a part of captured work.

        maxima: the rows' `Backend.row_maxima`. A draw yields what a `TokenSampler` of the device draws.
        """

    @abstractmethod
    def join(self) -> None:
        """What torch is asked for from now on comes after all that was asked for here."""

    @abstractmethod
    def record_event(self) -> DeviceEvent:
        """Behind all that was asked for until now."""

    @abstractmethod
    def host_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros in the host's memory, which the device copies to and from while the host does something else."""
