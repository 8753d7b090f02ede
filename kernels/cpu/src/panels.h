// out[M, N] = x[M, K] * weight^T + bias for a 16-bit panel weight and few rows M, at memory bandwidth.
//
// A panel has PANEL_ROWS rows of the weight. A line of 64 bytes holds two adjacent elements of K of each row, and lines are
// contiguous: decode reads one run from end to end, which the hardware prefetches by itself, and only two numbers of x per line, so
// that the stream does not evict x from L1 (measured on Zen 4: row-major weights reach three quarters of the bandwidth of two cores,
// panels all of it). bfloat16: the two elements of a row are adjacent, to be separated by a shift and a mask; float16: the 16 first
// ones, then the 16 second ones. Past the last row and the last element of K there are zeros.
//
// Every output is summed in one order whatever M, N, the thread count, the tile and the instruction set: even and odd
// elements of K separately, K_BLOCK of them at a time. Where the processor multiplies bfloat16 and both sides have that type
// (bf16_dot.h), lines are multiplied directly, in another order that is fixed as well.

#pragma once

#include "bf16_dot.h"
#include "recordable.h"
#include "simd.h"
#include "work_split.h"

namespace {
namespace panels {

constexpr long PANEL_ROWS = 16;
constexpr long LINE_ELEMENTS = 2 * PANEL_ROWS;
constexpr long K_BLOCK = 1024;          // elements of K that stay in L1 for all tiles of x; even
// Of the packed x: rows a page apart would share the sets of L1.
template <class N> constexpr long STRIDE = K_BLOCK / NUMBERS<N> + 16;
template <class N> constexpr long MAX_ROWS = 48;  // rows of x per pass over the weight
template <> constexpr long MAX_ROWS<pair> = 96;

// A tile is VECTORS * W rows of the weight by up to MAX_MT rows of x, two accumulators for each of its vectors.
#if WINDLASS_REGISTERS >= 32
constexpr int VECTORS = W == 4 ? 4 : 2;
template <class N> constexpr int MAX_MT = W == 4 ? 3 : 6;
template <> constexpr int MAX_MT<pair> = 12;  // one accumulator for each vector
#else
constexpr int VECTORS = 2;
template <class N> constexpr int MAX_MT = 3;
#endif
constexpr int ONE_VECTORS = PANEL_ROWS / W;  // one panel at a time for a single row of x
// Bytes that the first tile prefetches into L2 if there are several rows of x: with its many loads the processor cannot fetch far
// ahead (measured on Zen 4, float16 and 4 rows a quarter less time, 8 rows a seventh; pairs of bfloat16 and 12 rows a quarter). A
// single row is read as quickly without.
constexpr long AHEAD = 4096;

// Element `half` of the two that a line holds of each of W rows.
template <int half> INLINE vf load_element(const bf16 *p) {
    const vu pairs = *(const vu_any *)p;
    return (vf)(half ? pairs & 0xffff0000u : pairs << 16);
}
template <int half> INLINE vf load_element(const f16 *p) { return load(p + half * PANEL_ROWS); }

// Address in a line of the W rows from row r of a panel on.
INLINE const bf16 *rows_from(const bf16 *panel, long r) { return panel + 2 * r; }
INLINE const f16 *rows_from(const f16 *panel, long r) { return panel + r; }

template <bool PREFETCHES, class TW> INLINE void next_line(const TW *&w) {
    if (PREFETCHES) __builtin_prefetch((const char *)w + AHEAD, 0, 2);
    w += LINE_ELEMENTS;
}

// sums[v][m] += over `pairs` pairs of elements of K; set where `fresh`. x: rows STRIDE apart.
template <class TW, int V, int MT, bool PREFETCHES>
static NOINLINE void multiply_tile(const TW *const *weights, const float *x, long pairs, vf *sums, bool fresh) {
    vf acc[2][V][MT] = {};
    const TW *w[V];
    for (int v = 0; v < V; v++) w[v] = weights[v];
    for (long k = 0; k < pairs; k++, x += 2) {
        const auto multiply = [&](auto load_weight, vf (&into)[V][MT], int half) {
            vf weight[V];
            for (int v = 0; v < V; v++) weight[v] = load_weight(w[v]);
            for (int m = 0; m < MT; m++) {
                const vf xm = splat(x[m * STRIDE<float> + half]);
                for (int v = 0; v < V; v++) into[v][m] = add_product(into[v][m], weight[v], xm);
            }
        };
        multiply([](const TW *p) { return load_element<0>(p); }, acc[0], 0);
        multiply([](const TW *p) { return load_element<1>(p); }, acc[1], 1);
        for (int v = 0; v < V; v++) next_line<PREFETCHES>(w[v]);
    }
    for (int v = 0; v < V; v++)
        for (int m = 0; m < MT; m++) {
            const vf block = acc[0][v][m] + acc[1][v][m];
            sums[v * MT + m] = fresh ? block : sums[v * MT + m] + block;
        }
}

// The same of pairs.
template <class TW, int V, int MT, bool PREFETCHES>
static NOINLINE void multiply_tile(const TW *const *weights, const pair *x, long pairs, vf *sums, bool fresh) {
    vf acc[V][MT] = {};
    const TW *w[V];
    for (int v = 0; v < V; v++) w[v] = weights[v];
    for (long k = 0; k < pairs; k++, x++) {
        vu weight[V];
        for (int v = 0; v < V; v++) weight[v] = load((const pair *)w[v]), next_line<PREFETCHES>(w[v]);
        for (int m = 0; m < MT; m++) {
            const vu xm = splat(x[m * STRIDE<pair>]);
            for (int v = 0; v < V; v++) acc[v][m] = add_product(acc[v][m], weight[v], xm);
        }
    }
    for (int v = 0; v < V; v++)
        for (int m = 0; m < MT; m++) sums[v * MT + m] = fresh ? acc[v][m] : sums[v * MT + m] + acc[v][m];
}

template <class TW, int V, class N, int MT = 1>
INLINE void multiply_any(long mt, const TW *const *weights, const N *x, long pairs, vf *sums, bool fresh, bool prefetches) {
    if constexpr (V == VECTORS && MT < MAX_MT<N>) {
        if (mt > MT) return multiply_any<TW, V, N, MT + 1>(mt, weights, x, pairs, sums, fresh, prefetches);
    }
    if (prefetches) multiply_tile<TW, V, MT, true>(weights, x, pairs, sums, fresh);
    else multiply_tile<TW, V, MT, false>(weights, x, pairs, sums, fresh);
}

// packed[k block][row][STRIDE<N>]; a zero follows an odd K.
template <class TX, class N> static void pack_x(const Linear &p, N *packed) {
    for (long k0 = 0; k0 < p.K; k0 += K_BLOCK) {
        const long count = min_of(K_BLOCK, p.K - k0);
        for (long m = 0; m < p.M; m++, packed += STRIDE<N>) {
            const TX *source = (const TX *)p.x + m * p.x_stride + k0;
            if (count % 2) packed[count / NUMBERS<N>] = N{};
            if constexpr (NUMBERS<N> == 1) {
                copy_converted(source, packed, count);
            } else {
                static_assert(sizeof(TX) == sizeof(bf16));
                __builtin_memcpy(packed, source, count * sizeof(TX));
            }
        }
    }
}

// Rows [n0, n1) of the weight against all rows of x.
template <class TW, class TX, int V, class N>
static void multiply_rows(const Linear &p, Tiles tiles, const N *packed, long n0, long n1) {
    vf sums[MAX_ROWS<N> * V];
    const long lines = ceil_div(p.K, 2);
    for (long n = n0; n < n1; n += V * W) {
        for (long k = 0; k < p.K; k += K_BLOCK) {
            const TW *rows[V];
            for (int v = 0; v < V; v++) {
                const long row = min_of(n + v * W, round_up(n1, W) - W);  // a vector past the end repeats the last one
                const TW *panel = (const TW *)p.weight + row / PANEL_ROWS * lines * LINE_ELEMENTS + k / 2 * LINE_ELEMENTS;
                rows[v] = rows_from(panel, row % PANEL_ROWS);
            }
            const long pairs = ceil_div(min_of(K_BLOCK, p.K - k), 2);
            const N *x = packed + k / K_BLOCK * p.M * STRIDE<N>;
            for (long t = 0; t < tiles.count; t++) {
                const long first = tiles.begin(t);
                multiply_any<TW, V>(tiles.size(t), rows, x + first * STRIDE<N>, pairs, sums + first * V, k == 0, !t && p.M > 1);
            }
        }
        for (int v = 0; v < V && n + v * W < n1; v++) {
            const long row = n + v * W, valid = min_of(W, n1 - row);
            vf bias = {};
            if (p.bias)
                for (long i = 0; i < valid; i++) bias[i] = element(p.bias, p.bias_type, row + i);
            for (long t = 0; t < tiles.count; t++) {
                const long first = tiles.begin(t), mt = tiles.size(t);
                for (long m = 0; m < mt; m++) {
                    const vf y = sums[first * V + v * mt + m] + bias;
                    TX *out = (TX *)p.out + (first + m) * p.out_stride + row;
                    store_part(out, y, valid);
                }
            }
        }
    }
}

template <class TW, class TX, class N> static int multiply_pass(const Linear &p) {
    const Tiles tiles = {p.M, ceil_div(p.M, MAX_MT<N>)};
    const auto multiply = p.M == 1 ? multiply_rows<TW, TX, ONE_VECTORS, N> : multiply_rows<TW, TX, VECTORS, N>;
    const long unit = max_of(PANEL_ROWS, VECTORS * W);
    return in_chunks(
        p, unit, sizeof(TW), p.M * ceil_div(p.K, K_BLOCK) * STRIDE<N> * (long)sizeof(N),
        [&](void *packed) { pack_x<TX>(p, (N *)packed); },
        [&](const void *packed, long n0, long n1) { multiply(p, tiles, (const N *)packed, n0, n1); });
}

template <class TW, class TX, class N = float> static int multiply_all(const Linear &p) {
    // Passes of equal size: a last pass of a few rows would read the entire weight for little work.
    const long passes = ceil_div(p.M, MAX_ROWS<N>);
    return in_passes<TX>(p, passes ? min_of(round_up(ceil_div(p.M, passes), MAX_MT<N>), MAX_ROWS<N>) : 1, multiply_pass<TW, TX, N>);
}

template <class TW> INLINE int multiply_typed(const Linear &p) {
    return p.x_type == 0 ? multiply_all<TW, float>(p) : multiply_all<TW, bf16>(p);
}

// See Linear; the weight is of type 1 or 2. Returns 1 when out of memory.
EXPORT int WINDLASS_NAME(linear_panels)(const void *x, long x_stride, int x_type, const void *weight, int w_type,
                                        const void *bias, int bias_type, void *out, long out_stride, long M, long N, long K) {
    const Linear p = {x, x_stride, x_type, weight, 0, w_type, bias, bias_type, out, out_stride, M, N, K};
#if defined(WINDLASS_BF16)
    if (x_type == 1 && w_type == 1) return multiply_all<bf16, bf16, pair>(p);
#endif
    return w_type == 1 ? multiply_typed<bf16>(p) : multiply_typed<f16>(p);
}
RECORDABLE(linear_panels)

}  // namespace panels
}  // namespace
