// x of a product with a weight in blocks, rounded to 8 bits with a scale for each group of K. What a group becomes depends on
// that group alone.

#pragma once

#include "block_codes.h"
#include "byte_products.h"
#include "names.h"
#include "rounding.h"
#include "simd.h"
#include "tiles.h"

namespace {

namespace blocks {

// x of one pass: values [tile][quad][row of the tile][4], scale and correction [tile][group][row of the tile]. correction: what
// is to be added for the whole group, besides the products of codes: an int32 to their sum, or, in a form with minima, the
// float32 scale * (sum of rounded x) that the minimum multiplies.
struct RoundedRows {
    uint8_t *values;
    float *scale, *correction;
};

// One group of one row of x, of which `valid` elements are there and zeros behind them. rows: of the tile. total: of rounded x.
template <class F>
INLINE void round_group(const float *x, long valid, long rows, uint8_t *values, float &scale, int32_t &total) {
    constexpr int VECTORS = F::GROUP / W;
    vf part[VECTORS];
    vu top = {};
    for (int i = 0; i < VECTORS; i++) {
        if (valid >= F::GROUP) part[i] = load(x + i * W);
        else part[i] = i * W < valid ? load_some(x + i * W, min_of(W, valid - i * W)) : vf{};
        const vu bits = (vu)part[i] & 0x7fffffffu;  // they order like |x|, with infinity and NaN on top
        top = bits > top ? bits : top;
    }
    const uint32_t most = most_of(top);
    const float by = inverse_scale(float_of(most), most < 0x7f800000u, scale);
    vi sum = {};
    for (int i = 0; i < VECTORS; i++) {
        const vi q = round_scaled(part[i], by);
        sum += q;
        uint8_t *to = values + i * W * F::X * rows;
        if constexpr (F::PAIRS) {
            typedef int16_t half __attribute__((vector_size(2 * W)));
            const half narrow_q = __builtin_convertvector(q, half);
            for (int k = 0; k < W; k += 4) {
                const int16_t four[4] = {narrow_q[k], narrow_q[k + 2], narrow_q[k + 1], narrow_q[k + 3]};
                __builtin_memcpy(to + k * 2 * rows, four, 8);
            }
        } else {
            typedef int8_t quarter __attribute__((vector_size(W)));
            const quarter narrow_q = __builtin_convertvector(q, quarter);
            for (int k = 0; k < W; k += 4) __builtin_memcpy(to + k * rows, (const char *)&narrow_q + k, 4);
        }
    }
    total = total_of(sum);
}

// One tile of x. x: its first row; what `to` names is that of the whole pass.
template <class F>
static NOINLINE void round_tile(const float *x, long x_stride, long K, int offset, long begin, long rows, const RoundedRows &to) {
    const long groups = ceil_div(K, F::GROUP);
    uint8_t *values = to.values + begin * groups * F::GROUP * F::X;
    for (long m = 0; m < rows; m++) {
        for (long g = 0; g < groups; g++) {
            const long at = begin * groups + g * rows + m, k = g * F::GROUP;
            int32_t total;
            round_group<F>(x + m * x_stride + k, K - k, rows, values + (k * rows + 4 * m) * F::X, to.scale[at], total);
            if (F::MINIMUM) to.correction[at] = to.scale[at] * float(total);
            else {
                total *= -(offset + F::CARRIED);
                __builtin_memcpy(to.correction + at, &total, 4);
            }
        }
    }
}

}  // namespace blocks

}  // namespace
