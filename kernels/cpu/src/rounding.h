// x of a product with quantized weights, rounded to 8 bits: a scale for each row, or for each row and group of K with weights
// of 4 bits. What a row becomes depends on that row alone.

#pragma once

#include "byte_products.h"
#include "simd.h"
#include "tiles.h"

namespace {

namespace packed {

constexpr long PANEL = 16;            // rows of the weight side by side
constexpr int V = PANEL / W;          // vectors per panel
constexpr long GROUP = 32;            // elements of K under one scale, with 4 bits
constexpr long QUAD_BYTES = 4 * PANEL;
constexpr float TINY = 0x1p-100f;     // what is smaller counts as zero

// What differs between the two widths. X: bytes per element of rounded x; pairs are kept as int16 in the order 0 2 1 3,
// as they meet the even and the odd bytes of a quad. OFFSET: what the weight carries above its value in the product.
template <int BITS> struct Packing;
template <> struct Packing<8> {
    static constexpr bool PAIRS = !WINDLASS_QUADS;
    static constexpr long X = PAIRS ? 2 : 1, OFFSET = PAIRS ? 0 : BIAS, READY_BYTES = 2 * QUAD_BYTES;
    static constexpr long QUADS = 1, STORED_BYTES = QUAD_BYTES;  // the unit of K: quads, and their bytes in a panel
};
template <> struct Packing<4> {
    static constexpr bool PAIRS = !WINDLASS_QUADS && !WINDLASS_BYTES;
    static constexpr long X = PAIRS ? 2 : 1, OFFSET = 8, READY_BYTES = QUAD_BYTES;
    static constexpr long QUADS = GROUP / 4, STORED_BYTES = QUAD_BYTES * GROUP / 8;
};

struct PackedLinear {
    const float *x; long x_stride;
    const uint8_t *data;
    const void *scales;  // 8 bits: float32 [N]; 4 bits: bfloat16 [panels, groups, 16]
    const float *bias;
    float *out; long out_stride;
    long M, N, K;
    long units;  // of K: quads with 8 bits, groups with 4
};

// x of one pass, rounded: values[tile][quad][row of the tile][4], scale and correction [tile][group][row of the tile].
struct Rounded {
    uint8_t *values;
    float *scale;
    int32_t *correction;
};

// 127 / |largest| and the scale that goes with it. A row that holds NaN or infinity gets the scale NaN and zeros, so that
// all of its outputs are NaN and no others.
INLINE float inverse_scale(float largest, bool finite, float &scale) {
    scale = finite ? (largest < TINY ? 0.0f : largest * (1.0f / 127.0f)) : __builtin_nanf("");
    return finite && largest >= TINY ? 127.0f / largest : 0.0f;
}

// The nearest integers of x * by (even on a tie) for |x * by| < 2^22; zeros where by is 0, whatever x.
INLINE vi round_scaled(vf x, float by) {
    const vf magic = splat(12582912.0f);
    vu product = (vu)(x * by);
    hide(product);  // or it joins the addition where it can, and ties fall differently from one instruction set to the next
    const vi rounded = (vi)((vf)product + magic) - (vi)magic;
    return by == 0.0f ? vi{} : rounded;
}

// Lane i gets lane i + by, around the end.
template <int by> INLINE vi rotated_lanes() {
    vi from = {};
    for (int i = 0; i < W; i++) from[i] = (i + by) % W;
    return from;
}
template <int by = W / 2> INLINE uint32_t most_of(vu x) {
    const vu other = __builtin_shuffle(x, (vu)rotated_lanes<by>()), both = x > other ? x : other;
    if constexpr (by == 1) return both[0];
    else return most_of<by / 2>(both);
}
template <int by = W / 2> INLINE int32_t total_of(vi x) {
    const vi both = x + __builtin_shuffle(x, rotated_lanes<by>());
    if constexpr (by == 1) return both[0];
    else return total_of<by / 2>(both);
}

template <int BITS>
static void round_row(const float *x, long K, long quads, long first, long end, long rows, uint8_t *values, float &scale,
                      int32_t &correction) {
    constexpr long X = Packing<BITS>::X;
    // Bits of |x| order like |x|, with infinity and NaN on top.
    vu top = {};
    const long stop = min_of(4 * end, K), whole = 4 * first + (stop - 4 * first) / W * W;
    for (long k = 4 * first; k < stop; k += W) {
        const vu bits = (vu)(k < whole ? load(x + k) : load_some(x + k, stop - k)) & 0x7fffffffu;
        top = bits > top ? bits : top;
    }
    const uint32_t most = most_of(top);
    const float by = inverse_scale(float_of(most), most < 0x7f800000u, scale);
    vi total = {};
    for (long k = 4 * first; k < 4 * end; k += W) {
        const vf part = k < whole ? load(x + k) : k < stop ? load_some(x + k, stop - k) : vf{};
        const vi q = round_scaled(part, by);
        total += q;
        if constexpr (Packing<BITS>::PAIRS) {
            typedef int16_t half __attribute__((vector_size(2 * W)));
            const half narrow_q = __builtin_convertvector(q, half);
            for (long i = 0; i < W && k + i < 4 * quads; i += 4) {
                const int16_t four[4] = {narrow_q[i], narrow_q[i + 2], narrow_q[i + 1], narrow_q[i + 3]};
                __builtin_memcpy(values + (k + i) * X * rows, four, 8);
            }
        } else {
            typedef int8_t quarter __attribute__((vector_size(W)));
            const quarter narrow_q = __builtin_convertvector(q, quarter);
            for (long i = 0; i < W && k + i < 4 * quads; i += 4)
                __builtin_memcpy(values + (k + i) * X * rows, (const char *)&narrow_q + i, 4);
        }
    }
    correction = -int32_t(Packing<BITS>::OFFSET) * total_of(total);
}

template <int BITS> static void round_tile(const PackedLinear &p, Tiles tiles, long t, const Rounded &to) {
    constexpr long X = Packing<BITS>::X, QUADS = Packing<BITS>::QUADS;
    const long begin = tiles.begin(t), rows = tiles.size(t), quads = p.units * QUADS;
    const long groups = BITS == 8 ? 1 : p.units, step = BITS == 8 ? quads : QUADS;
    for (long m = 0; m < rows; m++) {
        const float *x = p.x + (begin + m) * p.x_stride;
        uint8_t *values = to.values + begin * quads * 4 * X + m * 4 * X;
        for (long g = 0; g < groups; g++) {
            const long at = begin * groups + g * rows + m;
            round_row<BITS>(x, p.K, quads, g * step, (g + 1) * step, rows, values, to.scale[at], to.correction[at]);
        }
    }
}

}  // namespace packed

}  // namespace
