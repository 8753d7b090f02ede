"""Steps that are made again: calls of a backend recorded once, or captured by its device. What it has to offer for that."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windlass.kernels.draws import SamplingTensors
from windlass.kernels.memory.marks import DeviceEvent
from windlass.kernels.step_rows import MultiStepInputs


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


class RepeatsSteps(ABC):
    """What a backend offers to make steps again: recorded calls, or graphs, or neither."""

    @property
    @abstractmethod
    def recording_refusal(self) -> str | None:
        """Why nothing can be recorded here, or None where it can."""

    @abstractmethod
    def recorder(self, capacity: int) -> Recorder:
        """A recorder with so many bytes for what recorded work makes; pages of them that nothing ever used cost nothing.

        Raises ValueError with `recording_refusal`.
        """

    def make_graph_runner(self) -> Graphs | None:
        """What captures steps on a device that runs beside its host, with a memory of its own; None: nothing does."""
        return None
