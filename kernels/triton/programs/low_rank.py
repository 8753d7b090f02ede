"""What low-rank changes add to products: out += scale * (x A^T) B^T, with matrices of each row's own.

Two programs follow each other: `down` makes x A^T in float32, in parts of K where few programs would run otherwise; `up` adds
those up, in order, multiplies by B^T and adds to the product. Either is there twice. Of few rows each has programs of its own,
which multiply number by number: reading matrices is what they take. Of many rows tiles are multiplied, one slot of a tile after
the other, with zeros in the place of rows that have another: rows of a prompt share theirs. A row's bits follow from that row
alone, and from the sizes.

Which changes there are is found in a table in the device's memory, see `DeviceLowRankTable`: work that was captured meets what
stands there when it is repeated, and reads nothing of a slot whose rank is 0. A and B lie in panels, see `layouts.low_rank`.
"""

import triton
import triton.language as tl

from windlass.kernels.triton.programs.order import wait_for_predecessor

# An entry of the table: the rank of all parts together and the address of A, then of each part the following.
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
    """Of A, rows r and columns k, which broadcast. ok: which there are."""
    panels = tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(KIND)), 16)
    strips = (inner + 15) // 16
    at = (r // 4 * strips).to(tl.int64) * 64 + (k // 16 * 64 + r % 4 * 16 + k % 16)
    return tl.load(panels + at, mask=ok, other=0.0)


@triton.jit
def part_of_columns(entry, tile, PARTS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_N: tl.constexpr):
    """What a tile of columns of a change adds to: (the entry of a part, its rank, which of its tiles, its first column, how many
    it has). Every part's columns start a tile of their own; behind the last there are tiles without any. ALIGNED: whether 16
    divides the columns of each."""
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
    if ALIGNED:  # else numbers would come one by one
        columns = tl.multiple_of(columns, 16)
        first = tl.multiple_of(first, 16)
    return at, rank, own, first, columns


@triton.jit
def b_numbers(part, rank, columns, r, column, KIND: tl.constexpr):
    """Of B^T, rows r and columns, which broadcast; zeros behind the last ones."""
    panels = tl.multiple_of(tl.load(part + ADDRESS).to(tl.pointer_type(KIND)), 16)
    at = (column // 32).to(tl.int64) * (rank * 32) + (r * 32 + column % 32)
    return tl.load(panels + at, mask=(r < rank) & (column // 32 < (columns + 31) // 32), other=0.0)


@triton.jit
def scale_of(part):
    return tl.load(part + SCALE).to(tl.int32).to(tl.float32, bitcast=True)


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
    length = (inner + splits * BLOCK_K - 1) // (splits * BLOCK_K) * BLOCK_K
    begin = split * length
    end = tl.minimum(begin + length, inner)
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
    """The smallest of a tile's rows above the last; SLOTS or more where there is none."""
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
    PRECISION: tl.constexpr,
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
    length = (inner + splits * BLOCK_K - 1) // (splits * BLOCK_K) * BLOCK_K
    begin = split * length
    end = tl.minimum(begin + length, inner)
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
                total = tl.dot(left.to(DOT), right.to(DOT), total, input_precision=PRECISION)
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
    PRECISION: tl.constexpr,
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
            total = tl.dot(left.to(DOT), right.to(DOT), total, input_precision=PRECISION)
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
