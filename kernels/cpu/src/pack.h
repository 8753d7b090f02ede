// Quantizes rows of a weight and lays them into the panels of quantized.h.
//
// 8 bits: one float32 scale a row, its largest magnitude becomes 127. 4 bits: one bfloat16 scale for 32 elements, values
// -8 .. 7. Of several ranges that clip more or less, the one with the least squared error wins; given the integers, the
// best scale is the least-squares fit. A row or group that holds NaN or infinity gets the scale NaN.
//
// Rows go side by side as in a panel, one a lane, so that nothing is summed across lanes and a panel is written in whole
// vectors. Ranges are tried in integers of 16 bits: quicker than float32, and exact, so every instruction set chooses
// alike.

#pragma once

#include "names.h"
#include "quantized.h"
#include "rounding.h"
#include "simd.h"

namespace {

namespace packed {

// Units of which the largest magnitude of a group has 2^13: a product of them with quarters, over 2^15, is an integer.
constexpr float UNITS = 8192.0f;
constexpr int RANGES = 9, NARROWEST = 28;  // quarters: the largest magnitude falls on 7 .. 9, of which 8 is kept
constexpr int CLIPPED = 30;                // quarters: from here on values round to what is past the end

// Rows first .. end of the W that start at one of the panel's, of a weight that has them at `source`.
template <class T> struct Lanes {
    const T *source;  // of lane `first`
    long stride, first, end;

    bool whole() const { return first == 0 && end == W; }
    // Elements k .. k + W of one row, zeros past the row's end and for lanes without a row.
    vf part(long lane, long k, long K) const {
        if (lane < first || lane >= end || k >= K) return vf{};
        const T *from = source + (lane - first) * stride + k;
        return k + W <= K ? load(from) : load_some(from, K - k);
    }
    // A word a lane, for those with a row.
    void store_words(uint8_t *to, vu words) const {
        if (whole()) *(vu_any *)to = words;
        else for (long i = first; i < end; i++) __builtin_memcpy(to + 4 * i, (const char *)&words + 4 * i, 4);
    }
};

template <class T> static void pack_lanes_eight(const Lanes<T> &rows, long K, uint8_t *panel, float *scales) {
    typedef int8_t quarter __attribute__((vector_size(W)));
    float by[W] = {};
    for (long i = rows.first; i < rows.end; i++) {
        vu top = {};
        for (long k = 0; k < K; k += W) {
            const vu bits = (vu)rows.part(i, k, K) & 0x7fffffffu;
            top = bits > top ? bits : top;
        }
        const uint32_t most = most_of(top);  // bits of |x| order like |x|, with infinity and NaN on top
        by[i] = inverse_scale(float_of(most), most < 0x7f800000u, scales[i]);
    }
    for (long k = 0; k < K; k += 4 * W) {
        vf words[W];  // of four bytes: those of one row, then those of one quad
        for (long i = 0; i < W; i++) {
            quarter bytes[4];
            for (int j = 0; j < 4; j++)
                bytes[j] = __builtin_convertvector(round_scaled(rows.part(i, k + j * W, K), by[i]), quarter);
            __builtin_memcpy(&words[i], bytes, sizeof bytes);
        }
        transpose(words);
        for (long q = 0; q < W && k + 4 * q < K; q++) rows.store_words(panel + (k / 4 + q) * QUAD_BYTES, (vu)words[q]);
    }
}

// The nearest integer of x * by, even on a tie, within -8 .. 7.
INLINE vi round_four(vf x, vf by) {
    const vf magic = splat(12582912.0f), low = splat(-8.0f), high = splat(7.0f);
    vu product = (vu)(x * by);
    hide(product);  // see round_scaled
    const vf rounded = ((vf)product + magic) - magic;
    return (vi)((rounded < low ? low : rounded > high ? high : rounded) + magic) - (vi)magic;
}

// (a * b + 2^14) >> 15, for products that leave this within int16.
INLINE vs multiply_round(vs a, vs b) {
#if defined(WINDLASS_FMA) && WINDLASS_LANES == 8
    return (vs)_mm256_mulhrs_epi16((__m256i)a, (__m256i)b);
#elif defined(WINDLASS_FMA) && WINDLASS_LANES == 16
    return (vs)_mm512_mulhrs_epi16((__m512i)a, (__m512i)b);
#else
    const vi x = (vi)a, y = (vi)b;
    const vi even = (((x << 16) >> 16) * ((y << 16) >> 16) + (1 << 14)) >> 15, odd = ((x >> 16) * (y >> 16) + (1 << 14)) >> 15;
    return (vs)((even & 0xffff) | (odd << 16));
#endif
}

// The best of the ranges tried so far, a group a lane: the error is least where (sum of x q)^2 / (sum of q^2) is largest.
struct Choice {
    vf square, norm, products;  // of the sum of x q, the sum of q^2, the sum of x q
};

// x and q with their signs turned: a tie, which goes upwards, then takes the extreme from 7.5 to -8.
template <bool CLIP> INLINE void try_range(const vs (&x)[GROUP / 2], int quarters, Choice &best) {
    const vs by = vs{} + int16_t(quarters), low = vs{} - int16_t(7), high = vs{} + int16_t(8);
    vi products = {}, norms = {};
    for (int j = 0; j < GROUP / 2; j++) {
        vs q = multiply_round(x[j], by);
        if (CLIP) q = q < low ? low : q > high ? high : q;
        products += madd_pairs(x[j], q);
        norms += madd_pairs(q, q);
    }
    const vf product = __builtin_convertvector(products, vf), norm = __builtin_convertvector(norms, vf);
    const vf square = product * product;
    const vi better = square * best.norm > best.square * norm;
    best = {better ? square : best.square, better ? norm : best.norm, better ? product : best.products};
}

// The scales of W groups of 32 values, one a lane, and 1 / scale; 0 where all are as good as zero.
static vf choose_scales(const vf (&x)[GROUP], bf16 (&stored)[W]) {
    vu top = {};
    vf most = x[0];
    for (int k = 0; k < GROUP; k++) {
        const vu bits = (vu)x[k] & 0x7fffffffu;
        top = bits > top ? bits : top;
        most = larger(x[k], most);
    }
    const vi finite = (vi)(top < splat_bits(0x7f800000u)), usable = finite & (vi)((vf)top >= splat(TINY));
    // The extreme's side is the one with room for -8; the other is tried too. Of two extremes, the positive one counts.
    const vf extreme = most == (vf)top ? most : -(vf)top;
    const vf unit = usable ? -UNITS / extreme : vf{};
    const vf magic = splat(12582912.0f);
    vs pairs[GROUP / 2];
    for (int j = 0; j < GROUP / 2; j++) {
        vi both[2];
        for (int i = 0; i < 2; i++) {
            vu product = (vu)(usable ? x[2 * j + i] * unit : vf{});
            hide(product);
            both[i] = (vi)((vf)product + magic) - (vi)magic;
        }
        pairs[j] = (vs)((both[0] & 0xffff) | (both[1] << 16));
    }
    Choice best = {vf{}, splat(1.0f), vf{}};
    for (int side = -1; side <= 1; side += 2) {
        for (int r = NARROWEST; r < NARROWEST + RANGES; r++) {
            const int quarters = side < 0 ? -r : r - 4;
            if (quarters > -CLIPPED && quarters < CLIPPED) try_range<false>(pairs, quarters, best);
            else try_range<true>(pairs, quarters, best);
        }
    }
    vf scale = best.products / best.norm * (extreme * (1.0f / UNITS));
    scale = usable ? scale : finite ? vf{} : splat(__builtin_nanf(""));
    store(stored, scale);
    return usable ? 1.0f / load(stored) : vf{};
}

template <class T> static void pack_lanes_four(const Lanes<T> &rows, long K, uint8_t *panel, bf16 *scales) {
    for (long k = 0; k < K; k += GROUP, panel += GROUP / 8 * QUAD_BYTES, scales += PANEL) {
        vf x[GROUP];
        for (int j = 0; j < GROUP; j += W) {
            vf square[W];
            for (int i = 0; i < W; i++) square[i] = rows.part(i, k + j, K);
            transpose(square);
            for (int i = 0; i < W; i++) x[j + i] = square[i];
        }
        bf16 chosen[W];
        const vf by = choose_scales(x, chosen);
        for (long i = rows.first; i < rows.end; i++) scales[i] = chosen[i];
        for (int pair = 0; pair < GROUP / 8; pair++) {
            vu words = {};
            for (int i = 0; i < 8; i++) {
                const vi q = by == 0.0f ? vi{} : round_four(x[8 * pair + i], by);
                words |= (vu)(q + 8) << (i < 4 ? 8 * i : 8 * (i - 4) + 4);
            }
            rows.store_words(panel + pair * QUAD_BYTES, words);
        }
    }
}

template <class T> static void pack_rows_of(const T *source, long stride, long first, long count, long K, int bits,
                                            uint8_t *data, void *scales) {
    const long units = ceil_div(K, bits == 8 ? 4 : GROUP), panel_bytes = units * QUAD_BYTES * (bits == 8 ? 1 : GROUP / 8);
    const long begin = first / PANEL, end = ceil_div(first + count, PANEL);
#pragma omp parallel for schedule(dynamic, 4)
    for (long panel = begin; panel < end; panel++) {  // whole panels, so that threads never write to one line
        for (long lane = 0; lane < PANEL; lane += W) {
            const long row = panel * PANEL + lane, from = max_of(first, row);
            const Lanes<T> rows = {source + (from - first) * stride, stride, from - row, min_of(first + count - row, W)};
            if (rows.first >= rows.end) continue;
            uint8_t *to = data + panel * panel_bytes + 4 * lane;
            if (bits == 8) pack_lanes_eight(rows, K, to, (float *)scales + row);
            else pack_lanes_four(rows, K, to, (bf16 *)scales + panel * units * PANEL + lane);
        }
    }
}

// Rows [first, first + count) of a packed weight from source [count, K] of the given type.
EXPORT int WINDLASS_NAME(pack_weight)(const void *source, long stride, int type, long first, long count, long K, int bits,
                                      uint8_t *data, void *scales) {
    with_type(type, [&](auto *of_type) {
        pack_rows_of((decltype(of_type))source, stride, first, count, K, bits, data, scales);
    });
    return 0;
}

}  // namespace packed

}  // namespace
