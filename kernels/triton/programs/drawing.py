"""Draws of tokens that are exact, each row read by many programs.

What a draw keeps is "magnitudes up to a limit". Top-k asks for the least magnitude up to which there are so many tokens, top-p
for the least up to which they weigh so much. Nothing is sorted: turn by turn, programs read a part of the row each, and add what
they meet to buckets of magnitudes, tokens and units. The one that ends last finds the bucket in which the wanted number is
reached, and the next turn looks into that one alone. Three turns tell each magnitude from the next. The first turn of top-k is
that of top-p too, so both take five.

At the end programs sum up what their part weighs, and the last one finds the token. Sums are of integers: it does not matter
which program comes first.
"""

import triton
import triton.language as tl

from windlass.kernels.triton.programs.logits import magnitude, scaled_logits, units
from windlass.kernels.triton.programs.order import is_last_program, wait_for_predecessor

_LAST = tl.constexpr(0x41C80000)  # the magnitude of 25: what lies beyond weighs nothing
# The first turn's buckets have 2^20 magnitudes each, and 2^16 from 1/8 on, where most tokens are. The next turns divide what they
# look into by 2^10.
_FINE = tl.constexpr(0x3E000000)
_COARSE = tl.constexpr(0x3E000000 >> 20)  # buckets before the fine ones
_FIRST = tl.constexpr(2048)  # buckets of the first turn
_NEXT = tl.constexpr(1024)  # of each other turn
TICKETS = tl.constexpr(8)  # room for those of a draw: of five turns, and of the end
_END = tl.constexpr(5)
COUNTS = tl.constexpr(2048 + 2 * 1024)  # top-k ends with the third turn
MASSES = tl.constexpr(2048 + 4 * 1024)
# What is known of a draw, int64 [STATE].
STATE = tl.constexpr(16)
_ROW = tl.constexpr(0)
_CHANGED = tl.constexpr(1)  # its row of the changed ones, below 0 for none
_LIMIT = tl.constexpr(2)  # the magnitude up to which tokens stay, below 0 where the token is known
_WANTS = tl.constexpr(3)  # what the next turn looks for:
_NOTHING = tl.constexpr(0)
_COUNT = tl.constexpr(1)
_MASS = tl.constexpr(2)
_LOW = tl.constexpr(4)  # it lies among the 2^span magnitudes from here on
_SPAN = tl.constexpr(5)
_BEFORE = tl.constexpr(6)  # tokens below
_MASS_BEFORE = tl.constexpr(7)  # and their units
_TOTAL = tl.constexpr(8)  # the units of which top-p wants a share
_ALL = tl.constexpr(31)  # a span
# Triton would compile a program for each way in which 16 divides these, addresses of parts of common tensors and sizes that
# follow from the number of draws.
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
    """Program (draw): its status, its token where that is the largest, and what the programs after this one begin with.

    rows: of the logits, None for 0, 1, 2 ... changed_rows: below 0 for none, None where nothing is changed. places, maxima: of
    the largest of each row. floors: int32, the magnitude up to which min-p keeps. top_ps: float64. statuses: of `SamplingStatus`.
    largest: float32, of the row that is drawn from. counts: int32 [draws, COUNTS]. masses: int64 [draws, MASSES]. tickets: int32
    [draws, TICKETS].
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
    """Where a turn's buckets begin among those of its draw."""
    return tl.where(turn == 0, 0, _FIRST + (turn - 1) * _NEXT)


@triton.jit
def bucket_of(number, low, span):
    first = tl.where(number < _FINE, number >> 20, _COARSE + ((number - _FINE) >> 16))
    return tl.where(span == _ALL, first, (number - low) >> tl.maximum(span - 10, 0))


@triton.jit
def range_of(bucket, low, span):
    """(low, span) of a bucket of such a range."""
    is_coarse = bucket < _COARSE
    first = tl.where(is_coarse, bucket << 20, _FINE + ((bucket - _COARSE) << 16))
    finer = tl.maximum(span - 10, 0)
    low_of = tl.where(span == _ALL, first, low + (bucket << finer))
    return low_of, tl.where(span == _ALL, tl.where(is_coarse, 20, 16), finer)


@triton.jit
def sums_of(buckets, turn):
    """What programs added in a turn, [_FIRST]. Read past a processor's own cache, which does not see what others add."""
    at = tl.arange(0, _FIRST)
    width = tl.where(turn == 0, _FIRST, _NEXT)
    return tl.load(buckets + buckets_of(turn) + at, mask=at < width, other=0, cache_modifier=".cg")


@triton.jit
def up_to(sums, bucket):
    """What buckets before one hold, and that one itself."""
    at = tl.arange(0, _FIRST)
    return tl.sum(tl.where(at < bucket, sums, 0), 0), tl.sum(tl.where(at == bucket, sums, 0), 0)


@triton.jit
def end_turn(state, counts, masses, turn, wants, top_k, top_p):
    """Find the bucket in which what is wanted is reached. Where top-k ends, top-p begins, in the first turn's buckets."""
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
        all_stay = bucket == _FIRST  # they are fewer
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
    """Program (draw, part): what a part of so many blocks adds to the buckets of a turn."""
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
    """What tokens up to a magnitude weigh together, in units."""
    total = tl.zeros([], tl.int64)
    for at in range(begin, end, BLOCK):
        scaled = scaled_logits(row, at + tl.arange(0, BLOCK), columns, largest, temperature)
        total += tl.sum(tl.where(magnitude(scaled) <= limit, units(scaled), 0), 0)
    return total


@triton.jit
def place_of(row, begin, columns, largest, temperature, limit, before, target, BLOCK: tl.constexpr):
    """The place, from `begin` on, of the token up to a magnitude with which the mass passes a target. before: the mass ahead."""
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
    """Program (draw, part): what a part of so many blocks weighs; the last one draws. part_masses: int64 [draws, PARTS]."""
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
