"""Products of rows with a weight that is plain or in blocks, which become numbers in registers.

A program makes one tile of the result, summing over K in tiles of one size and order. So a row's bits follow from that row,
the weight and the sizes of tiles. Three ways to say which weight: one, one for each head (BATCHED, by stride), or one for each
expert (GROUPED, by tables of addresses: rows come sorted by expert, and `row_ends` says where each expert's rows end).
"""

import triton
import triton.language as tl

from windlass.kernels.triton.programs.order import wait_for_predecessor


@triton.jit
def block_numbers(
    codes,
    scales,
    supers,
    row,
    column,
    ok,
    groups,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SUPER_GROUPS: tl.constexpr,
    MINIMUM: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """What rows and columns of a weight in blocks mean, float32; see `layouts.blocks`. They broadcast; `ok`: which there are."""
    PARTS: tl.constexpr = 2 if MINIMUM else 1
    LINES: tl.constexpr = GROUP * BITS // 32
    panel = row // 16
    lane = row % 16
    group = column // GROUP
    quad = column % GROUP // 4
    at_group = panel.to(tl.int64) * groups + group
    line = codes + (at_group * LINES * 16 + lane) * 4 + column % 4
    if BITS == 8:
        code = tl.load(line + quad * 64, mask=ok, other=0).to(tl.int8, bitcast=True).to(tl.float32)
    else:
        packed = tl.load(line + quad // 2 * 64, mask=ok, other=0).to(tl.int32)
        whole = (packed >> (quad % 2 * 4)) & 15
        if BITS > 4:
            WIDTH: tl.constexpr = BITS - 4
            EACH: tl.constexpr = 8 // WIDTH
            upper = tl.load(line + (GROUP // 8 + quad // EACH) * 64, mask=ok, other=0).to(tl.int32)
            whole = whole | (((upper >> (quad % EACH * WIDTH)) & ((1 << WIDTH) - 1)) << 4)
        code = whole.to(tl.float32)
    at_scale = at_group * PARTS * 16 + lane
    scale = tl.load(scales + at_scale, mask=ok, other=0).to(tl.float32)
    if SUPER_GROUPS > 0:
        supers_of_row = (groups + SUPER_GROUPS - 1) // SUPER_GROUPS
        at_super = (panel.to(tl.int64) * supers_of_row + group // SUPER_GROUPS) * PARTS * 16 + lane
        scale = scale * tl.load(supers + at_super, mask=ok, other=0).to(tl.float32)
    numbers = scale * (code - OFFSET)
    if MINIMUM:
        least = tl.load(scales + at_scale + 16, mask=ok, other=0).to(tl.float32)
        if SUPER_GROUPS > 0:
            least = -(least * tl.load(supers + at_super + 16, mask=ok, other=0).to(tl.float32))
        numbers = numbers + least
    return numbers


@triton.jit
def part_of_expert(
    tile, ends, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BY_PLACE: tl.constexpr
):
    """Whose rows a tile has, which of all rows in order is its first, and where its expert's end: not behind it if it has none.

    Every expert's rows start a tile of their own: expert e has the tiles from ends[e - 1] // BLOCK_M + e on. BY_PLACE, for fewer
    rows than these: a tile for each row, which has rows if a part of an expert begins there. BLOCK_E: EXPERTS or more.
    """
    index = tl.arange(0, BLOCK_E)
    there = index < EXPERTS
    last = tl.load(ends + index, mask=there, other=0)
    if not BY_PLACE:
        last = last // BLOCK_M + index + 1
    expert = tl.sum((there & (last <= tile)).to(tl.int32))
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert, mask=expert < EXPERTS, other=0)
    if BY_PLACE:
        first = tl.where((tile - begin) % BLOCK_M == 0, tile, end)
    else:
        first = begin + (tile - (begin // BLOCK_M + expert)) * BLOCK_M
    return expert, first, end


# Rows differ from step to step: Triton would compile a program for each of 1, a multiple of 16 and anything else.
@triton.jit(do_not_specialize=["rows"])
def matmul_kernel(
    x,
    x_stride,
    x_batch_stride,
    out,
    out_stride,
    out_batch_stride,
    weight,
    scales,
    supers,
    bias,
    weight_row_stride,
    weight_column_stride,
    weight_batch_stride,
    order,
    row_ends,
    rows,
    columns,
    inner,
    groups,
    BATCHED: tl.constexpr,
    GROUPED: tl.constexpr,
    PER_ROW: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BY_PLACE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCKS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SUPER_GROUPS: tl.constexpr,
    MINIMUM: tl.constexpr,
    OFFSET: tl.constexpr,
    BIAS: tl.constexpr,
    WEIGHT: tl.constexpr,
    SCALE: tl.constexpr,
    BIAS_TYPE: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS_FIRST: tl.constexpr,
):
    """Program (tile of columns, tile of rows, batch): out[rows, columns] = x @ weight.T + bias.

    GROUPED: `weight`, `scales`, `supers` and `bias` are int64 addresses by expert, `order` the places of the result in the order
    of experts, PER_ROW how many places a row of x has. BY_PLACE: see `part_of_expert`. ALIGNED: whether 16 divides the addresses.
    ROWS_FIRST: program (tile of rows, tile of columns, batch).
    """
    wait_for_predecessor()
    tile = tl.program_id(0 if ROWS_FIRST else 1)
    batch = tl.program_id(2).to(tl.int64)
    if GROUPED:
        expert, first, end = part_of_expert(tile, row_ends, EXPERTS, BLOCK_E, BLOCK_M, BY_PLACE)
        if first >= end:
            return
        place = first + tl.arange(0, BLOCK_M)
        row_ok = place < end
        to_row = tl.load(order + place, mask=row_ok, other=0)
        x_row = to_row // PER_ROW
        at_weight = tl.load(weight + expert).to(tl.pointer_type(WEIGHT))
        if ALIGNED:  # else numbers would come one by one
            at_weight = tl.multiple_of(at_weight, 16)
        if BLOCKS:
            at_scales = tl.load(scales + expert).to(tl.pointer_type(SCALE))
            if ALIGNED:
                at_scales = tl.multiple_of(at_scales, 16)
            at_supers = at_scales.to(tl.pointer_type(tl.float16))
            if SUPER_GROUPS > 0:
                at_supers = tl.load(supers + expert).to(tl.pointer_type(tl.float16))
        if BIAS:
            at_bias = tl.load(bias + expert).to(tl.pointer_type(BIAS_TYPE))
    else:
        to_row = tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        row_ok = to_row < rows
        x_row = to_row
        at_weight = weight
        at_scales = scales
        at_supers = supers
        at_bias = bias
        if BATCHED:
            at_weight = weight + batch * weight_batch_stride
    column = tl.program_id(1 if ROWS_FIRST else 0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column_ok = column < columns
    at_x = x + batch * x_batch_stride + x_row[:, None] * x_stride
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin_k in range(0, inner, BLOCK_K):
        k = begin_k + tl.arange(0, BLOCK_K)
        k_ok = k < inner
        left = tl.load(at_x + k[None, :], mask=row_ok[:, None] & k_ok[None, :], other=0.0)
        ok = k_ok[:, None] & column_ok[None, :]
        if BLOCKS:
            right = block_numbers(
                at_weight,
                at_scales,
                at_supers,
                column[None, :],
                k[:, None],
                ok,
                groups,
                BITS,
                GROUP,
                SUPER_GROUPS,
                MINIMUM,
                OFFSET,
            )
        else:
            at = column[None, :].to(tl.int64) * weight_row_stride + k[:, None].to(tl.int64) * weight_column_stride
            right = tl.load(at_weight + at, mask=ok, other=0.0)
        total = tl.dot(left.to(DOT), right.to(DOT), total, input_precision=PRECISION)
    if BIAS:
        total += tl.load(at_bias + column, mask=column_ok, other=0.0).to(tl.float32)[None, :]
    at_out = out + batch * out_batch_stride + to_row[:, None] * out_stride + column[None, :]
    tl.store(at_out, total.to(out.dtype.element_ty), mask=row_ok[:, None] & column_ok[None, :])


@triton.jit
def embed_blocks_kernel(
    ids,
    codes,
    scales,
    supers,
    out,
    columns,
    groups,
    table_rows,
    factor,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SUPER_GROUPS: tl.constexpr,
    MINIMUM: tl.constexpr,
    OFFSET: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row of the result, part of the columns): the numbers of a row of a table in blocks, NaN for a row that it lacks.

    SCALED: rounded, then times the factor and rounded again.
    """
    wait_for_predecessor()
    to = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids + to)
    there = (row >= 0) & (row < table_rows)
    numbers = block_numbers(
        codes,
        scales,
        supers,
        row,
        column,
        (column < columns) & there,
        groups,
        BITS,
        GROUP,
        SUPER_GROUPS,
        MINIMUM,
        OFFSET,
    )
    kind = out.dtype.element_ty
    found = tl.where(there, numbers, float("nan")).to(kind)
    if SCALED:
        found = (found.to(tl.float32) * factor).to(kind)
    tl.store(out + to * columns + column, found, mask=column < columns)
