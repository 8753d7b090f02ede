// Decoding over keys and values of floats: scores, running softmax and weighted values of a cut. See attention_decode.h. Rows of codes
// (int8_pages.h) are converted to floats one chunk at a time, once for all queries of their kv head.

#pragma once

#include "attention_decode.h"
#include "simd.h"

namespace {

// Prefetches the keys and values of some heads of a sequence of spans in memory order, interleaved with the arithmetic. Its
// lead is the amount prefetched at the start: one chunk, since the first head reads all of it at once, plus MORE bytes.
template <class T> struct FloatPrefetcher : LinePrefetcher<FloatPrefetcher<T>> {
    const Attention *p;
    const SpanSequence *course;
    long number, head, heads;
    KeySpan piece;
    bool over = true;
    long count = 0;             // keys of the run: up to a block when all heads are prefetched, else one
    bool value = true;          // whether the run holds values; keys come first
    static constexpr long MORE = 48 << 10;  // bytes prefetched at the start in addition to a chunk

    // Start with span `from`.
    void start_prefetch(const Attention &attention, const SpanSequence &pieces, long from, long first_head, long some_heads) {
        p = &attention, course = &pieces, number = from, head = first_head, heads = some_heads, piece = course->piece(number);
        over = false, count = 0, value = true, this->left = 0;
        const long chunk = CHUNK_KEYS<T> * heads * (p->dim + p->value_dim) * (long)sizeof(T);
        this->prefetch((chunk + min_of(chunk, MORE)) / 64);
    }
    NOINLINE bool next_run() {
        if (over) return false;
        value = !value;
        if (!value) {
            piece.at += count, count = 0;
            if (piece.at >= piece.end) {
                const KeySpan next = course->piece(number + 1);
                if (next.at >= next.end) return over = true, false;
                piece = next, number++;
            }
            const long at = piece.at;
            count = heads == p->kv_heads ? min_of(piece.end - at, p->block_size - at % p->block_size) : 1;
            if (IN_BURSTS<T>) count = max_of(1, min_of(count, BURST_RUN / (heads * p->dim * (long)sizeof(T))));
        }
        const long entry = p->entry(piece.b, piece.at) + head, dim = value ? p->value_dim : p->dim;
        this->line = (const char *)((const T *)(value ? p->values : p->keys) + entry * dim);
        this->left = ceil_div(count * heads * dim * (long)sizeof(T), 64);
        return true;
    }
};

// The element type in products with pages of T.
template <class T> struct Multiplied { typedef T type; };
template <> struct Multiplied<row_code> { typedef float type; };

// The prefetcher for pages of T. Latent rows are prefetched where they are converted.
template <class T> struct PrefetcherOf { typedef FloatPrefetcher<typename Multiplied<T>::type> type; };
template <class T, class E>
INLINE void start_prefetch(FloatPrefetcher<E> &prefetcher, const Attention &p, const SpanSequence &course, long number, long head,
                           long heads) {
    if (sizeof(T) == sizeof(E)) prefetcher.start_prefetch(p, course, number, head, heads);
}
// Nothing to do: this prefetcher follows the spans by itself.
template <class E> INLINE void continue_prefetch(FloatPrefetcher<E> &, const KeySpan &) {}

// The keys and values of one kv head in a chunk.
template <class T> struct Chunk {
    const T *keys[CHUNK_KEYS<T>], *values[CHUNK_KEYS<T>];
    long count;
    FloatPrefetcher<T> *ahead;
    const float *slopes;  // of the kv head's queries, or null
    long distance;        // of the query from the first key; with slopes

    // The first n of the slots that `entries` name.
    void find(const Attention &p, const long *entries, long head, long n) {
        count = n;
        for (long j = 0; j < n; j++) {
            keys[j] = (const T *)p.keys + (entries[j] + head) * p.dim;
            values[j] = (const T *)p.values + (entries[j] + head) * p.value_dim;
        }
    }
    // The same for latent rows, converted to floats in `wide`. The rows of the next n entries are prefetched.
    void widen(const Attention &p, const long *entries, long head, long n, long next, float *wide) {
        count = n;
        for (long j = 0; j < n; j++, wide += p.dim) {
            if (j < next) {
                const CodeRow row = p.code_row(entries[n + j] + head);
                for (long d = 0; d < p.dim; d += 64) __builtin_prefetch(row.codes + d, 0, 2);
                __builtin_prefetch(row.scales, 0, 2);
            }
            copy_converted(p.code_row(entries[j] + head), wide, p.dim);
            keys[j] = values[j] = (const T *)wide;
        }
    }
    // The same slots' next head.
    void next_head(const Attention &p) {
        for (long j = 0; j < count; j++) keys[j] += p.dim;
        for (long j = 0; j < count; j++) values[j] += p.value_dim;
    }
};

#if WINDLASS_LANES == 16
// Scores of 16 keys at once. A vector holds four adjacent dims of four keys, so that the final sum across lanes covers four lanes
// of a score instead of 16.
template <class T> struct Quarters {
    static constexpr int DIMS = 4, VECTORS = 1;  // dims of a key taken in one step, and the vectors they make of four keys
};
// 16 bytes of a key are its even dims, shifted, and its odd ones, masked.
template <> struct Quarters<bf16> {
    static constexpr int DIMS = 8, VECTORS = 2;
};

// 16 dims of each of four keys, four dims of all four in a vector.
template <> struct Quarters<f16> {
    static constexpr int DIMS = 16, VECTORS = 4;
};

INLINE void load_quarters(const float *a, const float *b, const float *c, const float *d, vf (&x)[1]) {
#if defined(WINDLASS_AVX)
    __m512 quarters = _mm512_broadcast_f32x4(_mm_loadu_ps(a));
    quarters = _mm512_mask_broadcast_f32x4(quarters, 0x00f0, _mm_loadu_ps(b));
    quarters = _mm512_mask_broadcast_f32x4(quarters, 0x0f00, _mm_loadu_ps(c));
    x[0] = (vf)_mm512_mask_broadcast_f32x4(quarters, 0xf000, _mm_loadu_ps(d));
#else
    const float *const from[4] = {a, b, c, d};
    for (int i = 0; i < 4; i++) __builtin_memcpy((char *)&x[0] + 16 * i, from[i], 16);
#endif
}
INLINE void load_quarters(const bf16 *a, const bf16 *b, const bf16 *c, const bf16 *d, vf (&x)[2]) {
    vf pairs[1];
    load_quarters((const float *)a, (const float *)b, (const float *)c, (const float *)d, pairs);
    x[0] = (vf)((vu)pairs[0] << 16), x[1] = (vf)((vu)pairs[0] & 0xffff0000u);
}
INLINE void load_quarters(const f16 *a, const f16 *b, const f16 *c, const f16 *d, vf (&x)[4]) {
#if defined(WINDLASS_AVX)
    const auto row = [](const f16 *key) { return _mm256_loadu_si256((const __m256i *)key); };
    const __m256i even_ab = _mm256_unpacklo_epi64(row(a), row(b)), odd_ab = _mm256_unpackhi_epi64(row(a), row(b));
    const __m256i even_cd = _mm256_unpacklo_epi64(row(c), row(d)), odd_cd = _mm256_unpackhi_epi64(row(c), row(d));
    x[0] = (vf)_mm512_cvtph_ps(_mm256_permute2x128_si256(even_ab, even_cd, 0x20));
    x[1] = (vf)_mm512_cvtph_ps(_mm256_permute2x128_si256(odd_ab, odd_cd, 0x20));
    x[2] = (vf)_mm512_cvtph_ps(_mm256_permute2x128_si256(even_ab, even_cd, 0x31));
    x[3] = (vf)_mm512_cvtph_ps(_mm256_permute2x128_si256(odd_ab, odd_cd, 0x31));
#else
    const f16 *const from[4] = {a, b, c, d};
    for (int v = 0; v < 4; v++) {
        f16 halves[16];
        for (int i = 0; i < 4; i++) __builtin_memcpy(halves + 4 * i, from[i] + 4 * v, 8);
        x[v] = load(halves);
    }
#endif
}
// Four floats in every quarter.
INLINE vf repeat_four(const float *p) {
#if defined(WINDLASS_AVX)
    return (vf)_mm512_broadcast_f32x4(_mm_loadu_ps(p));
#else
    vf x;
    for (int i = 0; i < 4; i++) __builtin_memcpy((char *)&x + 16 * i, p, 16);
    return x;
#endif
}

// Reorders a query's full vectors for score_tile.
template <class T> static void arrange_query(float *query, long dim) {
    if constexpr (Quarters<T>::VECTORS == 2)
        for (long d = 0; d < dim / W * W; d += 8) {
            float eight[8];
            for (int i = 0; i < 8; i++) eight[i] = query[d + i % 4 * 2 + i / 4];
            __builtin_memcpy(query + d, eight, sizeof eight);
        }
}

constexpr int tile_with(int) { return 16; }  // keys of a tile

// scores[i][j] of NQ queries and a tile of keys, unscaled. Every score is summed in one order, whatever NQ.
template <class T, int NQ>
INLINE void score_tile(const float *query, long query_row, const T *const *keys, long dim, float *scores, FloatPrefetcher<T> &ahead,
                       bool prefetch) {
    constexpr int VECTORS = Quarters<T>::VECTORS, DIMS = Quarters<T>::DIMS, TILE = tile_with(NQ);
    if (prefetch && IN_BURSTS<T>) ahead.prefetch(TILE * dim * (long)sizeof(T) / 64);
    vf acc[NQ][4] = {};
    for (long d = 0; d < dim / W * W; d += DIMS) {
        if (prefetch && !IN_BURSTS<T>) ahead.template prefetch<TILE * DIMS * sizeof(T) / 64>();
        vf q[NQ][VECTORS];
        for (int i = 0; i < NQ; i++)
            for (int v = 0; v < VECTORS; v++) q[i][v] = repeat_four(query + i * query_row + d + 4 * v);
        for (int g = 0; g < 4; g++) {  // keys g, 4 + g, 8 + g, 12 + g: sums of neighbours then leave them in order
            vf k[VECTORS];
            load_quarters(keys[g] + d, keys[4 + g] + d, keys[8 + g] + d, keys[12 + g] + d, k);
            for (int v = 0; v < VECTORS; v++)
                for (int i = 0; i < NQ; i++) acc[i][g] = add_product(acc[i][g], k[v], q[i][v]);
        }
    }
    for (int i = 0; i < NQ; i++)
        store(scores + i * CHUNK, add_neighbours(add_neighbours(acc[i][0], acc[i][1]), add_neighbours(acc[i][2], acc[i][3])));
}
#else
template <class T> static void arrange_query(float *, long) {}

constexpr int tile_with(int queries) { return keys_with(queries); }

// scores[i][j] of NQ queries and a tile of keys, unscaled. Every score is summed in one order, whatever NQ.
template <class T, int NQ>
INLINE void score_tile(const float *query, long query_row, const T *const *keys, long dim, float *scores, FloatPrefetcher<T> &ahead,
                       bool prefetch) {
    constexpr int KEYS = keys_with(NQ);
    if (prefetch) ahead.prefetch(KEYS * ceil_div(dim * (long)sizeof(T), 64));
    vf acc[NQ][KEYS] = {};
    const T *key[KEYS];
    for (int j = 0; j < KEYS; j++) key[j] = keys[j];
    for (long d = 0; d + W <= dim; d += W) {
        vf x[NQ];
        for (int i = 0; i < NQ; i++) x[i] = load(query + i * query_row + d);
        for (int j = 0; j < KEYS; j++) {
            const vf k = load(key[j] + d);
            for (int i = 0; i < NQ; i++) acc[i][j] = add_product(acc[i][j], k, x[i]);
        }
    }
    if constexpr (KEYS == 4) {
        for (int i = 0; i < NQ; i++) sum_four(acc[i][0], acc[i][1], acc[i][2], acc[i][3], scores + i * CHUNK);
    } else {
        for (int i = 0; i < NQ; i += 2) {
            const int next = i + 1 < NQ ? i + 1 : i;
            float four[4];
            sum_four(acc[i][0], acc[i][1], acc[next][0], acc[next][1], four);
            __builtin_memcpy(scores + i * CHUNK, four, 8);
            __builtin_memcpy(scores + next * CHUNK, four + 2, 8);
        }
    }
}
#endif

// The share of the dims past the last whole vector.
template <class T>
static NOINLINE void score_tail(const float *query, const T *const *keys, long dim, long count, float *scores) {
    for (long j = 0; j < count; j++)
        for (long d = dim / W * W; d < dim; d++) scores[j] += query[d] * widen(keys[j][d]);
}

template <class T, int NQ>
static NOINLINE void score_chunk(const Attention &p, const Scratch &s, long i, const Chunk<T> &chunk) {
    constexpr int TILE = tile_with(NQ);
    for (long j = 0; j < chunk.count; j += TILE) {
        // Past the last key the tile repeats it; its score is overwritten.
        const T *tile[TILE];
        for (int n = 0; n < TILE; n++) tile[n] = chunk.keys[min_of(j + n, chunk.count - 1)];
        score_tile<T, NQ>(s.query + i * s.query_row, s.query_row, tile, p.dim, s.scores + i * CHUNK + j, *chunk.ahead, i == 0);
    }
    if (p.dim % W)
        for (int n = 0; n < NQ; n++)
            score_tail(s.query + (i + n) * s.query_row, chunk.keys, p.dim, chunk.count, s.scores + (i + n) * CHUNK);
}

// Scores of NQ queries, in base 2 but for a soft cap, become weights 2^(score - top), zeros after the last; acc and total are brought
// to the new top. slopes: null, or those of the queries from number 0 on, the first key being `distance` before the query. The
// queries go together so that their chains of operations overlap.
template <int NQ>
static NOINLINE void soften(const Attention &p, const Scratch &s, long i, long count, const float *slopes, long distance) {
    float *scores = s.scores + i * CHUNK;
    const long padded = round_up(count, W);
    for (int n = 0; n < NQ; n++) {
        float *own = scores + n * CHUNK;
        if (p.soft_cap != 0.0f)
            for (long j = 0; j < padded; j += W)
                store(own + j, tanh_of(load(own + j) / p.soft_cap) * (p.soft_cap * LOG2_E));
        if (slopes)
            for (long j = 0; j < padded; j += W) store(own + j, load(own + j) + bias_of(slopes[i + n], distance - j));
        for (long j = count; j < padded; j++) own[j] = -__builtin_inff();
    }
    vf most[NQ];
    for (int n = 0; n < NQ; n++) most[n] = splat(-__builtin_inff());
    for (long j = 0; j < padded; j += W)
        for (int n = 0; n < NQ; n++) most[n] = larger(load(scores + n * CHUNK + j), most[n]);
    float base[NQ], shrink[NQ];
    for (int n = 0; n < NQ; n++) {
        const float here = largest(most[n]), old = s.top[i + n], top = here > old ? here : old;
        base[n] = top == -__builtin_inff() ? 0.0f : top;
        shrink[n] = top == old ? 1.0f : exp2_of(splat(old - base[n]))[0];
        s.top[i + n] = top;
    }
    vf total[NQ] = {};
    for (long j = 0; j < padded; j += W)
        for (int n = 0; n < NQ; n++) {
            const vf weight = exp2_of(load(scores + n * CHUNK + j) - base[n]);
            store(scores + n * CHUNK + j, weight);
            total[n] += weight;
        }
    for (int n = 0; n < NQ; n++) {
        for (long j = count; j < padded; j++) scores[n * CHUNK + j] = 0.0f;
        s.total[i + n] = s.total[i + n] * shrink[n] + sum(total[n]);
        float *acc = s.acc + (i + n) * s.acc_row;
        if (shrink[n] != 1.0f)
            for (long d = 0; d < s.acc_row; d += W) store(acc + d, load(acc + d) * shrink[n]);
    }
}

// acc[i][:] += sum over keys of weight * value, NQ queries at once.
template <class T, int NQ>
static NOINLINE void add_values(const Attention &p, const Scratch &s, long i, const Chunk<T> &chunk) {
    const float *weights = s.scores + i * CHUNK;
    constexpr int COLUMNS = columns_with(NQ);
    constexpr long at_once = IN_BURSTS<T> ? 16 : 1, lines = COLUMNS * W * (long)sizeof(T) / 64;
    long d = 0;
    for (; d + COLUMNS * W <= p.value_dim; d += COLUMNS * W) {
        float *acc = s.acc + i * s.acc_row + d;
        vf sums[NQ][COLUMNS];
        for (int n = 0; n < NQ; n++)
            for (int c = 0; c < COLUMNS; c++) sums[n][c] = load(acc + n * s.acc_row + c * W);
        for (long j = 0; j < chunk.count; j++) {
            if (i == 0 && j % at_once == 0) chunk.ahead->template prefetch<lines * at_once>();
            vf weight[NQ];
            for (int n = 0; n < NQ; n++) weight[n] = splat(weights[n * CHUNK + j]);
            for (int c = 0; c < COLUMNS; c++) {
                const vf value = load(chunk.values[j] + d + c * W);
                for (int n = 0; n < NQ; n++) sums[n][c] = add_product(sums[n][c], value, weight[n]);
            }
        }
        for (int n = 0; n < NQ; n++)
            for (int c = 0; c < COLUMNS; c++) store(acc + n * s.acc_row + c * W, sums[n][c]);
    }
    for (; d < p.value_dim; d += W) {
        const long rest = min_of(W, p.value_dim - d);
        for (int n = 0; n < NQ; n++) {
            float *acc = s.acc + (i + n) * s.acc_row + d;
            vf sums = load(acc);
            for (long j = 0; j < chunk.count; j++) {
                const vf value = load_part(chunk.values[j] + d, rest);
                sums = add_product(sums, value, splat(weights[n * CHUNK + j]));
            }
            store(acc, sums);
        }
    }
}

// Queries [first, last) of the scratch against one chunk.
template <class T>
static void attend_chunk(const Attention &p, const Scratch &s, long first, long last, const Chunk<T> &chunk) {
    together(first, last, [&](auto count, long i) { score_chunk<T, decltype(count)::value>(p, s, i, chunk); });
    together(first, last, [&](auto count, long i) {
        soften<decltype(count)::value>(p, s, i, chunk.count, chunk.slopes, chunk.distance);
    });
    together(first, last, [&](auto count, long i) { add_values<T, decltype(count)::value>(p, s, i, chunk); });
}

// One cut of `rows` rows from row b on, which share a table and see this cut from the same key on, for `heads` kv heads from
// `head` on: fills acc, top and total of their queries, [head][row][query of the group]. loaded: the queries are there from the
// cut before.
template <class T>
static void attend_cut(const Attention &p, const Scratch &all, long b, long rows, long head, long heads, long cut,
                       typename PrefetcherOf<T>::type &prefetcher, bool loaded) {
    const long group = p.group(), begin = p.begin_of(b, cut);
    long shortest = SPLIT, longest = 0;
    for (long r = 0; r < rows; r++) {
        shortest = min_of(shortest, p.end_of(b + r, cut) - begin);
        longest = max_of(longest, p.end_of(b + r, cut) - begin);
    }
    long entries[SPLIT];
    for (long j = 0; j < longest;) {  // a division for each would show
        const long at = begin + j, stop = min_of(longest, j + p.block_size - at % p.block_size);
        for (long entry = p.entry(b, at); j < stop; j++, entry += p.kv_heads) entries[j] = entry;
    }
    typedef typename Multiplied<T>::type E;
    for (long h = 0; h < heads; h++) {
        const Scratch s = all.from(h * rows * group);
        if (!loaded) {
            load_queries(p, s, b, p.query_of(b, cut), rows, head + h);
            for (long i = 0; i < rows * group; i++) arrange_query<E>(s.query + i * s.query_row, p.dim);
        }
        clear_results(s, rows * group);
    }
    Chunk<E> chunk;
    chunk.ahead = &prefetcher;
    constexpr long keys = CHUNK_KEYS<E>;
    constexpr bool coded = sizeof(T) != sizeof(E);
    for (long j = 0; j < longest; j += keys) {
        if (p.slopes) chunk.distance = p.distance(b, cut, begin + j);
        for (long h = 0; h < heads; h++) {
            const Scratch s = all.from(h * rows * group);
            const long there = min_of(keys, longest - j);
            chunk.slopes = p.slopes ? p.slopes + (head + h) * group : nullptr;
            if (coded) chunk.widen(p, entries + j, head + h, there, max_of(0, min_of(keys, longest - j - there)), s.wide);
            else if (h == 0 || chunk.count != there) chunk.find(p, entries + j, head + h, there);
            else chunk.next_head(p);
            if (shortest >= min_of(j + keys, longest)) {
                attend_chunk<E>(p, s, 0, rows * group, chunk);
                continue;
            }
            for (long r = 0; r < rows; r++) {
                chunk.count = min_of(keys, p.end_of(b + r, cut) - begin - j);
                if (chunk.count > 0) attend_chunk<E>(p, s, r * group, (r + 1) * group, chunk);
            }
        }
    }
}

}  // namespace
