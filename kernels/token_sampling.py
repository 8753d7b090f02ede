"""Token sampling contract: settings, logits adjustments and results of sampling, on any backend.

Order of operations for a row: allowed and forbidden tokens, biases, penalties, decreases, temperature, filters (min-p, top-k,
top-p, typical-p, XTC), then the first token, by id, at which the remaining cumulative weight exceeds the uniform number's share.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

# Below the smallest normal float32 a temperature would become 0; it means greedy long before that.
MIN_TEMPERATURE = 1e-30

_FINITE = 0x7F7FFFFF  # the magnitude of the lowest number


@dataclass(frozen=True, slots=True)
class Filters:
    """How one row is narrowed before the draw; the defaults keep everything. A temperature of 0 takes the largest logit.

    exclude_from: tokens that hold this share of what the other filters keep are top choices, of which only the least likely
    stays (XTC). It changes from draw to draw: see `SamplingRow`.
    """

    temperature: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    typical_p: float = 1.0
    exclude_from: float = 1.0

    @property
    def is_noop(self) -> bool:
        narrows = self.min_p > 0 or self.top_k > 0 or self.top_p < 1 or self.typical_p < 1
        return not narrows and self.exclude_from >= 1


@dataclass(frozen=True, slots=True)
class Penalties:
    """On tokens that were there before: repetition divides (arXiv 1909.05858), the others are taken off, as often as the
    output holds the token or once."""

    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0


@dataclass(frozen=True, slots=True)
class LogitsChanges:
    """What is done to a row's logits, by lists of distinct ids, int64, on the device of the logits.

    allowed: the only ids that stay, None for all. A bias is added to each of `biased`; `counted` are the tokens that
    penalties meet, and in_output how often the output holds each. After the penalties each of `decreased` loses its
    decrease. mask: bit i % 32 of word i // 32 is set where token i may stay, None for all. A forbidden token stays at -inf
    throughout.
    """

    allowed: Tensor | None
    forbidden: Tensor
    biased: Tensor
    bias: Tensor  # float32
    counted: Tensor
    in_output: Tensor  # float32
    decreased: Tensor
    decrease: Tensor  # float32
    mask: Tensor | None = None  # int32 [ceil(V / 32)], on the CPU


class SamplingTensors(NamedTuple):
    """Draws from rows 0 .. B - 1 of logits as they are, told in the memory of their device; [B] each.

    temperature: float32, 0 takes the largest. magnitude: int32, see `encode_filters`. top_k: int32, 0 keeps all. top_p, uniform:
    float64.
    """

    temperature: Tensor
    magnitude: Tensor
    top_k: Tensor
    top_p: Tensor
    uniform: Tensor


def encode_filters(filters: Filters, vocab_size: int) -> tuple[float, int, int, float]:
    """(temperature, magnitude, top_k, top_p) of `SamplingTensors`: filters by typical-p and exclusions have no such numbers.

    magnitude: bits of a float32, those of the lowest scaled logit less its row's largest that min-p keeps, without the sign.
    """
    temperature = max(filters.temperature, MIN_TEMPERATURE) if filters.temperature > 0 else 0.0
    lowest = _magnitude(math.log(filters.min_p)) if filters.min_p > 0 else _FINITE
    return temperature, lowest, filters.top_k if 0 < filters.top_k < vocab_size else 0, filters.top_p


def _magnitude(number: float) -> int:
    return int(np.float32(number).view(np.int32)) & 0x7FFFFFFF


class SamplingStatus(IntEnum):
    OK = 0
    BAD_LOGITS = 1  # NaN or infinity
    NOTHING_LEFT = 2
    NO_SUCH_ID = 3


class SamplingRow(Protocol):
    """A draw from one row, kept from step to step. Settable: row of the logits; uniform, in [0, 1); exclude_from, 1 for off.

    token: the drawn id where the status is OK, else -1.
    """

    row: int
    uniform: float
    exclude_from: float
    token: int
    status: int

    def change(self, changes: LogitsChanges) -> None:
        """What to do to the row's logits, from now on; the tensors may be written to until the draw is made."""


class TokenSampler(ABC):
    """Draws from rows of logits of one width."""

    @abstractmethod
    def new(self, filters: Filters, penalties: Penalties) -> SamplingRow:
        """A draw with these settings from row 0, without changes."""

    @abstractmethod
    def sample(self, logits: Tensor, draws: Sequence[SamplingRow]) -> None:
        """Fill token and status of each draw, which this drawer has made.

        logits: [R, V] float32, left unchanged. A row with NaN or infinity fails alone. What a draw yields depends on its
        row and settings, never on the rows beside it, and is the same on every backend.
        """


class TopLogprobs(NamedTuple):
    """Natural logarithms of probabilities of N tokens, and of the k most likely ones of their rows.

    chosen: [N] float32. ranks: [N] int64, 1 for the most likely, 0 where the row holds NaN or infinity and the rest means
    nothing. top_ids: [N, k] int64 and top: [N, k] float32, best first, those of equal logits by id.
    """

    chosen: NDArray[np.float32]
    ranks: NDArray[np.int64]
    top_ids: NDArray[np.int64]
    top: NDArray[np.float32]
