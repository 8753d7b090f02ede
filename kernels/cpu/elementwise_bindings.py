"""Elementwise, norm, embedding, sampling, step-buffer and collective bindings of the compiled kernels.

Functions named like an operation of `Backend` perform it. Arithmetic is float32 whatever the storage: float32, bfloat16 or
float16. Operands may have any row stride, results are contiguous, and operands that do not fit raise ValueError. Sampling
equals `torch.torch_sampler` bit for bit.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windlass.kernels.cpu.library import (
    TYPE_CODES,
    HasLibrary,
    Library,
    RankGroupFields,
    SamplingRowFields,
    address,
    check,
    check_matrix,
    check_vectors,
    tensor2,
)
from windlass.kernels.rank_group import SLOT_BYTES, RankEndedError, RankGroup
from windlass.kernels.step_recording import PersistentBuffers
from windlass.kernels.token_sampling import (
    MIN_TEMPERATURE,
    Filters,
    LogitsChanges,
    Penalties,
    SamplingRow,
    TokenSampler,
    TopLogprobs,
)

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu2": 3}


def activation_code(activation: str) -> int:
    """The library's code of an activation. Raises ValueError."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}; known are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[activation]


def rms_norm(kernels: HasLibrary, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """With `residual` ([T, D], x's dtype) the input is residual + x, which is stored in `residual`."""
    shape, dim = x.shape, x.shape[-1]
    _check_rows(x, "rms_norm")
    check_vectors("rms_norm: weight", torch.float32, dim, weight)
    if residual is not None:
        check(
            len(shape) == 2
            and residual.shape == shape
            and residual.dtype == x.dtype
            and residual.is_cpu
            and (dim < 2 or residual.stride(1) == 1),
            "rms_norm: residual must have x's shape [T, D] and dtype",
        )
    out = torch.empty(shape, dtype=x.dtype)
    group = shape[1] if len(shape) == 3 else 1  # rows of one token
    kernels.library.rms_norm(
        *(x.data_ptr(), x.stride(-2), max(group, 1), x.stride(0)),
        *(address(residual), 0 if residual is None else residual.stride(0), TYPE_CODES[x.dtype]),
        *(weight.data_ptr(), eps, out.data_ptr(), shape[0] * group, dim),
    )
    return out


def _check_rows(x: Tensor, name: str) -> None:
    if not 2 <= x.dim() <= 3 or x.dtype not in TYPE_CODES or not x.is_cpu or (x.shape[-1] > 1 and x.stride(-1) != 1):
        raise ValueError(
            f"{name}: x is {x.dtype} {tuple(x.shape)}, not a float CPU tensor [T, D] or [T, H, D] with adjacent elements"
        )


def _half_result(gate_up: Tensor, name: str) -> Tensor:
    """Memory for a result [T, F] of [T, 2F]."""
    check_matrix(gate_up, name)
    rows, columns = gate_up.shape
    if columns % 2:
        raise ValueError(f"{name} {tuple(gate_up.shape)} is not [T, 2F]")
    return torch.empty((rows, columns // 2), dtype=gate_up.dtype)


def gated_activation(kernels: HasLibrary, gate_up: Tensor, activation: str) -> Tensor:
    out, code = _half_result(gate_up, "gated_activation: gate_up"), activation_code(activation)
    kernels.library.gated_activation(*tensor2(gate_up), code, out.data_ptr(), *out.shape)
    return out


def clamped_glu(kernels: HasLibrary, gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    out = _half_result(gate_up, "clamped_glu: gate_up")
    kernels.library.clamped_glu(*tensor2(gate_up), alpha, limit, out.data_ptr(), *out.shape)
    return out


def gate_by_sigmoid(kernels: HasLibrary, x: Tensor, gate: Tensor) -> None:
    check_matrix(x, "gate_by_sigmoid: x")
    check_matrix(gate, "gate_by_sigmoid: gate")
    check(
        gate.shape in (x.shape, (x.shape[0], 1)),
        f"gate_by_sigmoid: x is {x.dtype} {tuple(x.shape)}, gate {gate.dtype} {tuple(gate.shape)}",
    )
    kernels.library.gate_by_sigmoid(*tensor2(x), *tensor2(gate), gate.shape[1], *x.shape)


def soft_cap(kernels: HasLibrary, x: Tensor, cap: float) -> Tensor:
    check_matrix(x, "soft_cap: x", wide=True)
    out = torch.empty(tuple(x.shape), dtype=x.dtype)
    kernels.library.soft_cap(x.data_ptr(), x.stride(0), cap, out.data_ptr(), x.shape[0], x.shape[1])
    return out


def embed_rows(
    kernels: HasLibrary, table: Tensor, ids: Tensor, scale: float = 1.0, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """table[ids] * scale, multiplied in float32.

    table: [N, D] float32, bfloat16 or float16, any row stride. ids: [T] int64, contiguous. Returns [T, D] of `dtype`, one of
    the three. Raises ValueError, and IndexError for an id out of range.
    """
    check_matrix(table, "embed_rows: the table")
    rows, dim = ids.shape[0], table.shape[1]
    check_vectors("embed_rows: ids", torch.int64, rows, ids)
    out = torch.empty((rows, dim), dtype=dtype)
    code = kernels.library.embed_rows(
        *tensor2(table), table.shape[0], ids.data_ptr(), scale, out.data_ptr(), TYPE_CODES[dtype], rows, dim
    )
    if code:
        raise IndexError(f"embed_rows: an id is not a row of a table of {table.shape[0]}")
    return out


def layer_norm(kernels: HasLibrary, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    shape, dim = x.shape, x.shape[-1]
    _check_rows(x, "layer_norm")
    check_vectors("layer_norm: weight and bias", torch.float32, dim, weight, bias)
    out = torch.empty(shape, dtype=x.dtype)
    group = shape[1] if len(shape) == 3 else 1  # rows of one token
    kernels.library.layer_norm(
        *(x.data_ptr(), x.stride(-2), max(group, 1), x.stride(0), TYPE_CODES[x.dtype]),
        *(weight.data_ptr(), address(bias), eps, out.data_ptr(), shape[0] * group, dim),
    )
    return out


def activate(kernels: HasLibrary, x: Tensor, activation: str) -> Tensor:
    check_matrix(x, "activate: x")
    out, code = torch.empty(tuple(x.shape), dtype=x.dtype), activation_code(activation)
    kernels.library.activate(*tensor2(x), code, out.data_ptr(), *x.shape)
    return out


def xielu(kernels: HasLibrary, x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    check_matrix(x, "xielu: x")
    numbers = (alpha_p, alpha_n, beta, eps)
    check_vectors("xielu: its numbers", torch.float32, 1, *numbers)
    out = torch.empty(tuple(x.shape), dtype=x.dtype)
    kernels.library.xielu(*tensor2(x), *(one.data_ptr() for one in numbers), out.data_ptr(), *x.shape)
    return out


def clip(kernels: HasLibrary, x: Tensor, limit: float) -> None:
    check_matrix(x, "clip: x")
    kernels.library.clip(*tensor2(x), limit, *x.shape)


def scale_rows(kernels: HasLibrary, x: Tensor, factors: Tensor) -> None:
    check_matrix(x, "scale_rows: x")
    check_vectors("scale_rows: factors", torch.float32, x.shape[0], factors)
    kernels.library.scale_rows(*tensor2(x), factors.data_ptr(), *x.shape)


def scale_columns(kernels: HasLibrary, x: Tensor, first: Tensor, second: Tensor) -> None:
    check_matrix(x, "scale_columns: x")
    check_vectors("scale_columns: factors", torch.float32, x.shape[1], first, second)
    kernels.library.scale_columns(*tensor2(x), first.data_ptr(), second.data_ptr(), *x.shape)


def multiply(kernels: HasLibrary, x: Tensor, by: Tensor) -> None:
    check_matrix(x, "multiply: x")
    single = by.dim() == 1
    if single:
        check_vectors("multiply: the factor", torch.float32, 1, by)
    else:
        check_matrix(by, "multiply: by")
        check(by.shape == x.shape and by.dtype == x.dtype, f"multiply: by must be {x.dtype} {tuple(x.shape)}")
    kernels.library.multiply(
        *tensor2(x),
        *((None, 0, by.data_ptr()) if single else (by.data_ptr(), by.stride(0), None)),
        *x.shape,
    )


def rms_norm_in_place(kernels: HasLibrary, x: Tensor, weight: Tensor, eps: float) -> None:
    check_matrix(x, "rms_norm_in_place: x")
    rows, dim = x.shape
    check_vectors("rms_norm_in_place: weight", torch.float32, dim, weight)
    kernels.library.rms_norm_in_place(*tensor2(x), weight.data_ptr(), eps, rows, dim)


class CompiledBufferFiller:
    """See `Backend.buffer_filler`. Operands are checked once here, since checks would take most of the time of a step."""

    def __init__(
        self,
        library: Library,
        rows: PersistentBuffers,
        inv_freq: Tensor,
        q_scale: Tensor,
        score_scale: Tensor,
        block_size: int,
    ) -> None:
        count, (groups, table_rows, half) = rows.metadata.shape[1], inv_freq.shape
        check(
            inv_freq.dtype == torch.float64 and inv_freq.is_cpu and inv_freq.is_contiguous(),
            f"buffer_filler: inv_freq is {inv_freq.dtype} on {inv_freq.device}, not contiguous float64 [G, R, d/2]",
        )
        check(
            rows.cos.shape == rows.sin.shape == (groups, count, half)
            and q_scale.shape == (groups, table_rows)
            and score_scale.shape == (table_rows,),
            f"buffer_filler: angles {tuple(rows.cos.shape)} and scales {tuple(q_scale.shape)} do not fit",
        )
        check(
            all(
                array.flags.c_contiguous
                for array in (rows.metadata, rows.positions, rows.lengths, rows.slots, rows.tables)
            )
            and rows.tables.shape[:2] == rows.slots.shape
            and rows.positions.shape == rows.lengths.shape == (count,),
            "buffer_filler: the rows' arrays do not fit each other",
        )
        self.rows, self._block_size, self._table_rows = rows, block_size, table_rows
        self._library = library
        metadata, positions = rows.metadata.ctypes.data, rows.positions.ctypes.data
        self._count, self._metadata = count, metadata
        own = (rows.lengths, rows.slots, rows.tables)
        self._own = (positions, *(array.ctypes.data for array in own), rows.tables.shape[2])
        self._frequencies = inv_freq.data_ptr(), groups, table_rows, half
        self._rotary_rows = rows.metadata[3].ctypes.data, positions, count
        self._angles = rows.cos.data_ptr(), rows.sin.data_ptr()
        self._scales = [(q_scale.numpy(), rows.q_scale.numpy()), (score_scale.numpy(), rows.score_scale.numpy())]
        self._table_layout: tuple[int, int, int, int] = (0, 0, 0, 0)  # address, group stride, row stride, columns
        self._tables: NDArray[np.int32] | None = None  # the tables of `_table_layout`
        self._inv_freq = inv_freq  # keeps the memory alive that the kernels read

    def __call__(self, tables: NDArray[np.int32], blocks: int) -> None:
        """See `BufferFiller`."""
        table_arguments = self._table_arguments(tables, blocks, int(self.rows.metadata[1].max()))
        if self._library.fill_step_buffers(self._metadata, self._count, *table_arguments, *self._own):
            raise IndexError("a scheduled token has no block to go to")
        if self._library.rotary_angles(*self._frequencies, *self._rotary_rows, *self._angles):
            raise IndexError(f"buffer_filler: a row is outside the rotary table of {self._table_rows}")
        rotary = self.rows.metadata[3]
        for whole, own in self._scales:  # rows were checked above; "clip" avoids a copy
            whole.take(rotary, axis=whole.ndim - 1, out=own, mode="clip")

    def arguments(self, tables: NDArray[np.int32], blocks: int, passes: int) -> tuple[int, ...]:
        """Arguments of `run_decode_steps` for filled rows and `passes` passes in total. Raises IndexError if their blocks
        cannot hold all tokens."""
        table_arguments = self._table_arguments(tables, blocks, int(self.rows.metadata[1].max()) + passes - 1)
        return self._metadata, self._count, *table_arguments, *self._own, *self._frequencies, *self._angles

    def _table_arguments(
        self, tables: NDArray[np.int32], blocks: int, last: int
    ) -> tuple[int, int, int, int, int, int]:
        """The tables as arguments of `fill_step_buffers`. last: the largest slot index of a row."""
        if tables is not self._tables:
            kv_groups, _, width = self.rows.tables.shape
            check(
                tables.dtype == np.int32
                and tables.ndim == 3
                and len(tables) == kv_groups
                and tables.strides[2] == 4
                and tables.strides[1] >= 0,
                f"buffer_filler: tables are {tables.dtype} {tables.shape}",
            )
            strides = tables.strides
            self._table_layout = (tables.ctypes.data, strides[0] // 4, strides[1] // 4, min(tables.shape[2], width))
            self._tables = tables
        base, group_stride, row_stride, most = self._table_layout
        if not 0 < blocks <= most or blocks * self._block_size <= last:
            raise IndexError(f"buffer_filler: {blocks} blocks of a table of {most} do not hold every row")
        return base, group_stride, row_stride, len(tables), blocks, self._block_size


def row_maxima(kernels: HasLibrary, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Raises MemoryError."""
    rows, vocab = logits.shape
    check_matrix(logits, "row_maxima: logits", wide=True)
    check(vocab > 0, "row_maxima: logits have no columns")
    ids, values = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.float32)
    if kernels.library.row_maxima(logits.data_ptr(), logits.stride(0), rows, vocab, ids.data_ptr(), values.data_ptr()):
        raise MemoryError("row_maxima: no memory")
    return ids, values


LOWEST = torch.finfo(torch.float32).min

MAX_VOCAB = 1 << 19  # weights are at most 1 and multiples of 2^-34: this many have an exact sum in float64

_SPAN = 128


class CompiledSamplingRow(SamplingRowFields):
    """One row to sample: logits changes, filters and result.

    row: of the logits. allowed, forbidden, biased (with bias), counted (with in_output), decreased (with decrease): addresses
    of int64 ids (of float32 numbers) and their counts. The caller keeps the memory alive, as `change` does. allowed: None
    allows all. temperature: 0 is greedy. floor: log(min_p), LOWEST for off. top_k: 0 is off. top_p, typical_p, exclude_from:
    1 is off. uniform: [0, 1). token: the sampled id if status is OK, else -1.
    """

    if TYPE_CHECKING:
        row: int
        uniform: float
        exclude_from: float
        temperature: float
        token: int
        status: int

    def change(self, changes: LogitsChanges) -> None:
        """See `SamplingRow`."""
        self._changes = changes  # keeps the memory alive
        allowed, forbidden, biased, counted = changes.allowed, changes.forbidden, changes.biased, changes.counted
        if allowed is None:
            self.allowed, self.num_allowed = None, 0
        else:  # an empty tensor may have a null address, which would allow all
            self.allowed, self.num_allowed = allowed.data_ptr() or 8, len(allowed)
        self.forbidden, self.num_forbidden = forbidden.data_ptr(), len(forbidden)
        self.biased, self.bias, self.num_biased = biased.data_ptr(), changes.bias.data_ptr(), len(biased)
        self.counted, self.in_output, self.num_counted = counted.data_ptr(), changes.in_output.data_ptr(), len(counted)
        decreased = changes.decreased
        self.decreased, self.decrease = decreased.data_ptr(), changes.decrease.data_ptr()
        self.num_decreased = len(decreased)
        self.mask = None if changes.mask is None else changes.mask.data_ptr()


def sampling_workspace(vocab: int, threads: int) -> Tensor:
    """Scratch memory of `sample_tokens` for rows of `vocab` logits on this many threads; untouched pages cost nothing."""
    tokens = -(-(vocab + 1) // _SPAN) * _SPAN
    return torch.empty(threads * (tokens * 32 + (tokens // _SPAN + 1) * 16), dtype=torch.uint8)


def _check_logits(name: str, logits: Tensor) -> None:
    check_matrix(logits, f"{name}: logits", wide=True)
    check(0 < logits.shape[1] <= MAX_VOCAB, f"{name}: logits {tuple(logits.shape)} of a vocabulary above 2^19")


def sample_tokens(kernels: HasLibrary, logits: Tensor, draws: Sequence[CompiledSamplingRow], memory: Tensor) -> None:
    """Fill token and status of each row to sample.

    logits: [R, V] float32, any row stride, not modified. memory: from `sampling_workspace`. A row with NaN or infinity fails
    alone. Raises ValueError, IndexError for a row out of range, MemoryError if `memory` is for a smaller vocabulary.
    """
    _check_logits("sample_tokens", logits)
    check(
        memory.dtype == torch.uint8 and memory.is_contiguous() and memory.is_cpu,
        "sample_tokens: memory is not uint8, contiguous, on the CPU",
    )
    count = len(draws)
    addresses = (ctypes.c_void_p * count)(*map(ctypes.addressof, draws))
    code = kernels.library.sample_tokens(
        *(logits.data_ptr(), logits.stride(0), *logits.shape),
        *(ctypes.addressof(addresses), count, memory.data_ptr(), memory.numel()),
    )
    if code == 1:
        raise MemoryError(f"sample_tokens: {memory.numel()} bytes are too few for a vocabulary of {logits.shape[1]}")
    if code:
        raise IndexError("sample_tokens: a row is outside the logits")


class CompiledSampler(TokenSampler):
    """Samples rows of `vocab` logits, at most MAX_VOCAB."""

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

    def sample(self, logits: Tensor, draws: Sequence[SamplingRow]) -> None:
        if self._memory is None:
            self._memory = sampling_workspace(self._vocab, torch.get_num_threads())
        sample_tokens(self._library, logits, cast(Sequence[CompiledSamplingRow], draws), self._memory)


def token_logprobs(kernels: HasLibrary, logits: Tensor, rows: Tensor, targets: Tensor, k: int) -> TopLogprobs:
    """Sums are float64. Raises IndexError for a row or token out of range."""
    _check_logits("token_logprobs", logits)
    count, vocab = len(rows), logits.shape[1]
    check_vectors("token_logprobs: rows and targets", torch.int64, count, rows, targets)
    check(0 <= k <= vocab, f"token_logprobs: k must be 0 to {vocab}; got {k}")
    chosen, ranks = np.empty(count, np.float32), np.zeros(count, np.int64)
    top_ids, top, normalisers = np.empty((count, k), np.int64), np.empty((count, k), np.float32), np.zeros(count)
    memory = sampling_workspace(vocab, max(1, min(count, torch.get_num_threads())))
    code = kernels.library.token_logprobs(
        *(logits.data_ptr(), logits.stride(0), *logits.shape, rows.data_ptr(), targets.data_ptr(), count, k),
        *(array.ctypes.data for array in (chosen, ranks, top_ids, top, normalisers)),
        *(memory.data_ptr(), memory.numel()),
    )
    if code:
        raise IndexError("token_logprobs: a row or a token is outside the logits")
    order = (-top).argsort(1, kind="stable")  # from order by id
    top_ids, top = np.take_along_axis(top_ids, order, 1), np.take_along_axis(top, order, 1)
    return TopLogprobs(chosen, ranks, top_ids, (top - normalisers[:, None]).astype(np.float32))


class SharedMemoryCollectives:
    """Collectives of one rank through shared memory. Calls are counted, so all ranks make the same ones in the same order."""

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks
        self._bounds = (ctypes.c_int64 * len(ranks.bounds))(*ranks.bounds)
        self._group = RankGroupFields(
            ranks.address, ctypes.addressof(self._bounds), ranks.rank, ranks.count, SLOT_BYTES, 0
        )
        self._address = ctypes.addressof(self._group)

    def all_reduce(self, kernels: HasLibrary, x: Tensor) -> None:
        check(
            x.dtype in TYPE_CODES and x.is_cpu and x.is_contiguous(),
            f"all_reduce: x is {x.dtype} {tuple(x.shape)}, not a contiguous float CPU tensor",
        )
        self._raise_for_code(kernels.library.all_reduce(self._address, x.data_ptr(), TYPE_CODES[x.dtype], x.numel()))

    def gather_columns(self, kernels: HasLibrary, part: Tensor) -> Tensor:
        bounds, rank = self._ranks.bounds, self._ranks.rank
        columns = bounds[rank + 1] - bounds[rank]
        check(
            part.dtype == torch.float32 and part.is_cpu and part.is_contiguous() and part.shape[1:] == (columns,),
            f"gather_columns: part is {part.dtype} {tuple(part.shape)}, not contiguous float32 [R, {columns}]",
        )
        out = torch.empty((part.shape[0], bounds[-1]), dtype=torch.float32) if rank == 0 else None
        self._raise_for_code(
            kernels.library.gather_columns(self._address, part.data_ptr(), address(out), part.shape[0])
        )
        return part if out is None else out

    def _raise_for_code(self, code: int) -> None:
        if code:
            raise RankEndedError(self._ranks.fault or "a rank of the model has ended")
