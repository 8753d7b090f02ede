// out[M, N] = x[M, K] * weight[N, K]^T + bias for few rows M, near the speed at which the weight can be read.
//
// A tile is NT weight rows by MT rows of x, with one vector accumulator per dot product. The weight is read from memory once, in
// blocks of K that stay in L1 for all tiles of x. The hardware prefetcher follows several rows poorly, so the first tile prefetches
// the next block into L2, row after row (measured on Zen 4: a third faster for bfloat16; L1, or all rows at once, gains less). Every
// output is summed in one order whatever M, N, the thread count and the tile: a row has the same bits alone and in a batch.

#pragma once

#include "recordable.h"
#include "simd.h"
#include "work_split.h"

namespace {

#if WINDLASS_REGISTERS >= 32
constexpr int MAX_MT = W == 4 ? 4 : 6, WIDE_NT = 4;  // ARM: GCC loads both halves of a turn at once and spills at 6
#else
constexpr int MAX_MT = 4, WIDE_NT = 3;  // 12 accumulators, 3 weights, 1 activation
#endif
constexpr int ONE_NT = 6, TWO_NT = 4;  // weight rows against one or two rows of x
constexpr int STEP = 2 * W;      // elements of K per turn of the inner loop
constexpr long K_BLOCK = 1024;   // elements of K that stay in L1; a multiple of STEP
constexpr int LINE = 64;         // bytes of a cache line
constexpr long MAX_ROWS = 48;    // rows of x per pass over the weight

// One half of STEP weights. A 32-bit lane holds two bfloat16: the even ones are the first half, the odd ones the second;
// pack_rows() arranges x accordingly.
template <int half> INLINE vf load_half(const float *p) { return load(p + half * W); }
template <int half> INLINE vf load_half(const f16 *p) { return load(p + half * W); }
template <int half> INLINE vf load_half(const bf16 *p) {
    // The tile needs every register. So the address is hidden, to load the second half again instead of keeping it; and the
    // lower bits are cleared by two shifts, hidden from each other, so that the compiler does not keep a mask.
    if (half) asm("" : "+r"(p));
    vu pairs = *(const vu_any *)p;
    if (half) pairs >>= 16;
    hide(pairs);
    return (vf)(pairs << 16);
}
template <class T> struct pairs_interleaved { static constexpr bool value = false; };
template <> struct pairs_interleaved<bf16> { static constexpr bool value = true; };

// packed[k block][tile][step][row of the tile][STEP], float32, K padded with zeros to whole steps.
template <class TX, bool interleaved>
static void pack_rows(const TX *x, long x_stride, Tiles tiles, long K, float *packed) {
    for (long k0 = 0; k0 < K; k0 += K_BLOCK) {
        const long k1 = min_of(k0 + K_BLOCK, K);
        for (long t = 0; t < tiles.count; t++) {
            const long first = tiles.begin(t), count = tiles.size(t);
            for (long k = k0; k < k1; k += STEP) {
                for (long m = 0; m < count; m++, packed += STEP) {
                    const TX *source = x + (first + m) * x_stride + k;
                    const long valid = min_of(STEP, k1 - k);
                    if (valid == STEP && !interleaved) {
                        store(packed, load(source));
                        store(packed + W, load(source + W));
                        continue;
                    }
                    for (long i = 0; i < STEP; i++) {
                        const long from = interleaved ? (i < W ? 2 * i : 2 * (i - W) + 1) : i;
                        packed[i] = from < valid ? widen(source[from]) : 0.0f;
                    }
                }
            }
        }
    }
}

template <int half, class TW, int NT, int MT>
INLINE void multiply_half(const TW *const (&w)[NT], const float *x, vf (&acc)[NT][MT]) {
    vf weight[NT];
    for (int n = 0; n < NT; n++) weight[n] = load_half<half>(w[n]);
    for (int m = 0; m < MT; m++) {
        const vf xm = load(x + m * STEP + half * W);
        for (int n = 0; n < NT; n++) acc[n][m] = add_product(acc[n][m], weight[n], xm);
    }
}

// Prefetches the lines of some rows, row after row.
template <class TW, int NT> struct AheadRows {
    const TW *const *rows;
    long row_lines, row = 0, left = row_lines;
    const char *line = (const char *)rows[0];
    INLINE_MEMBER void prefetch() {
        for (int n = 0; n < NT * STEP * (int)sizeof(TW) / LINE; n++) {
            __builtin_prefetch(line, 0, 2);
            line += LINE;
            if (--left == 0 && row + 1 < NT) line = (const char *)rows[++row], left = row_lines;
        }
    }
};

// next: the rows to prefetch, or null.
template <class TW, int NT, int MT>
static NOINLINE void multiply_tile(const TW *const *weights, const TW *const *next, const float *x, long turns, long tail,
                                   vf *sums, bool fresh) {
    vf acc[NT][MT];
    const TW *w[NT];
    for (int n = 0; n < NT; n++) {
        w[n] = weights[n];
        for (int m = 0; m < MT; m++) acc[n][m] = fresh ? vf{} : sums[n * MT + m];
    }
    const auto take_turns = [&](auto prefetch) {
        for (long s = 0; s < turns; s++, x += MT * STEP) {
            prefetch();
            multiply_half<0>(w, x, acc);
            multiply_half<1>(w, x, acc);
            for (int n = 0; n < NT; n++) w[n] += STEP;
        }
    };
    if (next && turns) {
        AheadRows<TW, NT> ahead = {next, turns * STEP * (long)sizeof(TW) / LINE};
        take_turns([&] { ahead.prefetch(); });
    } else take_turns([] {});
    if (tail) {  // the last elements of K, copied so that nothing past the row is read
        TW rest[NT][STEP] = {};
        for (int n = 0; n < NT; n++) {
            __builtin_memcpy(rest[n], w[n], tail * sizeof(TW));
            w[n] = rest[n];
        }
        multiply_half<0>(w, x, acc);
        multiply_half<1>(w, x, acc);
    }
    for (int n = 0; n < NT; n++)
        for (int m = 0; m < MT; m++) sums[n * MT + m] = acc[n][m];
}

template <class TW, int NT>
INLINE void multiply_any(long mt, const TW *const *weights, const TW *const *next, const float *x, long turns, long tail,
                         vf *sums, bool fresh) {
    const auto call = [&](auto multiply) { multiply(weights, next, x, turns, tail, sums, fresh); };
    if (mt == 1) return call(multiply_tile<TW, NT, 1>);
    if constexpr (NT != ONE_NT) {
        if (mt == 2) return call(multiply_tile<TW, NT, 2>);
    }
    if constexpr (NT == WIDE_NT) {
        if (mt == 3) return call(multiply_tile<TW, NT, 3>);
        if (mt == 4) return call(multiply_tile<TW, NT, 4>);
        if constexpr (MAX_MT > 4) {
            if (mt == 5) return call(multiply_tile<TW, NT, 5>);
            return call(multiply_tile<TW, NT, 6>);
        }
    }
}

// Weight rows [n0, n1) against all rows of x.
template <class TW, class TX, int NT>
static void multiply_rows(const Linear &p, Tiles tiles, const float *packed, TX *out, long n0, long n1) {
    vf sums[(MAX_ROWS + MAX_MT) * NT];
    const TW *weight = (const TW *)p.weight;
    for (long n = n0; n < n1; n += NT) {
        for (long k = 0; k < p.K; k += K_BLOCK) {
            const bool same_rows = k + K_BLOCK < p.K;
            const TW *rows[NT], *next[NT];
            for (int i = 0; i < NT; i++) {
                rows[i] = weight + min_of(n + i, n1 - 1) * p.w_stride + k;
                next[i] = same_rows ? rows[i] + K_BLOCK : weight + min_of(n + NT + i, p.N - 1) * p.w_stride;
            }
            const long span = min_of(K_BLOCK, p.K - k);
            const float *x = packed + k * p.M;
            vf *sum = sums;
            for (long t = 0; t < tiles.count; t++) {
                const long mt = tiles.size(t);
                multiply_any<TW, NT>(mt, rows, t ? nullptr : next, x, span / STEP, span % STEP, sum, k == 0);
                x += mt * round_up(span, STEP);
                sum += mt * NT;
            }
        }
        const vf *sum_of = sums;
        for (long t = 0; t < tiles.count; t++) {
            const long first = tiles.begin(t), mt = tiles.size(t);
            for (int i = 0; i < NT && n + i < n1; i++) {
                const float bias = p.bias ? element(p.bias, p.bias_type, n + i) : 0.0f;
                for (long m = 0; m < mt; m += 4) {
                    const vf *of = sum_of + i * mt + m;
                    const long more = mt - m - 1;
                    float four[4];
                    sum_four(of[0], of[min_of(1, more)], of[min_of(2, more)], of[min_of(3, more)], four);
                    for (long j = 0; j <= min_of(3, more); j++)
                        narrow(four[j] + bias, out[(first + m + j) * p.out_stride + n + i]);
                }
            }
            sum_of += mt * NT;
        }
    }
}

template <class TW, class TX> static int linear_pass(const Linear &p) {
    const Tiles tiles = {p.M, ceil_div(p.M, MAX_MT)};
    const long nt = p.M == 1 ? ONE_NT : p.M == 2 ? TWO_NT : WIDE_NT;
    const auto multiply = p.M == 1   ? multiply_rows<TW, TX, ONE_NT>
                          : p.M == 2 ? multiply_rows<TW, TX, TWO_NT>
                                     : multiply_rows<TW, TX, WIDE_NT>;
    return in_chunks(
        p, nt, sizeof(TW), p.M * round_up(p.K, STEP) * (long)sizeof(float),
        [&](void *packed) {
            pack_rows<TX, pairs_interleaved<TW>::value>((const TX *)p.x, p.x_stride, tiles, p.K, (float *)packed);
        },
        [&](const void *packed, long n0, long n1) { multiply(p, tiles, (const float *)packed, (TX *)p.out, n0, n1); });
}

template <class TW, class TX> static int linear_all(const Linear &p) {
    // Passes of equal size: a last pass of a few rows would read the entire weight for little work.
    const long passes = ceil_div(p.M, MAX_ROWS);
    return in_passes<TX>(p, passes ? round_up(ceil_div(p.M, passes), MAX_MT) : 1, linear_pass<TW, TX>);
}

template <class TW> INLINE int linear_typed(const Linear &p) {
    return p.x_type == 0 ? linear_all<TW, float>(p) : linear_all<TW, bf16>(p);
}

// See Linear. Returns 1 when out of memory.
EXPORT int WINDLASS_NAME(linear)(const void *x, long x_stride, int x_type, const void *weight, long w_stride, int w_type,
                                 const void *bias, int bias_type, void *out, long out_stride, long M, long N, long K) {
    const Linear p = {x, x_stride, x_type, weight, w_stride, w_type, bias, bias_type, out, out_stride, M, N, K};
    return w_type == 0 ? linear_typed<float>(p) : w_type == 1 ? linear_typed<bf16>(p) : linear_typed<f16>(p);
}
RECORDABLE(linear)

}  // namespace
