// Ranges: which version of a query meets which keys. A key that lies in the pages as rotated at s and shall stand at e meets the
// query turned by s - e; so a change of positions costs another version of the query, and no byte of any page.
//
// The slots of a sequence are cut into ranges. Each names the row of q that holds the sequence's first query as it meets the
// range (the next queries follow row by row), and a reach: a query at index i sees key j of it where 0 <= i - j < reach, or under
// a reach below 0 where i - j >= -reach.
// A range with row -1 is a hole, which nobody sees: neither its table entries nor its bytes are looked at. All ranges of a
// query share one softmax. Decoding takes them as cuts (`RangeCuts`), prompts one after the other for each of their units.

#pragma once

#include <cstdint>
#include <cstdlib>

#include "attention.h"
#include "attention_call.h"
#include "simd.h"

namespace {

constexpr long UNBOUNDED = 1l << 62;  // a reach that ends nowhere

// Keys [begin, end) of a sequence and the row of its first query as it meets them. ahead: keys behind itself that a query sees.
// chunk: a query sees those of its own chunk only; 0: there are none. gap: what its distance from a key is more than the slots between.
struct Range {
    long begin, end, query, reach, ahead = 0, chunk = 0, gap = 0;

    // Keys [first_seen, end_seen) are those that a query at this index sees; none where the first is no less than the second.
    INLINE_MEMBER long first_seen(long index) const {
        if (chunk) return min_of(end, index - index % chunk);
        if (reach == 0) return end;
        return reach < 0 || reach > index ? begin : min_of(end, max_of(begin, index - reach + 1));
    }
    INLINE_MEMBER long end_seen(long index) const { return min_of(end, index + 1 + min_of(reach, 0) + ahead); }
};

// Calls use(range) for the ranges of sequence b that are no holes, in order, up to its length. Neighbours that ask the same are
// one. own: the row of its first query where the call has no ranges; there is one range then.
template <class F> INLINE void each_range(const Operands &p, long b, long own, F use) {
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

// Whether the ranges of sequence b hold all of its keys.
INLINE bool ranges_suffice(const Operands &p, long b) {
    return !p.range_ends || p.length(b) <= 0 || (p.ranges > 0 && p.range_ends[b * p.ranges + p.ranges - 1] >= p.length(b));
}

// Whether every block that keys [begin, end) of sequence b lie in is one of the pages.
static NOINLINE bool blocks_are_there(const Operands &p, long b, long begin, long end) {
    if (begin >= end) return true;
    const long last = ceil_div(end, p.block_size);
    if (last > p.table_columns) return false;
    const int32_t *table = p.tables + b * p.table_row;
    for (long i = begin / p.block_size; i < last; i++)
        if (table[i] < 0 || table[i] >= p.num_blocks) return false;
    return true;
}

// What the last `queries` tokens of sequence b may be told of what they see: 0, or what is wrong with it.
static NOINLINE int check_ranges(const Operands &p, long b, long own, long queries) {
    if (!ranges_suffice(p, b)) return KEYS_WITHOUT_RANGE;
    int code = 0;
    each_range(p, b, own, [&](const Range &range) {
        const long first = range.first_seen(max_of(0, p.length(b) - queries)), end = range.end_seen(p.length(b) - 1);
        if (first >= end || code) return;
        if (p.range_ends && (range.query < 0 || range.query > p.q_rows - queries)) code = NO_SUCH_ROW;
        else if (!blocks_are_there(p, b, first, end)) code = NO_SUCH_BLOCK;
    });
    return code;
}

// The cuts of all rows of a decoding call with ranges: what a row sees of a range, cut at absolute multiples of SPLIT.
struct RangeCuts {
    long *first = nullptr;  // [batch + 1] cuts before each row
    Cut *cuts = nullptr;

    RangeCuts() = default;
    RangeCuts(const RangeCuts &) = delete;
    ~RangeCuts() { free(first), free(cuts); }

    // Makes them and has p take them. Returns 0, or 1 when out of memory. The ranges are checked already.
    int find(Attention &p) {
        first = (long *)malloc((p.batch + 1) * sizeof(long));
        if (!first) return OUT_OF_MEMORY;
        const auto each = [&](auto use) {
            first[0] = 0;
            for (long b = 0; b < p.batch; b++) {
                first[b + 1] = first[b];
                each_range(p, b, b, [&](const Range &range) {
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
