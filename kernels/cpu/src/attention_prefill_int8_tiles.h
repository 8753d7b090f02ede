// The products of attention_prefill_int8.h: some rows of queries or weights, in two planes of bytes, against the codes of a block
// of keys or values in the order of the pages, in tiles that fill the registers.

#pragma once

#include "attention_prefill.h"
#include "byte_products.h"
#include "int8_pages.h"
#include "simd.h"

namespace {

#if defined(WINDLASS_VNNI)
#define WINDLASS_INT8_PREFILL 1
#else
#define WINDLASS_INT8_PREFILL 0
#endif

#if WINDLASS_INT8_PREFILL
namespace prefill_codes {

using bytes::add_quads;
using bytes::load_bytes;
using bytes::spread;
using bytes::vi_any;
using bytes::vub;

constexpr long BLOCK = 256;                  // keys; as many as keep sums of weights and values below 2^31

// Lane i of the result: all lanes of rows[i], joined.
template <int step = 1, class V, class F> INLINE V fold_rows(V (&rows)[W], F join) {
    vi low = {}, high = {};
    for (int i = 0; i < W; i++) low[i] = i & step ? W + i - step : i, high[i] = i & step ? W + i : i + step;
    for (int i = 0; i < W / 2 / step; i++)
        rows[i] = join(__builtin_shuffle(rows[2 * i], rows[2 * i + 1], low), __builtin_shuffle(rows[2 * i], rows[2 * i + 1], high));
    if constexpr (2 * step == W) return rows[0];
    else return fold_rows<2 * step>(rows, join);
}

// Scores, still to be multiplied by the factors of their queries, of NR rows and NV vectors of keys.
template <int NR, int NV>
static NOINLINE void score_keys(const int8_t *query, const int32_t *bias, long quads, const int8_t *const *keys,
                                const int8_t *const *next, const float *key_scales, float *scores) {
    vi sums[NR][NV];
    for (int i = 0; i < NR; i++)
        for (int n = 0; n < NV; n++) sums[i][n] = vi{};
    for (int plane = 0; plane < 2; plane++) {
        const int8_t *ahead = next[plane % NV];
        for (long q = 0; q < quads; q++, query += 4 * TILE_ROWS) {
            __builtin_prefetch(ahead + q * PIECE, 0, 2);
            vub key[NV];
            for (int n = 0; n < NV; n++) key[n] = load_bytes(keys[n] + q * PIECE) ^ 0x80;
            for (int i = 0; i < NR; i++) {
                const vi x = spread(query + 4 * i);
                for (int n = 0; n < NV; n++) sums[i][n] = add_quads(sums[i][n], key[n], x);
            }
        }
        if (plane == 0)
            for (int i = 0; i < NR; i++)
                for (int n = 0; n < NV; n++) sums[i][n] = (vi)((vu)sums[i][n] << 8) + bias[i];
    }
    for (int n = 0; n < NV; n++) {
        const vf scale = load(key_scales + n * W);
        for (int i = 0; i < NR; i++) store(scores + i * BLOCK + n * W, __builtin_convertvector(sums[i][n], vf) * scale);
    }
}

// Where the planes of weights have the quad that begins at key j, a multiple of 4: packing gathers four vectors at a time and
// interleaves their quads.
INLINE long quad_place(unsigned long j) {
    const unsigned long quad = j % (4 * W) / 4;
    return j / (4 * W) * (4 * W) + 4 * (quad % (W / 4) * 4 + quad / (W / 4));
}

// The planes of 4 * W numbers of 16 bits.
INLINE void split_planes(const vi (&codes)[4], uint8_t *upper, uint8_t *lower) {
#if defined(WINDLASS_AVX) && WINDLASS_LANES == 16
    const __m512i low_bytes = _mm512_set1_epi16(255);
    const __m512i a = _mm512_packus_epi32((__m512i)codes[0], (__m512i)codes[1]);
    const __m512i b = _mm512_packus_epi32((__m512i)codes[2], (__m512i)codes[3]);
    *(vi_any *)upper = (vi)_mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8));
    *(vi_any *)lower = (vi)_mm512_packus_epi16(_mm512_and_si512(a, low_bytes), _mm512_and_si512(b, low_bytes));
#elif defined(WINDLASS_AVX) && WINDLASS_LANES == 8
    const __m256i low_bytes = _mm256_set1_epi16(255);
    const __m256i a = _mm256_packus_epi32((__m256i)codes[0], (__m256i)codes[1]);
    const __m256i b = _mm256_packus_epi32((__m256i)codes[2], (__m256i)codes[3]);
    *(vi_any *)upper = (vi)_mm256_packus_epi16(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8));
    *(vi_any *)lower = (vi)_mm256_packus_epi16(_mm256_and_si256(a, low_bytes), _mm256_and_si256(b, low_bytes));
#else
    for (int v = 0; v < 4; v++)
        for (int i = 0; i < W; i++) {
            upper[quad_place(v * W + i / 4 * 4) + i % 4] = uint8_t(codes[v][i] >> 8);
            lower[quad_place(v * W + i / 4 * 4) + i % 4] = uint8_t(codes[v][i]);
        }
#endif
}

// acc[i][:] = shrink[i] * acc[i][:] + factor[i] * weights * values for NR rows, NV vectors of dims and keys [first, last).
template <int NR, int NV>
static NOINLINE void add_values(const uint8_t *weights, const int8_t *const *values, const int8_t *const *next, long first, long last,
                                long value_dim, const float *factor, const float *shrink, float *acc) {
    vi sums[NR][NV];
    for (int i = 0; i < NR; i++)
        for (int n = 0; n < NV; n++) sums[i][n] = vi{};
    for (int plane = 0; plane < 2; plane++) {
        for (long j = first; j < last; j += PANEL_TOKENS) {
            const int8_t *piece = values[j / PANEL_TOKENS], *ahead = next[j / PANEL_TOKENS] + plane % NV * 4 * W;
            for (int k = 0; k < PANEL_TOKENS / 4; k++, piece += 4 * value_dim, ahead += 4 * value_dim) {
                __builtin_prefetch(ahead, 0, 2);
                vi value[NV];
                for (int n = 0; n < NV; n++) value[n] = (vi)load_bytes(piece + n * 4 * W);
                const uint8_t *x = weights + plane * BLOCK + quad_place(j) + 16 * (k % (W / 4)) + 4 * (k / (W / 4));
                for (int i = 0; i < NR; i++) {
                    const vub weight = (vub)spread(x + i * 2 * BLOCK);
                    for (int n = 0; n < NV; n++) sums[i][n] = add_quads(sums[i][n], weight, value[n]);
                }
            }
        }
        if (plane == 0)
            for (int i = 0; i < NR; i++)
                for (int n = 0; n < NV; n++) sums[i][n] = (vi)((vu)sums[i][n] << 8);
    }
    for (int i = 0; i < NR; i++)
        for (int n = 0; n < NV; n++) {
            float *target = acc + i * value_dim + n * W;
            store(target, add_product(load(target) * shrink[i], __builtin_convertvector(sums[i][n], vf), splat(factor[i])));
        }
}

}  // namespace prefill_codes
#endif
}  // namespace
