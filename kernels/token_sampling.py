"""Token sampling contract: settings, logits adjustments and results of sampling, on any backend.

Order of operations for a row: allowed and forbidden tokens, biases, penalties, decreases, temperature, filters (min-p, top-k,
top-p, typical-p, XTC), then the first token, by id, at which the remaining cumulative weight exceeds the uniform number's
share.
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

# Lower temperatures are raised to this value: near the smallest normal float32 they would become 0.
MIN_TEMPERATURE = 1e-30

_FINITE = 0x7F7FFFFF  # the magnitude of the lowest number


@dataclass(frozen=True, slots=True)
class Filters:
    """Temperature and filters of one row; the defaults keep all tokens. A temperature of 0 takes the largest logit.

    exclude_from: tokens with at least this share of the remaining weight are top choices, of which only the least likely is
    kept (XTC). It differs between tokens of a sequence: see `SamplingRow`.
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
    """Penalties of earlier tokens: repetition divides the logit (1909.05858); frequency is subtracted once per occurrence in
    the output, presence once."""

    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0


@dataclass(frozen=True, slots=True)
class LogitsChanges:
    """Changes of a row's logits, by lists of distinct ids, int64, on the device of the logits.

    allowed: the only allowed ids, None for all. bias: added to each of `biased`. counted: tokens with penalties; in_output:
    their counts in the output. decrease: subtracted from each of `decreased` after the penalties. mask: bit i % 32 of word i
    // 32 is set if token i is allowed, None for all. A forbidden token stays at -inf throughout.
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
    """Sampling parameters of rows 0 .. B - 1 of unchanged logits, in memory of their device; [B] each.

    temperature: float32, 0 takes the largest. magnitude: int32, see `encode_filters`. top_k: int32, 0 keeps all. top_p,
    uniform: float64.
    """

    temperature: Tensor
    magnitude: Tensor
    top_k: Tensor
    top_p: Tensor
    uniform: Tensor


def encode_filters(filters: Filters, vocab_size: int) -> tuple[float, int, int, float]:
    """(temperature, magnitude, top_k, top_p) of `SamplingTensors`; typical_p and exclude_from are not encoded.

    magnitude: the bits, without the sign, of the lowest scaled logit, relative to the row's largest, that min-p keeps
    (float32).
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
    """One row to sample, reused from step to step. The caller sets row (of the logits), uniform in [0, 1), exclude_from (1:
    off).

    token: the sampled id if the status is OK, else -1.
    """

    row: int
    uniform: float
    exclude_from: float
    token: int
    status: int

    def change(self, changes: LogitsChanges) -> None:
        """Set the changes of the row's logits from now on; the tensors may be modified until the row is sampled."""


class TokenSampler(ABC):
    """Samples tokens from rows of logits of one width."""

    @abstractmethod
    def new(self, filters: Filters, penalties: Penalties) -> SamplingRow:
        """A row to sample (row 0) with these settings, without changes of logits."""

    @abstractmethod
    def sample(self, logits: Tensor, draws: Sequence[SamplingRow]) -> None:
        """Fill token and status of each row; the rows are from `new`.

        logits: [R, V] float32, not modified. A row with NaN or infinity fails alone. A result depends on its own row and
        settings only, and is the same on every backend.
        """


class TopLogprobs(NamedTuple):
    """Log-probabilities (natural) of N tokens, and of the k most likely tokens of their rows.

    chosen: [N] float32. ranks: [N] int64, 1 for the most likely, 0 for a row with NaN or infinity, whose other results are
    undefined. top_ids: [N, k] int64 and top: [N, k] float32, best first; equal logits are ordered by id.
    """

    chosen: NDArray[np.float32]
    ranks: NDArray[np.int64]
    top_ids: NDArray[np.int64]
    top: NDArray[np.float32]
