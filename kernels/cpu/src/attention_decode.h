// Attention of one new token per sequence over its paged keys and values: "flash decoding".
//
// The keys of a sequence are cut at absolute multiples of SPLIT. A thread takes one cut of some or all kv heads and processes
// CHUNK_KEYS keys at a time, head after head, with a running maximum and sum in base 2. Cuts are merged in order by their
// log-sum-exp, so a sequence's result depends only on its own length, not on other sequences or the number of threads. Queries
// of one kv head share its loads. Only visible keys are read, and only table entries from the first visible key on. While a
// chunk is processed, the next one (of this or another row) is prefetched with all its heads in memory order: one head at a time
// would be a stride that the hardware prefetcher does not follow (measured: a third of the bandwidth).
//
// A call with key ranges (attention_key_ranges.h) has one or more cuts per range, each with the row of q that attends it.
//
// Rows with a common table are queries of one prompt. They are processed in packs that share the loads of common chunks. Every
// row passes through the same cuts and chunks as it would alone, so its bits are the same.

#pragma once

#include "attention_call.h"
#include "int8_pages.h"
#include "simd.h"

namespace {

constexpr long SPLIT = 256;    // keys per cut
constexpr long CHUNK = 128;    // keys whose scores are held at a time; divides SPLIT
// Keys processed at a time. Wider elements use shorter chunks: the chunk being read and the prefetched one share the L2 cache.
template <class T> constexpr long CHUNK_KEYS = IN_PANELS<T> ? CHUNK : CHUNK / 2;
// Float32 is prefetched in bursts of BURST_RUN bytes, keys and values alternating; narrower elements evenly between the arithmetic,
// a block at a time. Swapping the two is slower (measured: a tenth or more).
template <class T> constexpr bool IN_BURSTS = sizeof(T) == 4;
constexpr long BURST_RUN = 4096;
constexpr int QUERIES = 4;     // queries of one kv head handled together
// Keys, and vectors of a value, handled together with this number of queries: as many accumulators as registers allow.
#if WINDLASS_REGISTERS >= 32
constexpr int keys_with(int) { return 4; }
constexpr int columns_with(int) { return 4; }
#else
constexpr int keys_with(int queries) { return queries == 4 ? 2 : 4; }
constexpr int columns_with(int queries) { return queries == 4 ? 2 : 4; }
#endif
constexpr long PACK = 16;      // queries of one kv head, over all rows of a pack
constexpr float LOG2_E = 1.44269504f;

// The arguments, and values derived from them for every kernel.
struct Operands : AttentionArguments {
    explicit Operands(const AttentionArguments &arguments) : AttentionArguments(arguments) {}

    INLINE_MEMBER long length(long b) const {
        return int64_lengths ? (long)((const int64_t *)lengths)[b] : (long)((const int32_t *)lengths)[b];
    }
    INLINE_MEMBER long group() const { return heads / kv_heads; }
    // The first key that a query at this index sees; without ranges.
    INLINE_MEMBER long first_seen(long index) const {
        return window ? max_of(0, index - window + 1) : chunk ? index - index % chunk : 0;
    }
    // The latent row of entry slot * kv_heads + head.
    INLINE_MEMBER CodeRow code_row(long entry) const {
        return {(const int8_t *)keys + entry * dim, key_scales + entry * row_groups(dim), 0};
    }
    INLINE_MEMBER CodePages codes() const {
        return {(int8_t *)keys, (int8_t *)values, (float *)key_scales, (float *)value_scales, block_size, kv_heads,
                ceil_div(dim, QUAD), value_dim};
    }
};

// Keys [at, end) of row b; nothing where at >= end.
struct KeySpan { long b, at, end; };
// The spans of keys that a thread processes in order, so that the next one can be prefetched.
struct SpanSequence {
    // Span `number`, or an empty one after the last.
    virtual KeySpan piece(long number) const = 0;
};

// Prefetches cache lines into L2, run after run. Runs::next_run sets `line` and `left` to the next run, or returns false after the
// last.
template <class Runs> struct LinePrefetcher {
    const char *line = nullptr;
    long left = 0;  // cache lines left in the run

    NOINLINE void prefetch_line_by_line(long lines) {
        for (; lines > 0; lines--, left--, line += 64) {
            if (left == 0 && !static_cast<Runs *>(this)->next_run()) return;
            __builtin_prefetch(line, 0, 2);
        }
    }
    INLINE_MEMBER void prefetch(long lines) {
        if (left < lines) return prefetch_line_by_line(lines);
        left -= lines;
        for (; lines > 0; lines--, line += 64) __builtin_prefetch(line, 0, 2);
    }
    template <long lines> INLINE_MEMBER void prefetch() {
        if (left < lines) return prefetch_line_by_line(lines);
        for (long i = 0; i < lines; i++) __builtin_prefetch(line + i * 64, 0, 2);
        left -= lines, line += lines * 64;
    }
};

// Calls f(Number<n>, i) for queries [first, last), n from i on together: QUERIES where there are as many, else all that are left.
template <class F> INLINE void together(long first, long last, const F &f) {
    long i = first;
    for (; i + QUERIES <= last; i += QUERIES) f(Number<QUERIES>{}, i);
    if (last - i == 3) f(Number<3>{}, i);
    else if (last - i == 2) f(Number<2>{}, i);
    else if (last - i == 1) f(Number<1>{}, i);
}

// f(pointer of the element type) for pages of this type (AttentionArguments).
template <class F> INLINE int with_page_type(int type, const F &f) {
    switch (type) {
        case 0: return f((float *)nullptr);
        case 1: return f((bf16 *)nullptr);
        case 2: return f((f16 *)nullptr);
        case 3: return f((int8_t *)nullptr);
        default: return f((row_code *)nullptr);
    }
}

// Keys [begin, end) of a row, the row of q that attends them, and what is added to slot distances (gap).
struct Cut { long begin, end, query, gap; };

struct Attention : Operands {
    using Operands::Operands;
    const long *range_first = nullptr;  // of calls with ranges: cuts before each row, and the cuts (RangeCuts)
    const Cut *range_cuts = nullptr;

    INLINE_MEMBER const Cut &range_cut(long b, long cut) const { return range_cuts[range_first[b] + cut]; }
    INLINE_MEMBER long first_key(long b) const { return length(b) > 0 ? first_seen(length(b) - 1) : 0; }
    INLINE_MEMBER long first_cut(long b) const { return range_cuts ? 0 : first_key(b) / SPLIT; }
    INLINE_MEMBER long cuts(long b) const {
        if (range_cuts) return range_first[b + 1] - range_first[b];
        return length(b) <= 0 ? 0 : ceil_div(length(b), SPLIT) - first_cut(b);
    }
    INLINE_MEMBER long begin_of(long b, long cut) const {
        return range_cuts ? range_cut(b, cut).begin : max_of(cut * SPLIT, first_key(b));
    }
    INLINE_MEMBER long end_of(long b, long cut) const {
        return range_cuts ? range_cut(b, cut).end : min_of((cut + 1) * SPLIT, length(b));
    }
    // The row of q that attends the cut.
    INLINE_MEMBER long query_of(long b, long cut) const { return range_cuts ? range_cut(b, cut).query : b; }
    // How far the query is from key `at` of the cut; with slopes.
    INLINE_MEMBER long distance(long b, long cut, long at) const { return length(b) - 1 - at + range_cut(b, cut).gap; }
    // Index of key `at` of row b, head 0, among all [slot][kv head] of the pages.
    INLINE_MEMBER long entry(long b, long at) const {
        return ((long)tables[b * table_row + at / block_size] * block_size + at % block_size) * kv_heads;
    }
    INLINE_MEMBER bool has(long b, long cut) const { return begin_of(b, cut) < end_of(b, cut); }
};

// Per-thread working memory: scaled queries, their weighted values, running maxima and sums; and the scores of one kv head's
// queries against a chunk.
struct Scratch {
    float *query, *scores, *acc, *top, *total;
    float *wide;  // of latent rows: a chunk as floats
    long query_row, acc_row;
    static long wide_floats(const Attention &p) { return p.page_type == LATENT_PAGES ? CHUNK_KEYS<row_code> * p.dim : 0; }
    static long floats(const Attention &p, long rows, long heads) {
        const long queries = rows * p.group();
        return queries * heads * (round_up(p.dim, W) + round_up(p.value_dim, W) + 2) + queries * CHUNK + 4 * W + wide_floats(p);
    }
    void place(const Attention &p, long rows, long heads, float *memory) {
        const long queries = rows * p.group();
        query_row = round_up(p.dim, W), acc_row = round_up(p.value_dim, W);
        wide = memory;
        scores = wide + wide_floats(p);
        query = scores + queries * CHUNK;
        acc = query + queries * heads * query_row;
        top = acc + queries * heads * acc_row;
        total = top + queries * heads;
    }
    // The part for queries from `first` on; the score buffer is shared.
    INLINE_MEMBER Scratch from(long first) const {
        Scratch s = *this;
        s.query += first * query_row, s.acc += first * acc_row, s.top += first, s.total += first;
        return s;
    }
};

// The queries of `rows` rows from b on and one kv head, scaled for the softmax in base 2. query: the first one's row of q.
static void load_queries(const Attention &p, const Scratch &s, long b, long query, long rows, long head) {
    const long group = p.group();
    for (long r = 0; r < rows; r++) {
        const float scale = (p.soft_cap != 0.0f ? p.scale : p.scale * LOG2_E) * p.score_scale[b + r];
        for (long i = 0; i < group; i++) {
            const long source = (query + r) * p.q_row + (head * group + i) * p.q_head;
            float *target = s.query + (r * group + i) * s.query_row;
            with_type(p.q_type, [&](auto *type) {
                const auto *q = (decltype(type))p.q + source;
                for (long d = 0; d < p.dim; d++) target[d] = widen(q[d]) * scale;
            });
            for (long d = p.dim; d < s.query_row; d++) target[d] = 0.0f;
        }
    }
}

// The ALiBi bias of W keys in base 2; the first key is `distance` positions before the query.
INLINE vf bias_of(float slope, long distance) {
    return (__builtin_convertvector(lane_numbers(), vf) - float(distance)) * (slope * LOG2_E);
}

// Reset to no keys seen.
static void clear_results(const Scratch &s, long queries) {
    __builtin_memset(s.acc, 0, queries * s.acc_row * sizeof(float));
    for (long i = 0; i < queries; i++) s.top[i] = -__builtin_inff(), s.total[i] = 0.0f;
}

// A query's state after a cut, for the merge.
INLINE void keep_part(const Attention &p, const Scratch &s, long query, float *part) {
    __builtin_memcpy(part, s.acc + query * s.acc_row, p.value_dim * sizeof(float));
    part[p.value_dim] = s.top[query];
    part[p.value_dim + 1] = s.total[query];
}

// Result of one head from its cuts, each [value_dim weighted sums, top, total].
static NOINLINE void merge(const Attention &p, const float *parts, long count, long part_row, long b, long head) {
    const long at = (b * p.heads + head) * p.value_dim;
    const float sink = p.sinks ? p.sinks[head] * LOG2_E : -__builtin_inff();
    float top = sink;
    for (long c = 0; c < count; c++) top = parts[c * part_row + p.value_dim] > top ? parts[c * part_row + p.value_dim] : top;
    const float base = top == -__builtin_inff() ? 0.0f : top;
    float total = p.sinks ? exp2_of(splat(sink - base))[0] : 0.0f;
    for (long c = 0; c < count; c++)
        total += parts[c * part_row + p.value_dim + 1] * exp2_of(splat(parts[c * part_row + p.value_dim] - base))[0];
    for (long d = 0; d < p.value_dim; d += W) {
        const long n = min_of(W, p.value_dim - d);
        vf sums = {};
        for (long c = 0; c < count; c++) {
            const float *part = parts + c * part_row;
            const vf x = load_part(part + d, n);
            sums += x * exp2_of(splat(part[p.value_dim] - base));
        }
        if (count) sums /= total;
        with_type(p.q_type, [&](auto *type) { store_some((decltype(type))p.out + at + d, sums, n); });
    }
}

}  // namespace
