// Key ranges: which rotated copy of a query attends which keys. A key that was rotated at position s and now belongs at e is
// attended by the query rotated by s - e. So a change of positions costs another copy of the query, and no page is rewritten.
//
// The slots of a sequence are cut into ranges. Each names the row of q that holds the sequence's first query for this range (the
// next queries follow row by row) and a reach: a query at index i sees key j where 0 <= i - j < reach, or, for a negative reach,
// where i - j >= -reach. A range with row -1 is a hole that no query sees: neither its table entries nor its bytes are read. All
// ranges of a query share one softmax. Decode turns them into cuts (`RangeCuts`); prefill processes them in order for each unit.

#pragma once

#include "attention_call.h"
#include "attention_decode.h"
#include "simd.h"

namespace {

constexpr long UNBOUNDED = 1l << 62;  // no limit

// Keys [begin, end) of a sequence and the row of q of its first query for them. ahead: later keys that a query sees. chunk: a query
// sees only keys of its own chunk; 0: no chunks. gap: added to the distance in slots.
struct Range {
    long begin, end, query, reach, ahead = 0, chunk = 0, gap = 0;

    // A query at this index sees keys [first_seen, end_seen), which may be empty.
    INLINE_MEMBER long first_seen(long index) const {
        if (chunk) return min_of(end, index - index % chunk);
        if (reach == 0) return end;
        return reach < 0 || reach > index ? begin : min_of(end, max_of(begin, index - reach + 1));
    }
    INLINE_MEMBER long end_seen(long index) const { return min_of(end, index + 1 + min_of(reach, 0) + ahead); }
};

// Calls use(range) for the ranges of sequence b except holes, in order, up to its length. Adjacent ranges with equal parameters are
// merged. own: the row of its first query in a call without ranges, which has one range.
template <class F> INLINE void for_each_range(const Operands &p, long b, long own, F use) {
    const long length = p.length(b);
    if (!p.range_ends) {
        const long reach = p.window ? p.window : UNBOUNDED;
        return use(Range{0, max_of(0, length), own, reach, p.causal ? 0 : p.window ? p.window - 1 : UNBOUNDED, p.chunk});
    }
    const int64_t *ends = p.range_ends + b * p.ranges, *rows = p.range_rows + b * p.ranges, *reaches = p.range_reaches + b * p.ranges;
    const int64_t *gaps = p.slopes ? p.range_gaps + b * p.ranges : nullptr;
    Range last = {0, 0, -1, 0};
    for (long r = 0; r < p.ranges; r++) {
        const long end = min_of((long)ends[r], length);
        if (end <= last.end) continue;  // padding
        const long gap = gaps ? (long)gaps[r] : 0;
        if (rows[r] == last.query && reaches[r] == last.reach && gap == last.gap) {
            last.end = end;
            continue;
        }
        if (last.query != -1 && last.begin < last.end) use(last);
        last = {last.end, end, (long)rows[r], (long)reaches[r], 0, 0, gap};
    }
    if (last.query != -1 && last.begin < last.end) use(last);
}

// Whether the ranges of sequence b cover all of its keys.
INLINE bool ranges_cover_keys(const Operands &p, long b) {
    return !p.range_ends || p.length(b) <= 0 || (p.ranges > 0 && p.range_ends[b * p.ranges + p.ranges - 1] >= p.length(b));
}

// Whether the pages hold every block of keys [begin, end) of sequence b.
static NOINLINE bool blocks_exist(const Operands &p, long b, long begin, long end) {
    if (begin >= end) return true;
    const long last = ceil_div(end, p.block_size);
    if (last > p.table_columns) return false;
    const int32_t *table = p.tables + b * p.table_row;
    for (long i = begin / p.block_size; i < last; i++)
        if (table[i] < 0 || table[i] >= p.num_blocks) return false;
    return true;
}

// Validates the visible keys of the last `queries` tokens of sequence b. Returns 0 or an error code.
static NOINLINE int check_ranges(const Operands &p, long b, long own, long queries) {
    if (!ranges_cover_keys(p, b)) return RANGES_TOO_SHORT;
    int code = 0;
    for_each_range(p, b, own, [&](const Range &range) {
        const long first = range.first_seen(max_of(0, p.length(b) - queries)), end = range.end_seen(p.length(b) - 1);
        if (first >= end || code) return;
        if (p.range_ends && (range.query < 0 || range.query > p.q_rows - queries)) code = NO_SUCH_ROW;
        else if (!blocks_exist(p, b, first, end)) code = NO_SUCH_BLOCK;
    });
    return code;
}

// The cuts of all rows of a decode call with ranges: the visible keys of each range, cut at absolute multiples of SPLIT.
struct RangeCuts {
    long *first = nullptr;  // [batch + 1] cuts before each row
    Cut *cuts = nullptr;

    RangeCuts() = default;
    RangeCuts(const RangeCuts &) = delete;
    ~RangeCuts() { free(first), free(cuts); }

    // Computes the cuts and stores them in p. Returns 0 or OUT_OF_MEMORY. The ranges have been checked.
    int find(Attention &p) {
        first = (long *)malloc((p.batch + 1) * sizeof(long));
        if (!first) return OUT_OF_MEMORY;
        const auto each = [&](auto use) {
            first[0] = 0;
            for (long b = 0; b < p.batch; b++) {
                first[b + 1] = first[b];
                for_each_range(p, b, b, [&](const Range &range) {
                    long begin = range.first_seen(p.length(b) - 1);
                    const long last = range.end_seen(p.length(b) - 1);
                    for (long end; begin < last; begin = end) {
                        end = min_of(last, (begin / SPLIT + 1) * SPLIT);
                        use(Cut{begin, end, range.query, range.gap}, first[b + 1]++);
                    }
                });
            }
        };
        each([](const Cut &, long) {});
        cuts = (Cut *)malloc(max_of(1, first[p.batch]) * sizeof(Cut));
        if (!cuts) return OUT_OF_MEMORY;
        each([&](const Cut &cut, long at) { cuts[at] = cut; });
        p.range_first = first, p.range_cuts = cuts;
        return 0;
    }
};

}  // namespace
