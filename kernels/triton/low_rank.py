"""Low-rank updates (LoRA) in Triton: out += scale * (x A^T) B^T with matrices per row.

`down` computes x A^T in float32, split over K if few rows would occupy the device; `up` sums the splits in order, multiplies
by B^T and adds. Each exists per row (few rows) and per tile (many rows). The table of updates is in device memory, so
captured work sees changes.
"""

import itertools
import struct
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from windlass.kernels.device_memory import copy_into
from windlass.kernels.layouts.low_rank_weights import PANEL_COLUMNS, LowRankTable, LowRankTarget, LowRankUpdate
from windlass.kernels.triton.launch import ELEMENT_TYPES, Device, launch, power_of_two, strided, wait_for_predecessor

# An entry of the table: total rank and address of A, then for each part the following.
HEAD = tl.constexpr(2)
FIRST = tl.constexpr(0)
COLUMNS = tl.constexpr(1)
RANK_FIRST = tl.constexpr(2)
RANK = tl.constexpr(3)
ADDRESS = tl.constexpr(4)
SCALE = tl.constexpr(5)  # the bits of a float32
FIELDS = tl.constexpr(6)


@triton.jit
def a_numbers(entry, r, k, ok, inner, KIND: tl.constexpr):
    """Elements of A at rows r and columns k, which broadcast. ok: mask of valid ones."""
    panels = tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(KIND)), 16)
    strips = (inner + 15) // 16
    at = (r // 4 * strips).to(tl.int64) * 64 + (k // 16 * 64 + r % 4 * 16 + k % 16)
    return tl.load(panels + at, mask=ok, other=0.0)


@triton.jit
def part_of_columns(entry, tile, PARTS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_N: tl.constexpr):
    """The part that a tile of columns belongs to: (entry, rank, tile within the part, first column, number of columns). Every
    part begins a new tile; tiles after the last part are empty. ALIGNED: whether 16 divides the columns of each part."""
    place = -1
    own = 0
    for part in tl.static_range(PARTS):
        tiles = (tl.load(entry + HEAD + part * FIELDS + COLUMNS).to(tl.int32) + BLOCK_N - 1) // BLOCK_N
        here = (place < 0) & (tile < tiles)
        place = tl.where(here, part, place)
        own = tl.where(here, tile, own)
        tile -= tiles
    at = entry + HEAD + tl.maximum(place, 0) * FIELDS
    columns = tl.where(place < 0, 0, tl.load(at + COLUMNS).to(tl.int32))
    rank = tl.where(place < 0, 0, tl.load(at + RANK).to(tl.int32))
    first = tl.load(at + FIRST)
    if ALIGNED:  # enables vector loads
        columns = tl.multiple_of(columns, 16)
        first = tl.multiple_of(first, 16)
    return at, rank, own, first, columns


@triton.jit
def b_numbers(part, rank, columns, r, column, KIND: tl.constexpr):
    """Elements of B^T at rows r and columns, which broadcast; zeros past the end."""
    panels = tl.multiple_of(tl.load(part + ADDRESS).to(tl.pointer_type(KIND)), 16)
    at = (column // 32).to(tl.int64) * (rank * 32) + (r * 32 + column % 32)
    return tl.load(panels + at, mask=(r < rank) & (column // 32 < (columns + 31) // 32), other=0.0)


@triton.jit
def scale_of(part):
    return tl.load(part + SCALE).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def split_of_inner(inner, splits, BLOCK_K: tl.constexpr):
    """The part of K of this program, begin and end."""
    length = (inner + splits * BLOCK_K - 1) // (splits * BLOCK_K) * BLOCK_K
    begin = tl.program_id(1) * length
    return begin, tl.minimum(begin + length, inner)


@triton.jit(do_not_specialize=["splits"])
def low_rank_down_by_row_kernel(
    x,
    x_stride,
    slots,
    table,
    low,
    inner,
    splits,
    ranks,
    SLOTS: tl.constexpr,
    PARTS: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (row, part of K): low[row, part, :rank] = x @ A.T. low: float32 [rows, splits, ranks]. KIND: the type of A, B."""
    wait_for_predecessor()
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    slot = tl.load(slots + row)
    if (slot < 0) | (slot >= SLOTS):
        return
    entry = table + slot * (HEAD + PARTS * FIELDS)
    rank = tl.load(entry).to(tl.int32)
    begin, end = split_of_inner(inner, splits, BLOCK_K)
    for first in range(0, rank, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        total = tl.zeros([BLOCK_R, BLOCK_K], tl.float32)
        for begin_k in range(begin, end, BLOCK_K):
            k = begin_k + tl.arange(0, BLOCK_K)
            left = tl.load(x + row * x_stride + k, mask=k < end, other=0.0).to(tl.float32)
            ok = (r < rank)[:, None] & (k < end)[None, :]
            total += a_numbers(entry, r[:, None], k[None, :], ok, inner, KIND).to(tl.float32) * left[None, :]
        tl.store(low + (row * splits + split) * ranks + r, tl.sum(total, 1), mask=r < rank)


@triton.jit(do_not_specialize=["splits"])
def low_rank_up_by_row_kernel(
    slots,
    table,
    low,
    out,
    out_stride,
    columns,
    splits,
    ranks,
    SLOTS: tl.constexpr,
    PARTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program (tile of columns, row): out[row] += scale * (low[row] @ B.T); NaN for a slot that the table lacks."""
    wait_for_predecessor()
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row)
    at_row = out + row * out_stride
    if (slot < -1) | (slot >= SLOTS):
        column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        tl.store(at_row + column, float("nan"), mask=column < columns)
        return
    if slot < 0:
        return
    entry = table + slot * (HEAD + PARTS * FIELDS)
    part, rank, own_tile, first_column, own_columns = part_of_columns(entry, tile, PARTS, ALIGNED, BLOCK_N)
    column = own_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    at_low = low + row * splits * ranks + tl.load(part + RANK_FIRST)
    total = tl.zeros([BLOCK_N], tl.float32)
    for first in range(0, rank, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        left = tl.zeros([BLOCK_R], tl.float32)
        for split in range(splits):
            left += tl.load(at_low + split * ranks + r, mask=r < rank, other=0.0)
        right = b_numbers(part, rank, own_columns, r[:, None], column[None, :], KIND)
        total += tl.sum(right.to(tl.float32) * left[:, None], 0)
    at_out = at_row + first_column + column
    found = tl.load(at_out, mask=column < own_columns, other=0.0).to(tl.float32) + total * scale_of(part)
    tl.store(at_out, found.to(out.dtype.element_ty), mask=column < own_columns)


@triton.jit
def next_slot(slots, last, SLOTS: tl.constexpr):
    """The smallest slot of a tile's rows above the previous one; SLOTS or more if there is none."""
    return tl.min(tl.where(slots > last, slots, SLOTS))


@triton.jit(do_not_specialize=["rows", "splits"])
def low_rank_down_kernel(
    x,
    x_stride,
    slots,
    table,
    low,
    rows,
    inner,
    splits,
    ranks,
    SLOTS: tl.constexpr,
    PARTS: tl.constexpr,
    KIND: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (tile of rows, part of K): see `low_rank_down_by_row_kernel`."""
    wait_for_predecessor()
    begin_row = tl.program_id(0).to(tl.int64) * BLOCK_M
    row = tl.arange(0, BLOCK_M)  # of the tile
    split = tl.program_id(1)
    own = tl.load(slots + begin_row + row, mask=row < rows - begin_row, other=-1)
    at_x = x + begin_row * x_stride
    at_low = low + begin_row * splits * ranks
    begin, end = split_of_inner(inner, splits, BLOCK_K)
    slot = next_slot(own, -1, SLOTS)
    while slot < SLOTS:
        entry = table + slot * (HEAD + PARTS * FIELDS)
        rank = tl.load(entry).to(tl.int32)
        mine = own == slot
        for first in range(0, rank, BLOCK_R):
            r = first + tl.arange(0, BLOCK_R)
            total = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
            for begin_k in range(begin, end, BLOCK_K):
                k = begin_k + tl.arange(0, BLOCK_K)
                left_ok = mine[:, None] & (k < end)[None, :]
                left = tl.load(at_x + (row[:, None] * x_stride + k[None, :]), mask=left_ok, other=0.0)
                right_ok = (k < end)[:, None] & (r < rank)[None, :]
                right = a_numbers(entry, r[None, :], k[:, None], right_ok, inner, KIND)
                total = tl.dot(left.to(DOT), right.to(DOT), total, input_precision="ieee")
            at = (row[:, None] * splits + split) * ranks + r[None, :]
            tl.store(at_low + at, total, mask=mine[:, None] & (r < rank)[None, :])
        slot = next_slot(own, slot, SLOTS)


@triton.jit(do_not_specialize=["rows", "splits"])
def low_rank_up_kernel(
    slots,
    table,
    low,
    out,
    out_stride,
    rows,
    columns,
    splits,
    ranks,
    SLOTS: tl.constexpr,
    PARTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    KIND: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Program (tile of columns, tile of rows): see `low_rank_up_by_row_kernel`."""
    wait_for_predecessor()
    tile = tl.program_id(0)
    begin_row = tl.program_id(1).to(tl.int64) * BLOCK_M
    row = tl.arange(0, BLOCK_M)  # of the tile
    own = tl.load(slots + begin_row + row, mask=row < rows - begin_row, other=-1)
    at_tile = out + begin_row * out_stride
    slot = next_slot(own, -1, SLOTS)
    while slot < SLOTS:
        entry = table + slot * (HEAD + PARTS * FIELDS)
        part, rank, own_tile, first_column, own_columns = part_of_columns(entry, tile, PARTS, ALIGNED, BLOCK_N)
        mine = own == slot
        column = own_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        at_low = low + begin_row * splits * ranks + tl.load(part + RANK_FIRST)
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for first in range(0, rank, BLOCK_R):
            r = first + tl.arange(0, BLOCK_R)
            left = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
            for split in range(splits):
                left_ok = mine[:, None] & (r < rank)[None, :]
                at = (row[:, None] * splits + split) * ranks + r[None, :]
                left += tl.load(at_low + at, mask=left_ok, other=0.0)
            right = b_numbers(part, rank, own_columns, r[:, None], column[None, :], KIND)
            total = tl.dot(left.to(DOT), right.to(DOT), total, input_precision="ieee")
        at_out = at_tile + first_column + (row[:, None] * out_stride + column[None, :])
        ok = mine[:, None] & (column < own_columns)[None, :]
        found = tl.load(at_out, mask=ok, other=0.0).to(tl.float32) + total * scale_of(part)
        tl.store(at_out, found.to(out.dtype.element_ty), mask=ok)
        slot = next_slot(own, slot, SLOTS)
    wrong = (own < -1) | (own >= SLOTS)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    nothing = tl.full([BLOCK_M, BLOCK_N], float("nan"), tl.float32).to(out.dtype.element_ty)
    at_out = at_tile + (row[:, None] * out_stride + column[None, :])
    tl.store(at_out, nothing, mask=wrong[:, None] & (column < columns)[None, :])


_HEAD, _FIELDS = HEAD.value, FIELDS.value

_BY_ROW = 128  # rows up to which each has separate programs

_MOST_SPLITS = 16  # of K; the partial sums are read again for each tile of columns


class DeviceLowRankTable(LowRankTable):
    """A table with its description for the kernels. Updates are stored in the matrix's dtype.

    entries: int64 [slots, 2 + 6 parts], see this module; its address is fixed.
    """

    def __init__(self, slots: int, matrix: LowRankTarget, device: torch.device) -> None:
        super().__init__(slots)
        self.matrix = matrix
        self.entries = torch.zeros(slots, _HEAD + _FIELDS * len(matrix.parts), dtype=torch.int64, device=device)
        self._read: list[list[Tensor]] = [[] for _ in range(slots)]  # tensors whose addresses are in entries

    def put(self, slot: int, change: LowRankUpdate | None) -> None:
        """Raises ValueError for an update of another matrix, or one that exceeds the limits of the table."""
        entry, read = [0] * self.entries.shape[1], list[Tensor]()
        if change is not None:
            self._check(change)
            read = [self._own(matrix) for matrix in (change.down, *[part.up for part in change.parts])]
            fields = [change.rank, read[0].data_ptr()]
            for part, up in zip(change.parts, read[1:], strict=True):
                (scale,) = struct.unpack("<i", struct.pack("<f", part.scale))
                fields += [part.first, part.columns, part.rank_first, part.rank, up.data_ptr(), scale]
            entry[: len(fields)] = fields
        copy_into(self.entries[slot], torch.tensor(entry, device="cpu"))
        self._read[slot] = read
        super().put(slot, change)

    def _own(self, matrix: Tensor) -> Tensor:
        matrix = matrix.to(self.entries.device, self.matrix.dtype).contiguous()
        return matrix if matrix.data_ptr() % 16 == 0 else matrix.clone()

    def _check(self, change: LowRankUpdate) -> None:
        matrix = self.matrix
        ends = itertools.accumulate(matrix.parts)
        known = {(end - columns, columns) for end, columns in zip(ends, matrix.parts, strict=True)}
        fits = change.inner == matrix.inner and change.rank <= matrix.rank
        fits = fits and known.issuperset((part.first, part.columns) for part in change.parts)
        for part in change.parts:
            fits = fits and 0 <= part.rank_first <= part.rank_first + part.rank <= change.rank
        if not fits:
            raise ValueError(
                f"low rank: a change of rank {change.rank} with {len(change.parts)} parts is none of {matrix}"
            )


class _LowRankTile(NamedTuple):
    """Tile sizes: rows, columns, ranks, and elements of K at a time."""

    rows: int
    columns: int
    ranks: int
    inner: int


def add_low_rank(
    out: Tensor, x: Tensor, table: DeviceLowRankTable, slots: Tensor, *, fixed: bool, device: Device
) -> None:
    """See `Backend.add_low_rank`. slots: [T] int64, on the device. fixed: one tile size for any number of rows."""
    matrix, rows, x = table.matrix, x.shape[0], strided(x)
    # Tiles of a common type are multiplied in it, everything else in float32.
    dot = ELEMENT_TYPES[x.dtype if x.dtype == matrix.dtype else torch.float32]
    fits = out.shape == (rows, matrix.columns) and x.shape[1] == matrix.inner and len(slots) == rows
    if not fits or (matrix.columns > 1 and out.stride(1) != 1):
        raise ValueError(f"add_low_rank: {tuple(x.shape)} and {tuple(out.shape)} are not rows of {matrix}")
    by_row = rows <= _BY_ROW and not fixed
    sizes = _row_sizes(matrix) if by_row else _tile_sizes(matrix, wide=dot == tl.float32, fixed=fixed)
    row_tiles, tiles = -(-rows // sizes.rows), matrix.columns // sizes.columns + len(matrix.parts)
    splits = 1 if fixed else _splits(row_tiles, -(-matrix.inner // sizes.inner), device)
    low = torch.empty(rows, splits, matrix.rank, dtype=torch.float32, device=x.device)
    same: dict[str, Any] = {
        "SLOTS": len(table.changes),
        "PARTS": len(matrix.parts),
        "KIND": ELEMENT_TYPES[matrix.dtype],
        "BLOCK_R": sizes.ranks,
        "num_warps": 4,
    }
    of_down = {"BLOCK_K": sizes.inner}
    of_up = {"ALIGNED": all(columns % 16 == 0 for columns in matrix.parts), "BLOCK_N": sizes.columns}
    from_x, to_out = (x, x.stride(0), slots, table.entries, low), (slots, table.entries, low, out, out.stride(0))
    inner, columns = (matrix.inner, splits, matrix.rank), (matrix.columns, splits, matrix.rank)
    if by_row:
        launch(low_rank_down_by_row_kernel, (rows, splits), x, *from_x, *inner, **same, **of_down)
        launch(low_rank_up_by_row_kernel, (tiles, rows), x, *to_out, *columns, **same, **of_up)
        return
    same |= {"DOT": dot, "BLOCK_M": sizes.rows}
    launch(low_rank_down_kernel, (row_tiles, splits), x, *from_x, rows, *inner, **same, **of_down)
    launch(low_rank_up_kernel, (tiles, row_tiles), x, *to_out, rows, *columns, **same, **of_up)


def _row_sizes(matrix: LowRankTarget) -> _LowRankTile:
    return _LowRankTile(1, max(PANEL_COLUMNS, min(256, power_of_two(matrix.columns))), 16, 256)


def _tile_sizes(matrix: LowRankTarget, *, wide: bool, fixed: bool) -> _LowRankTile:
    """wide: whether products are float32, without tensor cores."""
    if wide:
        return _LowRankTile(16 if fixed else 32, 64, 16, 32)
    return _LowRankTile(16 if fixed else 64, 64, min(32, power_of_two(matrix.rank, 16)), 64)


def _splits(row_tiles: int, parts: int, device: Device) -> int:
    """The number of splits of K that gives every multiprocessor a program. parts: available parts of K."""
    return max(1, min(_MOST_SPLITS, parts, device.processors // max(row_tiles, 1)))
