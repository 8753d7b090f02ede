"""Draws tokens from rows of logits, and their log-probabilities, through the compiled kernels. Knows no requests.

The arithmetic and the order of a draw are those of `windlass.kernels.torch.draw`, to the bit.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from windlass.kernels import draws
from windlass.kernels.cpu.checks import check, vector_ok
from windlass.kernels.cpu.library import Library
from windlass.kernels.cpu.structs import SamplingRowFields
from windlass.kernels.draws import MIN_TEMPERATURE, Filters, LogitsChanges, Penalties, TopLogprobs

LOWEST = torch.finfo(torch.float32).min
MAX_VOCAB = 1 << 19  # weights are at most 1 and multiples of 2^-34: so many sum up exactly in float64
_SPAN = 128


class CompiledSamplingRow(SamplingRowFields):
    """One row to draw from: what is done to its logits, how it is narrowed, and what came of it.

    row: of the logits. allowed, forbidden, biased (with bias), counted (with in_output), decreased (with decrease): addresses
    of int64 ids (of float32 numbers) and how many there are; whoever sets one keeps the memory, as `change` does. An allowed
    of None allows all. temperature: 0 is greedy. floor: log(min_p), LOWEST for off. top_k: 0 is off. top_p, typical_p,
    exclude_from: 1 is off. uniform: [0, 1).
    token: the drawn id where status is OK, else -1.
    """

    if TYPE_CHECKING:
        row: int
        uniform: float
        exclude_from: float
        temperature: float
        token: int
        status: int

    def change(self, changes: LogitsChanges) -> None:
        """See `draws.SamplingRow`."""
        self._changes = changes  # whose memory is named below
        allowed, forbidden, biased, counted = changes.allowed, changes.forbidden, changes.biased, changes.counted
        if allowed is None:
            self.allowed, self.num_allowed = None, 0
        else:  # an empty tensor may have no address, which would allow all
            self.allowed, self.num_allowed = allowed.data_ptr() or 8, len(allowed)
        self.forbidden, self.num_forbidden = forbidden.data_ptr(), len(forbidden)
        self.biased, self.bias, self.num_biased = biased.data_ptr(), changes.bias.data_ptr(), len(biased)
        self.counted, self.in_output, self.num_counted = counted.data_ptr(), changes.in_output.data_ptr(), len(counted)
        decreased = changes.decreased
        self.decreased, self.decrease = decreased.data_ptr(), changes.decrease.data_ptr()
        self.num_decreased = len(decreased)
        self.mask = None if changes.mask is None else changes.mask.data_ptr()


def sampling_workspace(vocab: int, threads: int) -> Tensor:
    """Memory for `draw_tokens` to work in, for rows of `vocab` logits on so many threads; untouched pages cost nothing."""
    tokens = -(-(vocab + 1) // _SPAN) * _SPAN
    return torch.empty(threads * (tokens * 32 + (tokens // _SPAN + 1) * 16), dtype=torch.uint8)


def _check_logits(name: str, logits: Tensor) -> None:
    check(
        logits.dim() == 2
        and logits.dtype == torch.float32
        and logits.is_cpu
        and 0 < logits.shape[1] <= MAX_VOCAB
        and (logits.shape[1] == 1 or logits.stride(1) == 1),
        f"{name}: logits are {logits.dtype} {tuple(logits.shape)}, not float32 [R, V] with adjacent elements, V <= 2^19",
    )


def draw_tokens(logits: Tensor, draws: Sequence[CompiledSamplingRow], memory: Tensor, *, library: Library) -> None:
    """Fill token and status of each draw.

    logits: [R, V] float32, any row stride, left unchanged. memory: from `sampling_workspace`. A row with NaN or infinity fails
    alone. Raises ValueError, IndexError for a row that is none, MemoryError where `memory` is for a smaller vocabulary.
    """
    _check_logits("draw_tokens", logits)
    check(memory.dtype == torch.uint8 and memory.is_contiguous() and memory.is_cpu, "draw_tokens: memory is no memory")
    count = len(draws)
    addresses = (ctypes.c_void_p * count)(*map(ctypes.addressof, draws))
    code = library.draw_tokens(
        logits.data_ptr(),
        logits.stride(0),
        logits.shape[0],
        logits.shape[1],
        ctypes.addressof(addresses),
        count,
        memory.data_ptr(),
        memory.numel(),
    )
    if code == 1:
        raise MemoryError(f"draw_tokens: {memory.numel()} bytes are too few for a vocabulary of {logits.shape[1]}")
    if code:
        raise IndexError("draw_tokens: a row lies outside the logits")


class CompiledSampler(draws.TokenSampler):
    """Draws for rows of `vocab` logits, at most MAX_VOCAB."""

    def __init__(self, vocab: int, library: Library) -> None:
        self._vocab, self._library = vocab, library
        self._memory: Tensor | None = None

    def new(self, filters: Filters, penalties: Penalties) -> CompiledSamplingRow:
        return CompiledSamplingRow(
            repetition=penalties.repetition,
            frequency=penalties.frequency,
            presence=penalties.presence,
            temperature=max(filters.temperature, MIN_TEMPERATURE) if filters.temperature > 0 else 0.0,
            floor=math.log(filters.min_p) if filters.min_p > 0 else LOWEST,
            top_k=filters.top_k if filters.top_k < self._vocab else 0,
            top_p=filters.top_p,
            typical_p=filters.typical_p,
            exclude_from=filters.exclude_from,
        )

    def sample(self, logits: Tensor, draws: Sequence[draws.SamplingRow]) -> None:
        if self._memory is None:
            self._memory = sampling_workspace(self._vocab, torch.get_num_threads())
        draw_tokens(logits, cast(Sequence[CompiledSamplingRow], draws), self._memory, library=self._library)


def token_logprobs(logits: Tensor, rows: Tensor, targets: Tensor, k: int, *, library: Library) -> TopLogprobs:
    """What rows of logits [R, V] float32 say of a token each. rows, targets: [N] int64. k: 0 .. V.

    Sums are float64. Raises ValueError, and IndexError for a row or a token outside the logits.
    """
    _check_logits("token_logprobs", logits)
    count, vocab = len(rows), logits.shape[1]
    check(
        vector_ok(rows, torch.int64, count) and vector_ok(targets, torch.int64, count) and 0 <= k <= vocab,
        f"token_logprobs: rows and targets must be int64, contiguous [{count}], and k 0 to {vocab}",
    )
    chosen, ranks = np.empty(count, np.float32), np.zeros(count, np.int64)
    top_ids, top, normalisers = np.empty((count, k), np.int64), np.empty((count, k), np.float32), np.zeros(count)
    memory = sampling_workspace(vocab, max(1, min(count, torch.get_num_threads())))
    code = library.token_logprobs(
        logits.data_ptr(),
        logits.stride(0),
        logits.shape[0],
        vocab,
        rows.data_ptr(),
        targets.data_ptr(),
        count,
        k,
        *(array.ctypes.data for array in (chosen, ranks, top_ids, top, normalisers)),
        memory.data_ptr(),
        memory.numel(),
    )
    if code:
        raise IndexError("token_logprobs: a row or a token lies outside the logits")
    order = (-top).argsort(1, kind="stable")  # they come by id
    top_ids, top = np.take_along_axis(top_ids, order, 1), np.take_along_axis(top, order, 1)
    return TopLogprobs(chosen, ranks, top_ids, (top - normalisers[:, None]).astype(np.float32))
