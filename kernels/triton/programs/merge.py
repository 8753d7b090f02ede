"""The merge of the splits of a context, each of which `attention` attended by itself."""

import triton
import triton.language as tl

from windlass.kernels.triton.programs.attention_tile import LOG2_E
from windlass.kernels.triton.programs.order import wait_for_predecessor


@triton.jit(do_not_specialize=["num_splits", "maxima", "weights", "query_start"])
def merge_splits_kernel(
    out,
    sums,
    maxima,
    weights,
    query_start,
    sinks,
    num_splits,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SINKS: tl.constexpr,
    SINGLES: tl.constexpr,
    MANY: tl.constexpr,
    FEW: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Program (place, head) of the splits that `attention` wrote: their sum, a FEW splits after the other. MANY: of which the
    largest is found at once."""
    wait_for_predecessor()
    place = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = place
    if SINGLES:
        row = tl.load(query_start + place)
        if tl.load(query_start + place + 1) - row != 1:
            return
    dims = tl.arange(0, BLOCK_V)
    dims_ok = dims < VALUE_DIM
    at = (place * HEADS + head) * num_splits
    largest = tl.full([], float("-inf"), tl.float32)
    if SINKS:
        largest = tl.load(sinks + head) * LOG2_E
    used = 0  # splits up to the last one in which something was seen
    for begin in range(0, num_splits, MANY):
        split = begin + tl.arange(0, MANY)
        own = tl.load(maxima + at + split, mask=split < num_splits, other=float("-inf"))
        largest = tl.maximum(largest, tl.max(own, 0))
        seen = tl.load(weights + at + split, mask=split < num_splits, other=0.0) != 0.0  # NaN shows, too
        used = tl.maximum(used, tl.max(tl.where(seen, split + 1, 0), 0))
    base = tl.where(largest == float("-inf"), 0.0, largest)
    weight = tl.zeros([], tl.float32)
    if SINKS:
        weight = tl.exp2(tl.load(sinks + head) * LOG2_E - base)
    summed = tl.zeros([BLOCK_V], tl.float32)
    # Splits that hold nothing add nothing, so that bits do not depend on how many there are.
    for begin in range(0, used, FEW):
        split = begin + tl.arange(0, FEW)
        ok = split < used
        kept = tl.exp2(tl.load(maxima + at + split, mask=ok, other=float("-inf")) - base)
        weight += tl.sum(kept * tl.load(weights + at + split, mask=ok, other=0.0), 0)
        at_sum = sums + (at + split)[:, None] * VALUE_DIM + dims[None, :]
        summed += tl.sum(kept[:, None] * tl.load(at_sum, mask=ok[:, None] & dims_ok[None, :], other=0.0), 0)
    found = summed / tl.where(weight == 0.0, 1.0, weight)
    tl.store(out + (row * HEADS + head) * VALUE_DIM + dims, found.to(out.dtype.element_ty), mask=dims_ok)
