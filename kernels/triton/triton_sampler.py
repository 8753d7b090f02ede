"""Triton sampler: exact sampling, row maxima, log-sums and logits adjustments.

Retained tokens are those up to a magnitude (distance from the row maximum). Top-k and top-p find that limit by radix
selection over buckets of magnitudes, in at most five passes, without sorting. Weights are integers in units of 2^-34, so sums
are exact in any order. Typical-p and XTC use the torch sampler.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from windlass.kernels.device_memory import to_device
from windlass.kernels.token_sampling import LogitsChanges, SamplingRow, SamplingStatus, SamplingTensors, encode_filters
from windlass.kernels.torch.torch_sampler import TorchSampler, TorchSamplingRow
from windlass.kernels.triton.launch import is_last_program, launch, power_of_two, strided, wait_for_predecessor

LOG2_E = tl.constexpr(1.44269504)

UNIT = tl.constexpr(17179869184.0)  # 2^34

# Parts of common tensors, whose alignment depends on the number of rows: Triton would compile a variant for each.
_OF_CHANGES = ["rows", "masks", "ids", "numbers", "bounds", "penalties"]


@triton.jit
def units(scaled):
    """`torch_sampler.weigh` in units of 2^-34: int64."""
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
    """The largest number of a row and its first index; a NaN counts as the largest."""
    largest = tl.full([], float("-inf"), tl.float32)
    place = tl.zeros([], tl.int32)
    none = tl.full([], 1, tl.int32)  # until a number has been seen
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
    """Program (row, part): the largest number of PART columns, stored in [rows, parts]."""
    wait_for_predecessor()
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    begin = part * PART
    found, place = largest_of(logits + row * stride + begin, tl.minimum(columns - begin, PART), BLOCK)
    tl.store(places + row * parts + part, begin + place)
    tl.store(largest + row * parts + part, found)


@triton.jit
def row_maxima_kernel(part_places, part_largest, parts, places, largest, BLOCK: tl.constexpr):
    """Program (row): the largest of its parts."""
    wait_for_predecessor()
    row = tl.program_id(0).to(tl.int64)
    found, part = largest_of(part_largest + row * parts, parts, BLOCK)
    tl.store(places + row, tl.load(part_places + row * parts + part).to(tl.int64))
    tl.store(largest + row, found)


@triton.jit
def log_sums_kernel(x, stride, columns, out, BLOCK: tl.constexpr):
    """Program (row): the logarithm of the sum of its exponentials, in an order that does not depend on the number of rows."""
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
    """Program (changed row): writes its changed logits to its row of `out`.

    masks: int32 [S, words]. ids: int64, numbers: float32, the concatenated lists of all rows; bounds: int64 [S, 6], the
    starts of its lists (allowed, forbidden, biased, counted, decreased) and the end of the last one. penalties: float32 [S,
    4], the fourth is 1 if only allowed tokens are kept.
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
    lists = bounds + draw * 6
    repetition = tl.load(penalties + draw * 4)
    frequency = tl.load(penalties + draw * 4 + 1)
    presence = tl.load(penalties + draw * 4 + 2)
    for kind in tl.static_range(5):
        tl.debug_barrier()
        end = tl.load(lists + kind + 1)
        for begin in range(tl.load(lists + kind), end, LIST):
            at = begin + tl.arange(0, LIST)
            ok = at < end
            token = tl.load(ids + at, mask=ok, other=0)
            number = tl.load(numbers + at, mask=ok, other=0.0)
            x = tl.load(to + token, mask=ok, other=0.0)
            if kind == 0:  # allowed
                word = tl.load(masks + draw * words + token // 32, mask=ok, other=0)
                x = tl.load(source + token, mask=ok, other=0.0)
                x = tl.where((word >> (token % 32).to(tl.int32)) & 1 != 0, x, float("-inf"))
            elif kind == 1:  # forbidden
                x = tl.full([LIST], float("-inf"), tl.float32)
            elif kind == 2:  # biased
                x = x + number
            elif kind == 3:  # counted
                x = tl.where(x < 0, x * repetition, tl.div_rn(x, repetition))
                x = x - frequency * number
                x = x - presence * (number > 0).to(tl.float32)
            else:  # decreased
                x = x - number
            tl.store(to + token, x, mask=ok)


_LAST = tl.constexpr(0x41C80000)  # the magnitude of 25: larger ones have weight 0

# The buckets of the first pass have 2^20 magnitudes each, and 2^16 from 1/8 on, where most tokens are. The next passes divide
# their range by 2^10.
_FINE = tl.constexpr(0x3E000000)
_COARSE = tl.constexpr(0x3E000000 >> 20)  # buckets before the fine ones
_FIRST = tl.constexpr(2048)  # buckets of the first pass
_NEXT = tl.constexpr(1024)  # of each other pass
COUNTS = tl.constexpr(2048 + 2 * 1024)  # top-k ends with the third pass
MASSES = tl.constexpr(2048 + 4 * 1024)

TICKETS = tl.constexpr(8)  # per row: of five passes, and of the end
_END = tl.constexpr(5)

# State of a row, int64 [STATE].
STATE = tl.constexpr(16)
_ROW = tl.constexpr(0)
_CHANGED = tl.constexpr(1)  # its index among changed rows, negative for none
_LIMIT = tl.constexpr(2)  # the magnitude up to which tokens are kept, negative if the token is known
_WANTS = tl.constexpr(3)  # the target of the next pass: _NOTHING, _COUNT or _MASS
_LOW = tl.constexpr(4)  # the limit is among the 2^span magnitudes from here on
_SPAN = tl.constexpr(5)
_BEFORE = tl.constexpr(6)  # tokens below
_MASS_BEFORE = tl.constexpr(7)  # and their units
_TOTAL = tl.constexpr(8)  # the units of which top-p keeps a share

_NOTHING = tl.constexpr(0)
_COUNT = tl.constexpr(1)
_MASS = tl.constexpr(2)

_ALL = tl.constexpr(31)  # a span

# Addresses of parts of common tensors, and sizes that depend on the number of rows: Triton would compile variants by alignment.
_BY_DRAWS = [
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
    "turn",
    "blocks",
]


@triton.jit(do_not_specialize=_BY_DRAWS)
def begin_sampling_kernel(
    rows,
    changed_rows,
    places,
    maxima,
    changed_places,
    changed_maxima,
    temperatures,
    floors,
    top_ks,
    top_ps,
    tokens,
    statuses,
    largest,
    states,
    counts,
    masses,
    tickets,
):
    """Program (draw): its status, its token if that is the largest, and the initial state of the following kernels.

    rows: of the logits, None for 0, 1, 2 ... changed_rows: negative for none, None if no row is changed. places, maxima: of
    the largest of each row. floors: int32, the magnitude up to which min-p keeps tokens. top_ps: float64. statuses:
    `SamplingStatus`. largest: float32, of the sampled row. counts: int32 [draws, COUNTS]. masses: int64 [draws, MASSES].
    tickets: int32 [draws, TICKETS].
    """
    wait_for_predecessor()
    draw = tl.program_id(0).to(tl.int64)
    row = draw
    if rows is not None:
        row = tl.load(rows + draw)
    highest = tl.load(maxima + row)
    found = highest
    token = tl.load(places + row)
    changed = tl.full([], -1, tl.int64)
    if changed_rows is not None:
        changed = tl.load(changed_rows + draw)
        if changed >= 0:
            found = tl.load(changed_maxima + changed)
            token = tl.load(changed_places + changed)
    status = 0
    if (found - found) != 0.0:
        status = 2
    if (highest - highest) != 0.0:
        status = 1
    tl.store(tokens + draw, tl.where(status == 0, token, -1))
    tl.store(statuses + draw, status)
    tl.store(largest + draw, found)
    drawn = (status == 0) & (tl.load(temperatures + draw) > 0.0)
    by_mass = tl.where(tl.load(top_ps + draw) < 1.0, _MASS, _NOTHING)
    wants = tl.where(drawn, tl.where(tl.load(top_ks + draw) > 0, _COUNT, by_mass), _NOTHING)
    state = states + draw * STATE
    tl.store(state + _ROW, row)
    tl.store(state + _CHANGED, changed)
    tl.store(state + _LIMIT, tl.where(drawn, tl.minimum(tl.load(floors + draw), _LAST), -1))
    tl.store(state + _WANTS, wants)
    tl.store(state + _LOW, 0)
    tl.store(state + _SPAN, _ALL)
    tl.store(state + _BEFORE, 0)
    tl.store(state + _MASS_BEFORE, 0)
    tl.store(state + _TOTAL, 0)
    tl.store(tickets + draw * TICKETS + tl.arange(0, TICKETS), tl.zeros([TICKETS], tl.int32))
    if wants != _NOTHING:
        at = tl.arange(0, _NEXT)
        for begin in range(0, COUNTS, _NEXT):
            tl.store(counts + draw * COUNTS + begin + at, tl.zeros([_NEXT], tl.int32))
        for begin in range(0, MASSES, _NEXT):
            tl.store(masses + draw * MASSES + begin + at, tl.zeros([_NEXT], tl.int64))


@triton.jit
def row_of(logits, stride, columns, changed, state):
    row = logits + tl.load(state + _ROW) * stride
    at = tl.load(state + _CHANGED)
    if at >= 0:
        row = changed + at * columns
    return row


@triton.jit
def buckets_of(turn):
    """The first bucket of a pass among those of its draw."""
    return tl.where(turn == 0, 0, _FIRST + (turn - 1) * _NEXT)


@triton.jit
def bucket_of(number, low, span):
    first = tl.where(number < _FINE, number >> 20, _COARSE + ((number - _FINE) >> 16))
    return tl.where(span == _ALL, first, (number - low) >> tl.maximum(span - 10, 0))


@triton.jit
def range_of(bucket, low, span):
    """(low, span) of a bucket of this range."""
    is_coarse = bucket < _COARSE
    first = tl.where(is_coarse, bucket << 20, _FINE + ((bucket - _COARSE) << 16))
    finer = tl.maximum(span - 10, 0)
    low_of = tl.where(span == _ALL, first, low + (bucket << finer))
    return low_of, tl.where(span == _ALL, tl.where(is_coarse, 20, 16), finer)


@triton.jit
def sums_of(buckets, turn):
    """The sums of all programs in a pass, [_FIRST]. Bypasses the L1 cache, which does not see additions of others."""
    at = tl.arange(0, _FIRST)
    width = tl.where(turn == 0, _FIRST, _NEXT)
    return tl.load(buckets + buckets_of(turn) + at, mask=at < width, other=0, cache_modifier=".cg")


@triton.jit
def up_to(sums, bucket):
    """The sum of all buckets before one, and of that one."""
    at = tl.arange(0, _FIRST)
    return tl.sum(tl.where(at < bucket, sums, 0), 0), tl.sum(tl.where(at == bucket, sums, 0), 0)


@triton.jit
def end_turn(state, counts, masses, turn, wants, top_k, top_p):
    """Find the bucket in which the target is reached. After top-k, top-p starts with the buckets of the first pass."""
    low = tl.load(state + _LOW).to(tl.int32)
    span = tl.load(state + _SPAN).to(tl.int32)
    mass_before = tl.load(state + _MASS_BEFORE)
    total = tl.load(state + _TOTAL)
    limit = tl.load(state + _LIMIT).to(tl.int32)
    begins = (wants == _MASS) & (turn == 0)
    if begins:
        total = tl.sum(sums_of(masses, turn), 0)
    if wants == _COUNT:
        before = tl.load(state + _BEFORE)
        tokens = sums_of(counts, turn)
        bucket = tl.sum((before + tl.cumsum(tokens, 0) < top_k).to(tl.int32), 0)
        skipped, _ = up_to(tokens, bucket)
        tl.store(state + _BEFORE, before + skipped)
        inside, own = up_to(sums_of(masses, turn), bucket)
        mass_before += inside
        low, span = range_of(bucket, low, span)
        all_stay = bucket == _FIRST  # fewer tokens than the target
        if all_stay | (span == 0):
            total = mass_before + own
            limit = tl.where(all_stay, limit, low)
            begins = top_p < 1.0
            wants = tl.where(begins, _MASS, _NOTHING)
    if wants == _MASS:
        if begins:
            low = tl.zeros([], tl.int32)
            span = tl.full([], _ALL, tl.int32)
            mass_before = tl.zeros([], tl.int64)
        sums = sums_of(masses, tl.where(begins, 0, turn))
        wanted = tl.minimum(top_p * total.to(tl.float64), total.to(tl.float64))
        bucket = tl.sum(((mass_before + tl.cumsum(sums, 0)).to(tl.float64) < wanted).to(tl.int32), 0)
        inside, _ = up_to(sums, bucket)
        mass_before += inside
        low, span = range_of(bucket, low, span)
        if span == 0:
            limit = low
            wants = tl.full([], _NOTHING, tl.int32)
    tl.store(state + _LIMIT, limit)
    tl.store(state + _WANTS, wants)
    tl.store(state + _LOW, low)
    tl.store(state + _SPAN, span)
    tl.store(state + _MASS_BEFORE, mass_before)
    tl.store(state + _TOTAL, total)


@triton.jit(do_not_specialize=_BY_DRAWS)
def radix_select_kernel(
    logits,
    stride,
    columns,
    changed,
    temperatures,
    top_ks,
    top_ps,
    largest,
    states,
    counts,
    masses,
    tickets,
    turn,
    blocks,
    BLOCK: tl.constexpr,
):
    """Program (draw, part): adds a part of the blocks to the buckets of a pass."""
    wait_for_predecessor()
    draw = tl.program_id(0).to(tl.int64)
    state = states + draw * STATE
    wants = tl.load(state + _WANTS).to(tl.int32)
    if wants != _NOTHING:
        row = row_of(logits, stride, columns, changed, state)
        highest = tl.load(largest + draw)
        temperature = tl.load(temperatures + draw)
        limit = tl.load(state + _LIMIT).to(tl.int32)
        low = tl.load(state + _LOW).to(tl.int32)
        span = tl.load(state + _SPAN).to(tl.int32)
        own_counts = counts + draw * COUNTS
        own_masses = masses + draw * MASSES
        first = tl.program_id(1) * blocks * BLOCK
        for begin in range(first, tl.minimum(first + blocks * BLOCK, columns), BLOCK):
            scaled = scaled_logits(row, begin + tl.arange(0, BLOCK), columns, highest, temperature)
            number = magnitude(scaled)
            inside = (number <= limit) & (((number - low) >> span) == 0)
            to = buckets_of(turn) + bucket_of(number, low, span)
            tl.atomic_add(own_masses + to, units(scaled), mask=inside, sem="relaxed")
            tl.atomic_add(own_counts + to, 1, mask=inside & (wants == _COUNT), sem="relaxed")
        if is_last_program(tickets + draw * TICKETS + turn):
            end_turn(state, own_counts, own_masses, turn, wants, tl.load(top_ks + draw), tl.load(top_ps + draw))


@triton.jit
def mass(row, begin, end, columns, largest, temperature, limit, BLOCK: tl.constexpr):
    """The total weight of tokens up to a magnitude, in units."""
    total = tl.zeros([], tl.int64)
    for at in range(begin, end, BLOCK):
        scaled = scaled_logits(row, at + tl.arange(0, BLOCK), columns, largest, temperature)
        total += tl.sum(tl.where(magnitude(scaled) <= limit, units(scaled), 0), 0)
    return total


@triton.jit
def place_of(row, begin, columns, largest, temperature, limit, before, target, BLOCK: tl.constexpr):
    """The index, from `begin` on, of the token (up to a magnitude) at which the mass exceeds a target. before: the previous
    mass."""
    place = tl.full([], -1, tl.int32)
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


@triton.jit(do_not_specialize=_BY_DRAWS)
def sample_tokens_kernel(
    logits,
    stride,
    columns,
    changed,
    temperatures,
    uniforms,
    largest,
    states,
    tokens,
    part_masses,
    tickets,
    blocks,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Program (draw, part): the weight of a part of the blocks; the last program samples. part_masses: int64 [draws, PARTS]."""
    wait_for_predecessor()
    draw = tl.program_id(0).to(tl.int64)
    state = states + draw * STATE
    limit = tl.load(state + _LIMIT).to(tl.int32)
    if limit >= 0:
        row = row_of(logits, stride, columns, changed, state)
        highest = tl.load(largest + draw)
        temperature = tl.load(temperatures + draw)
        part = tl.program_id(1)
        size = blocks * BLOCK
        end = tl.minimum((part + 1) * size, columns)
        own = mass(row, part * size, end, columns, highest, temperature, limit, BLOCK)
        tl.store(part_masses + draw * PARTS + part, own)
        if is_last_program(tickets + draw * TICKETS + _END):
            parts = tl.arange(0, PARTS)
            there = parts < tl.num_programs(1)
            sums = tl.load(part_masses + draw * PARTS + parts, mask=there, other=0, cache_modifier=".cg")
            whole = tl.sum(sums, 0).to(tl.float64)
            below = (whole.to(tl.int64, bitcast=True) - 1).to(tl.float64, bitcast=True)
            target = tl.minimum(tl.load(uniforms + draw) * whole, below)
            chosen = tl.sum((tl.cumsum(sums, 0).to(tl.float64) <= target).to(tl.int32), 0)
            before = tl.sum(tl.where(parts < chosen, sums, 0), 0)
            token = place_of(row, chosen * size, columns, highest, temperature, limit, before, target, BLOCK)
            tl.store(tokens + draw, token.to(tl.int64))


_BLOCK, _LIST = 8192, 512  # columns changed at a time, and tokens of a list, by one program per row

_PART = 4096  # columns per program of the row maximum

_SAMPLE_BLOCK = 2048  # columns read at a time while sampling

# Programs per row, and for all rows: these run at once, and take little time if they have no work.
_MOST_PARTS, _PROGRAMS = 64, 512

_RADIX_PASSES = 0, 3, 5  # passes without a filter, with top-k or top-p, with both

_EXACT: dict[str, Any] = {"enable_fp_fusion": False, "num_warps": 8}


def row_maxima(logits: Tensor) -> tuple[Tensor, Tensor]:
    logits = strided(logits)
    rows, columns = logits.shape
    parts = max(1, -(-columns // _PART))
    part_places = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    part_largest = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    operands = logits, logits.stride(0), columns, part_places, part_largest, parts
    launch(partial_maxima_kernel, (rows, parts), logits, *operands, PART=_PART, BLOCK=min(2048, _block(columns)))
    places = torch.empty(rows, dtype=torch.int64, device=logits.device)
    largest = torch.empty(rows, dtype=torch.float32, device=logits.device)
    found = part_places, part_largest, parts, places, largest
    launch(row_maxima_kernel, (rows,), logits, *found, BLOCK=min(256, power_of_two(parts)), num_warps=1)
    return places, largest


def log_sums(rows: Tensor) -> Tensor:
    """log(sum(exp(x))) of rows [N, V] float32, as [N, 1]; a row's bits depend on that row alone."""
    rows = strided(rows)
    found = torch.empty(rows.shape[0], 1, dtype=torch.float32, device=rows.device)
    operands = rows, rows.stride(0), rows.shape[1], found
    launch(log_sums_kernel, (rows.shape[0],), rows, *operands, BLOCK=min(2048, _block(rows.shape[1])))
    return found


class TritonSampler(TorchSampler):
    def sample(self, logits: Tensor, draws: Sequence[SamplingRow]) -> None:
        own = cast(Sequence[TorchSamplingRow], draws)
        apart = [one for one in own if _needs_torch(one)]
        here = [one for one in own if not _needs_torch(one)]
        if apart:
            super().sample(logits, apart)
        if here:
            _draw(strided(logits), here)


def _needs_torch(sample: TorchSamplingRow) -> bool:
    return sample.filters.temperature > 0 and (sample.filters.typical_p < 1 or sample.filters.exclude_from < 1)


def _draw(logits: Tensor, draws: Sequence[TorchSamplingRow]) -> None:
    device, columns = logits.device, logits.shape[1]
    altered = [(one, one.changes) for one in draws if one.changes is not None]
    places = iter(range(len(altered)))
    whole = np.array([[one.row, -1 if one.changes is None else next(places)] for one in draws], dtype=np.int64)
    kinds = np.array([encode_filters(one.filters, columns) for one in draws], dtype=np.float64).T
    limits = np.ascontiguousarray(kinds[1:3].astype(np.int32))
    shares = np.array([kinds[3], [one.uniform for one in draws]], dtype=np.float64)
    own_rows, changed_rows = _to(device, np.ascontiguousarray(whole.T))
    magnitude, top_k = _to(device, limits)
    top_p, uniform = _to(device, shares)
    tensors = SamplingTensors(_to(device, kinds[0].astype(np.float32)), magnitude, top_k, top_p, uniform)
    filters = int((((kinds[2] > 0) * 1 + (kinds[3] < 1)) * (kinds[0] > 0)).max())
    rows = _RowsToSample(logits, row_maxima(logits), own_rows)
    changed = rows._replace(of_draw=changed_rows)
    if altered:
        made = _changed_rows(logits, altered)
        changed = _RowsToSample(made, row_maxima(made), changed_rows)
    found = _launch(rows, changed, tensors, _RADIX_PASSES[filters])
    for one, token, status in zip(draws, *found.tolist(), strict=True):
        one.set_result(token, SamplingStatus(status))


def sample_rows(logits: Tensor, maxima: tuple[Tensor, Tensor], draws: SamplingTensors) -> tuple[Tensor, Tensor]:
    tokens, statuses = _launch(_RowsToSample(strided(logits), maxima, None), None, draws, _RADIX_PASSES[-1])
    return tokens, statuses


class _RowsToSample(NamedTuple):
    """Rows [R, V] and their `row_maxima`. of_draw: int64, the row of each draw, negative for none; None for rows in order."""

    logits: Tensor
    maxima: tuple[Tensor, Tensor]
    of_draw: Tensor | None


def _launch(rows: _RowsToSample, changed: _RowsToSample | None, draws: SamplingTensors, passes: int) -> Tensor:
    """Tokens and statuses [2, draws]. passes: of `radix_select_kernel`."""
    logits, device, count = rows.logits, rows.logits.device, draws.uniform.shape[0]
    columns = logits.shape[1]
    found = torch.empty(2, count, dtype=torch.int64, device=device)
    largest = torch.empty(count, dtype=torch.float32, device=device)
    states, masses, part_masses = (
        torch.empty(count, size, dtype=torch.int64, device=device) for size in (STATE.value, MASSES.value, _MOST_PARTS)
    )
    counts, tickets = (
        torch.empty(count, size, dtype=torch.int32, device=device) for size in (COUNTS.value, TICKETS.value)
    )
    temperature, floor, top_k, top_p, uniform = draws
    sums = counts, masses, tickets
    launch(
        begin_sampling_kernel,
        (count,),
        logits,
        rows.of_draw,
        None if changed is None else changed.of_draw,
        *rows.maxima,
        *(rows if changed is None else changed).maxima,
        temperature,
        floor,
        top_k,
        top_p,
        *found,
        largest,
        states,
        *sums,
        **_EXACT,
    )
    block = min(_SAMPLE_BLOCK, power_of_two(columns))
    blocks, parts = _parts(count, -(-columns // block))
    row = logits, logits.stride(0), columns, logits if changed is None else changed.logits, temperature
    narrow: tuple[Any, ...] = *row, top_k, top_p, largest, states, *sums
    for turn in range(passes):
        launch(radix_select_kernel, (count, parts), logits, *narrow, turn, blocks, BLOCK=block, **_EXACT)
    sample: tuple[Any, ...] = *row, uniform, largest, states, found[0], part_masses, tickets, blocks
    launch(sample_tokens_kernel, (count, parts), logits, *sample, BLOCK=block, PARTS=_MOST_PARTS, **_EXACT)
    return found


def _parts(rows: int, blocks: int) -> tuple[int, int]:
    """Blocks per program and programs per row: many for few rows, so that all fit on the device."""
    each = -(-blocks // max(1, min(_MOST_PARTS, _PROGRAMS // rows)))
    return each, -(-blocks // each)


def _changed_rows(logits: Tensor, altered: Sequence[tuple[TorchSamplingRow, LogitsChanges]]) -> Tensor:
    """The changed rows, one for each draw with changes."""
    device, columns = logits.device, logits.shape[1]
    words = -(-columns // 32)
    masks = np.full((len(altered), words), -1, dtype=np.int32)
    penalties = np.empty((len(altered), 4), dtype=np.float32)
    bounds = np.zeros((len(altered), 6), dtype=np.int64)
    ids: list[Tensor] = []
    numbers: list[Tensor] = []
    end = 0
    for at, (one, changes) in enumerate(altered):
        if changes.mask is not None:
            masks[at] = changes.mask.numpy()
        settings = one.penalties
        own = changes.allowed is not None
        penalties[at] = settings.repetition, settings.frequency, settings.presence, own
        nothing = changes.forbidden[:0]
        lists = (
            (nothing if changes.allowed is None else changes.allowed, None),
            (changes.forbidden, None),
            (changes.biased, changes.bias),
            (changes.counted, changes.in_output),
            (changes.decreased, changes.decrease),
        )
        for place, (tokens, values) in enumerate(lists):
            bounds[at, place] = end
            end += len(tokens)
            if len(tokens):
                ids.append(tokens)
                numbers.append(torch.zeros(len(tokens), device=device) if values is None else values)
        bounds[at, 5] = end
    empty = torch.zeros(1, device=device)
    out = torch.empty(len(altered), columns, dtype=torch.float32, device=device)
    launch(
        adjust_logits_kernel,
        (len(altered),),
        logits,
        logits,
        logits.stride(0),
        _to(device, np.array([one.row for one, _ in altered], dtype=np.int64)),
        out,
        columns,
        _to(device, masks),
        words,
        torch.cat(ids) if ids else empty.long(),
        torch.cat(numbers) if numbers else empty,
        _to(device, bounds),
        _to(device, penalties),
        BLOCK=_block(columns),
        LIST=_LIST,
        **_EXACT | {"num_warps": 16},
    )
    return out


def _to(device: torch.device, numbers: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Tensor:
    return to_device(torch.from_numpy(numbers), device)


def _block(columns: int) -> int:
    return min(_BLOCK, int(power_of_two(columns)))
