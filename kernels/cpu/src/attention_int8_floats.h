// The products of attention_int8.h in float32: codes are widened when they are loaded, once for all queries of a kv head.

#pragma once

#include "attention_decode.h"
#include "attention_int8.h"
#include "int8_pages.h"
#include "simd.h"

namespace {
namespace codes {

constexpr int VECTORS = 2;  // of tokens or of dims, handled together

// Prefetches as many lines as step `step` reads.
INLINE void prefetch_for_step(CodePrefetcher &ahead, long step) { ahead.prefetch(VECTORS * W >= PANEL_TOKENS ? VECTORS * W / PANEL_TOKENS : step & 1); }

// Scores of NQ queries, key scales included.
template <int NQ> static NOINLINE void score_floats(const Attention &p, const Scratch &s, long i, const Chunk &chunk, CodePrefetcher &ahead) {
    const long quads = ceil_div(p.dim, QUAD);
    for (long j = chunk.begin; j < chunk.end; j += VECTORS * W) {
        const int8_t *key[VECTORS];
        long at[VECTORS];
        for (int v = 0; v < VECTORS; v++) at[v] = min_of(j + v * W, chunk.end - W), key[v] = chunk.key_codes(at[v]);
        vf acc[NQ][VECTORS] = {};
        const float *query = s.query + i * s.query_row;
        for (long q = 0; q < quads; q++, query += QUAD) {
            if (i == 0) prefetch_for_step(ahead, q);
            vi quad[VECTORS];
            for (int v = 0; v < VECTORS; v++) quad[v] = load_quads(key[v] + q * PIECE);
            for (int e = 0; e < QUAD; e++) {
                vf k[VECTORS];
                for (int v = 0; v < VECTORS; v++) k[v] = quad_element(quad[v], e);
                for (int n = 0; n < NQ; n++) {
                    const vf x = splat(query[n * s.query_row + e]);
                    for (int v = 0; v < VECTORS; v++) acc[n][v] = add_product(acc[n][v], k[v], x);
                }
            }
        }
        for (int v = 0; v < VECTORS; v++) {
            const vf scale = chunk.key_scale(at[v]);
            for (int n = 0; n < NQ; n++) store(s.scores + (i + n) * CHUNK + at[v], acc[n][v] * scale);
        }
    }
}

// acc[n][:] += weighted values, V vectors of dims from d on, of which the last has `rest` dims.
template <int NQ, int V>
INLINE void add_dims_of_floats(const Scratch &s, long i, const Chunk &chunk, CodePrefetcher &ahead, long value_dim, long d, long rest) {
    vf sums[NQ][V];
    for (int n = 0; n < NQ; n++)
        for (int v = 0; v < V; v++) sums[n][v] = load(s.acc + (i + n) * s.acc_row + d + v * W);
    const float *weights = s.scores + i * CHUNK;
    for (long j = chunk.begin; j < chunk.end; j += QUAD) {
        const int8_t *value = chunk.values[j / PANEL_TOKENS] + j % PANEL_TOKENS * value_dim + d * QUAD;
        if (i == 0 && V == VECTORS) prefetch_for_step(ahead, j / QUAD);
        vi quad[V];
        for (int v = 0; v < V; v++)
            quad[v] = v + 1 < V || rest == W ? load_quads(value + v * W * QUAD) : load_some_quads(value + v * W * QUAD, rest);
        for (int e = 0; e < QUAD; e++) {
            vf x[V];
            for (int v = 0; v < V; v++) x[v] = quad_element(quad[v], e);
            for (int n = 0; n < NQ; n++) {
                const vf weight = splat(weights[n * CHUNK + j + e]);
                for (int v = 0; v < V; v++) sums[n][v] = add_product(sums[n][v], x[v], weight);
            }
        }
    }
    for (int n = 0; n < NQ; n++)
        for (int v = 0; v < V; v++) store(s.acc + (i + n) * s.acc_row + d + v * W, sums[n][v]);
}
template <int NQ> static NOINLINE void add_floats(const Attention &p, const Scratch &s, long i, const Chunk &chunk, CodePrefetcher &ahead) {
    long d = 0;
    for (; d + VECTORS * W <= p.value_dim; d += VECTORS * W) add_dims_of_floats<NQ, VECTORS>(s, i, chunk, ahead, p.value_dim, d, W);
    for (; d < p.value_dim; d += W) add_dims_of_floats<NQ, 1>(s, i, chunk, ahead, p.value_dim, d, min_of(W, p.value_dim - d));
}

struct Floats {
    static void prepare(const Attention &, float *) {}
    static void score(const Attention &p, const Scratch &s, long queries, const Chunk &chunk, CodePrefetcher &ahead) {
        together(0, queries, [&](auto count, long i) { score_floats<decltype(count)::value>(p, s, i, chunk, ahead); });
    }
    static void finish_weights(float *, const Chunk &, float) {}
    static void add(const Attention &p, const Scratch &s, long queries, const Chunk &chunk, CodePrefetcher &ahead) {
        together(0, queries, [&](auto count, long i) { add_floats<decltype(count)::value>(p, s, i, chunk, ahead); });
    }
};

}  // namespace codes
}  // namespace
