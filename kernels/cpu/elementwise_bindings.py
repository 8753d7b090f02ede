"""Elementwise, norm, embedding, sampling, step-buffer and collective bindings of the compiled kernels.

Arithmetic is float32 whatever the storage. Sampling equals `torch.torch_sampler` bit for bit.
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

from windlass.kernels import token_sampling as draws
from windlass.kernels.cpu.library import TYPE_CODES, Library, RankGroupFields, SamplingRowFields, check, vector_ok
from windlass.kernels.rank_group import SLOT_BYTES, RankEndedError, RankGroup
from windlass.kernels.step_recording import PersistentBuffers
from windlass.kernels.token_sampling import MIN_TEMPERATURE, Filters, LogitsChanges, Penalties, TopLogprobs

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu2": 3}


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, *, library: Library) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim (1910.07467).

    x: [T, D] or [T, H, D] float32, bfloat16 or float16, any strides but the last. weight: [D] float32. With `residual`
    ([T, D], x's dtype) the input is residual + x, which is stored back into `residual`. Returns x's shape, contiguous, in
    its dtype. Raises ValueError.
    """
    shape = x.shape
    check(
        2 <= len(shape) <= 3 and x.dtype in TYPE_CODES and x.is_cpu and (shape[-1] < 2 or x.stride(-1) == 1),
        f"rms_norm: x is {x.dtype} {tuple(shape)}, not a float CPU tensor [T, D] or [T, H, D] with adjacent elements",
    )
    dim = shape[-1]
    check(vector_ok(weight, torch.float32, dim), f"rms_norm: weight must be float32 [{dim}], contiguous")
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
    library.rms_norm(
        x.data_ptr(),
        x.stride(-2),
        max(group, 1),
        x.stride(0),
        None if residual is None else residual.data_ptr(),
        0 if residual is None else residual.stride(0),
        TYPE_CODES[x.dtype],
        weight.data_ptr(),
        eps,
        out.data_ptr(),
        shape[0] * group,
        dim,
    )
    return out


def gated_activation(gate_up: Tensor, activation: str, *, library: Library) -> Tensor:
    """activation(gate) * up of [T, 2F] holding (gate, up), any row stride. activation: one of ACTIVATIONS.

    Returns [T, F], contiguous, rounded once to gate_up's dtype. Raises ValueError.
    """
    check(
        gate_up.dim() == 2 and gate_up.dtype in TYPE_CODES and gate_up.is_cpu and gate_up.shape[1] % 2 == 0,
        f"gated_activation: gate_up is {gate_up.dtype} {tuple(gate_up.shape)}, not a float CPU tensor [T, 2F]",
    )
    check(gate_up.shape[1] < 2 or gate_up.stride(1) == 1, "gated_activation: the last dimension is not contiguous")
    check(activation in ACTIVATIONS, f"unknown activation {activation!r}; known are {', '.join(ACTIVATIONS)}")
    rows, dim = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, dim), dtype=gate_up.dtype)
    library.gated_activation(
        gate_up.data_ptr(),
        gate_up.stride(0),
        TYPE_CODES[gate_up.dtype],
        ACTIVATIONS[activation],
        out.data_ptr(),
        rows,
        dim,
    )
    return out


def clamped_glu(gate_up: Tensor, alpha: float, limit: float, *, library: Library) -> Tensor:
    """See `Backend.clamped_glu`. gate_up: [T, 2F], any row stride. Returns [T, F] in its dtype. Raises ValueError."""
    check(
        gate_up.dim() == 2
        and gate_up.dtype in TYPE_CODES
        and gate_up.is_cpu
        and gate_up.shape[1] % 2 == 0
        and (gate_up.shape[1] < 2 or gate_up.stride(1) == 1),
        f"clamped_glu: gate_up is {gate_up.dtype} {tuple(gate_up.shape)}, not a float CPU tensor [T, 2F]",
    )
    rows, dim = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, dim), dtype=gate_up.dtype)
    library.clamped_glu(
        gate_up.data_ptr(), gate_up.stride(0), TYPE_CODES[gate_up.dtype], alpha, limit, out.data_ptr(), rows, dim
    )
    return out


def gate_by_sigmoid(x: Tensor, gate: Tensor, *, library: Library) -> None:
    """x *= sigmoid(gate). x: [T, N]. gate: [T, N] or [T, 1]; both of any float type and row stride. Raises ValueError."""
    check(
        x.dim() == 2
        and all(one.dtype in TYPE_CODES and one.is_cpu for one in (x, gate))
        and gate.shape in (x.shape, (x.shape[0], 1))
        and all(one.shape[1] < 2 or one.stride(1) == 1 for one in (x, gate)),
        f"gate_by_sigmoid: x is {x.dtype} {tuple(x.shape)}, gate {gate.dtype} {tuple(gate.shape)}",
    )
    library.gate_by_sigmoid(
        x.data_ptr(),
        x.stride(0),
        TYPE_CODES[x.dtype],
        gate.data_ptr(),
        gate.stride(0),
        TYPE_CODES[gate.dtype],
        gate.shape[1],
        *x.shape,
    )


def soft_cap(x: Tensor, cap: float, *, library: Library) -> Tensor:
    """cap * tanh(x / cap) of [T, N] float32, any row stride. Returns [T, N], contiguous. Raises ValueError."""
    check(
        x.dim() == 2 and x.dtype == torch.float32 and x.is_cpu and (x.shape[1] < 2 or x.stride(1) == 1),
        f"soft_cap: x is {x.dtype} {tuple(x.shape)}, not a float32 CPU tensor [T, N] with adjacent elements",
    )
    out = torch.empty(tuple(x.shape), dtype=x.dtype)
    library.soft_cap(x.data_ptr(), x.stride(0), cap, out.data_ptr(), x.shape[0], x.shape[1])
    return out


def embed_rows(
    table: Tensor,
    ids: Tensor,
    scale: float = 1.0,
    *,
    dtype: torch.dtype = torch.float32,
    library: Library,
) -> Tensor:
    """table[ids] * scale, multiplied in float32. table: [N, D] float32, bfloat16 or float16, any row stride. ids: [T] int64,
    contiguous. dtype: any of the three.

    Returns [T, D] of dtype. Raises ValueError, and IndexError for an id that is no row.
    """
    check(
        table.dim() == 2
        and table.dtype in TYPE_CODES
        and table.is_cpu
        and (table.shape[1] < 2 or table.stride(1) == 1),
        f"embed_rows: the table is {table.dtype} {tuple(table.shape)}, not a float CPU tensor [N, D] with adjacent elements",
    )
    rows, dim = ids.shape[0], table.shape[1]
    check(vector_ok(ids, torch.int64, rows), "embed_rows: ids must be int64, contiguous [T]")
    out = torch.empty((rows, dim), dtype=dtype)
    code = library.embed_rows(
        table.data_ptr(),
        table.stride(0),
        TYPE_CODES[table.dtype],
        table.shape[0],
        ids.data_ptr(),
        scale,
        out.data_ptr(),
        TYPE_CODES[dtype],
        rows,
        dim,
    )
    if code:
        raise IndexError(f"embed_rows: an id is no row of a table of {table.shape[0]}")
    return out


def _check_matrix(x: Tensor, name: str) -> None:
    check(
        x.dim() == 2 and x.dtype in TYPE_CODES and x.is_cpu and (x.shape[1] < 2 or x.stride(1) == 1),
        f"{name}: x is {x.dtype} {tuple(x.shape)}, not a float CPU tensor [T, N] with adjacent elements",
    )


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, library: Library) -> Tensor:
    """See `Backend.layer_norm`. x: [T, D] or [T, H, D], any strides but the last. Raises ValueError."""
    shape = x.shape
    check(
        2 <= len(shape) <= 3 and x.dtype in TYPE_CODES and x.is_cpu and (shape[-1] < 2 or x.stride(-1) == 1),
        f"layer_norm: x is {x.dtype} {tuple(shape)}, not a float CPU tensor [T, D] or [T, H, D] with adjacent elements",
    )
    dim = shape[-1]
    check(
        vector_ok(weight, torch.float32, dim) and (bias is None or vector_ok(bias, torch.float32, dim)),
        f"layer_norm: weight and bias must be float32 [{dim}], contiguous",
    )
    out = torch.empty(shape, dtype=x.dtype)
    group = shape[1] if len(shape) == 3 else 1  # rows of one token
    library.layer_norm(
        *(x.data_ptr(), x.stride(-2), max(group, 1), x.stride(0), TYPE_CODES[x.dtype]),
        *(weight.data_ptr(), None if bias is None else bias.data_ptr(), eps, out.data_ptr(), shape[0] * group, dim),
    )
    return out


def activate(x: Tensor, activation: str, *, library: Library) -> Tensor:
    """See `Backend.activation`. x: [T, N], any row stride. Returns [T, N], contiguous, in its dtype. Raises ValueError."""
    _check_matrix(x, "activate")
    check(activation in ACTIVATIONS, f"unknown activation {activation!r}; known are {', '.join(ACTIVATIONS)}")
    out = torch.empty(tuple(x.shape), dtype=x.dtype)
    library.activate(x.data_ptr(), x.stride(0), TYPE_CODES[x.dtype], ACTIVATIONS[activation], out.data_ptr(), *x.shape)
    return out


def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor, *, library: Library) -> Tensor:
    """See `Backend.xielu`. x: [T, N], any row stride. Returns [T, N], contiguous, in its dtype. Raises ValueError."""
    _check_matrix(x, "xielu")
    numbers = (alpha_p, alpha_n, beta, eps)
    check(all(vector_ok(one, torch.float32, 1) for one in numbers), "xielu: its numbers must be float32 [1]")
    out = torch.empty(tuple(x.shape), dtype=x.dtype)
    library.xielu(
        x.data_ptr(), x.stride(0), TYPE_CODES[x.dtype], *(one.data_ptr() for one in numbers), out.data_ptr(), *x.shape
    )
    return out


def clip(x: Tensor, limit: float, *, library: Library) -> None:
    """See `Backend.clip`. x: [T, N], any row stride. Raises ValueError."""
    _check_matrix(x, "clip")
    library.clip(x.data_ptr(), x.stride(0), TYPE_CODES[x.dtype], limit, *x.shape)


def scale_rows(x: Tensor, factors: Tensor, *, library: Library) -> None:
    """See `Backend.scale_rows`. x: [T, N], any row stride. Raises ValueError."""
    _check_matrix(x, "scale_rows")
    check(
        vector_ok(factors, torch.float32, x.shape[0]), f"scale_rows: factors must be float32 [{x.shape[0]}], contiguous"
    )
    library.scale_rows(x.data_ptr(), x.stride(0), TYPE_CODES[x.dtype], factors.data_ptr(), *x.shape)


def scale_columns(x: Tensor, first: Tensor, second: Tensor, *, library: Library) -> None:
    """See `Backend.scale_columns`. x: [T, N], any row stride. Raises ValueError."""
    _check_matrix(x, "scale_columns")
    for factors in (first, second):
        check(
            vector_ok(factors, torch.float32, x.shape[1]),
            f"scale_columns: factors must be float32 [{x.shape[1]}], contiguous",
        )
    library.scale_columns(x.data_ptr(), x.stride(0), TYPE_CODES[x.dtype], first.data_ptr(), second.data_ptr(), *x.shape)


def multiply(x: Tensor, by: Tensor, *, library: Library) -> None:
    """See `Backend.multiply`. x and a `by` of its shape: any row strides. Raises ValueError."""
    _check_matrix(x, "multiply")
    single = by.dim() == 1
    if single:
        check(vector_ok(by, torch.float32, 1), f"multiply: the factor is {by.dtype} {tuple(by.shape)}, not float32 [1]")
    else:
        _check_matrix(by, "multiply")
        check(by.shape == x.shape and by.dtype == x.dtype, f"multiply: by must be {x.dtype} {tuple(x.shape)}")
    library.multiply(
        *(x.data_ptr(), x.stride(0), TYPE_CODES[x.dtype]),
        *((None, 0, by.data_ptr()) if single else (by.data_ptr(), by.stride(0), None)),
        *x.shape,
    )


def rms_norm_in_place(x: Tensor, weight: Tensor, eps: float, *, library: Library) -> None:
    """See `Backend.rms_norm_in_place`. x: [T, D], any row stride. Raises ValueError."""
    check(
        x.dim() == 2 and x.dtype in TYPE_CODES and x.is_cpu and (x.shape[1] < 2 or x.stride(1) == 1),
        f"rms_norm_in_place: x is {x.dtype} {tuple(x.shape)}, not a float CPU tensor [T, D] with adjacent elements",
    )
    rows, dim = x.shape
    check(vector_ok(weight, torch.float32, dim), f"rms_norm_in_place: weight must be float32 [{dim}], contiguous")
    library.rms_norm_in_place(x.data_ptr(), x.stride(0), TYPE_CODES[x.dtype], weight.data_ptr(), eps, rows, dim)


class CompiledBufferFiller:
    """See `Backend.buffer_filler`. Operands are checked here, once: a step is short, and checks are most of it."""

    def __init__(
        self,
        rows: PersistentBuffers,
        inv_freq: Tensor,
        q_scale: Tensor,
        score_scale: Tensor,
        block_size: int,
        *,
        library: Library,
    ) -> None:
        count, (groups, table_rows, half) = rows.metadata.shape[1], inv_freq.shape
        check(
            inv_freq.dtype == torch.float64 and inv_freq.is_cpu and inv_freq.is_contiguous(),
            f"rows_filler: inv_freq is {inv_freq.dtype} on {inv_freq.device}, not contiguous float64 [G, R, d/2]",
        )
        check(
            rows.cos.shape == rows.sin.shape == (groups, count, half)
            and q_scale.shape == (groups, table_rows)
            and score_scale.shape == (table_rows,),
            f"rows_filler: angles {tuple(rows.cos.shape)} and scales {tuple(q_scale.shape)} do not fit",
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
        self._count, self._said = count, metadata
        self._own = (
            positions,
            rows.lengths.ctypes.data,
            rows.slots.ctypes.data,
            rows.tables.ctypes.data,
            rows.tables.shape[2],
        )
        self._frequencies = inv_freq.data_ptr(), groups, table_rows, half
        self._turned = rows.metadata[3].ctypes.data, positions, count
        self._angles = rows.cos.data_ptr(), rows.sin.data_ptr()
        self._scales = [(q_scale.numpy(), rows.q_scale.numpy()), (score_scale.numpy(), rows.score_scale.numpy())]
        self._known: tuple[int, int, int, int] = (0, 0, 0, 0)  # of the tables: who they are, address, strides
        self._held: NDArray[np.int32] | None = None
        self._kept = inv_freq  # its memory is read

    def __call__(self, tables: NDArray[np.int32], blocks: int) -> None:
        """Fill the rows: see `BufferFiller`."""
        described = self._described(tables, blocks, int(self.rows.metadata[1].max()))
        if self._library.fill_rows(self._said, self._count, *described, *self._own):
            raise IndexError("a scheduled token has no block to go to")
        if self._library.rotary_angles(*self._frequencies, *self._turned, *self._angles):
            raise IndexError(f"rows_filler: a row lies outside the rotary table of {self._table_rows}")
        rotary = self.rows.metadata[3]
        for whole, own in self._scales:  # rows are checked above; "clip" spares a copy
            whole.take(rotary, axis=whole.ndim - 1, out=own, mode="clip")

    def arguments(self, tables: NDArray[np.int32], blocks: int, passes: int) -> tuple[int, ...]:
        """What `draw_passes` takes of rows that are filled and go on for so many passes in all. Raises IndexError where
        their blocks do not hold all."""
        described = self._described(tables, blocks, int(self.rows.metadata[1].max()) + passes - 1)
        return self._said, self._count, *described, *self._own, *self._frequencies, *self._angles

    def _described(self, tables: NDArray[np.int32], blocks: int, last: int) -> tuple[int, int, int, int, int, int]:
        """Tables as `fill_rows` takes them. last: the furthest slot of a row."""
        if tables is not self._held:
            kv_groups, _, width = self.rows.tables.shape
            check(
                tables.dtype == np.int32
                and tables.ndim == 3
                and len(tables) == kv_groups
                and tables.strides[2] == 4
                and tables.strides[1] >= 0,
                f"rows_filler: tables are {tables.dtype} {tables.shape}",
            )
            strides = tables.strides
            self._known = (tables.ctypes.data, strides[0] // 4, strides[1] // 4, min(tables.shape[2], width))
            self._held = tables
        address, group_stride, row_stride, most = self._known
        if not 0 < blocks <= most or blocks * self._block_size <= last:
            raise IndexError(f"rows_filler: {blocks} blocks of a table of {most} do not hold every row")
        return address, group_stride, row_stride, len(tables), blocks, self._block_size


def row_maxima(logits: Tensor, *, library: Library) -> tuple[Tensor, Tensor]:
    """Of each row of logits [R, V] the first index of its largest value, int64 [R], and that value, float32 [R].

    A NaN counts as the largest. logits: float32, any row stride. Raises ValueError, and MemoryError.
    """
    rows, vocab = logits.shape
    check(
        logits.dtype == torch.float32 and logits.is_cpu and vocab > 0 and (vocab == 1 or logits.stride(1) == 1),
        f"row_maxima: logits are {logits.dtype} {tuple(logits.shape)}, not float32 [R, V] with adjacent elements",
    )
    ids, values = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.float32)
    if library.row_maxima(logits.data_ptr(), logits.stride(0), rows, vocab, ids.data_ptr(), values.data_ptr()):
        raise MemoryError("row_maxima: no memory")
    return ids, values


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
