// The products of attention_int8.h by vpdpbusd or sdot, which sum four byte products, directly on the stored codes.
//
// Queries, and later weights, are rounded to 16 bits and split into two planes of bytes. Sums are exact integers, so the error
// is 2^-16 of the largest element of the query, or weight of the chunk, far below that of the codes. One factor of vpdpbusd is
// unsigned. For scores that is the code plus 128, and sums start at -128 times the sum of the query's plane; for results it is
// the weight, which is never negative. sdot takes signed bytes: plain codes, and weights of 15 bits.

#pragma once

#include "attention_decode.h"
#include "attention_int8.h"
#include "byte_products.h"
#include "int8_pages.h"
#include "simd.h"

namespace {

#if defined(WINDLASS_VNNI) || defined(WINDLASS_DOT)
namespace codes {

using bytes::add_quads;
using bytes::spread;
using bytes::vub;

constexpr long MOST_DIM = 512;  // 127 * 32639 * 512 is below 2^31
constexpr float QUERY_STEPS = 32639.0f;  // 127 * 256 + 127: both planes of a query are signed
constexpr float WEIGHT_STEPS = bytes::BIAS ? 65535.0f : 32639.0f;
constexpr int32_t UPPER_ROUNDING = bytes::BIAS ? 0 : 128;  // a signed lower plane borrows from the upper one
#if WINDLASS_REGISTERS >= 32
constexpr int SCORED = 4, RESULT_VECTORS = 4;  // queries scored together; vectors of results of two queries: 16 accumulators
#else
constexpr int SCORED = 2, RESULT_VECTORS = 2;
#endif

typedef int8_t narrow_bytes __attribute__((vector_size(W)));
typedef narrow_bytes narrow_any __attribute__((aligned(1), may_alias));

// The low bytes of W integers.
INLINE narrow_bytes low_bytes(vi x) {
#if defined(WINDLASS_AVX) && WINDLASS_LANES == 16  // GCC 12 takes some of these conversions apart, element by element
    __m128i bytes = _mm512_cvtepi32_epi8((__m512i)x);
    asm("" : "+v"(bytes));  // prevents an early spill to memory, which is slower
    return (narrow_bytes)bytes;
#elif defined(WINDLASS_AVX) && WINDLASS_LANES == 8
    const __m256i first = _mm256_set1_epi32(0x0c080400), quarters = _mm256_shuffle_epi8((__m256i)x, first);
    return (narrow_bytes)_mm_cvtsi128_si64(_mm_unpacklo_epi32(_mm256_castsi256_si128(quarters), _mm256_extracti128_si256(quarters, 1)));
#else
    return __builtin_convertvector(x & 255, narrow_bytes);
#endif
}

INLINE float inverse(float most, float steps) { return most > 0x1p-100f && most < __builtin_inff() ? steps / most : 0.0f; }

// A scaled query is replaced in place by alternating quads of its upper and lower plane, followed by this.
struct QueryEnd {
    float factor;      // of the integers
    int32_t start[2];  // of the planes' sums
};

// Whether a rounded query and its QueryEnd fit into the row of the query.
INLINE bool quads_fit(const Attention &p) {
    const long needed = 2 * ceil_div(p.dim, QUAD) * (long)sizeof(int32_t) + (long)sizeof(QueryEnd);
    return p.value_dim % W == 0 && p.dim <= MOST_DIM && needed <= round_up(p.dim, W) * (long)sizeof(float);
}
INLINE QueryEnd *end_of(float *query, long quads) { return (QueryEnd *)(query + 2 * quads); }

static NOINLINE void round_query(const Attention &p, float *query) {
    const long quads = ceil_div(p.dim, QUAD), padded = round_up(p.dim, W);
    float x[MOST_DIM];
    __builtin_memcpy(x, query, padded * sizeof(float));
    vf most = {}, poison = {};
    for (long d = 0; d < padded; d += W) {
        most = larger(magnitude_of(load(x + d)), most);
        poison += load(x + d) * 0.0f;
    }
    QueryEnd end;
    end.factor = (largest(most) + sum(poison)) / QUERY_STEPS;
    const float by = inverse(largest(most) + sum(poison), QUERY_STEPS);
    vi sums[2] = {};
    int32_t *planes = (int32_t *)query;
    for (long d = 0; d < padded; d += W) {
        const vi code = nearest_int(load(x + d) * by), low = (code << 24) >> 24, high = (code - low) >> 8;
        sums[0] += high, sums[1] += low;
        const narrow_bytes halves[2] = {low_bytes(high), low_bytes(low)};
        for (long q = 0; q < W / QUAD && d / QUAD + q < quads; q++)
            for (int plane = 0; plane < 2; plane++)
                __builtin_memcpy(planes + (d / QUAD + q) * 2 + plane, (const char *)&halves[plane] + q * QUAD, QUAD);
    }
    for (int plane = 0; plane < 2; plane++) end.start[plane] = -bytes::BIAS * total_of(sums[plane]);
    *end_of(query, quads) = end;
}

// Scores of NQ queries, key scales included; V vectors of tokens at once. lines: prefetched with every quad.
template <int NQ, int V>
static NOINLINE void score_quads(const Attention &p, const Scratch &s, long i, const Chunk &chunk, CodePrefetcher &ahead, long lines) {
    const long quads = ceil_div(p.dim, QUAD);
    const int32_t *planes[NQ];
    for (int n = 0; n < NQ; n++) planes[n] = (const int32_t *)(s.query + (i + n) * s.query_row);
    for (long j = chunk.begin; j < chunk.end; j += V * W) {
        const int8_t *key[V];
        long at[V];
        for (int v = 0; v < V; v++) {
            at[v] = min_of(j + v * W, chunk.end - W);
            key[v] = chunk.key_codes(at[v]);
        }
        vi acc[NQ][2][V];
        for (int n = 0; n < NQ; n++)
            for (int plane = 0; plane < 2; plane++)
                for (int v = 0; v < V; v++) acc[n][plane][v] = bytes::splat_int(planes[n][2 * quads + 1 + plane]);
        for (long q = 0; q < quads; q++) {
            ahead.prefetch(lines);
            vub code[V];
            for (int v = 0; v < V; v++) code[v] = (vub)load_quads(key[v] + q * PIECE) ^ uint8_t(bytes::BIAS);
            for (int n = 0; n < NQ; n++)
                for (int plane = 0; plane < 2; plane++) {
                    const vi x = spread(planes[n] + 2 * q + plane);
                    for (int v = 0; v < V; v++) acc[n][plane][v] = add_quads(acc[n][plane][v], code[v], x);
                }
        }
        for (int v = 0; v < V; v++) {
            const vf scale = chunk.key_scale(at[v]);
            for (int n = 0; n < NQ; n++) {
                const float factor = ((const float *)planes[n])[2 * quads];
                const vi whole = (vi)(((vu)acc[n][0][v] << 8) + (vu)acc[n][1][v]);
                store(s.scores + (i + n) * CHUNK + at[v], __builtin_convertvector(whole, vf) * (scale * factor));
            }
        }
    }
}

// Weights, of which `most` is the largest, are replaced in place by two planes of bytes, W of each alternating, followed by
// the factor of their integers.
INLINE void round_weights(float *weights, const Chunk &chunk, float most) {
    const vf by = splat(inverse(most, WEIGHT_STEPS)), magic = splat(8388608.0f);  // 2^23: integers appear in the low bits
    for (long j = chunk.begin; j < chunk.end; j += W) {
        const vi code = (vi)(load(weights + j) * by + magic);
        int8_t *planes = (int8_t *)weights + 2 * j;
        *(narrow_any *)planes = low_bytes((code + UPPER_ROUNDING) >> 8), *(narrow_any *)(planes + W) = low_bytes(code);
    }
    weights[CHUNK - 1] = most / WEIGHT_STEPS;
}

// acc[n][d: d + V * W] += weighted values. lines: prefetched with every quad.
template <int NQ, int V>
INLINE void add_dims_of_quads(const Scratch &s, long i, const Chunk &chunk, long value_dim, long d, CodePrefetcher &ahead, long lines) {
    vi acc[NQ][2][V] = {};
    const char *planes[NQ];
    for (int n = 0; n < NQ; n++) planes[n] = (const char *)(s.scores + (i + n) * CHUNK);
    for (long j = chunk.begin; j < chunk.end; j += PANEL_TOKENS) {
        const int8_t *value = chunk.values[j / PANEL_TOKENS] + d * QUAD;
        for (long t = 0; t < PANEL_TOKENS; t += QUAD, value += QUAD * value_dim) {
            vi code[V];
            for (int v = 0; v < V; v++) code[v] = load_quads(value + v * W * QUAD);
            ahead.prefetch(lines);
            for (int n = 0; n < NQ; n++)
                for (int plane = 0; plane < 2; plane++) {
                    const vub x = (vub)spread(planes[n] + 2 * j + t / W * 2 * W + plane * W + t % W);
                    for (int v = 0; v < V; v++) acc[n][plane][v] = add_quads(acc[n][plane][v], x, code[v]);
                }
        }
    }
    for (int n = 0; n < NQ; n++) {
        float *target = s.acc + (i + n) * s.acc_row + d;
        const vf factor = splat(s.scores[(i + n) * CHUNK + CHUNK - 1]);
        for (int v = 0; v < V; v++) {
            const vi whole = (acc[n][0][v] << 8) + acc[n][1][v];
            store(target + v * W, load(target + v * W) + __builtin_convertvector(whole, vf) * factor);
        }
    }
}
template <int NQ>
static NOINLINE void add_values_of_quads(const Attention &p, const Scratch &s, long i, const Chunk &chunk, CodePrefetcher &ahead, long lines) {
    long d = 0;
    for (; d + RESULT_VECTORS * W <= p.value_dim; d += RESULT_VECTORS * W)
        add_dims_of_quads<NQ, RESULT_VECTORS>(s, i, chunk, p.value_dim, d, ahead, lines);
    for (; d < p.value_dim; d += W) add_dims_of_quads<NQ, 1>(s, i, chunk, p.value_dim, d, ahead, lines / RESULT_VECTORS);
}

// The share of `all` lines that pass `pass` of `passes` over the same codes prefetches: evenly, since the processor drops
// prefetches issued in a burst.
INLINE long share_of(long all, long passes, long pass) { return all * (pass + 1) / passes - all * pass / passes; }

struct Quads {
    static void prepare(const Attention &p, float *query) { round_query(p, query); }
    static void score(const Attention &p, const Scratch &s, long queries, const Chunk &chunk, CodePrefetcher &ahead) {
        constexpr int V = 2;
        const long all = V * W / PANEL_TOKENS, passes = ceil_div(queries, SCORED);
        const auto lines = [&](long i) { return share_of(all, passes, i / SCORED); };
        long i = 0;
        for (; i + SCORED <= queries; i += SCORED) score_quads<SCORED, V>(p, s, i, chunk, ahead, lines(i));
        const long rest = queries - i;
        if (rest == 3) score_quads<SCORED < 3 ? 1 : 3, V>(p, s, i, chunk, ahead, lines(i));
        else if (rest == 2) score_quads<SCORED < 2 ? 1 : 2, V>(p, s, i, chunk, ahead, lines(i));
        else if (rest == 1) score_quads<1, V>(p, s, i, chunk, ahead, lines(i));
    }
    static void finish_weights(float *weights, const Chunk &chunk, float most) { round_weights(weights, chunk, most); }
    static void add(const Attention &p, const Scratch &s, long queries, const Chunk &chunk, CodePrefetcher &ahead) {
        const long all = RESULT_VECTORS * W / PANEL_TOKENS, passes = ceil_div(queries, 2);
        long i = 0;
        for (; i + 2 <= queries; i += 2) add_values_of_quads<2>(p, s, i, chunk, ahead, share_of(all, passes, i / 2));
        if (i < queries) add_values_of_quads<1>(p, s, i, chunk, ahead, share_of(all, passes, i / 2));
    }
};

}  // namespace codes
#endif
}  // namespace
