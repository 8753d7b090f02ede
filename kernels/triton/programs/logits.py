"""Rows of logits: their maxima, their sums, their changes, and what a token weighs.

Weights are what `torch.draw` makes them: multiples of 2^-34, summed as integers of that unit, so order does not matter. Products
must not be fused with additions here: programs are launched without that.

Logits less their maximum are never positive, so the bits of their magnitudes are in the reverse of their order.
"""

import triton
import triton.language as tl

from windlass.kernels.triton.programs.order import wait_for_predecessor

LOG2_E = tl.constexpr(1.44269504)
UNIT = tl.constexpr(17179869184.0)  # 2^34
# Parts of common tensors, whose addresses 16 divides or not with the number of draws: Triton would compile a program for each.
_OF_CHANGES = ["rows", "masks", "ids", "numbers", "bounds", "penalties"]


@triton.jit
def units(scaled):
    """`torch.draw.weigh` in units of 2^-34: int64."""
    clamped = tl.maximum(scaled, -30.0)
    n = (clamped * LOG2_E + 12582912.0) - 12582912.0
    r = (clamped - n * 0.693359375) + n * 2.12194440e-4
    p = r * 0.0 + 1.9875691500e-4
    p = p * r + 1.3981999507e-3
    p = p * r + 8.3334519073e-3
    p = p * r + 4.1665795894e-2
    p = p * r + 1.6666665459e-1
    p = p * r + 5.0000001201e-1
    p = ((p * r) * r + r) + 1.0
    y = p * ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    y = tl.where(y < 0.00048828125, (y + 0.00048828125) - 0.00048828125, y)
    return (y * UNIT).to(tl.int64)


@triton.jit
def scaled_logits(row, at, columns, largest, temperature):
    x = tl.load(row + at, mask=at < columns, other=float("-inf"))
    return tl.div_rn(x - largest, temperature)


@triton.jit
def magnitude(scaled):
    return scaled.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def largest_of(row, columns, BLOCK: tl.constexpr):
    """The largest number of a row and its first place; a NaN counts as the largest."""
    largest = tl.full([], float("-inf"), tl.float32)
    place = tl.zeros([], tl.int32)
    none = tl.full([], 1, tl.int32)  # until a number was seen
    for begin in range(0, columns, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        ok = at < columns
        x = tl.load(row + at, mask=ok, other=float("-inf"))
        is_nan = (x != x) & ok
        found = tl.max(tl.where(is_nan, float("inf"), x), 0)
        nans = tl.sum(is_nan.to(tl.int32), 0)
        wanted = tl.where(nans > 0, is_nan, (x == found) & ok)
        first = tl.min(tl.where(wanted, at, columns), 0)
        found = tl.where(nans > 0, float("nan"), found)
        better = (largest == largest) & ((found != found) | (found > largest) | (none > 0))
        place = tl.where(better, first, place)
        largest = tl.where(better, found, largest)
        none = none * 0
    return largest, place


@triton.jit
def partial_maxima_kernel(logits, stride, columns, places, largest, parts, PART: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row, part): the largest number of PART columns, into its place of [rows, parts]."""
    wait_for_predecessor()
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    begin = part * PART
    found, place = largest_of(logits + row * stride + begin, tl.minimum(columns - begin, PART), BLOCK)
    tl.store(places + row * parts + part, begin + place)
    tl.store(largest + row * parts + part, found)


@triton.jit
def row_maxima_kernel(part_places, part_largest, parts, places, largest, BLOCK: tl.constexpr):
    """Program (row): of its parts."""
    wait_for_predecessor()
    row = tl.program_id(0).to(tl.int64)
    found, part = largest_of(part_largest + row * parts, parts, BLOCK)
    tl.store(places + row, tl.load(part_places + row * parts + part).to(tl.int64))
    tl.store(largest + row, found)


@triton.jit
def log_sums_kernel(x, stride, columns, out, BLOCK: tl.constexpr):
    """Program (row): the logarithm of the sum of its exponentials, in one order however many rows there are."""
    wait_for_predecessor()
    row = tl.program_id(0).to(tl.int64)
    largest, _ = largest_of(x + row * stride, columns, BLOCK)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.zeros([], tl.float32)
    for begin in range(0, columns, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        total += tl.sum(tl.exp(tl.load(x + row * stride + at, mask=at < columns, other=float("-inf")) - base), 0)
    tl.store(out + row, tl.where(largest == float("inf"), largest, base + tl.log(total)))


@triton.jit(do_not_specialize=_OF_CHANGES)
def adjust_logits_kernel(
    logits,
    stride,
    rows,
    out,
    columns,
    masks,
    words,
    ids,
    numbers,
    bounds,
    penalties,
    BLOCK: tl.constexpr,
    LIST: tl.constexpr,
):
    """Program (changed draw): its row of logits into its row of `out`, as its changes say.

    masks: int32 [S, words]. ids: int64, numbers: float32, the lists of all draws one after the other; bounds: int64 [S, 6], where
    its lists begin (allowed, forbidden, biased, counted, decreased) and the last one ends. penalties: float32 [S, 4], the fourth
    1 where only the allowed stay.
    """
    wait_for_predecessor()
    draw = tl.program_id(0).to(tl.int64)
    source = logits + tl.load(rows + draw) * stride
    to = out + draw * columns
    own = tl.load(penalties + draw * 4 + 3) > 0
    for begin in range(0, columns, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        ok = at < columns
        x = tl.load(source + at, mask=ok & (own == 0), other=float("-inf"))
        word = tl.load(masks + draw * words + at // 32, mask=ok, other=0)
        tl.store(to + at, tl.where((word >> (at % 32)) & 1 != 0, x, float("-inf")), mask=ok)
    tl.debug_barrier()
    lists = bounds + draw * 6
    place = tl.arange(0, LIST)
    for begin in range(tl.load(lists), tl.load(lists + 1), LIST):
        ok = begin + place < tl.load(lists + 1)
        token = tl.load(ids + begin + place, mask=ok, other=0)
        word = tl.load(masks + draw * words + token // 32, mask=ok, other=0)
        x = tl.load(source + token, mask=ok, other=0.0)
        tl.store(to + token, tl.where((word >> (token % 32).to(tl.int32)) & 1 != 0, x, float("-inf")), mask=ok)
    tl.debug_barrier()
    for begin in range(tl.load(lists + 1), tl.load(lists + 2), LIST):
        ok = begin + place < tl.load(lists + 2)
        token = tl.load(ids + begin + place, mask=ok, other=0)
        tl.store(to + token, tl.full([LIST], float("-inf"), tl.float32), mask=ok)
    tl.debug_barrier()
    for begin in range(tl.load(lists + 2), tl.load(lists + 3), LIST):
        ok = begin + place < tl.load(lists + 3)
        token = tl.load(ids + begin + place, mask=ok, other=0)
        bias = tl.load(numbers + begin + place, mask=ok, other=0.0)
        tl.store(to + token, tl.load(to + token, mask=ok, other=0.0) + bias, mask=ok)
    tl.debug_barrier()
    repetition = tl.load(penalties + draw * 4)
    frequency = tl.load(penalties + draw * 4 + 1)
    presence = tl.load(penalties + draw * 4 + 2)
    for begin in range(tl.load(lists + 3), tl.load(lists + 4), LIST):
        ok = begin + place < tl.load(lists + 4)
        token = tl.load(ids + begin + place, mask=ok, other=0)
        count = tl.load(numbers + begin + place, mask=ok, other=0.0)
        x = tl.load(to + token, mask=ok, other=0.0)
        x = tl.where(x < 0, x * repetition, tl.div_rn(x, repetition))
        x = x - frequency * count
        x = x - presence * (count > 0).to(tl.float32)
        tl.store(to + token, x, mask=ok)
    tl.debug_barrier()
    for begin in range(tl.load(lists + 4), tl.load(lists + 5), LIST):
        ok = begin + place < tl.load(lists + 5)
        token = tl.load(ids + begin + place, mask=ok, other=0)
        less = tl.load(numbers + begin + place, mask=ok, other=0.0)
        tl.store(to + token, tl.load(to + token, mask=ok, other=0.0) - less, mask=ok)
