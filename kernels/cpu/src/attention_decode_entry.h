// Entry point of decode attention: distribution of rows over threads, and the order of merging. See attention_decode.h.

#pragma once

#include "attention_call.h"
#include "attention_decode.h"
#include "attention_floats.h"
#include "attention_int8.h"
#include "attention_int8_floats.h"
#include "attention_int8_vnni.h"
#include "attention_key_ranges.h"
#include "recordable.h"
#include "simd.h"
#include "work_split.h"

namespace {

// Elements of keys below which one thread is quicker (measured: two are at 24 keys of 8 heads of 64 already).
constexpr long SERIAL_KEYS = 1 << 12;

// Pages of codes are prefetched chunk by chunk; this prefetches the first chunk of the next cut.
template <> struct PrefetcherOf<int8_t> { typedef KeySpan type; };
template <class T>
INLINE void start_prefetch(KeySpan &, const Attention &p, const SpanSequence &course, long number, long head, long heads) {
    codes::first_chunk(p, course.piece(number), head, heads).prefetch(1 << 20);
}
INLINE void continue_prefetch(KeySpan &prefetcher, const KeySpan &next) { prefetcher = next; }

template <>
void attend_cut<int8_t>(const Attention &p, const Scratch &all, long b, long rows, long head, long heads, long cut,
                        KeySpan &following, bool loaded) {
#if defined(WINDLASS_VNNI) || defined(WINDLASS_DOT)
    if (codes::quads_fit(p)) return codes::attend_cut<codes::Quads>(p, all, b, rows, head, heads, cut, following, loaded);
#endif
    codes::attend_cut<codes::Floats>(p, all, b, rows, head, heads, cut, following, loaded);
}

// Whether row b can share the pass over a cut with previous rows that see keys [begin, end) of it.
template <class T> INLINE bool may_join(const Attention &p, long b, long cut, long begin, long end) {
    if (!p.has(b, cut)) return false;
    const long own = p.begin_of(b, cut);
    return IN_PANELS<T> ? own >= begin && own <= end : own == begin;
}

// As p, but only `count` queries of kv head `head`, from its query `first` on.
static Attention with_queries(Attention p, long head, long first, long count) {
    const long skipped = head * p.group() + first - head * count;  // its queries are read from head * count on
    p.q = (const char *)p.q + skipped * p.q_head * (p.q_type == 0 ? 4 : 2);
    if (p.slopes) p.slopes += skipped;
    p.heads = count * p.kv_heads;
    return p;
}

// The spans of all cuts, by unit. There is no next span where heads are separate units (not adjacent in memory) or a thread's share
// ends.
struct Cuts final : SpanSequence {
    const Attention &p;
    const long *owner, *first;  // the row of each cut; the number of each row's first
    const Shares &shares;
    const long each;  // units of a cut
    long begun = 0;   // the first unit of the current run
    Cuts(const Attention &p, const long *owner, const long *first, const Shares &shares, long each)
        : p(p), owner(owner), first(first), shares(shares), each(each) {}
    KeySpan cut(long number) const {
        const long b = owner[number], cut = p.first_cut(b) + number - first[b];
        return {b, p.begin_of(b, cut), p.end_of(b, cut)};
    }
    KeySpan piece(long unit) const override {
        if (unit != begun && (each > 1 || shares.begins_one(unit))) return {0, 0, 0};
        return cut(unit / each);
    }
};
// One span: all keys that the rows of a pack see.
struct Keys final : SpanSequence {
    const KeySpan all;
    explicit Keys(const KeySpan &all) : all(all) {}
    KeySpan piece(long number) const override { return number ? KeySpan{0, 0, 0} : all; }
};

// Rows with separate tables. Units are (row, cut, some heads), so one long row is spread over the threads. If there is nothing else
// to distribute, the queries of a single head are split too; they read the same keys, which are in the caches by then.
template <class T> static int attend_alone(const Attention &p) {
    const long group = p.group(), part_row = p.value_dim + 2;
    long *first = (long *)malloc((p.batch + 1) * sizeof(long));  // cuts before each sequence
    if (!first) return 1;
    first[0] = 0;
    long keys = 0;
    for (long b = 0; b < p.batch; b++) {
        first[b + 1] = first[b] + p.cuts(b);
        keys += max_of(0, p.length(b) - p.first_key(b));
    }
    const long cuts = first[p.batch], all_threads = most_threads();
    const bool serial = keys * p.kv_heads * p.dim < SERIAL_KEYS;
    // The heads of a cut are adjacent in memory: one thread takes them all if there are enough cuts for all threads.
    const long wanted = serial ? 1 : min_of(p.kv_heads, ceil_div(all_threads, max_of(1, cuts)));
    const long heads = ceil_div(p.kv_heads, wanted), pieces = ceil_div(p.kv_heads, heads);
    const long spread = serial || heads > 1 ? 1 : min_of(ceil_div(group, QUERIES), all_threads / max_of(1, cuts * pieces));
    const long queries = spread > 1 ? round_up(ceil_div(group, spread), QUERIES) : group, slices = ceil_div(group, queries);
    const long units = cuts * pieces * slices;
    const long threads = serial ? 1 : max_of(1, min_of(units, all_threads));
    long *owner = (long *)malloc(max_of(1, cuts) * sizeof(long));
    // Parts [cut][head][part_row], then the scratch of each thread.
    const long scratch = Scratch::floats(p, 1, heads);
    float *parts = (float *)malloc((cuts * p.heads * part_row + threads * scratch) * sizeof(float));
    const int failed = !owner || !parts;
    if (!failed) {
        for (long b = 0; b < p.batch; b++)
            for (long c = first[b]; c < first[b + 1]; c++) owner[c] = b;
        Shares shares(units, threads);
        on_threads(threads, [&](long thread) {
            Scratch s;
            s.place(p, 1, heads, parts + cuts * p.heads * part_row + thread * scratch);
            long coming = -1;  // the unit whose first chunk has been prefetched
            Cuts course(p, owner, first, shares, pieces * slices);
            typename PrefetcherOf<T>::type prefetcher;
            shares.take(thread, [&](long unit) {
                const long at = unit / slices / pieces, head = unit / slices % pieces * heads, here = min_of(heads, p.kv_heads - head);
                const long skipped = unit % slices * queries, count = min_of(queries, group - skipped);
                const bool prefetched = coming == unit;
                if (!prefetched) course.begun = unit, start_prefetch<T>(prefetcher, p, course, unit, head, here);
                const KeySpan own = course.cut(at);
                coming = pieces * slices == 1 && !shares.begins_one(unit + 1) ? unit + 1 : -1;
                continue_prefetch(prefetcher, course.piece(unit + 1));
                const long b = own.b, cut = p.first_cut(b) + at - first[b];
                const bool loaded = prefetched && at > first[b] && p.query_of(b, cut) == p.query_of(b, cut - 1);
                attend_cut<T>(slices == 1 ? p : with_queries(p, head, skipped, count), s, b, 1, head, here, cut, prefetcher, loaded);
                for (long i = 0; i < here * count; i++)
                    keep_part(p, s, i, parts + (at * p.heads + head * group + skipped + i) * part_row);
            });
        });
        for_units(p.batch * p.heads, threads_for(cuts * p.heads * part_row, p.batch * p.heads), [&](long i) {
            const long b = i / p.heads, head = i % p.heads;
            merge(p, parts + (first[b] * p.heads + head) * part_row, first[b + 1] - first[b], p.heads * part_row, b, head);
        });
    }
    free(first), free(owner), free(parts);
    return failed;
}

// Rows with a common table: units are (pack of rows, kv head), merged within the unit.
template <class T> static int attend_packed(const Attention &p) {
    const long group = p.group(), part_row = p.value_dim + 2, rows = max_of(1, PACK / group);
    const long packs = ceil_div(p.batch, rows), units = packs * p.kv_heads;
    long keys = 0, most_cuts = 0;
    for (long pack = 0; pack < packs; pack++) {
        long first = p.first_cut(pack * rows), last = 0;
        for (long b = pack * rows; b < min_of((pack + 1) * rows, p.batch); b++) {
            first = min_of(first, p.first_cut(b));
            last = max_of(last, p.first_cut(b) + p.cuts(b));
            keys += max_of(0, p.length(b) - p.first_key(b));
        }
        most_cuts = max_of(most_cuts, last - first);
    }
    const long threads = keys * p.kv_heads * p.dim < SERIAL_KEYS ? 1 : max_of(1, min_of(units, most_threads()));
    // Of each thread: scratch, then parts [cut][row][query of the group][part_row].
    const long scratch = Scratch::floats(p, rows, 1), own_floats = scratch + most_cuts * rows * group * part_row;
    float *memory = (float *)malloc(max_of(1, threads * own_floats) * sizeof(float));
    if (!memory) return 1;
    Units taken(units);
    on_threads(threads, [&](long thread) {
        Scratch s;
        s.place(p, rows, 1, memory + thread * own_floats);
        float *parts = memory + thread * own_floats + scratch;
        taken.take([&](long unit) {
            // The last pack sees most keys, so it is scheduled first.
            const long b0 = (packs - 1 - unit / p.kv_heads) * rows, head = unit % p.kv_heads;
            const long count = min_of(rows, p.batch - b0);
            long first = p.first_cut(b0), last = 0;
            for (long r = 0; r < count; r++) {
                first = min_of(first, p.first_cut(b0 + r));
                last = max_of(last, p.first_cut(b0 + r) + p.cuts(b0 + r));
            }
            const Keys course({b0, p.first_key(b0), p.length(b0 + count - 1)});
            typename PrefetcherOf<T>::type prefetcher;
            start_prefetch<T>(prefetcher, p, course, 0, head, 1);
            for (long cut = first; cut < last; cut++) {
                for (long r = 0, run; r < count; r += run) {
                    run = 1;
                    if (!p.has(b0 + r, cut)) continue;
                    const long begin = p.begin_of(b0 + r, cut);
                    long end = p.end_of(b0 + r, cut);
                    for (; r + run < count && may_join<T>(p, b0 + r + run, cut, begin, end); run++)
                        end = max_of(end, p.end_of(b0 + r + run, cut));
                    // The next span is most often the row's next cut.
                    continue_prefetch(prefetcher, {b0 + r, end, min_of(end + SPLIT, p.length(b0 + r))});
                    attend_cut<T>(p, s, b0 + r, run, head, 1, cut, prefetcher, false);
                    float *part = parts + ((cut - first) * rows + r) * group * part_row;
                    for (long i = 0; i < run * group; i++) keep_part(p, s, i, part + i * part_row);
                }
            }
            for (long r = 0; r < count; r++) {
                const float *part = parts + ((p.first_cut(b0 + r) - first) * rows + r) * group * part_row;
                for (long i = 0; i < group; i++)
                    merge(p, part + i * part_row, p.cuts(b0 + r), rows * group * part_row, b0 + r, head * group + i);
            }
        });
    });
    free(memory);
    return 0;
}

// One token per sequence. A length of 0 gives a row of zeros. With a table_row of 0 all rows share the first table.
// NO_SUCH_BLOCK: a visible block is missing in the tables or pages. NO_SUCH_ROW: a range names a row that q lacks.
// RANGES_TOO_SHORT: the last range ends before the last key.
EXPORT int WINDLASS_NAME(paged_attention_decode)(const AttentionArguments *arguments) {
    Attention p(*arguments);
    if (is_unsupported(p)) return UNSUPPORTED_CALL;
    for (long b = 0; b < p.batch; b++)
        if (const int code = check_ranges(p, b, b, 1)) return code;
    RangeCuts cuts;
    if (p.range_ends && cuts.find(p)) return OUT_OF_MEMORY;
    const bool packed = p.table_row == 0 && p.batch > 1 && !p.range_ends;
    return with_page_type(p.page_type, [&](auto *page) {
        typedef __typeof__(*page) T;
        return packed ? attend_packed<T>(p) : attend_alone<T>(p);
    });
}
RECORDABLE(paged_attention_decode)

}  // namespace
