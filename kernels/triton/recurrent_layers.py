"""Recurrent layers in Triton: short convolution, gated delta rule and state space (Mamba 2)."""

import math
from typing import Any, Literal

import triton
import triton.language as tl
from torch import Tensor

from windlass.kernels.backend import StateRows
from windlass.kernels.triton.elementwise import sigmoid
from windlass.kernels.triton.launch import launch, power_of_two, strided, wait_for_predecessor

LENGTH_EPS = tl.constexpr(1e-6)


@triton.jit
def span(starts, blocks, lengths, num_blocks, sequence):
    """Per sequence: first token, end token, block, whether the block is valid, the value of its rows if not, and whether the
    sequence starts from a zero state."""
    first = tl.load(starts + sequence)
    end = tl.load(starts + sequence + 1)
    block = tl.load(blocks + sequence)
    lost = tl.where(block == -1, 0.0, float("nan"))
    return first, end, block, (block >= 0) & (block < num_blocks), lost, tl.load(lengths + sequence) == end - first


@triton.jit
def inputs(x, stride, window, first, row, begins, column, ok, columns, PAST: tl.constexpr):
    """A row of the window of a sequence followed by its tokens. window: at the sequence's block."""
    old = row < PAST
    kept = tl.load(window + row * columns + column, mask=ok & old & (begins == 0), other=0.0)
    given = tl.load(x + (first + row - PAST) * stride + column, mask=ok & (row >= PAST), other=0.0)
    return tl.where(old, kept, given.to(tl.float32))


@triton.jit
def short_convolution_kernel(
    x,
    stride,
    weight,
    bias,
    window,
    blocks,
    starts,
    lengths,
    num_blocks,
    snapshots,
    out,
    columns,
    SILU: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (sequence, part of the columns, stride of tokens). The window is only read; `store_conv_window_kernel` updates
    it. Snapshots of windows are written. Rows without a valid block get the value of `span`."""
    wait_for_predecessor()
    first, end, block, known, lost, begins = span(starts, blocks, lengths, num_blocks, tl.program_id(0))
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = (column < columns) & known
    own = window + block * (WIDTH - 1) * columns
    for t in range(first + tl.program_id(2), end, tl.num_programs(2)):
        total = tl.zeros([BLOCK], tl.float32)
        if snapshots is not None:
            other = tl.load(snapshots + t)
        if bias is not None:
            total += tl.load(bias + column, mask=column < columns, other=0.0)
        for i in tl.static_range(WIDTH):
            tap = tl.load(weight + column * WIDTH + i, mask=column < columns, other=0.0)
            given = inputs(x, stride, own, first, t - first + i, begins, column, ok, columns, WIDTH - 1)
            total += given * tap
            if snapshots is not None and i > 0:
                at_other = window + (other * (WIDTH - 1) + i - 1) * columns + column
                tl.store(at_other, given, mask=ok & (other >= 0) & (other < num_blocks))
        if SILU:
            total = total * sigmoid(total)
        found = tl.where(known, total, lost)
        tl.store(out + t * columns + column, found.to(out.dtype.element_ty), mask=column < columns)


@triton.jit
def store_conv_window_kernel(
    x, stride, window, blocks, starts, lengths, num_blocks, columns, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (sequence, part of the columns): stores the last inputs as the window."""
    wait_for_predecessor()
    first, end, block, known, _, begins = span(starts, blocks, lengths, num_blocks, tl.program_id(0))
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = (column < columns) & known & (end > first)
    own = window + block * (WIDTH - 1) * columns
    # Rows move towards the front, and a thread moves its own columns: none is written before it is read.
    for i in tl.static_range(WIDTH - 1):
        kept = inputs(x, stride, own, first, end - first + i, begins, column, ok, columns, WIDTH - 1)
        tl.store(own + i * columns + column, kept, mask=ok)


@triton.jit
def unit(x):
    """x normalized to length 1."""
    return x * tl.div_rn(1.0, tl.sqrt_rn(tl.sum(x * x, 0) + LENGTH_EPS))


@triton.jit
def softplus(x):
    """Softplus, accurate to rounding for small results too, which 1 + exp(x) would lose."""
    u = tl.exp(x)
    above = 1.0 + u
    log = tl.where(above == 1.0, u, tl.log(above) * tl.div_rn(u, tl.where(above == 1.0, 1.0, above - 1.0)))
    return tl.where(x > 20.0, x, log)


@triton.jit
def part_of_memory(KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Keys and columns of a program (sequence, head, part of the columns), each with a mask of valid ones."""
    key = tl.arange(0, power_of_two(KEY_DIM))
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    return key, key < KEY_DIM, column, column < VALUE_DIM


@triton.jit
def memory_at(memory, block, key, column, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr):
    """Addresses of this program's part of the memory in a block."""
    numbers = key[:, None] * VALUE_DIM + column[None, :]
    return memory + (block * HEADS + tl.program_id(1)) * KEY_DIM * VALUE_DIM + numbers


@triton.jit
def gated_delta_rule_kernel(
    qkv,
    stride,
    decay,
    decay_stride,
    strength,
    strength_stride,
    rate,
    bias,
    memory,
    blocks,
    starts,
    lengths,
    num_blocks,
    snapshots,
    out,
    scale,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    IN_TURNS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (sequence, head, part of the columns of its memory), which stays in registers over all tokens. Rows without a
    valid block get the value of `span`."""
    wait_for_predecessor()
    first, end, block, known, lost, begins = span(starts, blocks, lengths, num_blocks, tl.program_id(0))
    head = tl.program_id(1)
    key, is_key, column, is_column = part_of_memory(KEY_DIM, VALUE_DIM, BLOCK)
    ok = is_key[:, None] & is_column[None, :] & known & (end > first)
    at = memory_at(memory, block, key, column, HEADS, KEY_DIM, VALUE_DIM)
    m = tl.load(at, mask=ok & (begins == 0), other=0.0)
    fades = tl.load(rate + head)
    shift = tl.load(bias + head)
    of_key = (head % KEY_HEADS if IN_TURNS else head // (HEADS // KEY_HEADS)) * KEY_DIM + key
    for t in range(first, end):
        row = qkv + t * stride
        q = unit(tl.load(row + of_key, mask=is_key, other=0.0).to(tl.float32)) * scale
        k = unit(tl.load(row + KEY_HEADS * KEY_DIM + of_key, mask=is_key, other=0.0).to(tl.float32))
        of_value = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + column
        v = tl.load(row + of_value, mask=is_column, other=0.0).to(tl.float32)
        x = tl.load(decay + t * decay_stride + head).to(tl.float32) + shift
        share = sigmoid(tl.load(strength + t * strength_stride + head).to(tl.float32))
        m *= tl.exp(-fades * softplus(x))
        m += k[:, None] * (share * (v - tl.sum(m * k[:, None], 0)))[None, :]
        read = tl.where(known, tl.sum(m * q[:, None], 0), lost)
        to = out + (t * HEADS + head) * VALUE_DIM + column
        tl.store(to, read.to(out.dtype.element_ty), mask=is_column)
        if snapshots is not None:
            other = tl.load(snapshots + t)
            at_other = memory_at(memory, other, key, column, HEADS, KEY_DIM, VALUE_DIM)
            tl.store(at_other, m, mask=ok & (other >= 0) & (other < num_blocks))
    tl.store(at, m, mask=ok)


@triton.jit
def state_space_kernel(
    mixed,
    stride,
    step,
    step_stride,
    rate,
    bias,
    skip,
    memory,
    blocks,
    starts,
    lengths,
    num_blocks,
    snapshots,
    out,
    least,
    most,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (sequence, head, part of the columns of its memory), which stays in registers over all tokens. Rows without a
    valid block get the value of `span`."""
    wait_for_predecessor()
    first, end, block, known, lost, begins = span(starts, blocks, lengths, num_blocks, tl.program_id(0))
    head = tl.program_id(1)
    key, is_key, column, is_column = part_of_memory(KEY_DIM, VALUE_DIM, BLOCK)
    ok = is_key[:, None] & is_column[None, :] & known & (end > first)
    at = memory_at(memory, block, key, column, HEADS, KEY_DIM, VALUE_DIM)
    m = tl.load(at, mask=ok & (begins == 0), other=0.0)
    fades = tl.load(rate + head)
    shift = tl.load(bias + head)
    passes = tl.load(skip + head)
    of_key = HEADS * VALUE_DIM + head // (HEADS // KEY_HEADS) * KEY_DIM + key
    for t in range(first, end):
        row = mixed + t * stride
        v = tl.load(row + head * VALUE_DIM + column, mask=is_column, other=0.0).to(tl.float32)
        k = tl.load(row + of_key, mask=is_key, other=0.0).to(tl.float32)
        q = tl.load(row + KEY_HEADS * KEY_DIM + of_key, mask=is_key, other=0.0).to(tl.float32)
        d = softplus(tl.load(step + t * step_stride + head).to(tl.float32) + shift)
        d = tl.where(d < least, least, tl.where(d > most, most, d))
        m = m * tl.exp(-fades * d) + k[:, None] * (d * v)[None, :]
        read = tl.where(known, tl.sum(m * q[:, None], 0) + passes * v, lost)
        to = out + (t * HEADS + head) * VALUE_DIM + column
        tl.store(to, read.to(out.dtype.element_ty), mask=is_column)
        if snapshots is not None:
            other = tl.load(snapshots + t)
            at_other = memory_at(memory, other, key, column, HEADS, KEY_DIM, VALUE_DIM)
            tl.store(at_other, m, mask=ok & (other >= 0) & (other < num_blocks))
    tl.store(at, m, mask=ok)


_CHANNELS = 512

# Per sequence: tokens of a program when evenly spread, and the number of programs.
_TOKENS, _MOST_PARTS = 4, 64

_COLUMNS = 16  # of a memory, per program


def short_convolution(
    x: Tensor,
    weight: Tensor,
    window: Tensor,
    rows: StateRows,
    activation: Literal["silu"] | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """See `Backend.short_convolution`; rows of a block that the window lacks become NaN."""
    x = strided(x)
    (tokens, channels), width, sequences = x.shape, weight.shape[1], rows.blocks.shape[0]
    out = x.new_empty(tokens, channels)
    block = min(_CHANNELS, power_of_two(channels))
    grid = sequences, -(-channels // block)
    parts = min(_MOST_PARTS, max(1, tokens // max(1, sequences * _TOKENS)))
    whose = rows.blocks, rows.starts, rows.lengths, window.shape[0]
    launch(
        short_convolution_kernel,
        (*grid, parts),
        x,
        *(x, x.stride(0), weight, bias, window, *whose, rows.snapshots, out, channels),
        SILU=activation is not None,
        WIDTH=width,
        BLOCK=block,
    )
    launch(store_conv_window_kernel, grid, x, x, x.stride(0), window, *whose, channels, WIDTH=width, BLOCK=block)
    return out


def gated_delta_rule(
    qkv: Tensor,
    decay: Tensor,
    strength: Tensor,
    rate: Tensor,
    bias: Tensor,
    memory: Tensor,
    rows: StateRows,
    *,
    tiled_heads: bool = False,
) -> Tensor:
    """See `Backend.gated_delta_rule`; rows of a block that the memory lacks become NaN."""
    decay, strength = strided(decay), strided(strength)
    operands = decay, decay.stride(0), strength, strength.stride(0), rate, bias
    scale = memory.shape[2] ** -0.5
    return _by_head(gated_delta_rule_kernel, qkv, operands, memory, rows, scale, IN_TURNS=tiled_heads)


def state_space(
    mixed: Tensor,
    step: Tensor,
    rate: Tensor,
    bias: Tensor,
    skip: Tensor,
    memory: Tensor,
    rows: StateRows,
    *,
    limits: tuple[float, float] = (0.0, math.inf),
) -> Tensor:
    """See `Backend.state_space`; rows of a block that the memory lacks become NaN."""
    step = strided(step)
    operands = step, step.stride(0), rate, bias, skip
    return _by_head(state_space_kernel, mixed, operands, memory, rows, *map(float, limits))


def _by_head(
    program: Any, x: Tensor, operands: tuple[Any, ...], memory: Tensor, rows: StateRows, *numbers: float, **sizes: Any
) -> Tensor:
    """Launch a program for each sequence, head and part of the columns of its memory. x: [T, Hv * Dv + 2 * Hk * Dk]; returns
    [T, Hv * Dv] in x's dtype."""
    x, (blocks, heads, key_dim, value_dim) = strided(x), memory.shape
    out = x.new_empty(x.shape[0], heads * value_dim)
    block = min(_COLUMNS, power_of_two(value_dim))
    launch(
        program,
        (rows.blocks.shape[0], heads, -(-value_dim // block)),
        x,
        *(x, x.stride(0), *operands),
        *(memory, rows.blocks, rows.starts, rows.lengths, blocks, rows.snapshots, out, *numbers),
        KEY_HEADS=(x.shape[1] - heads * value_dim) // (2 * key_dim),
        HEADS=heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK=block,
        **sizes,
    )
    return out
