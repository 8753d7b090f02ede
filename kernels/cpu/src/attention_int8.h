// Decode attention over int8 keys and values in page order (int8_pages.h). See attention_decode.h for cuts, chunks and merging.
//
// A vector holds a quad of W tokens' keys or W dims of four tokens' values, so no sum crosses lanes: scores are ordered by
// token, results by dim. Chunks begin at absolute multiples of CHUNK whatever the window. Hidden tokens are masked by
// selection, since their codes and scales may be anything. They contribute exact zeros, so a row's bits do not depend on the rows
// that share its chunk.

#pragma once

#include "attention_decode.h"
#include "int8_pages.h"
#include "simd.h"

namespace {
namespace codes {

constexpr long PANELS = CHUNK / PANEL_TOKENS;

// The part [begin, end) of a chunk that any row sees, for one kv head: whole panels, as tokens of the chunk.
struct Chunk : CodePanels<PANELS> {
    long begin, end;
    const float *slopes;  // of the kv head's queries, or null
    long distance;        // of the query from the first key; with slopes

    INLINE_MEMBER const int8_t *key_codes(long token) const { return keys[token / PANEL_TOKENS] + token % PANEL_TOKENS * QUAD; }
    INLINE_MEMBER vf key_scale(long token) const { return load(key_scales[token / PANEL_TOKENS] + token % PANEL_TOKENS); }
    INLINE_MEMBER vf value_scale(long token) const { return load(value_scales[token / PANEL_TOKENS] + token % PANEL_TOKENS); }

    // Tokens first to last of row b's sequence, of the chunk that begins at `start`.
    void find(const Attention &p, const CodePages &pages, long b, long head, long start, long first, long last) {
        begin = (first - start) / PANEL_TOKENS * PANEL_TOKENS, end = round_up(last - start, PANEL_TOKENS);
        for (long j = begin; j < end; j += PANEL_TOKENS)
            find_panel(j / PANEL_TOKENS, pages, p.tables + b * p.table_row, head, start + j);
    }
    // The same tokens of the next head.
    void next_head(const CodePages &pages) {
        for (long i = begin / PANEL_TOKENS; i < end / PANEL_TOKENS; i++) {
            keys[i] += pages.block_size * pages.quads * QUAD, values[i] += pages.block_size * pages.value_dim;
            key_scales[i] += pages.block_size, value_scales[i] += pages.block_size;
        }
    }
};

// Prefetches tokens [at, end) of a row for some heads in memory order, a few lines at a time between the arithmetic. Many lines
// at once would wait for each other; one head at a time gives runs too short for the hardware prefetcher (measured: half the
// bandwidth).
struct CodePrefetcher : LinePrefetcher<CodePrefetcher> {
    const Attention *p;
    CodePages pages;
    long b, head, heads, at, end;
    long count = 0;             // tokens up to the end of the block of `at`
    long part = 0, number = 0;  // keys, values, their scales; the head

    CodePrefetcher(const Attention &p, const CodePages &pages, long b, long head, long heads, long at, long end)
        : p(&p), pages(pages), b(b), head(head), heads(heads), at(at), end(end) {
        count = min_of(end - at, p.block_size - at % p.block_size);
    }
    NOINLINE bool next_run() {
        if (number == heads) number = 0, part++;
        if (part == 4) {
            part = 0, at += count;
            count = min_of(end - at, p->block_size);
        }
        if (at >= end) return false;
        const long block = p->tables[b * p->table_row + at / p->block_size], token = at % p->block_size, h = head + number;
        const long bytes = part == 0 ? pages.quads * QUAD : part == 1 ? pages.value_dim : long(sizeof(float));
        const void *first = part == 0   ? (const void *)pages.key_panel(block, h, token)
                            : part == 1 ? (const void *)pages.value_quad(block, h, token)
                            : part == 2 ? (const void *)pages.key_scale(block, h, token)
                                        : (const void *)pages.value_scale(block, h, token);
        // All heads of a full block are one run.
        const long together = count == p->block_size ? heads : 1;
        line = (const char *)first;
        left = ceil_div(together * count * bytes, 64);
        number += together;
        return true;
    }
};

static CodePrefetcher first_chunk(const Attention &p, const KeySpan &of, long head, long heads) {
    const long end = min_of(of.at / CHUNK * CHUNK + CHUNK, of.end);
    return CodePrefetcher(p, p.codes(), of.b, head, heads, of.at / PANEL_TOKENS * PANEL_TOKENS, of.at < end ? end : 0);
}

// Of W tokens from j on, x where a row sees them, else `hidden`.
INLINE vf only_seen(vf x, long j, long first, long last, float hidden) {
    if (j >= first && j + W <= last) return x;
    const vi lanes = lane_numbers() + int32_t(j);
    return (lanes >= int32_t(first)) & (lanes < int32_t(last)) ? x : splat(hidden);
}

// The tokens [first, last) of a chunk that a query sees.
struct Seen {
    long first, last;
    INLINE_MEMBER bool all(const Chunk &chunk) const { return first <= chunk.begin && last >= chunk.end; }
};

// Final scores of W tokens from j on.
INLINE vf capped(const Attention &p, vf x) {
    return p.soft_cap == 0.0f ? x : tanh_of(x / p.soft_cap) * (p.soft_cap * LOG2_E);
}

// Of every vector the largest lane (NaN may be passed over) and the sum, four vectors at once where there are four; the sums are
// added in one order either way.
template <int N> INLINE void largest_of(const vf (&x)[N], float *most) {
    for (int n = 0; n < N; n++) most[n] = largest(x[n]);
}
#if WINDLASS_LANES == 16
INLINE void largest_of(const vf (&x)[4], float *most) {
    const vi even = WINDLASS_PAIRS(0, W), odd = WINDLASS_PAIRS(1, W + 1);
    const auto fold = [&](vf a, vf b) { return larger(__builtin_shuffle(a, b, even), __builtin_shuffle(a, b, odd)); };
    vf y = fold(fold(x[0], x[1]), fold(x[2], x[3]));
    y = larger(y, __builtin_shuffle(y, vi{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11}));
    y = larger(y, __builtin_shuffle(y, vi{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}));
    __builtin_memcpy(most, &y, 16);
}
#endif
template <int N> INLINE void sums_of(const vf (&x)[N], float *sums) {
    if constexpr (N == 4) sum_four(x[0], x[1], x[2], x[3], sums);
    else
        for (int n = 0; n < N; n++) sums[n] = sum(x[n]);
}

// Scores of NQ queries become weights times value scales, zeros where a query does not see, and their largest goes to `most`,
// NaN if any is; top, total and acc are updated. Queries are interleaved so that their dependency chains overlap.
template <int NQ> static NOINLINE void soften(const Attention &p, const Scratch &s, long i, const Chunk &chunk, const Seen *seen,
                                             float *most, CodePrefetcher &ahead) {
    float *scores = s.scores + i * CHUNK;
    bool all = p.soft_cap == 0.0f && !chunk.slopes;
    for (int n = 0; n < NQ; n++) all &= seen[n].all(chunk);
    if (!all)
        for (int n = 0; n < NQ; n++)
            for (long j = chunk.begin; j < chunk.end; j += W) {
                float *at = scores + n * CHUNK + j;
                vf score = capped(p, load(at));
                if (chunk.slopes) score += bias_of(chunk.slopes[i + n], chunk.distance - j);
                store(at, only_seen(score, j, seen[n].first, seen[n].last, -__builtin_inff()));
            }
    vf highest[NQ];
    for (int n = 0; n < NQ; n++) highest[n] = splat(-__builtin_inff());
    for (long j = chunk.begin; j < chunk.end; j += W) {
        ahead.prefetch(1);
        for (int n = 0; n < NQ; n++) highest[n] = larger(load(scores + n * CHUNK + j), highest[n]);
    }
    vf base[NQ], total[NQ];
    vu bits[NQ];
    float highs[NQ];
    largest_of(highest, highs);
    for (int n = 0; n < NQ; n++) {
        const float here = highs[n], old = s.top[i + n];
        if (here > old) {
            const float shrink = exp2_of(splat(old - here))[0];
            float *acc = s.acc + (i + n) * s.acc_row;
            s.top[i + n] = here;
            s.total[i + n] *= shrink;
            for (long d = 0; d < s.acc_row; d += W) store(acc + d, load(acc + d) * shrink);
        }
        base[n] = splat(s.top[i + n] == -__builtin_inff() ? 0.0f : s.top[i + n]);
        total[n] = vf{}, bits[n] = vu{};
    }
    for (long j = chunk.begin; j < chunk.end; j += W) {
        const vf scale = chunk.value_scale(j);
        ahead.prefetch(1);
        for (int n = 0; n < NQ; n++) {
            float *at = scores + n * CHUNK + j;
            const vf weight = exp2_of(load(at) - base[n]);
            total[n] += weight;
            vf scaled = weight * scale;
            if (!all) scaled = only_seen(scaled, j, seen[n].first, seen[n].last, 0.0f);
            bits[n] = larger_bits((vu)scaled, bits[n]);
            store(at, scaled);
        }
    }
    float sums[NQ];
    sums_of(total, sums);
    for (int n = 0; n < NQ; n++) {
        s.total[i + n] += sums[n];
        most[n] = float_of(largest(bits[n]));
    }
}

// One cut of `rows` rows from row b on, which share a table, for `heads` kv heads from `head` on: fills acc, top and total of
// their queries, [head][row][query of the group]. The visible keys of the rows are contiguous. Products: Floats or Quads. loaded:
// the scaled queries are left from the previous cut.
template <class Products>
static void attend_cut(const Attention &p, const Scratch &all, long b, long rows, long head, long heads, long cut,
                       const KeySpan &following, bool loaded) {
    const long group = p.group(), queries = rows * group;
    const CodePages pages = p.codes();
    for (long h = 0; h < heads; h++) {
        const Scratch s = all.from(h * queries);
        if (!loaded) {
            load_queries(p, s, b, p.query_of(b, cut), rows, head + h);
            for (long i = 0; i < queries; i++) Products::prepare(p, s.query + i * s.query_row);
        }
        clear_results(s, queries);
    }
    long first = p.begin_of(b, cut), last = p.end_of(b, cut);
    for (long r = 1; r < rows; r++) first = min_of(first, p.begin_of(b + r, cut)), last = max_of(last, p.end_of(b + r, cut));
    Chunk chunk;
    for (long start = first / CHUNK * CHUNK; start < last; start += CHUNK) {
        const long next = start + CHUNK;
        if (p.slopes) chunk.distance = p.distance(b, cut, start);
        CodePrefetcher ahead = next < last ? CodePrefetcher(p, pages, b, head, heads, next, min_of(next + CHUNK, last))
                                           : first_chunk(p, following, head, heads);
        for (long h = 0; h < heads; h++) {
            if (h == 0) chunk.find(p, pages, b, head, start, max_of(start, first), min_of(start + CHUNK, last));
            else chunk.next_head(pages);
            chunk.slopes = p.slopes ? p.slopes + (head + h) * group : nullptr;
            const Scratch s = all.from(h * queries);
            Products::score(p, s, queries, chunk, ahead);
            together(0, queries, [&](auto number, long i) {
                constexpr int count = decltype(number)::value;
                Seen seen[QUERIES];
                float most[QUERIES];
                for (long n = 0; n < count; n++) {
                    const long row = b + (i + n) / group;
                    seen[n] = {p.begin_of(row, cut) - start, p.end_of(row, cut) - start};
                }
                soften<count>(p, s, i, chunk, seen, most, ahead);
                for (long n = 0; n < count; n++) Products::finish_weights(s.scores + (i + n) * CHUNK, chunk, most[n]);
            });
            Products::add(p, s, queries, chunk, ahead);
        }
    }
}

}  // namespace codes
}  // namespace
