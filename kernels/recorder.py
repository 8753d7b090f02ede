"""Calls of a backend that are recorded once and made again: what a device has to offer for that."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from windlass.kernels.step_rows import RowsAhead


class Recording(ABC):
    """The calls of a piece of work, to be made again on the same memory. obstacle: why they cannot be, None if they can."""

    obstacle: str | None

    @abstractmethod
    def repeat(self) -> bool:
        """Make the calls again; False as soon as one reports an error. Raises ValueError where there is an obstacle."""

    def draw_passes(
        self, ahead: RowsAhead, passes: int, maxima: tuple[Tensor, Tensor], stop_ids: Sequence[Sequence[int]]
    ) -> NDArray[np.int64] | None:
        """Make the calls up to `passes` times: the ids that one time's `maxima` [B] hold are what the next one computes.

        ahead: of the rows, which are filled for the first time. It ends behind a pass that came to one of a row's `stop_ids`,
        and before one that failed or whose largest logits are not finite. Returns the ids of all passes that count, [P, B],
        or None where the device does not offer this. Raises IndexError where the rows' blocks do not hold so many.
        """
        return None

    @abstractmethod
    def same_values(self, other: Recording) -> bool:
        """Whether the other recording made the same calls, addresses aside."""


class Recorder(ABC):
    """Records what its backend is asked to do, in one piece of memory that all of its recordings share."""

    @abstractmethod
    def record(self) -> AbstractContextManager[Recording]:
        """Record what is done meanwhile, which is done as ever.

        Tensors that are there before have to outlive the recording where they are. Those made meanwhile hold what was
        written to them until this recorder records something else, or one of its recordings is repeated.
        """
