"""Draws of tokens that are exact: sums are of integers, so order does not matter.

A kept set is "magnitudes up to a limit". Limits are found by bisection; nothing is sorted. What is near the largest goes to a
list first: nearly always the limits lie in there, and the rest of the row is not read again.
"""

import triton
import triton.language as tl

from windlass.kernels.triton.programs.logits import largest_of, magnitude, scaled_logits, units
from windlass.kernels.triton.programs.order import follow

# Magnitudes that a list may reach to: 6, 12, 24.
_LEAST_REACH = tl.constexpr(6.0)
_REACHES = tl.constexpr(3)
# Parts of common tensors, whose addresses 16 divides or not with the number of draws: Triton would compile a program for each.
_OF_DRAWS = [
    "rows",
    "changed_rows",
    "places",
    "maxima",
    "temperatures",
    "floors",
    "top_ks",
    "top_ps",
    "uniforms",
    "tokens",
    "statuses",
    "near_numbers",
    "near_ids",
]


@triton.jit
def mass(row, columns, largest, temperature, limit, BLOCK: tl.constexpr):
    """What tokens up to a magnitude weigh together, in units."""
    total = tl.zeros([], tl.int64)
    for begin in range(0, columns, BLOCK):
        scaled = scaled_logits(row, begin + tl.arange(0, BLOCK), columns, largest, temperature)
        total += tl.sum(tl.where(magnitude(scaled) <= limit, units(scaled), 0), 0)
    return total


@triton.jit
def counted(row, columns, largest, temperature, limit, BLOCK: tl.constexpr):
    """How many tokens there are up to a magnitude."""
    count = tl.zeros([], tl.int32)
    for begin in range(0, columns, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        near = magnitude(scaled_logits(row, at, columns, largest, temperature)) <= limit
        count += tl.sum((near & (at < columns)).to(tl.int32), 0)
    return count


@triton.jit
def limit_of_count(row, columns, largest, temperature, wanted, high, BLOCK: tl.constexpr):
    """The least magnitude up to which there are so many tokens, `high` at most."""
    low = tl.zeros([], tl.int32)
    while low < high:
        middle = low + (high - low) // 2
        if counted(row, columns, largest, temperature, middle, BLOCK) >= wanted:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def limit_of_mass(row, columns, largest, temperature, wanted, high, BLOCK: tl.constexpr):
    """The least magnitude up to which tokens weigh so much, `high` at most."""
    low = tl.zeros([], tl.int32)
    while low < high:
        middle = low + (high - low) // 2
        if mass(row, columns, largest, temperature, middle, BLOCK).to(tl.float64) >= wanted:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def place_of(row, columns, largest, temperature, limit, total, uniform, BLOCK: tl.constexpr):
    """The place of the token, of those up to a magnitude, at which a share of their mass is passed."""
    whole = total.to(tl.float64)
    below = (whole.to(tl.int64, bitcast=True) - 1).to(tl.float64, bitcast=True)
    target = tl.minimum(uniform * whole, below)
    before = tl.zeros([], tl.int64)
    place = tl.full([], -1, tl.int32)
    begin = tl.zeros([], tl.int32)
    while place < 0:
        at = begin + tl.arange(0, BLOCK)
        scaled = scaled_logits(row, at, columns, largest, temperature)
        own = tl.where(magnitude(scaled) <= limit, units(scaled), 0)
        inside = tl.sum(own, 0)
        if (before + inside).to(tl.float64) > target:
            passed = (before + tl.cumsum(own, 0)).to(tl.float64) <= target
            place = begin + tl.sum(passed.to(tl.int32), 0)
        before += inside
        begin += BLOCK
        if (begin >= columns) & (place < 0):
            place = columns - 1
    return place


@triton.jit
def reach_of_list(row, columns, largest, temperature, most, BLOCK: tl.constexpr):
    """The largest of some magnitudes up to which there are `most` tokens or fewer, -1 for none."""
    reach = tl.full([], -1, tl.int32)
    for power in tl.static_range(_REACHES):
        limit = tl.full([], _LEAST_REACH * 2**power, tl.float32).to(tl.int32, bitcast=True)
        if counted(row, columns, largest, temperature, limit, BLOCK) <= most:
            reach = limit
    return reach


@triton.jit
def list_near(row, columns, largest, temperature, reach, numbers, ids, BLOCK: tl.constexpr):
    """Write what tokens up to a magnitude are, scaled and by id, in their order; how many there are."""
    count = tl.zeros([], tl.int32)
    for begin in range(0, columns, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        scaled = scaled_logits(row, at, columns, largest, temperature)
        near = ((magnitude(scaled) <= reach) & (at < columns)).to(tl.int32)
        to = count + tl.cumsum(near, 0) - 1
        tl.store(numbers + to, scaled, mask=near > 0)
        tl.store(ids + to, at, mask=near > 0)
        count += tl.sum(near, 0)
    tl.debug_barrier()
    return count


@triton.jit(do_not_specialize=_OF_DRAWS)
def draw_tokens(
    logits,
    stride,
    columns,
    rows,
    changed,
    changed_rows,
    places,
    maxima,
    temperatures,
    floors,
    top_ks,
    top_ps,
    uniforms,
    tokens,
    statuses,
    near_numbers,
    near_ids,
    BLOCK: tl.constexpr,
    FEW: tl.constexpr,
    MOST: tl.constexpr,
):
    """Program (draw). rows: of the logits. changed_rows: int64, its row of `changed`, below 0 for none. places, maxima: of the
    largest of each row of logits. floors: int32, the magnitude up to which min-p keeps. top_ps, uniforms: float64. statuses: of
    `DrawStatus`. near_numbers, near_ids: MOST numbers for the list of each draw."""
    follow()
    draw = tl.program_id(0)
    row_at = tl.load(rows + draw)
    changed_at = tl.load(changed_rows + draw)
    row = logits + row_at * stride
    if changed_at >= 0:
        row = changed + changed_at * columns
    highest = tl.load(maxima + row_at)
    largest = highest
    token = tl.load(places + row_at).to(tl.int32)
    if changed_at >= 0:
        largest, token = largest_of(row, columns, BLOCK)
    status = 0
    if (largest - largest) != 0.0:
        status = 2
    if (highest - highest) != 0.0:
        status = 1
    temperature = tl.load(temperatures + draw)
    if (status == 0) & (temperature > 0.0):
        limit = tl.load(floors + draw)
        top_k = tl.load(top_ks + draw)
        top_p = tl.load(top_ps + draw)
        uniform = tl.load(uniforms + draw)
        reach = tl.full([], -1, tl.int32)
        listed = tl.zeros([], tl.int32)
        numbers = near_numbers + draw.to(tl.int64) * MOST
        ids = near_ids + draw.to(tl.int64) * MOST
        if (top_k > 0) | (top_p < 1.0):
            reach = reach_of_list(row, columns, largest, temperature, MOST, BLOCK)
            listed = list_near(row, columns, largest, temperature, reach, numbers, ids, BLOCK)
        inside = listed > 0  # whether all that is kept is in the list
        if top_k > 0:
            inside = listed >= top_k
            if inside:
                limit = tl.minimum(limit, limit_of_count(numbers, listed, 0.0, 1.0, top_k, reach, FEW))
            else:
                high = tl.full([], 0x7F800000, tl.int32)
                limit = tl.minimum(limit, limit_of_count(row, columns, largest, temperature, top_k, high, BLOCK))
        if inside & (limit <= reach):
            total = mass(numbers, listed, 0.0, 1.0, limit, FEW)
        else:
            total = mass(row, columns, largest, temperature, limit, BLOCK)
        if top_p < 1.0:
            wanted = tl.minimum(top_p * total.to(tl.float64), total.to(tl.float64))
            high = limit
            if inside:
                high = tl.minimum(limit, reach)
                inside = mass(numbers, listed, 0.0, 1.0, high, FEW).to(tl.float64) >= wanted
            if inside:
                limit = limit_of_mass(numbers, listed, 0.0, 1.0, wanted, high, FEW)
                total = mass(numbers, listed, 0.0, 1.0, limit, FEW)
            else:
                limit = limit_of_mass(row, columns, largest, temperature, wanted, limit, BLOCK)
                total = mass(row, columns, largest, temperature, limit, BLOCK)
        if inside & (limit <= reach):
            token = tl.load(ids + place_of(numbers, listed, 0.0, 1.0, limit, total, uniform, FEW))
        else:
            token = place_of(row, columns, largest, temperature, limit, total, uniform, BLOCK)
    tl.store(tokens + draw, tl.where(status == 0, token, -1).to(tl.int64))
    tl.store(statuses + draw, status)
