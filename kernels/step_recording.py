"""Step recording contract: persistent buffers of a decode step, recorded CPU calls and captured device graphs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windlass.kernels.device_memory import DeviceEvent
from windlass.kernels.token_sampling import SamplingTensors

# Arguments: the tables of all sequences, int32 [K, R, columns], and the number of relevant columns. Fills all buffers except
# `metadata`. Raises IndexError if a row has no block or no rotary row.
BufferFiller: TypeAlias = Callable[[NDArray[np.int32], int], None]


class MultiStepInputs(NamedTuple):
    """Inputs with which the rows of a step advance without the host. blocks: table columns that all of their tokens need."""

    fill: BufferFiller
    tables: NDArray[np.int32]
    blocks: int


@dataclass(frozen=True, slots=True)
class PersistentBuffers:
    """Inputs of B rows, each the next token of a sequence. All arrays are contiguous and in host memory.

    The caller writes metadata: per row its token, the index of its slot in the sequence, the position of the sequence's first
    slot, its rotary row, and its row of the tables. A `BufferFiller` computes the other arrays.
    """

    metadata: NDArray[np.int64]  # [5, B]
    positions: NDArray[np.int64]  # [B]
    lengths: NDArray[np.int64]  # [B]
    slots: NDArray[np.int64]  # [K, B]
    tables: NDArray[np.int32]  # [K, B, width]; columns after a sequence's blocks are undefined
    cos: Tensor  # [G, B, d/2] float32
    sin: Tensor  # [G, B, d/2] float32
    q_scale: Tensor  # [G, B] float32
    score_scale: Tensor  # [B] float32

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


class Recording(Protocol):
    """Recorded calls, to be repeated on the same memory. obstacle: why they cannot be repeated, or None."""

    obstacle: str | None

    def repeat(self) -> bool:
        """Make the calls again; False as soon as one reports an error. Raises ValueError if there is an obstacle."""

    def run_decode_steps(
        self, ahead: MultiStepInputs, passes: int, maxima: tuple[Tensor, Tensor], stop_ids: Sequence[Sequence[int]]
    ) -> NDArray[np.int64] | None:
        """Make the calls up to `passes` times: the ids in `maxima` [B] after one pass are the input of the next.

        ahead: the rows, already filled for the first pass. Ends after a pass that yields one of a row's `stop_ids`, and
        before one that fails or whose largest logits are not finite. Returns the ids of all valid passes, [P, B], or None if
        the device does not support this. Raises IndexError if the rows' blocks cannot hold `passes` tokens.
        """

    def same_calls(self, other: Recording) -> bool:
        """Whether the other recording made the same calls, addresses aside."""


# Returns a context that records the calls of a backend, which are also executed. All recordings of a recorder share one piece
# of memory. Tensors made before must outlive the recording at the same addresses. Those made meanwhile keep their contents
# until the recorder records again or one of its recordings is repeated.
Recorder: TypeAlias = Callable[[], AbstractContextManager[Recording]]


class Graphs(ABC):
    """Asynchronous work of a device: captured once, submitted repeatedly.

    Submitted work runs in order; only `DeviceEvent.wait` blocks the host. All captured work shares one memory for its results,
    which stay valid until other captured work runs.
    """

    @abstractmethod
    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture the device operations of `work`. The returned function repeats them on the same memory, for `submit`.

        `work` runs once before, so it must be harmless. Python state is read now and not again. Raises RuntimeError if it does
        something that cannot be captured, such as waiting for the device, and what torch raises when there is no memory.
        """

    @abstractmethod
    def submit(self, work: Callable[[], None]) -> None:
        """Run this next on the device: captured work, or torch operations that do not wait."""

    @abstractmethod
    def sample_rows(
        self, logits: Tensor, maxima: tuple[Tensor, Tensor], draws: SamplingTensors
    ) -> tuple[Tensor, Tensor]:
        """The tokens [B] and statuses [B], int64, sampled from all rows of logits [B, V], as a part of captured work.

        maxima: the rows' `Backend.row_maxima`. Tokens equal those of a `TokenSampler` of the device.
        """

    @abstractmethod
    def join(self) -> None:
        """Order later torch operations after all work submitted here."""

    @abstractmethod
    def record_event(self) -> DeviceEvent:
        """An event after all work submitted so far."""

    @abstractmethod
    def host_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros in host memory that the device copies to and from asynchronously."""
